"""Says what limits the speed of a training loop, in one of five words, and what to try first.

    data-bound      steps wait for their batches
    loader-bound    batches come in time, but loading takes cores from the steps
    host-bound      Python queues a step about as slowly as the accelerator runs it
    compute-bound   none of these
    not measured    the figures do not tell

On a CPU, what loading can cost a step is bounded by what loading does: the step's waiting, and the CPU seconds of the
workers and the preloader's thread. A larger gain is not reported: another program, or the clock, caused it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader

from .baselines import CachedLoader, TorchLoader, TorchStream
from .cores import LEAST_SECONDS, CoreSeconds
from .machine import available_cores
from .preload.preloader import Preloader
from .resident_loader import ResidentLoader
from .stats import LoaderStats, PreloaderStats, WorkerStats
from .worker_loader import WorkerLoader

GAINS = 1.15  # loading limits steps if they would be more than this many times as fast with instant loading
WAITS = 1 - 1 / GAINS  # from this share of a step on, waiting alone does that
NO_GAIN = 1.05  # a gain up to this many times is not reported
BOUNDED = 10  # nor is a bound of this many times or more: it says nothing
# A CPU second of loading holds up a step on all cores for about as long: a preempted thread holds up the others.
# Measured on two cores, with workers of a known load: 0.8 to 1.3 seconds for two threads, 0.4 for one.
COSTS = 1.25
QUEUES = 0.8  # from this share of a step on, queueing it makes training host-bound
LEAST_STEPS = 5
MANY_TURNS = 5
OTHERS = 0.15  # above this share of the cores, other programs may slow steps, if less than one core is idle
IDLE = 0.6  # workers, or the preloader's thread, are idle below this share of the time
SPARE = 2  # twice as many workers as are busy on average are enough
CROWDED = 0.25  # above this share of their reading, workers wait for a core
SLEEPS = 0.5  # above this share of their reading, workers wait for a disk, a network or a lock
MOST_PREFETCHED = 16  # batches for each worker: more would not help

CODE = {  # how a program writes what a verdict may advise; train.py has keys instead
    "num_workers": "num_workers={}",
    "prefetch_factor": "prefetch_factor={}",
    "num_threads": "torch.set_num_threads({})",
    "depth": "depth={}",
    "workers": "a WorkerLoader",
    "resident": "a ResidentLoader, or cheaper samples",
    "samples": "cheaper or smaller samples",
    "transform": "a cheaper transform",
    "compile": 'torch.compile(model, mode="reduce-overhead")',
    "batch": "a larger batch",
}


class Advice(NamedTuple):
    """What to try first.

    what: a name in CODE, or a sentence of its own. value: what it should be set to; now: what it is set to.
    """

    what: str
    value: int | None = None
    now: int | None = None
    because: str = ""

    def sentence(self, names: Mapping[str, str]) -> str:
        if self.what not in names:
            return self.what
        change = names[self.what].format(self.value)
        if self.value is not None:
            change += f" (now {self.now})"
        return f"{self.because}: try {change}" if self.because else f"Try {change}"


@dataclass(frozen=True)
class Verdict:
    """What limits the speed of a loop (`word`), the figures that show it (`reason`), and what to try first.

    gains: how many times as fast steps would be with instant loading: at least, and at most, which may be inf.

    peak: the share of the device's peak that the steps reach, and what peak that is, such as "H100's bf16 peak".
    """

    word: str
    reason: str
    gains: tuple[float, float] | None = None
    peak: tuple[float, str] | None = None
    advice: Advice | None = None

    def sentence(self, names: Mapping[str, str] = CODE) -> str:
        """names: how the program writes its settings, as CODE has them."""
        peak = "" if self.peak is None else f", at {self.peak[0]:.0%} of the {self.peak[1]}"
        advice = "" if self.advice is None else f". {self.advice.sentence(names)}"
        return f"{self.word}{peak}: {self.reason}{advice}"

    __str__ = sentence


class Setting(NamedTuple):
    """How a loop loads its batches."""

    kind: str = "other"  # workers | threads | torch | resident | cached | other (an iterable that is none of these)
    num_workers: int = 0
    prefetch_factor: int = 0
    depth: int = 0  # the Preloader's
    num_threads: int = 1  # threads of a step on a CPU
    on_cpu: bool = True

    @classmethod
    def of(cls, loader: Any, on_cpu: bool) -> Setting:
        depth = 0
        while isinstance(loader, Preloader):
            depth = max(depth, loader.depth)
            loader = loader.loader
        num_workers = getattr(loader, "num_workers", 0)
        prefetch_factor = getattr(loader, "prefetch_factor", None) or 0
        return cls(_kind(loader), num_workers, prefetch_factor, depth, torch.get_num_threads(), on_cpu)


def _kind(loader: Any) -> str:
    if isinstance(loader, ResidentLoader):
        return "resident"
    if isinstance(loader, CachedLoader):
        return "cached"
    if isinstance(loader, WorkerLoader) and not isinstance(loader, (TorchLoader, TorchStream)):
        return "threads" if loader.worker_method == "thread" else "workers"
    return "torch" if isinstance(loader, DataLoader) else "other"


@dataclass(frozen=True)
class Measured:
    """What was measured after a run, in turns with and without loading.

    free: the seconds of a step in each turn without loading.
    loaded: the seconds of a step in each turn with loading, without its waiting for the batch.
    queueing: the seconds that Python takes to queue a step on an idle accelerator; None: not measured, as on a CPU.
    synchronizes: whether the step itself waits for the device.
    callbacks: the seconds of callbacks in a step of the run, which `free` and `loaded` leave out.
    compiles: whether the step runs as CUDA graphs.
    peak: see Verdict.
    """

    free: Sequence[float]
    loaded: Sequence[float]
    queueing: float | None = None
    synchronizes: bool = False
    callbacks: float = 0.0
    compiles: bool = False
    peak: tuple[float, str] | None = None

    def slowdowns(self) -> tuple[float, float]:
        """How many times as long computing takes with loading as in the next turn without it: the least and the most.

        With more than MANY_TURNS, the lowest and the highest ratio are left out, as anything may have happened then.
        """
        ratios = sorted(loaded / free for loaded, free in zip(self.loaded, self.free, strict=True))
        within = ratios[1:-1] if len(ratios) > MANY_TURNS else ratios
        return within[0], within[-1]


@dataclass(frozen=True)
class Evidence:
    """What is known of the timed steps of a loop. Seconds are those of a step, on average.

    stats: the loader's totals. cores: whose work kept the cores busy.
    is_ahead: whether the accelerator mostly has a step to run while Python queues the next one.
    """

    steps: int
    step: float
    waiting: float
    setting: Setting
    stats: LoaderStats
    cores: CoreSeconds
    is_ahead: bool = False

    @property
    def computing(self) -> float:
        return self.step - self.waiting

    @property
    def processes(self) -> float:
        """CPU seconds of worker processes; NaN if it is not known what workers or threads compute."""
        setting = self.setting
        has_stats = bool(self.stats.workers and self.stats.workers.read_batches)  # not of torch's own workers
        if setting.kind == "other" or (setting.kind == "threads" and not has_stats):
            return math.nan
        if setting.num_workers == 0 or setting.kind in ("threads", "resident", "cached"):
            return 0.0
        return self._per_batch("worker_cpu_seconds") if has_stats else self.cores.busy_workers * self.step

    @property
    def preparing(self) -> float:
        """Seconds in which batches are copied and transformed."""
        preloader = self.stats.preloader or PreloaderStats()
        return (preloader.copy_seconds + preloader.transform_seconds) / max(1, preloader.batches)

    @property
    def threads(self) -> float:
        """Seconds of threads that share the interpreter with the step: thread workers, and the preloader's."""
        seconds = self._per_batch("worker_cpu_seconds") if self.setting.kind == "threads" else 0.0
        if self.setting.depth:
            preloader = self.stats.preloader or PreloaderStats()
            seconds += self.preparing
            if self.setting.num_workers == 0:  # then the thread reads the batches, too
                seconds += preloader.loader_wait_seconds / max(1, preloader.batches)
        return seconds

    @property
    def bound(self) -> float:
        """How many times as long computing takes because of loading, at most; it may be infinite."""
        if not self.setting.on_cpu:  # the loader's copies and transforms take time of the accelerator, too
            return math.inf
        on_its_cores = min(1.0, self.setting.num_threads / available_cores())  # the share of the workers' seconds
        held_up = COSTS * (self.processes * on_its_cores + self.threads)
        return self.computing / (self.computing - held_up) if held_up < self.computing else math.inf

    def gain(self, slowdown: float, callbacks: float = 0.0) -> float:
        """How many times as fast steps would be without waiting, and without this slowdown of their computing."""
        slowdown = min(max(1.0, slowdown), self.bound)
        callbacks = min(callbacks, self.computing)
        rest = callbacks + (self.computing - callbacks) / slowdown
        return self.step / rest if rest > 0 else math.inf

    def verdict(self, measured: Measured | None = None) -> Verdict:
        """Says what limits the steps."""
        if self.steps == 0:
            return Verdict("not measured", "no step was timed")
        if self.steps < LEAST_STEPS or self.steps * self.step < LEAST_SECONDS:
            return Verdict("not measured", f"{self.steps} timed steps are too few to tell")
        gains = self.gains(measured)
        slower, faster = gains
        reason = self._reason(gains)
        if self.cores.others > OTHERS and self.cores.idle_cores < 1:
            reason += f"; other programs used {self.cores.others:.0%} of the cores"
            if not self._holds_without_others():
                return Verdict("not measured", reason, gains)
        if self.waiting >= WAITS * self.step:
            return Verdict("data-bound", reason, gains, advice=self._for_waiting())
        if slower > GAINS:
            return Verdict("loader-bound", f"{reason}: loading takes cores", gains, advice=self._for_loading())
        if faster > GAINS:
            unknown = "steps without loading were not timed" if measured is None else "that varies from turn to turn"
            return Verdict("not measured", f"{reason}: {unknown}", gains)
        if measured is None:
            return Verdict("compute-bound", reason, gains)
        return self._without_loading(measured, reason, gains)

    def gains(self, measured: Measured | None) -> tuple[float, float]:
        """How many times as fast steps would be with instant loading: at least, and at most, within the bound."""
        if measured is None:  # a loader does not slow an accelerator that always has a step to run
            return self.gain(1.0), self.gain(1.0 if self.is_ahead else self.bound)
        least, most = measured.slowdowns()
        return self.gain(least, measured.callbacks), self.gain(most, measured.callbacks)

    def _reason(self, gains: tuple[float, float]) -> str:
        slower, faster = gains
        waits = f"training waits {100 * self.waiting / self.step:.0f} % of its {1000 * self.step:.1f} ms per step"
        if faster <= NO_GAIN:
            return waits
        span = f"{slower:.2f} or more"
        if faster < BOUNDED:
            span = " to ".join(dict.fromkeys((f"{slower:.2f}", f"{faster:.2f}")))
        return f"{waits}; instant loading, which takes no cores, would make it {span} times as fast"

    def _holds_without_others(self) -> bool:
        """Whether the verdict would be the same if no other programs took cores from loading and computing.

        Computing would then take less time than was measured. So steps would wait if loading alone takes longer than
        the measured computing. An accelerator that always has a step to run would still have one.
        """
        setting = self.setting
        if self.is_ahead:
            return True
        if setting.num_workers == 0 and setting.depth == 0:
            return self.waiting >= WAITS * self.step
        alone = self._per_batch("worker_busy_seconds") - self._per_batch("worker_queued_seconds")
        return (1 - WAITS) * alone / max(1, setting.num_workers) > self.computing

    def _without_loading(self, measured: Measured, reason: str, gains: tuple[float, float]) -> Verdict:
        """Says whether Python or the device limits steps that loading does not limit."""
        free = median(measured.free)
        faster = (self.computing - measured.callbacks) / free
        if faster > GAINS * self.bound:
            reason += f"; after the run steps were {faster:.1f} times as fast, which loading cannot explain: "
            reason += "another program, or the clock"
        if measured.queueing is None or measured.queueing < QUEUES * free:
            return Verdict("compute-bound", reason, gains, measured.peak)
        reason += f"; Python queues a step in {1000 * measured.queueing:.1f} ms, and it runs in {1000 * free:.1f} ms"
        if measured.synchronizes:
            advice = Advice("The step waits for the device, as .item(), .cpu() and fp16 do")
        else:
            advice = Advice("batch" if measured.compiles else "compile")
        return Verdict("host-bound", reason, gains, measured.peak, advice)

    def _for_waiting(self) -> Advice:
        """What to try first if steps wait for their batches."""
        setting = self.setting
        cores = available_cores()
        if setting.kind in ("resident", "cached"):
            return Advice("transform", because="Its batches come from memory")
        if setting.kind != "other" and setting.num_workers == 0:
            return self._workers(cores, "No workers read its batches")
        if setting.kind in ("torch", "other"):
            return Advice("workers")
        reading = self._per_batch("worker_busy_seconds")
        queued = self._per_batch("worker_queued_seconds") / max(reading, 1e-9)
        if queued > CROWDED:
            because = f"Its workers wait for a core in {queued:.0%} of their reading"
            if setting.num_workers > cores:
                return self._workers(cores, because)
            if setting.on_cpu and setting.num_threads > 1:
                return Advice("num_threads", 1, setting.num_threads, because)
            return Advice("samples", because=because)
        busy = reading / setting.num_workers / self.step
        if busy < IDLE:
            if self.preparing > IDLE * self.step:
                share = self.preparing / self.step
                return Advice("transform", because=f"Copying and transforming take {share:.0%} of the time")
            if setting.prefetch_factor < MOST_PREFETCHED:
                because = f"Its workers are idle {1 - busy:.0%} of the time"
                return Advice("prefetch_factor", MOST_PREFETCHED, setting.prefetch_factor, because)
            return Advice("samples")
        if setting.num_workers < cores:
            return self._workers(cores, "Its workers are always busy")
        asleep = 1 - queued - self._per_batch("worker_cpu_seconds") / max(reading, 1e-9)
        if asleep > SLEEPS:
            because = f"Its workers wait for a disk, a network or a lock in {asleep:.0%} of their reading"
            return self._workers(2 * setting.num_workers, because)
        return Advice("samples", because="Its workers are always busy")

    def _for_loading(self) -> Advice:
        """What to try first if loading takes cores from the steps."""
        setting = self.setting
        if setting.kind in ("torch", "other", "threads"):
            return Advice("workers")
        enough = math.ceil(SPARE * self._per_batch("worker_busy_seconds") / self.step)
        enough = min(max(1, enough), available_cores())
        if enough < setting.num_workers:
            return self._workers(enough, "Fewer are enough")
        if setting.depth and (setting.on_cpu or setting.num_workers == 0):
            return Advice("depth", 0, setting.depth)
        return Advice("transform" if setting.kind in ("resident", "cached") else "resident")

    def _workers(self, number: int, because: str) -> Advice:
        return Advice("num_workers", number, self.setting.num_workers, because)

    def _per_batch(self, name: str) -> float:
        """One of the workers' totals of seconds, divided by the number of batches that they have read."""
        workers = self.stats.workers or WorkerStats()
        return float(getattr(workers, name)) / max(1, workers.read_batches)
