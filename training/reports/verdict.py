"""Names what bounded a run, from what was measured: a pure function, so that it can be checked on made-up figures.

What a step loses because of its data is its duration less the duration with free data, measured after the run. That
also sees what waiting cannot: on a CPU, workers take cores from the step. The loss is then split among its causes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from loaders import LoaderConfig

LEAST_LOSS = 0.15  # share of a step that free data would save; below it, training counts as compute-bound
# Shares of a whole run from which on these count as its bottleneck, if nothing else takes more.
PHASES = {"start-up": 0.3, "evaluation": 0.3, "checkpoint": 0.1}
ALWAYS_BUSY = 0.1  # share of the time that workers are idle, below which they never rest
BUSY = 0.6  # share of the time that workers read: above, samples are the limit, and below, handing batches over

SENTENCES = {
    "step": "compute-bound: a step takes {step:.1f} ms, and {free:.1f} ms with free data: a faster loader cannot help",
    "start-up": "start-up took {phase:.0%} of the run: {phase_seconds:.1f} s until the first batch had come",
    "evaluation": "evaluation took {phase:.0%} of the run, {phase_seconds:.1f} s",
    "checkpoint": "saving checkpoints took {phase:.0%} of the run, {phase_seconds:.1f} s",
    "cores": "short of cores: workers and the training step share {cores}: computing takes {computing:.1f} ms a step, "
    "and {free:.1f} ms while no worker runs; a worker waits {queued:.1f} ms for a core in each batch",
    "reading": "data-bound: samples wait for a disk or a network: a worker takes {reading:.1f} ms for a batch, with "
    "{cpu:.1f} ms of CPU time",
    "decoding": "data-bound: reading the samples of a batch takes a worker {reading:.1f} ms, with {cpu:.1f} ms of CPU "
    "time, and a step takes {free:.1f} ms with free data",
    "gil": "data-bound: the samples' Python code takes turns: {workers} threads share one interpreter lock (the GIL)",
    "uneven": "data-bound: a few slow samples hold up the others, as batches come in order: a batch takes "
    "{reading:.1f} ms with a standard deviation of {deviation:.1f} ms, and workers are idle {idle:.0%} of the time",
    "collate": "data-bound: collating takes {collate:.1f} of the {reading:.1f} ms that a worker needs for a batch",
    "transform": "data-bound: making whole batches ready in the training process takes {transform:.1f} ms a step",
    "copy": "data-bound: copying batches to the device takes {copy:.1f} ms a step",
    "loader": "data-bound: passing a batch from a worker to training is the limit: workers are idle {idle:.0%} of the "
    "time, and training waits {waiting:.1f} ms a step",
    "restarts": "data-bound: {deaths} workers died, and training waited for their batches to be read again",
}
SLOWED = (
    "compute-bound, and slowed by other programs or by its own threads: computing takes {computing:.1f} ms a step, "
    "and took {free:.1f} ms a moment later"
)
UNMEASURED = "compute-bound: a step takes {step:.1f} ms, of which it waits for data {waiting:.1f} ms"
CACHED = "loader=cached: this is what training costs with free data: compare its images/s with those of other loaders"
HINTS = {
    "start-up": "make the dataset's first samples cheaper, or train longer per start",
    "checkpoint": "save less often: train.checkpoint_every=10min",
    "cores": "make samples cheaper, give the run more cores, or keep the set on the device (loader=resident)",
    "reading": "move the data to a faster disk, or pack small files into one (scripts/pack_images.py)",
    "decoding": "make a sample cheaper, for example by smaller or decoded files (scripts/pack_images.py)",
    "gil": "read in processes: loader=prefetch",
    "uneven": "load further ahead: raise loader.prefetch_factor",
    "collate": "let the dataset write whole batches (read_batch), or make collate_fn cheaper",
    "transform": "make augmentation of whole batches cheaper",
    "copy": "copy less: uint8 in place of floats",
    "loader": "use larger batches or smaller samples",
    "restarts": "see the log for why they died",
}


@dataclass(frozen=True)
class Measured:
    """What a run measured. Seconds are those of one training step, on average, where nothing else is said."""

    loader: LoaderConfig
    cores: int  # that this process may use
    num_threads: int  # CPU threads of a training step; 1 on a GPU
    steps: int
    phases: dict[str, float]  # seconds of the whole run: start-up, training, evaluation, checkpoint, rest
    step: float  # waiting and all else included
    waiting: float = 0.0  # in next(), without what the training thread copied and transformed there
    copy: float = 0.0  # in the training thread
    transform: float = 0.0
    free: float | None = None  # a step with free data, workers idle; None: not measured
    cpu: float = 0.0  # of all threads of the training process
    num_workers: int = 1  # threads or processes; 1 if the training or the preloader's thread reads
    workers: dict[str, Any] = field(default_factory=dict)  # loader.stats()["workers"]
    # What the preloader's thread did for a batch: waited for the loader, copied, transformed. Zeros without a thread.
    ahead: tuple[float, float, float] = (0.0, 0.0, 0.0)

    @property
    def computing(self) -> float:
        return self.step - self.waiting - self.copy - self.transform

    def of_batch(self, key: str) -> float:
        """Seconds of a worker for one batch: key is busy, cpu, queued or collate."""
        return float(self.workers.get(f"worker_{key}_seconds", 0.0)) / max(1, self.workers.get("read_batches", 0))

    @property
    def deviation(self) -> float:
        """Standard deviation of the seconds that a worker takes for a batch, without queueing for a core."""
        squares = float(self.workers.get("worker_busy_squares", 0.0)) / max(1, self.workers.get("read_batches", 0))
        return math.sqrt(max(0.0, squares - (self.of_batch("busy") - self.of_batch("queued")) ** 2))

    @property
    def takes_turns(self) -> bool:
        """Whether worker threads and the training thread together keep about one core busy."""
        return self.loader.name == "threads" and 0.6 * self.step < self.cpu < 1.4 * self.step

    @property
    def is_slowed(self) -> bool:
        """Whether computing took clearly longer than on its own."""
        return self.free is not None and self.computing > 1.3 * self.free

    @property
    def cores_gain(self) -> float:
        """How many times as fast the run would be if what it computes kept all cores busy all the time."""
        workers = 0.0 if self.loader.name == "threads" else self.of_batch("cpu")  # threads count for this process
        work = (self.cpu + workers) / self.cores
        return self.step / work if work else math.inf

    @property
    def idle(self) -> float:
        """Share of the time in which workers had nothing to do."""
        return max(0.0, 1 - self.of_batch("busy") / (self.num_workers * self.step))


@dataclass(frozen=True)
class Verdict:
    """What bounds a run: `bottleneck` is a key of SENTENCES, `free_gain` the factor that is left at best."""

    bottleneck: str
    finding: str
    free_gain: float
    changes: tuple[str, ...] = ()  # the overrides to try
    measured_gain: float | None = None  # what they gave when they were tried
    cores_gain: float = math.inf  # the factor that is left if the same work kept all cores busy

    @property
    def gain(self) -> float:
        """The factor that was measured; else the most that the changes, or free data if there are none, can give."""
        if self.measured_gain is not None:
            return self.measured_gain
        return max(1.0, min(self.free_gain, self.cores_gain)) if self.changes else self.free_gain

    @property
    def sentence(self) -> str:
        parts = [self.finding]
        # What was tried may have been faster, on a busy machine.
        if self.bottleneck not in ("step", *PHASES) and (self.measured_gain or 0.0) < self.free_gain:
            parts.append(f"With free data, training would be {self.free_gain:.1f} times as fast")
        if self.changes:
            measured = (
                ""
                if self.measured_gain is None
                else f": {self.measured_gain:.2f} times as fast, measured after this run"
            )
            parts.append(f"Try {' '.join(self.changes)}{measured}")
        elif hint := HINTS.get(self.bottleneck):
            parts.append(hint[0].upper() + hint[1:])
        return ". ".join(parts)


def diagnose(measured: Measured) -> Verdict:
    """Returns what bounds the run, and how much could be gained if it cost nothing."""
    if measured.loader.name == "cached":
        return Verdict("step", CACHED, 1.0)
    losses = losses_of(measured)
    lost = sum(losses.values())
    total = sum(measured.phases.values()) or 1.0
    data = lost * measured.steps / total if lost > LEAST_LOSS * measured.step else 0.0
    shares = {phase: measured.phases.get(phase, 0.0) / total for phase in PHASES}
    shares = {phase: share for phase, share in shares.items() if share > PHASES[phase]}
    phase = max(shares, key=shares.__getitem__, default="")
    if phase and shares[phase] > data:
        return _verdict(measured, phase, 1 / (1 - shares[phase]), shares[phase])
    if not data:
        return _verdict(measured, "step", max(1.0, measured.step / (measured.step - lost)))
    cause = max(losses, key=losses.__getitem__)
    return _verdict(measured, cause, measured.step / (measured.step - lost))


def losses_of(measured: Measured) -> dict[str, float]:
    """Seconds that a step loses because of its data, by their cause."""
    free = measured.computing if measured.free is None else min(measured.free, measured.step)
    waits = dict.fromkeys(("loader", "copy", "transform"), 0.0)
    ahead = sum(measured.ahead)
    for name, seconds in zip(waits, measured.ahead, strict=True):  # what the training thread waits for
        waits[name] = measured.waiting * (seconds / ahead if ahead else float(name == "loader"))
    losses = {"copy": measured.copy + waits["copy"], "transform": measured.transform + waits["transform"]}
    # Workers take no more time from computing than they compute, in threads that wait for one another twice as much.
    slowed = min(max(0.0, measured.computing - free), 2 * measured.of_batch("cpu"))
    cause = cause_of_waiting(measured)
    losses[cause] = losses.get(cause, 0.0) + waits["loader"]
    # Computing is slower beside the workers. Where these never rest, it would only wait for them instead.
    cause = cause if measured.idle < ALWAYS_BUSY else "gil" if measured.takes_turns else "cores"
    losses[cause] = losses.get(cause, 0.0) + slowed
    excess = sum(losses.values()) - (measured.step - free)  # free data may save less: computing was slower there
    largest = max(losses, key=losses.__getitem__)
    losses[largest] = max(0.0, losses[largest] - max(0.0, excess))
    return losses


def cause_of_waiting(measured: Measured) -> str:
    """Why the loader's batches come late."""
    reading, cpu = measured.of_batch("busy"), measured.of_batch("cpu")
    if measured.workers.get("retry_wait_seconds", 0.0) > 0.5 * measured.workers.get("wait_seconds", 0.0) > 0:
        return "restarts"
    if not measured.workers:  # a resident set
        return "transform"
    is_inline = measured.loader.num_workers == 0  # then reading a batch is a part of waiting for it
    if reading < BUSY * measured.waiting if is_inline else measured.idle > 1 - BUSY:
        return "uneven" if measured.deviation > max(0.4 * reading, measured.waiting) else "loader"
    if measured.of_batch("collate") > 0.5 * reading:
        return "collate"
    blocked = reading - cpu - measured.of_batch("queued")  # by a disk, a network, or the interpreter's lock
    if measured.takes_turns and blocked > 0.2 * reading:
        return "gil"
    if blocked > 0.5 * (reading - measured.of_batch("queued")):
        return "reading"
    is_short = measured.num_workers > measured.cores or measured.of_batch("queued") > 0.5 * reading
    return "cores" if is_short else "decoding"


def candidates(bottleneck: str, measured: Measured) -> list[tuple[str, ...]]:
    """Overrides that may help against the bottleneck, the most promising first."""
    loader, workers = measured.loader, measured.num_workers
    fewer_threads: list[tuple[str, ...]] = [("train.num_threads=1",)] if measured.num_threads > 1 else []
    if bottleneck == "step" and measured.is_slowed:
        return fewer_threads
    if bottleneck in ("step", *PHASES) or loader.name == "cached":
        return []
    if loader.name == "torch" and bottleneck not in ("copy", "transform"):
        return [("loader=prefetch",)]
    more, fewer = (f"loader.num_workers={count}" for count in (measured.cores, max(1, workers - 1)))
    is_fixed = loader.num_workers != "auto"
    factor = 4 if loader.prefetch_factor == "auto" else int(loader.prefetch_factor)
    changes: dict[str, list[tuple[str, ...]]] = {
        "gil": [("loader=prefetch",)],
        "reading": [(f"loader.num_workers={4 * workers}",)],
        "decoding": [(more,)] if is_fixed and workers < measured.cores else fewer_threads,
        "cores": [*fewer_threads, (fewer,)] if is_fixed and workers > 1 else fewer_threads,
        "uneven": [(f"loader.prefetch_factor={4 * factor}",)],
        "loader": [*fewer_threads, ("loader=threads",)],
        "collate": [(more,)] if is_fixed and workers < measured.cores else [],
    }
    return changes.get(bottleneck, [])


def _verdict(measured: Measured, bottleneck: str, gain: float, phase: float = 0.0) -> Verdict:
    free = measured.computing if measured.free is None else measured.free
    milliseconds = {
        "step": measured.step,
        "free": free,
        "computing": measured.computing,
        "waiting": measured.waiting,
        "transform": measured.transform or measured.ahead[2],
        "copy": measured.copy or measured.ahead[1],
        "reading": measured.of_batch("busy"),
        "cpu": measured.of_batch("cpu"),
        "collate": measured.of_batch("collate"),
        "deviation": measured.deviation,
        "queued": measured.of_batch("queued"),
    }
    sentence = SENTENCES[bottleneck]
    if bottleneck == "step":
        sentence = UNMEASURED if measured.free is None else SLOWED if measured.is_slowed else sentence
    finding = sentence.format(
        **{name: 1000 * seconds for name, seconds in milliseconds.items()},
        phase=phase,
        phase_seconds=measured.phases.get(bottleneck, 0.0),
        cores=measured.cores,
        workers=measured.num_workers,
        idle=measured.idle,
        deaths=measured.workers.get("deaths"),
    )
    return Verdict(bottleneck, finding, gain, cores_gain=measured.cores_gain)
