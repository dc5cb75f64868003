"""The peers of bench_peers.py, each in its best documented settings, over a dataset of JPEGs in data/.

A function takes a dataset and a number of workers or threads. It returns an iterable of shuffled uint8 batches of
BATCH images: random crops of 8 to 100 % of the area, resized to SIZE, half of them mirrored.
"""

import io
from collections.abc import Iterator
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from data.image_folder import ImageFolder
from data.images.crops import random_crop
from extras.benchmarks.bench_images import open_pack, stock_pictures
from loaders import tensors
from scripts.bench_workloads import Plain, loader_rows

SIZE = 224
BATCH = 64


def spdl(dataset: Any, workers: int) -> Any:
    import spdl.io
    from spdl.dataloader import DataLoader

    def decode(index: int) -> tuple[Any, int]:
        packets = spdl.io.demux_image(dataset.path(index))
        draws = np.random.rand(41).tolist()
        left, top, right, bottom = random_crop((packets.codec.width, packets.codec.height), 0.08, draws[1:])
        crop = f"crop={right - left}:{bottom - top}:{left}:{top}:exact=1,scale={SIZE}:{SIZE}:flags=bilinear"
        filters = f"{crop}{',hflip' if draws[0] < 0.5 else ''},format=pix_fmts=rgb24"
        return spdl.io.decode_packets(packets, filter_desc=filters), dataset.labels[index]

    def collate(samples: list[tuple[Any, int]]) -> tuple[torch.Tensor, torch.Tensor]:
        frames, labels = zip(*samples, strict=True)
        return spdl.io.to_torch(spdl.io.convert_frames(list(frames))), torch.tensor(labels)

    epochs = (np.random.permutation(len(dataset)).tolist() for _ in repeat(None))
    return DataLoader(
        chain.from_iterable(epochs), preprocessor=decode, aggregator=collate, batch_size=BATCH, num_threads=workers
    )


def dali(dataset: Any, workers: int) -> Any:
    from nvidia.dali import fn, pipeline_def, types
    from nvidia.dali.plugin.pytorch import DALIGenericIterator, LastBatchPolicy

    @pipeline_def(batch_size=BATCH, num_threads=workers, device_id=None)  # type: ignore[untyped-decorator]  # no types
    def pipeline() -> tuple[Any, Any]:
        files, labels = fn.readers.file(file_root=str(dataset.folder), shuffle_after_epoch=True, name="files")
        images = fn.decoders.image_random_crop(files, random_area=(0.08, 1.0), random_aspect_ratio=(3 / 4, 4 / 3))
        images = fn.resize(images, size=(SIZE, SIZE), interp_type=types.INTERP_TRIANGULAR)  # antialiased
        return fn.flip(images, horizontal=fn.random.coin_flip()), labels

    return DALIGenericIterator(
        pipeline(), ["image", "label"], reader_name="files", last_batch_policy=LastBatchPolicy.DROP, auto_reset=True
    )


def ffcv(dataset: Any, workers: int) -> Any:
    from ffcv.fields import IntField, RGBImageField
    from ffcv.fields.rgb_image import IMAGE_MODES, RandomResizedCropRGBImageDecoder
    from ffcv.loader import Loader, OrderOption
    from ffcv.transforms import RandomHorizontalFlip, ToTensor
    from ffcv.writer import DatasetWriter

    class Unchanged(RGBImageField):  # type: ignore[misc]  # no types; FFCV's own encodes again
        def encode(self, destination: Any, data: bytes, malloc: Any) -> None:
            destination["mode"] = IMAGE_MODES["jpg"]
            destination["width"], destination["height"] = Image.open(io.BytesIO(data)).size
            destination["data_ptr"], memory = malloc(len(data))
            memory[:] = np.frombuffer(data, np.uint8)

    path = f"{dataset.folder.name}.beton"
    files = Plain(range(len(dataset)), dataset.labels.tolist(), lambda index: dataset.encoded(index)[0])
    if not Path(path).exists():  # made in the first round
        fields = {"image": Unchanged(), "label": IntField()}
        DatasetWriter(path, fields, num_workers=workers).from_indexed_dataset(files)
    image = [RandomResizedCropRGBImageDecoder((SIZE, SIZE)), RandomHorizontalFlip(), ToTensor()]
    return Loader(
        path,
        BATCH,
        workers,
        os_cache=True,
        order=OrderOption.RANDOM,
        pipelines={"image": image},
        custom_fields={"image": RGBImageField},
    )


PEERS = {  # what pip installs, and the loader
    "spdl": ("spdl==0.8.0", spdl),
    "dali": ("--ignore-installed nvidia-dali-cuda130==2.4.0", dali),  # it needs its packages in one folder
    "ffcv": ("ffcv==1.0.2", ffcv),
}


def batches(loader: str, reads: str, root: Path, workers: int) -> Iterator[torch.Tensor]:
    """Endless epochs of images. reads: "files", or the folder of a pack; root: the folder of the files."""
    dataset: Any = ImageFolder(True, root) if reads == "files" else open_pack(Path(reads))
    if loader in PEERS:
        made = PEERS[loader][1](dataset, workers)
    else:
        made = loader_rows(dataset, stock_pictures(root / "train"), BATCH)[loader](workers)
    for batch in chain.from_iterable(repeat(made)):
        yield next(tensor for tensor in tensors(batch) if tensor.ndim == 4)
