"""Runs of train.py on 2 cores whose bottleneck is known by construction, with the dataset and the model they need.

CPU time is that of the calling thread, so it is the same work on a busy machine. Only training steps and the samples
of one split cost anything.
"""

from __future__ import annotations

import os
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import default_collate

from data.synthetic import COSTS, Synthetic

# A case: its name, the bottleneck that a right verdict names, and below them the run's overrides.
CASES = """
# A batch takes 32 * 2 = 64 ms and a step 10: the only worker is always busy, and the second core mostly idle.
python_too_few_workers | reading
    loader=workers loader.num_workers=1 data.length=6400 data.cost=python data.cost_ms=2 model.step_ms=10
# Samples of Python code in threads of one process: the threads take turns, so together they need 32 ms per batch.
python_in_threads | reading
    loader=threads loader.num_workers=4 data.length=9600 data.cost=python data.cost_ms=1 model.step_ms=5
# Receiving two tiny images takes the training process 0.6 ms of CPU time, a step 0.3, and reading them 0.02.
tiny_batches | loader
    loader=torch loader.num_workers=2 train.batch_size=2 data.length=20000
# A batch takes 64 ms of one core, a step 30 ms of both: the two cores need (64 + 60) / 2 = 62 ms for each.
too_many_workers | cores
    loader=workers loader.num_workers=8 train.batch_size=64 data.length=12800 data.cost_ms=1 model.step_ms=30
    model.threads=2
# A real network: reading a batch takes 1 ms, and a step 50 or more.
slow_step | step
    loader=prefetch loader.num_workers=1 train.batch_size=128 data.length=32000 data.image_size=32 model=small_cnn
# The training process normalises, erases and mixes images for 50 to 80 ms. Reading them takes 1 ms, and a step 2.
slow_transform | transform
    loader=workers loader.num_workers=1 train.batch_size=64 augment.erase=1 augment.mixup=0.2 data.length=9600
    data.image_size=224 model.step_ms=2
# Three epochs, each of 1 s of training and 4 s of evaluation.
slow_evaluation | evaluation
    loader=workers loader.num_workers=2 train.epochs=3 data.length=3200 data.cost=wait data.cost_ms=4
    data.costly_split=test data.test_length=2000 model.step_ms=10
# Each worker needs 7 s of CPU time to open the data, then training takes 3 s.
slow_start | start-up
    loader=workers loader.num_workers=2 data.length=9600 data.open_ms=7000 model.step_ms=10
# A checkpoint of 128 MB every fifth step, that is every 50 ms. Writing it takes at least 250 ms.
frequent_checkpoints | checkpoint
    loader=workers loader.num_workers=1 train.checkpoint_every=5 data.length=4800 model.step_ms=10 model.ballast_mb=128
# Batches of 4 to 8 pixels in width: a step on one of them does not tell how long a step takes.
widths_vary | not measurable
    loader=workers loader.num_workers=1 data.length=6400 data.cost=python data.cost_ms=0.5 model.step_ms=10
    data.collate={_target_:scripts.verdict_cases.narrowed}
"""
COSTLY = "data=synthetic data._target_=scripts.verdict_cases.Costly data.test_length=256 data.image_size=8"
TIMED = "model=linear model._target_=scripts.verdict_cases.Timed ~model.size"


def cases() -> dict[str, tuple[str, list[str]]]:
    """For each case its bottleneck, and train.py's arguments; keys that conf/ does not have are added."""
    found = {}
    for name, truth, overrides in re.findall(r"^(\w+) \| (.+)\n((?: +.+\n)+)", CASES, re.MULTILINE):
        model = "" if "model=" in overrides else TIMED
        texts = f"device=cpu train.batch_size=32 train.epochs=1 {COSTLY} {model} {overrides}".split()
        found[name] = truth, [re.sub(r"^(data|model)\.", r"++\1.", text) for text in texts]
    return found


class Costly(Synthetic):
    """Synthetic's images, of which only those of the `costly_split` take time to read.

    Before its first sample each process spends `open_ms` with Python code, as for imports.
    """

    def __init__(
        self, train: bool, cost_ms: float = 0.0, open_ms: float = 0.0, costly_split: str = "train", **images: Any
    ) -> None:
        costs = train == (costly_split == "train")
        super().__init__(train, cost_ms=costs * cost_ms, **images)
        self.open_seconds, self.opened_in = costs * open_ms / 1000, 0

    def open(self) -> None:
        if self.opened_in != os.getpid():
            COSTS["python"](self.open_seconds)
            self.opened_in = os.getpid()

    # Both ways to read are defined here: loaders use an inherited read_batch only if __getitem__ is inherited too.
    def __getitem__(self, index: int) -> dict[str, Any]:
        self.open()
        return super().__getitem__(index)

    def read_batch(self, indices: np.ndarray, out: dict[str, torch.Tensor], random: Any) -> None:
        self.open()
        super().read_batch(indices, out, random)


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
        self, num_classes: int, in_channels: int, step_ms: float = 0.0, threads: int = 1, ballast_mb: int = 0
    ) -> None:
        super().__init__()
        self.classifier = nn.Linear(in_channels, num_classes)
        self.register_buffer("ballast", torch.zeros(ballast_mb, 2**18))
        self.step_ms, self.threads, self.pool = step_ms, threads, ThreadPoolExecutor(threads)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if self.training and self.step_ms:
            list(self.pool.map(COSTS["native"], [self.step_ms / 1000] * self.threads))
        return self.classifier(images[:, :, ::8, ::8].mean(dim=(2, 3)))
