"""Measured: the measurements of a run, from which training/callbacks/report/verdict.py finds its bottleneck."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from loaders import LoaderConfig

LEAST_LOSS = 0.15  # share of a step; if free data would save less, training counts as compute-bound
MOST_OTHERS = 0.15  # share of the cores; if other programs use more, nothing can be said about the run
# How many times as long as the shortest repetition the longest may take: if all agree on whether training is bound by
# its data, and if they do not.
AGREE, DISAGREE = 2.0, 1.3
VARIES = 0.1  # share by which the sizes of batches may differ, on average, from that of the batch for free data


class Interval(NamedTuple):
    """The shortest, the median and the longest of some repetitions; or the same of a figure computed from them."""

    low: float
    middle: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Interval:
        ordered = sorted(values)
        return cls(ordered[0], statistics.median(ordered), ordered[-1])

    def map(self, function: Callable[[float], float]) -> Interval:
        """Applies a monotonic function."""
        return Interval.of(map(function, self))

    def __format__(self, spec: str) -> str:
        low, high = format(self.low, spec), format(self.high, spec)
        return low if low == high else f"{low} to {high}"


@dataclass(frozen=True)
class Measured:
    """The measurements of a run. Times are in seconds, the mean per training step if nothing else is given."""

    loader: LoaderConfig
    cores: int  # CPU cores that this process may use
    num_threads: int  # CPU threads of a training step; 1 on a GPU
    steps: int
    phases: dict[str, float]  # of the whole run: start-up, training, evaluation, checkpoint, rest
    step: float  # the whole step, with waiting
    waiting: float = 0.0  # until its batch has come, and has been made ready
    copy: float = 0.0  # of a batch to the device, in the training thread or the preloader's
    transform: float = 0.0  # of a batch, likewise
    ahead: float | None = None  # the preloader's thread, for a batch: waiting for the loader; None: without a thread
    free: Interval | None = None  # a whole step with free data, while no worker runs; None: not measured
    sizes: Sequence[int] = (1,)  # how many numbers a batch has: the one for free data, and then those of the run
    others: float = 0.0  # share of the cores that other programs kept from the run
    num_workers: int = 1  # threads or processes; 1 if the training thread or the preloader's reads
    workers: dict[str, Any] = field(default_factory=dict)  # loader.stats()["workers"]
    in_memory: bool = False  # whether the dataset can be resident

    @property
    def for_ready(self) -> float:
        """The part of the waiting in which batches are made ready; of a thread's, as it spends its time."""
        ready = self.copy + self.transform
        return min(self.waiting, ready) if self.ahead is None else self.waiting * ready / ((self.ahead + ready) or 1.0)

    @property
    def for_loader(self) -> float:
        """The rest of the waiting."""
        return self.waiting - self.for_ready

    @property
    def computing(self) -> float:
        return self.step - self.waiting

    def of_batch(self, key: str) -> float:
        """A worker's seconds for one batch; key: busy (all of it), cpu, queued (for a core) or collate."""
        return float(self.workers.get(f"worker_{key}_seconds", 0.0)) / max(1, self.workers.get("read_batches", 0))

    @property
    def idle(self) -> float:
        """Share of the time that workers have nothing to do."""
        return max(0.0, 1 - self.of_batch("busy") / (self.num_workers * self.step))

    @property
    def computes(self) -> bool:
        """Whether workers compute for most of their time, and do not wait for a disk, a network or one another."""
        return self.of_batch("cpu") > 0.5 * (self.of_batch("busy") - self.of_batch("queued"))

    @property
    def is_slowed(self) -> bool:
        """Whether computing took clearly longer than in steps with free data."""
        return self.free is not None and self.computing > DISAGREE * self.free.high

    @property
    def obstacle(self) -> str:
        """Why steps with free data say nothing about this run: a key of `reasons` in verdict.py, or ""."""
        kept = self.sizes[0]
        if not self.workers and self.loader.name == "torch" and self.waiting > LEAST_LOSS * self.step:
            return "workers"
        if self.free is not None and statistics.mean(abs(size - kept) for size in self.sizes) > VARIES * kept:
            return "sizes"
        if self.others > MOST_OTHERS:
            return "others"
        if self.free is None:
            return ""
        are_the_limit = {self.step - seconds > LEAST_LOSS * self.step for seconds in self.free}
        if self.free.high > (AGREE if len(are_the_limit) == 1 else DISAGREE) * self.free.low:
            return "repetitions"
        saved = self.step - self.free.middle
        return "free" if self.waiting > LEAST_LOSS * self.step and saved < self.waiting / 2 else ""
