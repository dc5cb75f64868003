"""The optional, fast decoders of image files, and the choice between them (data.decoder).

A decoder takes a file's bytes and a function that chooses a box in an upright image. It returns the box's pixels, RGB,
uint8 (3, H, W), or None for a file that another decoder must read. All return the same pixels for a JPEG, because each
uses libjpeg-turbo. Pillow comes last (data/images/decoding.py): it reads the other files and raises the errors.
"""

import functools
import importlib
import logging
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from data.errors import DataError, check_choice
from data.images.decoding import Box, Crop, Decoder, Size, can_be_read_whole, cut, jpeg_header

log = logging.getLogger(__name__)

END = b"\xff\xd9"  # the last bytes of JPEGs that are complete
HEIC = (b"ftypheic", b"ftypheix", b"ftypmif1")
NARROWEST = 16  # pixels; libjpeg-turbo smooths colours differently at the edges of a box that is one pixel wide
_thread_local = threading.local()


def nvimgcodec(data: bytes, crop: Crop) -> torch.Tensor | None:
    """Decodes only the box, with nvImageCodec, which skips most of the work for the other pixels."""
    header = jpeg_header(data)
    if header is None or not data.endswith(END):  # Pillow raises the error for a truncated file
        return None
    size, orientation = header
    left, top, right, bottom = box_as_stored(crop(size), size, orientation)
    if right - left < NARROWEST:
        return None
    codec = import_nvimgcodec()
    if getattr(_thread_local, "process", None) != os.getpid():  # each thread of each process needs its own decoder
        cpu = codec.Backend(codec.BackendKind.CPU_ONLY)
        _thread_local.decoder = codec.Decoder(codec.NVIMGCODEC_DEVICE_CPU_ONLY, max_num_cpu_threads=1, backends=[cpu])
        _thread_local.parameters = codec.DecodeParams(
            False, codec.ColorSpec.SRGB, sample_format=codec.SampleFormat.I_RGB
        )
        _thread_local.process = os.getpid()
    pixels = np.empty((bottom - top, right - left, 3), np.uint8)
    with suppress(RuntimeError, ValueError):
        part = codec.CodeStream(data).get_sub_code_stream(region=codec.Region(top, left, bottom, right))
        image = codec.as_image(pixels, sample_format=codec.SampleFormat.I_RGB, color_spec=codec.ColorSpec.SRGB)
        if _thread_local.decoder.decode(part, image=image, params=_thread_local.parameters) is not None:
            return upright(torch.from_numpy(pixels).permute(2, 0, 1), orientation)
    return None


def torchcodec(data: bytes, crop: Crop) -> torch.Tensor | None:
    if data[4:12] in HEIC:
        return cut_from_whole(data, crop, import_torchcodec().decode_image)
    return cut_from_whole(data, crop, import_torchcodec().decode_jpeg) if can_be_read_whole(data) else None


def torchvision(data: bytes, crop: Crop) -> torch.Tensor | None:
    return cut_from_whole(data, crop, import_torchvision()) if can_be_read_whole(data) else None


def cut_from_whole(data: bytes, crop: Crop, read: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor | None:
    with suppress(RuntimeError, ImportError):  # then Pillow reads it, or raises a clearer error
        return cut(read(torch.frombuffer(bytearray(data), dtype=torch.uint8)), crop)
    return None


def box_as_stored(box: Box, size: Size, orientation: int) -> Box:
    """Converts a box of the upright image, which has `size` (width, height), to the image as it is stored."""
    left, top, right, bottom = box
    if orientation in (2, 3, 6, 7):
        left, right = size[0] - right, size[0] - left
    if orientation in (3, 4, 7, 8):
        top, bottom = size[1] - bottom, size[1] - top
    return (top, left, bottom, right) if orientation > 4 else (left, top, right, bottom)


def upright(pixels: torch.Tensor, orientation: int) -> torch.Tensor:
    """Turns and mirrors pixels (3, H, W) that are stored with an EXIF orientation, 1 to 8."""
    if orientation > 4:
        pixels = pixels.transpose(1, 2)
    mirrored = [axis for axis, which in ((2, (2, 3, 6, 7)), (1, (3, 4, 7, 8))) if orientation in which]
    return pixels.flip(mirrored) if mirrored else pixels


@functools.cache
def import_nvimgcodec() -> Any:
    """Imports nvImageCodec with only one of its decoders, that of JPEGs on the CPU.

    The others need libraries for GPUs, and print errors on stderr where these are missing.
    """
    package = find_spec("nvidia.nvimgcodec")
    if package is None or package.origin is None:
        raise ImportError("pip install nvidia-nvimgcodec-cu13")
    (library,) = Path(package.origin).parent.glob("extensions/libjpeg_turbo_ext.so*")
    with TemporaryDirectory() as folder:
        os.symlink(library, Path(folder, library.name))
        variables = {"NVIMGCODEC_EXTENSIONS_PATH": folder, "PYNVIMGCODEC_VERBOSITY": "0"}
        before = {name: os.environ.get(name) for name in variables}
        os.environ.update(variables)
        try:
            return importlib.import_module("nvidia.nvimgcodec")
        finally:
            for name, value in before.items():
                os.environ.pop(name)
                if value is not None:
                    os.environ[name] = value


@functools.cache
def import_torchcodec() -> Any:
    module = importlib.import_module("torchcodec.decoders")
    module.decode_jpeg  # noqa: B018  # raises AttributeError for versions before 0.16
    return module


@functools.cache
def import_torchvision() -> Callable[[torch.Tensor], torch.Tensor]:
    """torchvision.io.decode_jpeg, without its deprecation warning at each call."""
    mode = importlib.import_module("torchvision.io").ImageReadMode.RGB.value
    operator = torch.ops.image.decode_jpeg
    return lambda data: operator(data, mode, True)  # True: apply the EXIF orientation


DECODERS: dict[str, tuple[Decoder, Callable[[], Any]]] = {
    "nvimgcodec": (nvimgcodec, import_nvimgcodec),
    "torchcodec": (torchcodec, import_torchcodec),
    "torchvision": (torchvision, import_torchvision),
}


@functools.cache
def choose(name: str) -> tuple[Decoder, ...]:
    """The decoders to try one after another before Pillow: those of DECODERS that can be imported, from `name` on.

    name: one of DECODERS, "pillow", or "auto" for all. torchvision's decoder is only for versions of torch that
    TorchCodec does not support. The choice is logged once. Raises DataError if `name` is unknown or not installed.
    """
    check_choice("data.decoder", name, ("auto", *DECODERS, "pillow"), DataError)
    chosen: dict[str, Decoder] = {}
    missing: dict[str, str] = {}
    names = [*DECODERS, "pillow"]
    for each in names[0 if name == "auto" else names.index(name) : -1]:
        if each == "torchvision" and chosen:
            continue  # the others read nearly the same files, and importing it takes a second and 160 MB
        decoder, load = DECODERS[each]
        try:
            load()
            chosen[each] = decoder
        except Exception as error:  # a library that does not fit raises OSError, RuntimeError and others
            missing[each] = str(error).split("\n")[0]
    if name in missing:
        raise DataError(
            f"data.decoder={name} cannot be imported ({missing[name]}); install it or use data.decoder=auto"
        )
    without = "".join(f"; {each} cannot be imported: {reason}" for each, reason in missing.items())
    log.info("data.decoder=%s: JPEGs are read by %s%s", name, ", then ".join([*chosen, "pillow"]), without)
    return tuple(chosen.values())
