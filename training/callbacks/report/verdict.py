"""Finds the bottleneck of a run from its measurements. A pure function, so that made-up measurements can test it.

Data are free if a batch is already on the device; steps with free data are measured after the run. How much longer the
steps of the run took is their loss to the data. It includes more than waiting: on a CPU, workers also take cores from
the step. The loss is then split among its causes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from loaders import LoaderConfig

LEAST_LOSS = 0.15  # share of a step; if free data would save less, training counts as compute-bound
# A phase that takes more than this share of the run is its bottleneck, unless data cost more.
PHASES = {"start-up": 0.3, "evaluation": 0.3, "checkpoint": 0.1}
ALWAYS_BUSY = 0.1  # workers count as always busy if they are idle for less than this share of the time
BUSY = 0.6  # workers that read for more than this share of the time are the limit; else it is the delivery of batches

SENTENCES = {
    "step": "compute-bound: a step takes {step:.1f} ms, and {free:.1f} ms with free data: a faster loader cannot help",
    "start-up": "start-up took {phase:.0%} of the run: {phase_seconds:.1f} s until the first batch arrived",
    "evaluation": "evaluation took {phase:.0%} of the run, {phase_seconds:.1f} s",
    "checkpoint": "saving checkpoints took {phase:.0%} of the run, {phase_seconds:.1f} s",
    "cores": "short of cores ({cores} for workers and training): computing takes {computing:.1f} ms per step, and "
    "{free:.1f} ms while no worker runs; a worker waits {queued:.1f} ms for a core in each batch",
    "reading": "data-bound: samples wait for a disk or a network: a worker takes {reading:.1f} ms for a batch, with "
    "{cpu:.1f} ms of CPU time",
    "decoding": "data-bound: reading the samples of a batch takes a worker {reading:.1f} ms, with {cpu:.1f} ms of CPU "
    "time, and a step takes {free:.1f} ms with free data",
    "gil": "data-bound: {workers} worker threads run Python code in turns: they share one interpreter lock (the GIL)",
    "uneven": "data-bound: a few slow samples hold up the others, as batches come in order: a batch takes "
    "{reading:.1f} ms with a standard deviation of {deviation:.1f} ms, and workers are idle {idle:.0%} of the time",
    "collate": "data-bound: collating takes {collate:.1f} of the {reading:.1f} ms that a worker needs for a batch",
    "transform": "data-bound: transforming batches in the training process takes {transform:.1f} ms per step",
    "resident": "data-bound: loader=resident selects and augments a batch in {waiting:.1f} ms per step",
    "copy": "data-bound: copying batches to the device takes {copy:.1f} ms per step",
    "loader": "data-bound: passing a batch from a worker to training is the limit: workers are idle {idle:.0%} of the "
    "time, and training waits {waiting:.1f} ms per step",
    "restarts": "data-bound: {deaths} workers died, and training waited while their batches were retried",
}
SLOWED = (
    "compute-bound, and slowed by other programs or by its own threads: computing takes {computing:.1f} ms per step, "
    "and took {free:.1f} ms right after the run"
)
UNMEASURED = "compute-bound: a step takes {step:.1f} ms, and waits for data for {waiting:.1f} ms of them"
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
    "transform": "this transform normalises images and applies augment.*: use smaller images, or less of augment.*",
    "resident": "use smaller images or less augmentation, or let workers prepare batches (loader=prefetch)",
    "copy": "copy less: uint8 in place of floats",
    "loader": "use larger batches or smaller samples",
    "restarts": "see the log for why they died",
}


@dataclass(frozen=True)
class Measured:
    """The measurements of a run. Times are in seconds, the mean per training step if nothing else is given."""

    loader: LoaderConfig
    cores: int  # CPU cores that this process may use
    num_threads: int  # CPU threads of a training step; 1 on a GPU
    steps: int
    phases: dict[str, float]  # of the whole run: start-up, training, evaluation, checkpoint, rest
    step: float  # the whole step, with waiting
    waiting: float = 0.0  # in next(), without the copy and the transform of the training thread there
    copy: float = 0.0  # in the training thread
    transform: float = 0.0  # in the training thread
    free: float | None = None  # a whole step with free data, while no worker runs; None: not measured
    cpu: float = 0.0  # CPU time of all threads of the training process
    num_workers: int = 1  # threads or processes; 1 if the training thread or the preloader's reads
    workers: dict[str, Any] = field(default_factory=dict)  # loader.stats()["workers"]
    # The preloader's thread, for a batch: waiting for the loader, copying, transforming. Zeros without a thread.
    ahead: tuple[float, float, float] = (0.0, 0.0, 0.0)

    @property
    def computing(self) -> float:
        return self.step - self.waiting - self.copy - self.transform

    def of_batch(self, key: str) -> float:
        """A worker's seconds for one batch; key: busy (all of it), cpu, queued (for a core) or collate."""
        return float(self.workers.get(f"worker_{key}_seconds", 0.0)) / max(1, self.workers.get("read_batches", 0))

    @property
    def deviation(self) -> float:
        """Standard deviation of a worker's seconds for a batch, without the wait for a core."""
        squares = float(self.workers.get("worker_busy_squares", 0.0)) / max(1, self.workers.get("read_batches", 0))
        return math.sqrt(max(0.0, squares - (self.of_batch("busy") - self.of_batch("queued")) ** 2))

    @property
    def takes_turns(self) -> bool:
        """Whether worker threads and the training thread together use about one core: they wait for the GIL."""
        return self.loader.name == "threads" and 0.6 * self.step < self.cpu < 1.4 * self.step

    @property
    def is_slowed(self) -> bool:
        """Whether computing took clearly longer than in steps with free data."""
        return self.free is not None and self.computing > 1.3 * self.free

    @property
    def cores_gain(self) -> float:
        """How many times as fast the run would be if all cores were busy with its work all the time."""
        workers = 0.0 if self.loader.name == "threads" else self.of_batch("cpu")  # self.cpu includes threads
        work = (self.cpu + workers) / self.cores
        return self.step / work if work else math.inf

    @property
    def idle(self) -> float:
        """Share of the time that workers have nothing to do."""
        return max(0.0, 1 - self.of_batch("busy") / (self.num_workers * self.step))


@dataclass(frozen=True)
class Verdict:
    """What bounds a run. Gains are factors: 2.0 is twice as fast."""

    bottleneck: str  # a key of SENTENCES
    finding: str  # the sentence about it
    free_gain: float  # if the bottleneck cost no time
    changes: tuple[str, ...] = ()  # the overrides to try
    measured_gain: float | None = None  # of the changes, if they were tried
    cores_gain: float = math.inf  # if all cores were busy with the same work

    @property
    def gain(self) -> float:
        """The measured gain; without one, the most that the changes can give, or free data if there are none."""
        if self.measured_gain is not None:
            return self.measured_gain
        return max(1.0, min(self.free_gain, self.cores_gain)) if self.changes else self.free_gain

    @property
    def sentence(self) -> str:
        parts = [self.finding]
        # On a busy machine, the tried change may be faster than free data was.
        if self.bottleneck not in ("step", *PHASES) and (self.measured_gain or 0.0) < self.free_gain:
            parts.append(f"With free data, training would be {self.free_gain:.1f} times as fast")
        if self.changes:
            gain = self.measured_gain
            measured = "" if gain is None else f": {gain:.2f} times as fast, measured after this run"
            parts.append(f"Try {' '.join(self.changes)}{measured}")
        elif hint := HINTS.get(self.bottleneck):
            parts.append(hint[0].upper() + hint[1:])
        return ". ".join(parts)


def diagnose(measured: Measured) -> Verdict:
    """Returns the bottleneck of the run, and how much faster the run would be without it."""
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
    """The seconds that a step loses to its data, by cause."""
    free = measured.computing if measured.free is None else min(measured.free, measured.step)
    waits = dict.fromkeys(("loader", "copy", "transform"), 0.0)
    ahead = sum(measured.ahead)
    for name, seconds in zip(waits, measured.ahead, strict=True):  # as the preloader's thread spent its time
        waits[name] = measured.waiting * (seconds / ahead if ahead else float(name == "loader"))
    losses = {"copy": measured.copy + waits["copy"], "transform": measured.transform + waits["transform"]}
    # Workers slow down the step by no more than their CPU time, or twice that: threads also wait for one another.
    slowed = min(max(0.0, measured.computing - free), 2 * measured.of_batch("cpu"))
    cause = cause_of_waiting(measured)
    losses[cause] = losses.get(cause, 0.0) + waits["loader"]
    # If workers are always busy, a step that they did not slow down would wait for them instead: same cause.
    if measured.idle >= ALWAYS_BUSY:
        cause = "gil" if measured.takes_turns else "cores"
    losses[cause] = losses.get(cause, 0.0) + slowed
    excess = sum(losses.values()) - (measured.step - free)  # no more is lost than free data would save
    largest = max(losses, key=losses.__getitem__)
    losses[largest] = max(0.0, losses[largest] - max(0.0, excess))
    return losses


def cause_of_waiting(measured: Measured) -> str:
    """Why the batches of the loader are late: a key of SENTENCES."""
    reading, cpu = measured.of_batch("busy"), measured.of_batch("cpu")
    if measured.workers.get("retry_wait_seconds", 0.0) > 0.5 * measured.workers.get("wait_seconds", 0.0) > 0:
        return "restarts"
    if not measured.workers:  # loader=resident has none
        return "resident"
    is_inline = measured.loader.num_workers == 0  # then the time of reading is a part of the waiting
    rarely_reads = reading < BUSY * measured.waiting if is_inline else measured.idle > 1 - BUSY
    if rarely_reads:
        return "uneven" if measured.deviation > max(0.4 * reading, measured.waiting) else "loader"
    if measured.of_batch("collate") > 0.5 * reading:
        return "collate"
    blocked = reading - cpu - measured.of_batch("queued")  # by a disk, a network, or the GIL
    if measured.takes_turns and blocked > 0.2 * reading:
        return "gil"
    if blocked > 0.5 * (reading - measured.of_batch("queued")):
        return "reading"
    is_short = measured.num_workers > measured.cores or measured.of_batch("queued") > 0.5 * reading
    return "cores" if is_short else "decoding"


def candidates(bottleneck: str, measured: Measured) -> list[tuple[str, ...]]:
    """Changes that may help against the bottleneck, each some overrides; the most promising is the first."""
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
