"""Datasets and a model whose costs are given in milliseconds, so that a run's bottleneck is known beforehand.

CPU time is that of the calling thread, so it is the same work on a busy machine. Only training samples and training
steps cost anything, so evaluation takes no time, except with SlowTest.
"""

from __future__ import annotations

import mmap
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import default_collate
from torch.utils.data._utils.collate import default_collate_fn_map

from data.synthetic import COSTS, Synthetic


class Costly(Synthetic):
    """Synthetic's images. Each takes `python_ms` of Python code, `native_ms` of C code and `wait_ms` of sleep."""

    def __init__(
        self, train: bool, python_ms: float = 0.0, native_ms: float = 0.0, wait_ms: float = 0.0, **images: Any
    ) -> None:
        super().__init__(train, **images)
        self.costs = {"python": python_ms, "native": native_ms, "wait": wait_ms} if train else {}

    def spend(self, index: int) -> None:
        """Spends the time that reading the sample takes."""
        for kind, milliseconds in self.costs.items():
            if milliseconds:
                COSTS[kind](milliseconds / 1000)

    # Both ways to read are defined here: loaders use an inherited read_batch only if __getitem__ is inherited too.
    def __getitem__(self, index: int) -> dict[str, Any]:
        self.spend(index)
        return super().__getitem__(index)

    def read_batch(self, indices: np.ndarray, out: dict[str, torch.Tensor], random: Any) -> None:
        for index in indices.tolist():
            self.spend(index)
        super().read_batch(indices, out, random)


class Uneven(Costly):
    """One sample in `every` takes `every` times the given cost and the others nothing: the mean is the given cost."""

    def __init__(self, train: bool, every: int, **costly: Any) -> None:
        super().__init__(train, **costly)
        self.every = every
        self.costs = {kind: every * milliseconds for kind, milliseconds in self.costs.items()}

    def spend(self, index: int) -> None:
        if index % self.every == 0:
            super().spend(index)


class Cold(Costly):
    """A sample costs something only when a worker reads it for the first time: a cache that fills."""

    def __init__(self, train: bool, **costly: Any) -> None:
        super().__init__(train, **costly)
        self.was_read = shared_bytes(self.length)

    def spend(self, index: int) -> None:
        if not self.was_read[index]:
            super().spend(index)
            self.was_read[index] = 1


class Opening(Costly):
    """Before its first sample each process opens the data, with `open_ms` of Python code: imports, an index.

    One sample in `crash_every` kills the process that reads it for the first time; 0 = none.
    """

    def __init__(self, train: bool, open_ms: float, crash_every: int = 0, **costly: Any) -> None:
        super().__init__(train, **costly)
        self.open_ms = open_ms if train else 0.0
        self.crash_every = crash_every if train else 0
        self.opened_in = 0
        self.has_crashed = shared_bytes(self.length)

    def spend(self, index: int) -> None:
        if self.opened_in != os.getpid():
            COSTS["python"](self.open_ms / 1000)
            self.opened_in = os.getpid()
        super().spend(index)
        if self.crash_every and index % self.crash_every == 0 and not self.has_crashed[index]:
            self.has_crashed[index] = 1
            os.kill(os.getpid(), signal.SIGKILL)  # as the system does when memory runs out


class SlowTest(Costly):
    """Test samples cost what training samples cost elsewhere, and training samples nothing."""

    def __init__(self, train: bool, **costly: Any) -> None:
        super().__init__(not train, **costly)  # the costs of the other split
        self.length = costly["length"] if train else costly["test_length"]


class ManyFields(Costly):
    """Samples with `fields` small tensors beside the image, as in detection: each is stacked and sent separately."""

    def __init__(self, train: bool, fields: int, **costly: Any) -> None:
        super().__init__(train, **costly)
        self.fields = {f"field {number}": torch.zeros(4) for number in range(fields)}

    def __getitem__(self, index: int) -> dict[str, Any]:  # without a read_batch: a plain dataset
        return {**super().__getitem__(index), **self.fields}


class SlowCollate(Costly):
    """Samples with a field whose collate function takes `collate_ms` of Python code per batch, as padding does."""

    def __init__(self, train: bool, collate_ms: float, **costly: Any) -> None:
        super().__init__(train, **costly)
        self.boxes = Boxes(collate_ms if train else 0.0)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**super().__getitem__(index), "boxes": self.boxes}


class Boxes:
    """Something that torch's default_collate cannot stack."""

    def __init__(self, collate_ms: float) -> None:
        self.collate_ms = collate_ms


def collate_boxes(boxes: list[Boxes], *, collate_fn_map: Any = None) -> torch.Tensor:
    COSTS["python"](boxes[0].collate_ms / 1000)
    return torch.zeros(len(boxes), 4)


default_collate_fn_map[Boxes] = collate_boxes


def narrowed(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """A batch whose images are cut to a width of 4 to 8 pixels, which depends on the first one."""
    batch = default_collate(samples)
    width = 4 + int(batch["image"][0].sum()) % 5
    return {**batch, "image": batch["image"][:, :, :width].contiguous()}


class Timed(nn.Module):
    """A training step takes `step_ms` of C code on each of `threads` threads; the network itself is tiny.

    `ballast_mb` megabytes of weights that are never trained make its checkpoints large.
    """

    def __init__(
        self, num_classes: int, in_channels: int, step_ms: float, threads: int = 1, ballast_mb: int = 0
    ) -> None:
        super().__init__()
        self.classifier = nn.Linear(in_channels, num_classes)
        self.register_buffer("ballast", torch.zeros(ballast_mb, 2**18))
        self.step_ms, self.threads = step_ms, threads
        self.pool = ThreadPoolExecutor(threads)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if self.training and self.step_ms:
            list(self.pool.map(COSTS["native"], [self.step_ms / 1000] * self.threads))
        return self.classifier(images[:, :, ::8, ::8].mean(dim=(2, 3)))


def shared_bytes(length: int) -> np.ndarray:
    """uint8 (length,) zeros, in memory that forked workers share."""
    return np.frombuffer(mmap.mmap(-1, length), np.uint8)
