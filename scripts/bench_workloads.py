"""The workloads of bench_loaders.py: functions that return, for each row of the table, what makes its loader."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader
from torchvision.transforms import v2

from data.array_dataset import ArrayDataset
from data.batch_transform import Normalize
from loaders import Preloader, ResidentLoader, WorkerLoader

Maker = Callable[[int], Any]  # number of workers -> loader


class Transport:
    """Ready-made images in memory: reading one means copying it."""

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
        images = out["image"].numpy()
        source = self.images.numpy()
        for row, index in enumerate(indices.tolist()):
            images[row] = source[index % 64]
        out["label"].copy_(torch.from_numpy(indices % 10))


class Tiny(Transport):
    """Samples so small that only the loader's own work takes time."""

    def __init__(self, length: int = 64_000) -> None:
        self.length = length
        self.images = torch.rand(64, 8)

    def read_batch(self, indices: np.ndarray, out: dict[str, torch.Tensor], random: Any) -> None:
        out["image"].copy_(self.images[indices % 64])
        out["label"].copy_(torch.from_numpy(indices % 10))


class Plain:
    """A dataset without its read_batch; with `labels`: images, to which torchvision's `transform` is applied."""

    def __init__(self, dataset: Any, labels: list[int] | None = None, transform: Any = None) -> None:
        self._dataset = dataset
        self._labels = labels
        self._transform = transform

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

    def stock_loader(dataset: Any) -> Maker:
        return lambda n: DataLoader(dataset, num_workers=n, multiprocessing_context="fork", **common)

    def our_loader(depth: int = 0, **options: Any) -> Maker:
        settings = {"dataset": ours, "seed": 0, **common, **options}
        return lambda n: Preloader(WorkerLoader(num_workers=n, **settings), "cpu", depth, transform)

    return {
        **{name: stock_loader(dataset) for name, dataset in stock.items()},
        "workers": our_loader(),
        "workers-plain": our_loader(**plain),
        "workers-seeded-plain": our_loader(dataset=Plain(ours)),
        "threads": our_loader(**thread),
        "threads-plain": our_loader(**plain, **thread),
        "prefetch": our_loader(depth=2),
    }


def transport() -> dict[str, Maker]:
    dataset = Transport()
    return loader_rows(dataset, {"torch": dataset}, 256)


def tiny(batch_size: int = 64) -> dict[str, Maker]:
    dataset = Tiny()
    return loader_rows(dataset, {"torch": dataset}, batch_size)


def cifar(length: int = 50_000) -> dict[str, Maker]:
    """Small images, randomly cropped and mirrored, then normalised: every row delivers float32 batches."""
    batch_size = 512
    mean = (0.491, 0.482, 0.447)
    std = (0.247, 0.244, 0.262)
    generator = np.random.default_rng(0)
    images = generator.integers(256, size=(length, 32, 32, 3), dtype=np.uint8)
    labels = generator.integers(10, size=length)
    classes = [str(label) for label in range(10)]
    about: dict[str, Any] = {"classes": classes, "mean": mean, "std": std, "pad": 4, "transform": ["crop", "flip"]}
    ours = ArrayDataset(images, labels, train=True, **about)
    normalize = Normalize(mean, std)
    planes = torch.from_numpy(images.transpose(0, 3, 1, 2).copy())
    transform = v2.Compose(
        [
            v2.RandomCrop(32, padding=4, padding_mode="reflect"),
            v2.RandomHorizontalFlip(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(mean, std),
        ]
    )
    stock = Plain(planes, labels.tolist(), transform)
    resident = ResidentLoader(ours, batch_size, shuffle=True, drop_last=True)
    rows = loader_rows(ours, {"torch": stock}, batch_size, normalize)
    return rows | {"resident": lambda _: Preloader(resident, "cpu", 0, normalize)}


WORKLOADS: dict[str, Callable[[], dict[str, Maker]]] = {
    "transport": transport,
    "cifar": cifar,
    "tiny": tiny,
    "batch-1": lambda: tiny(batch_size=1),
}
# The ratios in docs/benchmarks.md, with two workers on two idle cores.
DOCUMENTED: dict[str, dict[str, float]] = {
    "transport": {"torch": 1, "workers": 12.2, "workers-plain": 12.0, "threads": 10.6, "threads-plain": 10.9},
    "cifar": {
        "torch": 1,
        "workers": 11.4,
        "workers-plain": 5.8,
        "threads": 7.2,
        "threads-plain": 2.7,
        "resident": 9.2,
    },
    "tiny": {"torch": 1, "workers": 9.6, "workers-plain": 3.8, "threads": 9.0, "threads-plain": 3.5},
    "batch-1": {"torch": 1, "workers": 9.4, "workers-plain": 6.4, "threads": 8.1, "threads-plain": 9.0},
}
