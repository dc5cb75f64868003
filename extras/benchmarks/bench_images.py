"""Measures how many images per second each loader reads from image files, as scripts/bench_loaders.py does.

    python extras/benchmarks/bench_images.py --workload jpeg --data-root DIR   # DIR/train/CLASS/*.jpg (or made-up)
    python extras/benchmarks/bench_images.py --workload own --rounds 5         # a dataset of one's own, with Pillow
    python extras/benchmarks/bench_images.py --workload packed                 # packed with extras/packed
    python extras/benchmarks/bench_images.py --workload cached                 # data.cache=ram, and that pack again
    python extras/benchmarks/bench_images.py --workload decoders --workers 1   # a row for each installed decoder

`torch-tv` is the stock DataLoader with torchvision's decoder instead of Pillow. In the workload `own`, `torch`,
`workers` and `workers-plain` read the same dataset, so only the loader differs. `image-files` reads its files with our
decoder (docs/data.md). The other rows and the columns are explained in scripts/bench_loaders.py.
"""

import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset
from torchvision.datasets import ImageFolder as TorchImageFolder
from torchvision.io import ImageReadMode, read_file
from torchvision.transforms import v2

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from data.errors import DataError
from data.image_folder import ImageFiles, ImageFolder
from data.images.decoders import DECODERS, decoders_for
from extras.benchmarks import photographs
from scripts.bench_loaders import compare, options
from scripts.bench_workloads import Maker, loader_rows
from training.config import ConfigError
from training.script import run_script

AUGMENTATION = (v2.RandomResizedCrop(224, antialias=True), v2.RandomHorizontalFlip())
PACK_IMAGES = Path(__file__).parents[1] / "packed" / "pack_images.py"


class OwnPhotos(Dataset[Any]):
    """A dataset as most programs have it, with Pillow and torchvision's transforms: uint8 (C, H, W), and a label."""

    def __init__(self, root: Path) -> None:
        self.files = sorted(root.glob("train/*/*"))
        names = [file.parent.name for file in self.files]
        self.classes, self.labels = np.unique(names, return_inverse=True)
        self.transform = v2.Compose([*AUGMENTATION, v2.PILToTensor()])

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image = Image.open(self.files[index]).convert("RGB")
        return self.transform(image), int(self.labels[index])


class OwnImageFiles(ImageFiles):
    """The same files and labels, cropped and mirrored in the same way, but read by our decoder."""

    def __init__(self, photos: OwnPhotos) -> None:
        super().__init__(train=True)
        self.files = photos.files
        self.classes = tuple(photos.classes)
        self.labels = photos.labels

    def path(self, index: int) -> str:
        return str(self.files[index])


def jpeg(root: Path, _: Path) -> dict[str, Maker]:
    return loader_rows(ImageFolder(train=True, root=root), stock_pictures(root / "train"), 64)


def own(root: Path, _: Path) -> dict[str, Maker]:
    photos = OwnPhotos(root)
    rows = loader_rows(photos, {"torch": photos}, 64)
    same = {name: rows[name] for name in ("torch", "workers", "workers-plain")}
    return {**same, "image-files": loader_rows(OwnImageFiles(photos), {}, 64)["workers"]}


def packed(root: Path, temporary: Path) -> dict[str, Maker]:
    make_pack(root, temporary / "pack")
    return loader_rows(open_pack(temporary / "pack"), stock_pictures(root / "train"), 64)


def cached(root: Path, temporary: Path) -> dict[str, Maker]:
    make_pack(root, temporary / "pack")
    images = ImageFolder(True, root, cache="ram", cache_dir=str(temporary / "cache"))
    for index in range(len(images)):  # the first epoch
        images.encoded(index)
    datasets = {"packed": open_pack(temporary / "pack"), "cached": images}
    return {name: loader_rows(dataset, {}, 64)["workers"] for name, dataset in datasets.items()}


def decoders(root: Path, _: Path) -> dict[str, Maker]:
    installed = ["pillow"]
    for name in DECODERS:
        with suppress(DataError):
            decoders_for(name)
            installed.append(name)
    return {name: loader_rows(ImageFolder(True, root, decoder=name), {}, 64)["workers"] for name in installed}


WORKLOADS: dict[str, Callable[[Path, Path], dict[str, Maker]]] = {
    make.__name__: make for make in (jpeg, own, packed, cached, decoders)
}
DOCUMENTED: dict[str, dict[str, float]] = {  # the ratios in docs/benchmarks.md, with two workers on two idle cores
    "jpeg": {"torch": 1, "torch-tv": 1.4, "workers": 2.3, "workers-plain": 2.1, "threads": 2.1, "threads-plain": 2.0},
    "own": {"torch": 1, "workers": 1.0, "workers-plain": 0.9, "image-files": 2.1},
    "packed": {"torch": 1, "workers": 18.0, "workers-plain": 14.0, "threads": 14.8, "threads-plain": 10.9},
}


def stock_pictures(folder: Path) -> dict[str, Any]:
    """The datasets that most programs use: torchvision's ImageFolder, with Pillow or with torchvision's decoder."""
    return {
        "torch": TorchImageFolder(str(folder), v2.Compose([*AUGMENTATION, v2.PILToTensor()])),
        "torch-tv": TorchImageFolder(str(folder), v2.Compose(AUGMENTATION), loader=decoded),
    }


def decoded(path: str) -> torch.Tensor:
    """What torchvision.io.decode_jpeg returns, without the warning that it gives at each call since 0.29."""
    return torch.ops.image.decode_jpeg(read_file(path), ImageReadMode.RGB.value, False)


def make_pack(root: Path, pack: Path, *settings: str) -> None:
    if not PACK_IMAGES.exists():
        raise ConfigError(f"packs need {PACK_IMAGES}, which has been deleted: choose another workload")
    command: list[str | Path] = [sys.executable, PACK_IMAGES, root, pack, *settings]
    if subprocess.run(command, stdout=subprocess.DEVNULL).returncode:
        raise ConfigError(f"{PACK_IMAGES} could not pack {root}: see its error above")


def open_pack(pack: Path) -> Any:
    from extras.packed.packed import Packed  # here, because this extra also works without that one

    return Packed(True, pack)


def main(typed: list[str] | None = None) -> None:
    command_line = options(__doc__, WORKLOADS)
    command_line.add_argument("--data-root", type=Path, help="a folder of images (photographs that it makes)")
    arguments = command_line.parse_args(typed)
    with tempfile.TemporaryDirectory() as folder:
        root = arguments.data_root or Path(folder, "images")
        if arguments.data_root is None:
            photographs.make(root)
        compare(WORKLOADS[arguments.workload](root, Path(folder)), DOCUMENTED.get(arguments.workload, {}), arguments)


if __name__ == "__main__":
    run_script(main)
