"""The workloads of bench_loaders.py: each gives a function per row of the table, which makes the row's loader."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torchvision.datasets import ImageFolder as TorchImageFolder
from torchvision.io import ImageReadMode, decode_jpeg, read_file
from torchvision.transforms import v2

from data.array_dataset import ArrayDataset
from data.errors import DataError
from data.image_folder import ImageFolder
from data.images.decoders import DECODERS, choose
from data.synthetic import Synthetic
from data.transform import Normalize
from loaders import Preloader, ResidentLoader, WorkerLoader
from training.config import ConfigError

Maker = Callable[[int], Any]  # number of workers -> loader
Workload = Callable[[Path, Path], dict[str, Maker]]  # folder of pictures, temporary folder -> the maker of each row

TRAINING = (v2.RandomResizedCrop(224, antialias=True), v2.RandomHorizontalFlip())
EVALUATION = (v2.Resize(256, antialias=True), v2.CenterCrop(224))


class Transport:
    """Ready-made images in memory: to read one is to copy it."""

    def __init__(self, length: int = 25_600) -> None:
        self.length = length
        generator = np.random.default_rng(0)
        self.images = torch.from_numpy(generator.integers(256, size=(64, 3, 224, 224), dtype=np.uint8))

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"image": self.images[index % 64], "label": index % 10}

    def sample_spec(self) -> dict[str, Any]:
        return {"image": (tuple(self.images.shape[1:]), self.images.dtype), "label": ((), torch.int64)}

    def read_batch(self, indices: np.ndarray, out: dict[str, torch.Tensor], random: Any) -> None:
        images, source = out["image"].numpy(), self.images.numpy()
        for row, index in enumerate(indices.tolist()):
            images[row] = source[index % 64]
        out["label"].copy_(torch.from_numpy(indices % 10))


class Tiny(Transport):
    """Samples so small that only the loader's own work takes time."""

    def __init__(self, length: int = 64_000) -> None:
        self.length, self.images = length, torch.rand(64, 8)

    def read_batch(self, indices: np.ndarray, out: dict[str, torch.Tensor], random: Any) -> None:
        out["image"].copy_(self.images[indices % 64])
        out["label"].copy_(torch.from_numpy(indices % 10))


class Plain:
    """A dataset with its read_batch hidden; or images with `labels`, and torchvision's `transform` for each image."""

    def __init__(self, dataset: Any, labels: list[int] | None = None, transform: Any = None) -> None:
        self._dataset, self._labels, self._transform = dataset, labels, transform

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        sample = self._dataset[index]
        return sample if self._labels is None else (self._transform(sample), self._labels[index])


def loader_rows(ours: Any, stock: dict[str, Any], batch_size: int, transform: Any = None) -> dict[str, Maker]:
    """The rows of one workload: the stock DataLoader over each dataset in `stock`, and our loaders over `ours`."""
    common: dict[str, Any] = {"batch_size": batch_size, "shuffle": True, "drop_last": True, "persistent_workers": True}
    plain: dict[str, Any] = {"dataset": Plain(ours), "seed": None}
    thread: dict[str, Any] = {"worker_method": "thread"}

    def our_loader(depth: int = 0, **options: Any) -> Maker:
        settings = {"dataset": ours, "seed": 0, **common, **options}
        return lambda n: Preloader(WorkerLoader(num_workers=n, **settings), "cpu", depth, transform)

    return {
        **{name: stock_loader(dataset, **common) for name, dataset in stock.items()},
        "workers": our_loader(),
        "workers-plain": our_loader(**plain),
        "threads": our_loader(**thread),
        "threads-plain": our_loader(**plain, **thread),
        "prefetch": our_loader(depth=2),
    }


def stock_loader(dataset: Any, **options: Any) -> Maker:
    return lambda n: DataLoader(dataset, num_workers=n, multiprocessing_context="fork", **options)


def transport(*_: Path) -> dict[str, Maker]:
    dataset = Transport()
    return loader_rows(dataset, {"torch": dataset}, 256)


def overhead(*_: Path) -> dict[str, Maker]:
    dataset = Tiny()
    single = loader_rows(dataset, {"torch": dataset}, 1)
    return loader_rows(dataset, {"torch": dataset}, 64) | {f"{name}-1": make for name, make in single.items()}


def cifar(*_: Path, length: int = 50_000) -> dict[str, Maker]:
    """Small images, randomly cropped and mirrored, then normalised: the batches of every row are float32."""
    generator, batch_size = np.random.default_rng(0), 512
    images = generator.integers(256, size=(length, 32, 32, 3), dtype=np.uint8)
    labels, classes = generator.integers(10, size=length), [str(label) for label in range(10)]
    about: dict[str, Any] = {"classes": classes, "mean": (0.491, 0.482, 0.447), "std": (0.247, 0.244, 0.262)}
    ours = ArrayDataset(images, labels, **about, train=True, pad=4, flip=True)
    steps = [v2.RandomCrop(32, padding=4, padding_mode="reflect"), v2.RandomHorizontalFlip()]
    steps += [v2.ToDtype(torch.float32, scale=True), v2.Normalize(ours.mean, ours.std)]
    planes = torch.from_numpy(images.transpose(0, 3, 1, 2).copy())
    stock = Plain(planes, ours.labels.tolist(), v2.Compose(steps))
    normalize = Normalize(ours.mean, ours.std)
    resident = ResidentLoader(ours, batch_size, shuffle=True, drop_last=True)
    rows = loader_rows(ours, {"torch": stock}, batch_size, normalize)
    return rows | {"resident": lambda _: Preloader(resident, "cpu", 0, normalize)}


def jpeg(root: Path, _: Path) -> dict[str, Maker]:
    return loader_rows(ImageFolder(train=True, root=root), stock_pictures(root / "train", TRAINING), 64)


def evaluation(root: Path, _: Path) -> dict[str, Maker]:
    return loader_rows(ImageFolder(train=False, root=root), stock_pictures(root / "val", EVALUATION), 16)


def decoders(root: Path, _: Path) -> dict[str, Maker]:
    installed = ["pillow"]
    for name in DECODERS:
        with suppress(DataError):
            choose(name)
            installed.append(name)
    return {name: loader_rows(ImageFolder(True, root, decoder=name), {}, 64)["workers"] for name in installed}


def packed(root: Path, temporary: Path) -> dict[str, Maker]:
    pack = temporary / "pack"
    make_pack(root, pack)
    from data.packed import Packed  # here, because a fork may have deleted it

    return loader_rows(Packed(train=True, root=pack), stock_pictures(root / "train", TRAINING), 64)


def stock_pictures(folder: Path, steps: tuple[v2.Transform, ...]) -> dict[str, Any]:
    """The datasets that most programs use: torchvision's ImageFolder, with Pillow or with torchvision's decoder."""
    return {
        "torch": TorchImageFolder(str(folder), v2.Compose([*steps, v2.PILToTensor()])),
        "torch-tv": TorchImageFolder(str(folder), v2.Compose(steps), loader=decoded),
    }


def decoded(path: str) -> torch.Tensor:
    return decode_jpeg(read_file(path), mode=ImageReadMode.RGB)


def costly(kind: str, *_: Path) -> dict[str, Maker]:
    """Samples that each take a millisecond of Python code, of C code that releases the GIL, or of sleep."""
    dataset = Synthetic(train=True, length=6400, cost=kind, cost_ms=1.0)
    return loader_rows(dataset, {"torch": dataset}, 32)


class Shared(IterableDataset[Any]):
    """A map-style dataset's samples as a stream, of which each worker gives its share."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return map(self.dataset.__getitem__, range(first, len(self.dataset), step))


class Lines(IterableDataset[Any]):
    """The lists of numbers in the lines of JSONL files, of which each worker reads its share."""

    def __init__(self, folder: Path, files: int = 16, lines: int = 2000) -> None:
        self.paths = [folder / f"{number}.jsonl" for number in range(files)]
        generator = np.random.default_rng(0)
        for path in self.paths:
            texts = [generator.integers(30_000, size=length) for length in generator.integers(20, 200, size=lines)]
            path.write_text("".join(json.dumps({"tokens": text.tolist()}) + "\n" for text in texts))

    def __iter__(self) -> Iterator[list[int]]:
        info = get_worker_info()
        for path in self.paths if info is None else self.paths[info.id :: info.num_workers]:
            with path.open() as lines:
                for line in lines:
                    yield json.loads(line)["tokens"]


def padded(texts: list[list[int]]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(text) for text in texts], batch_first=True)


def stream(
    make: Callable[[Path], IterableDataset[Any]], batch_size: int, collate: Any, *folders: Path
) -> dict[str, Maker]:
    """The rows of one workload whose dataset is a stream: the stock DataLoader, and ours with a seed and without."""
    dataset = make(folders[-1])
    common: dict[str, Any] = {"batch_size": batch_size, "collate_fn": collate, "persistent_workers": True}
    return {
        "torch": stock_loader(dataset, **common),
        "workers": lambda n: WorkerLoader(dataset, num_workers=n, seed=0, **common),
        "workers-plain": lambda n: WorkerLoader(dataset, num_workers=n, **common),
    }


PICTURE_WORKLOADS: dict[str, Workload] = {one.__name__: one for one in (jpeg, evaluation, packed, decoders)}
WORKLOADS: dict[str, Workload] = {"transport": transport, "cifar": cifar, **PICTURE_WORKLOADS, "overhead": overhead}
WORKLOADS |= {kind: partial(costly, kind) for kind in ("python", "native", "wait")}
WORKLOADS |= {
    "stream": partial(stream, lambda _: Shared(Transport()), 256, None),
    "stream-jsonl": partial(stream, Lines, 64, padded),
    "stream-tiny": partial(stream, lambda _: Shared(Tiny()), 64, None),
}


def make_pictures(root: Path) -> Path:
    """Makes the photographs of data=photographs in `root`, and returns it."""
    from data import photographs  # here, because a fork may have deleted it

    photographs.make(root)
    return root


def make_pack(root: Path, pack: Path, *options: str) -> None:
    command: list[str | Path] = [sys.executable, Path(__file__).with_name("pack_images.py"), root, pack, *options]
    if subprocess.run(command, stdout=subprocess.DEVNULL).returncode:
        raise ConfigError(f"scripts/pack_images.py could not pack {root}: see its error above")
