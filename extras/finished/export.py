"""Exports a network for programs without this repository, and checks that the exported file computes the same."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from textwrap import dedent
from typing import Any

import torch
from torch import Tensor, nn

from training.config import ConfigError
from training.data_spec import DataSpec
from training.files import write_whole
from training.finished.prepare import Prepare

PACKAGES = ("onnx", "onnxscript", "onnxruntime")
LARGEST_FILE = 2 * 10**9  # bytes: ONNX keeps the weights of larger networks in a second file

Predict = Callable[[Tensor], Tensor]  # from normalised images (B, C, H, W) to outputs, on the CPU


def export_torch(model: nn.Module, images: Tensor, path: Path) -> Predict:
    """Writes a program of torch.export to `path`. Returns the network, loaded from that file."""
    with torch.no_grad():
        program = torch.export.export(model, (images,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    torch.export.save(program, path)
    loaded: Predict = torch.export.load(path).module()
    return loaded


def export_onnx(model: nn.Module, images: Tensor, path: Path) -> Predict:
    """Writes an ONNX file to `path`. Returns the network, loaded from that file by ONNX Runtime."""
    import onnxruntime  # optional: see check_packages

    size = sum(weight.nbytes for weight in model.state_dict().values())
    options: dict[str, Any] = {"input_names": ["images"], "output_names": ["outputs"], "verbose": False}
    shapes = ({0: torch.export.Dim("batch")},)
    with torch.no_grad():
        torch.onnx.export(
            model, (images,), path, dynamo=True, dynamic_shapes=shapes, external_data=size > LARGEST_FILE, **options
        )
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run(None, {"images": images.numpy()})[0])


FORMATS = {"torch": ("model.pt2", export_torch), "onnx": ("model.onnx", export_onnx)}
LOADING = {
    "torch": 'import torch\nmodel = torch.export.load("model.pt2").module()\noutputs = model(images)',
    "onnx": (
        'import onnxruntime\nmodel = onnxruntime.InferenceSession("model.onnx")\n'
        '(outputs,) = model.run(None, {"images": images.numpy()})'
    ),
}


def check_packages() -> None:
    """Raises ConfigError if a package that ONNX needs is not installed."""
    missing = [package for package in PACKAGES if find_spec(package) is None]
    if missing:
        raise ConfigError(f"--format onnx needs {', '.join(missing)}: pip install {' '.join(missing)}")


def export(model: nn.Module, images: Tensor, folder: Path, form: str, tolerance: float) -> str:
    """Writes `model` into `folder`, compares the file with it, and returns a sentence on how much the outputs differ.

    model: on the CPU, in evaluation mode. images: to compare on, as a batch and the first one alone; normalised,
    float32 (B, C, H, W) with B at least 2. form: a key of FORMATS. Raises ConfigError if the network cannot be
    exported, and, after it removed the file, if outputs differ by more than `tolerance` times the largest output.
    """
    name, write = FORMATS[form]
    path = folder / name
    with torch.no_grad():
        expected, first = model(images).float(), model(images[:1]).float()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        written = write(model, images, path)
    except RuntimeError as error:  # errors of torch.export and torch.onnx are subclasses
        reason = re.sub(r"\x1b\[\d*m", "", str(error).strip()).partition("\n")[0]
        raise ConfigError(f"{type(model).__name__} cannot be exported with --format {form}: {reason}") from error
    with torch.no_grad():
        differences = written(images).float() - expected, written(images[:1]).float() - first
        difference = torch.cat(differences).abs().max().item()
    largest = expected.abs().max().item()
    sentence = (
        f"on {len(images)} test images its outputs differ by up to {difference:.2g}, and are up to {largest:.2g}"
    )
    if not difference <= tolerance * largest:  # also if one is NaN
        path.unlink()
        raise ConfigError(f"{name} computes different outputs: {sentence}; --tolerance sets the allowed share")
    return sentence


def describe(spec: DataSpec, prepare: Prepare, folder: Path, about: str) -> None:
    """Writes preprocessing.json and README.md into `folder`, which tell how to use the exported files there."""
    height, width, channels = spec.shape or ()
    steps = [
        f"decode the image, upright (EXIF orientation), to {'grey' if channels == 1 else 'RGB'}: uint8 (height, "
        f"width, {channels})",
        f"do what the method {prepare.name} does (its code is below; {prepare.values or 'it has no settings'}), which "
        f"makes it uint8 ({height}, {width}, {channels})",
        f"divide by 255, subtract the mean {spec.mean} and divide by the standard deviation {spec.std}",
        f"put the channels first: float32 (batch, {channels}, {height}, {width}); the batch may have any size",
    ]
    write_whole(folder / "preprocessing.json", json.dumps({**asdict(spec), "steps": steps}, indent=2) + "\n")
    loading = [LOADING[form] for form, (name, _) in FORMATS.items() if (folder / name).exists()]
    text = f"# {about}\n\nHow to prepare `images`, as in preprocessing.json:\n\n"
    text += "".join(f"{number}. {step}\n" for number, step in enumerate(steps, 1))
    text += f"\n```python\n{dedent(prepare.source)}```\n"
    text += "\nHow to load and call the network:\n" + "".join(f"\n```python\n{code}\n```\n" for code in loading)
    text += "\n`outputs` are logits (batch, classes): `softmax` makes them probabilities. The classes, in order:\n\n"
    write_whole(folder / "README.md", text + "".join(f"    {name}\n" for name in spec.classes))
