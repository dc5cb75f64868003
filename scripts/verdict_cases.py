"""Runs of train.py on 2 cores whose bottleneck is known by construction, with the datasets and the model they need.

CPU time is that of the calling thread, so it is the same work on a busy machine. Only training steps and the samples
of one split cost anything.
"""

from __future__ import annotations

import mmap
import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.utils.data import default_collate

from data.synthetic import COSTS, Synthetic

# A case has two lines: its name, the bottleneck that a right verdict names, the overrides that remove the bottleneck
# and change nothing else, how many times as fast the run then is at least, and how many other programs keep a core
# busy meanwhile; then the run's overrides. In the comments, the time of a batch is that of one worker.
CASES = """
# A batch takes 32 * 2 = 64 ms and a step 10: the only worker is always busy, and the second core mostly idle.
python_too_few_workers | reading | data.cost_ms=0 | 3.0 | 0
    loader=workers loader.num_workers=1 data.length=6400 data.cost=python data.cost_ms=2 model.step_ms=10
# A batch sleeps for 32 * 10 = 320 ms, so two workers deliver one every 160 ms, and a step takes 5. No CPU is used.
slow_disk | reading | data.cost_ms=0 | 8.0 | 0
    loader=workers loader.num_workers=2 data.length=3200 data.cost=wait data.cost_ms=10 model.step_ms=5
# One batch in six has a sample that sleeps for 400 ms, and at most 8 are loaded ahead: four workers mostly wait.
one_in_a_hundred | loader | data.every=1 | 1.6 | 0
    loader=workers loader.num_workers=4 train.batch_size=16 data.length=4000 data.cost=wait data.cost_ms=4
    data.every=100 model.step_ms=5
# Samples of Python code in threads of one process: the threads take turns, so together they need 32 ms per batch.
python_in_threads | reading | loader=workers | 1.4 | 0
    loader=threads loader.num_workers=4 data.length=9600 data.cost=python data.cost_ms=1 model.step_ms=5
# A batch takes 64 ms of one core, a step 30 ms of both: the two cores need (64 + 60) / 2 = 62 ms for each.
too_many_workers | cores | data.cost_ms=0 | 1.5 | 0
    loader=workers loader.num_workers=8 train.batch_size=64 data.length=12800 data.cost_ms=1 model.step_ms=30
    model.threads=2
# 24 small tensors per batch, each with a file descriptor: 4 ms of CPU time in a worker and 4 in the training process.
stock_loader_many_fields | loader | loader=workers | 1.6 | 0
    loader=torch loader.num_workers=2 train.batch_size=16 data._target_=scripts.verdict_cases.Fields data.length=24000
    data.fields=24 model.step_ms=0.5
# A real network: reading a batch takes 1 ms, and a step 50 or more.
slow_step | step | model.width=1 | 1.4 | 0
    loader=prefetch loader.num_workers=1 train.batch_size=128 data.length=32000 data.image_size=32 model=small_cnn
# Reading takes no time, collating 60 ms per batch in each of two workers, and a step 5.
slow_collate | reading | data.collate=null | 3.0 | 0
    loader=workers loader.num_workers=2 data.length=12800 model.step_ms=5
    data.collate={_target_:scripts.verdict_cases.slow_collate}
# Three epochs, each of 1 s of training and 4 s of evaluation.
slow_evaluation | evaluation | data.cost_ms=0 | 1.5 | 0
    loader=workers loader.num_workers=2 train.epochs=3 data.length=3200 data.cost=wait data.cost_ms=4
    data.costly_split=test data.test_length=2000 model.step_ms=10
# Each worker needs 7 s of CPU time to open the data, then training takes 3 s.
slow_start | start-up | data.open_ms=0 | 1.5 | 0
    loader=workers loader.num_workers=2 data.length=9600 data.open_ms=7000 model.step_ms=10
# Batches of 4 to 8 pixels in width: a step on one of them does not tell how long a step takes.
widths_vary | not measurable | data.collate=null | 0.8 | 0
    loader=workers loader.num_workers=1 data.length=6400 data.cost=python data.cost_ms=0.5 model.step_ms=10
    data.collate={_target_:scripts.verdict_cases.narrowed}
# Two other programs get half of the two cores.
busy_machine | not measurable | | 0.8 | 2
    loader=workers loader.num_workers=1 data.length=3200 data.cost=python data.cost_ms=0.5 model.step_ms=10
# The same with a real network: of the two threads of a step, one waits whenever another program has its core.
threads_wait | not measurable | train.num_threads=1 | 1.3 | 2
    loader=workers loader.num_workers=1 data.length=1280 data.image_size=32 model=small_cnn model.width=4
"""
# Do not tune the verdict to these.
HELD_OUT = """
# A batch takes 64 * 0.6 = 38 ms and a step 20, each on one core: the step waits almost half of the time.
cheap_native_one_worker | reading | data.cost_ms=0 | 1.5 | 0
    loader=prefetch loader.num_workers=1 train.batch_size=64 data.length=19200 data.cost_ms=0.6 model.step_ms=20
# The first epoch, whose batches are read, takes 6 of 10 s: reading bounds the run, though a typical step never waits.
cold_cache | reading | data.cost_ms=0 | 1.6 | 0
    loader=workers loader.num_workers=4 train.epochs=5 data.length=3200 data.cost=wait data.cost_ms=8 data.is_cold=true
    model.step_ms=10
# 20 steps. The threads take turns with the Python code of a batch, 717 ms. Two processes could share this work.
large_batches_in_threads | reading | loader=workers | 1.3 | 0
    loader=threads loader.num_workers=3 train.batch_size=1024 data.length=20480 data.cost=python data.cost_ms=0.7
    model.step_ms=50
# One batch in 19 takes 300 ms, and only six are loaded ahead: two of three workers and one core are mostly idle.
one_slow_native_sample | loader | data.every=1 | 1.3 | 0
    loader=prefetch loader.num_workers=3 train.batch_size=8 data.length=4800 data.every=150 data.cost_ms=2
    model.step_ms=4
# A batch takes 32 ms of one core and a step 30 ms of both: together (32 + 60) / 2 = 46 ms instead of 30.
shared_cores | cores | data.cost_ms=0 | 1.3 | 0
    loader=prefetch loader.num_workers=2 train.batch_size=64 data.length=16000 data.cost_ms=0.5 model.step_ms=30
    model.threads=2
# Receiving two tiny images takes the training process 0.6 ms of CPU time, a step 0.3, and reading them 0.02.
tiny_batches | loader | loader=workers | 1.4 | 0
    loader=torch loader.num_workers=2 train.batch_size=2 data.length=20000
# Four workers deliver a batch every 32 ms, and a step takes 40: it never waits, though they are busy 80 % of the time.
balanced | step | model.step_ms=20 | 1.15 | 0
    loader=workers loader.num_workers=4 data.length=9600 data.cost=wait data.cost_ms=4 model.step_ms=40
# The training process normalises, erases and mixes images for 50 to 80 ms. Reading them takes 1 ms, and a step 2.
slow_transform | transform | augment.erase=0 augment.mixup=0 | 1.3 | 0
    loader=workers loader.num_workers=1 train.batch_size=64 augment.erase=1 augment.mixup=0.2 data.length=9600
    data.image_size=224 model.step_ms=2
# 40 samples kill the worker that reads them. Its replacement needs 0.3 s to open the data: 12 of the run's 14 s.
crashing_workers | reading | data.crash_every=0 | 2.0 | 0
    loader=workers loader.num_workers=2 data.length=12800 data.open_ms=300 data.crash_every=320 data.cost_ms=0.3
    model.step_ms=5
# A checkpoint of 128 MB every fifth step, that is every 50 ms. Writing it takes at least 250 ms.
frequent_checkpoints | checkpoint | train.checkpoint_every=null | 1.5 | 0
    loader=workers loader.num_workers=1 train.checkpoint_every=5 data.length=4800 model.step_ms=10 model.ballast_mb=128
"""
COSTLY = "data=synthetic data._target_=scripts.verdict_cases.Costly data.test_length=256 data.image_size=8"
TIMED = "model=linear model._target_=scripts.verdict_cases.Timed ~model.size"


class Case(NamedTuple):
    truth: str
    without: str
    speedup: float
    others: int
    overrides: str

    def command(self, extra: list[str]) -> list[str]:
        """The arguments of train.py; keys of data and model are added where conf/ does not have them."""
        model = "" if "model=" in self.overrides else TIMED
        texts = f"train.batch_size=32 train.epochs=1 {COSTLY} {model} {self.overrides}".split() + extra
        return ["train.py", "device=cpu", *(re.sub(r"^(data|model)\.", r"++\1.", text) for text in texts)]


def cases_of(text: str) -> dict[str, Case]:
    """The cases of a table such as CASES, by name."""
    found = {}
    for entry in re.split(r"\n(?! )", re.sub(r"\n#.*", "", text).strip("\n")):
        heading, *overrides = entry.split("\n")
        name, truth, without, speedup, others = (cell.strip() for cell in heading.split("|"))
        found[name] = Case(truth, without, float(speedup), int(others), " ".join(" ".join(overrides).split()))
    return found


class Costly(Synthetic):
    """Synthetic's images, of which only those of the `costly_split` take time to read.

    One sample in `every` takes `every` times `cost_ms`, and the others nothing: on average `cost_ms`. is_cold: only
    the first time that a sample is read costs something, as with a cache that fills. Before its first sample each
    process spends `open_ms` with Python code, as for imports. One sample in `crash_every` kills the process that reads
    it for the first time; 0 = none.
    """

    def __init__(
        self,
        train: bool,
        cost: str = "native",
        cost_ms: float = 0.0,
        every: int = 1,
        is_cold: bool = False,
        open_ms: float = 0.0,
        crash_every: int = 0,
        costly_split: str = "train",
        **images: Any,
    ) -> None:
        super().__init__(train, **images)
        costs = train == (costly_split == "train")
        self.work, self.seconds, self.every, self.is_cold = COSTS[cost], costs * cost_ms / 1000, every, is_cold
        self.open_seconds, self.crash_every, self.opened_in = costs * open_ms / 1000, costs * crash_every, 0
        self.was_read = np.frombuffer(mmap.mmap(-1, self.length), np.uint8)  # shared with forked workers

    def spend(self, index: int) -> None:
        """Spends the time that reading the sample takes."""
        is_first, self.was_read[index] = not self.was_read[index], 1
        if self.opened_in != os.getpid():
            COSTS["python"](self.open_seconds)
            self.opened_in = os.getpid()
        if self.seconds and index % self.every == 0 and (is_first or not self.is_cold):
            self.work(self.every * self.seconds)
        if self.crash_every and index % self.crash_every == 0 and is_first:
            os.kill(os.getpid(), signal.SIGKILL)  # as the system does when memory runs out

    # Both ways to read are defined here: loaders use an inherited read_batch only if __getitem__ is inherited too.
    def __getitem__(self, index: int) -> dict[str, Any]:
        self.spend(index)
        return super().__getitem__(index)

    def read_batch(self, indices: np.ndarray, out: dict[str, torch.Tensor], random: Any) -> None:
        for index in indices.tolist():
            self.spend(index)
        super().read_batch(indices, out, random)


class Fields(Costly):
    """Samples with `fields` small tensors beside the image, as in detection: each is stacked and sent separately."""

    def __init__(self, train: bool, fields: int, **costly: Any) -> None:
        super().__init__(train, **costly)
        self.fields = {f"field {number}": torch.zeros(4) for number in range(fields)}

    def __getitem__(self, index: int) -> dict[str, Any]:  # without a read_batch: a plain dataset
        return {**super().__getitem__(index), **self.fields}


def slow_collate(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """A batch that takes 60 ms of Python code, as padding may."""
    COSTS["python"](0.06)
    return default_collate(samples)


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
