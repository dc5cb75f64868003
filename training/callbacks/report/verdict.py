"""Finds the bottleneck of a run from its measurements. A pure function, so that made-up measurements can test it.

Data are free if a batch is already on the device; steps with free data are measured after the run. How much longer the
steps of the run took is their loss to the data. It includes more than waiting: on a CPU, workers also take cores from
the step. The loss is then split among its causes. Where the measurements contradict one another, the verdict says so.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from training.callbacks.report.measured import LEAST_LOSS, Interval, Measured

# A phase that takes more than this share of the run is its bottleneck, unless data cost more.
PHASES = {"start-up": 0.3, "evaluation": 0.3, "checkpoint": 0.1}
NO_DATA = ("step", "threads", "not measurable", *PHASES)  # bottlenecks for which training does not wait for data
ALWAYS_BUSY = 0.1  # workers count as always busy if they are idle for less than this share of the time
BUSY = 0.6  # workers that read for more than this share of the time are the limit; else it is the delivery of batches

SENTENCES = {
    "step": "compute-bound: a step takes {step:.1f} ms, and {free:.1f} ms with free data: a faster loader cannot help",
    "threads": "threads in contention: with free data a step takes {free:.1f} ms with {num_threads} threads, and "
    "{one:.1f} ms with one",
    "not measurable": "not measurable: {obstacle}. A step takes {step:.1f} ms, {seen:.1f} of which it spends on data",
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
    "compute-bound, and slowed down by something else than its data: computing takes {computing:.1f} ms per step, "
    "and took {free:.1f} ms right after the run"
)
UNMEASURED = "compute-bound: a step takes {step:.1f} ms, and waits for data for {waiting:.1f} ms of them"
CACHED = "loader=cached: this is what training costs with free data: compare its images/s with those of other loaders"
# Why steps with free data may say nothing about a run.
OBSTACLES = {
    "others": "other programs kept {others:.0%} of the cores busy: run it again on an idle machine",
    "sizes": "batches vary in size ({least:,} to {most:,} numbers), and free data are one batch: compare loaders by a "
    "sweep",
    "repetitions": "repetitions of a step with free data disagree, {free:.1f} ms: run it again, or raise "
    "timing.trial_seconds",
    "free": "a step takes {free:.1f} ms with free data, which is not faster, although it waits for data: run it again",
}
HINTS = {
    "start-up": "make the dataset's first samples cheaper, or train longer per start",
    "checkpoint": "save less often: train.checkpoint_every=10min",
    "cores": "make samples cheaper, or give the run more cores",
    "reading": "move the data to a faster disk, or pack small files into one (image folders: scripts/pack_images.py)",
    "decoding": "make a sample cheaper, as by smaller or decoded files (image folders: scripts/pack_images.py)",
    "gil": "read in processes: loader=prefetch",
    "uneven": "load further ahead: raise loader.prefetch_factor",
    "collate": "let the dataset write whole batches (read_batch)",
    "collate_fn": "make data.collate cheaper",
    "transform": "this transform normalises images: use smaller ones",
    "augment": "this transform normalises images and applies augment.*: use smaller images, or less of augment.*",
    "resident": "use smaller images, or let workers prepare batches (loader=prefetch)",
    "copy": "copy less, such as smaller samples, or uint8 in place of floats",
    "loader": "use larger batches or smaller samples",
    "restarts": "see the log for why they died",
}


@dataclass(frozen=True)
class Verdict:
    """What bounds a run. Gains are factors: 2.0 is twice as fast."""

    bottleneck: str  # a key of SENTENCES
    finding: str  # the sentence about it
    free_gain: Interval | None = None  # if the bottleneck cost no time; None: unknown
    changes: tuple[str, ...] = ()  # the overrides to try
    measured_gain: Interval | None = None  # of the changes, if they were tried
    cores_gain: float = math.inf  # if all cores were busy with the same work
    hint: str = ""  # what may help, if there are no changes

    @property
    def gain(self) -> float | None:
        """The measured gain; without one, the most that the changes can give, or free data if there are none."""
        if self.measured_gain is not None:
            return self.measured_gain.middle
        free = self.free_gain and self.free_gain.middle
        return max(1.0, min(free, self.cores_gain)) if self.changes and free is not None else free

    @property
    def sentence(self) -> str:
        parts = [self.finding]
        gain = self.measured_gain
        # A change that took work off the cores may be faster than free data was.
        if self.free_gain and self.bottleneck not in NO_DATA and (not gain or gain.middle < self.free_gain.middle):
            parts.append(f"With free data, training would be {self.free_gain:.1f} times as fast")
        if self.changes:
            measured = "" if gain is None else f": {gain:.2f} times as fast, measured after this run"
            parts.append(f"Try {' '.join(self.changes)}{measured}")
        elif self.hint:
            parts.append(self.hint[0].upper() + self.hint[1:])
        return ". ".join(parts)


def diagnose(measured: Measured) -> Verdict:
    """Returns the bottleneck of the run, and how much faster the run would be without it."""
    if measured.loader.name == "cached":
        return Verdict("step", CACHED, Interval.of([1.0]))
    losses, threads = losses_of(measured), measured.contention
    lost = sum(losses.values())
    is_lost = max(lost, threads) > LEAST_LOSS * measured.step
    total = sum(measured.phases.values()) or 1.0
    share = is_lost * max(lost, threads) * measured.steps / total
    if measured.obstacle:  # any part of the training may have been lost
        share = measured.phases.get("training", 0.0) / total
    shares = {phase: measured.phases.get(phase, 0.0) / total for phase in PHASES}
    shares = {phase: share for phase, share in shares.items() if share > PHASES[phase]}
    phase = max(shares, key=shares.__getitem__, default="")
    if phase and shares[phase] > share:
        return _verdict(measured, phase, Interval.of([1 / (1 - shares[phase])]), shares[phase])
    if measured.obstacle:
        return _verdict(measured, "not measurable", None)
    if is_lost and threads > lost:
        return _verdict(measured, "threads", Interval.of([measured.step / (measured.step - threads)]))
    free = measured.free or Interval.of([measured.computing])
    gain = free.map(lambda seconds: measured.step / (measured.step - sum(losses_of(measured, seconds).values())))
    return _verdict(measured, max(losses, key=losses.__getitem__) if is_lost else "step", gain)


def losses_of(measured: Measured, free: float | None = None) -> dict[str, float]:
    """The seconds that a step loses to its data, by cause. free: of a step with free data, if not the median."""
    middle = measured.computing if measured.free is None else measured.free.middle
    free = min(middle if free is None else free, measured.step)
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
    if (measured.contention and bottleneck in ("threads", "not measurable")) or (
        bottleneck == "step" and measured.is_slowed
    ):
        return fewer_threads
    if bottleneck in NO_DATA or loader.name == "cached":
        return []
    if loader.name == "torch" and bottleneck not in ("copy", "transform"):
        return [("loader=prefetch",)]
    more, fewer = (f"loader.num_workers={count}" for count in (measured.cores, max(1, workers - 1)))
    is_fixed = loader.num_workers != "auto"
    factor = 4 if loader.prefetch_factor == "auto" else int(loader.prefetch_factor)
    resident: list[tuple[str, ...]] = [("loader=resident",)] if measured.in_memory else []
    changes: dict[str, list[tuple[str, ...]]] = {
        "gil": [("loader=prefetch",)],
        "reading": [(f"loader.num_workers={4 * workers}",)],
        "decoding": [(more,)] if is_fixed and workers < measured.cores else fewer_threads,
        "cores": [*fewer_threads, *([(fewer,)] if is_fixed and workers > 1 else []), *resident],
        "uneven": [(f"loader.prefetch_factor={4 * factor}",)],
        "loader": [*fewer_threads, ("loader=threads",)],
        "collate": [(more,)] if is_fixed and workers < measured.cores else [],
    }
    return changes.get(bottleneck, [])


def _verdict(measured: Measured, bottleneck: str, gain: Interval | None, phase: float = 0.0) -> Verdict:
    milliseconds = {
        "step": measured.step,
        "computing": measured.computing,
        "seen": measured.seen,
        "waiting": measured.waiting,
        "transform": measured.transform or measured.ahead[2],
        "copy": measured.copy or measured.ahead[1],
        "reading": measured.of_batch("busy"),
        "cpu": measured.of_batch("cpu"),
        "collate": measured.of_batch("collate"),
        "deviation": measured.deviation,
        "queued": measured.of_batch("queued"),
    }
    intervals = {"free": measured.free or Interval.of([measured.computing]), "one": measured.one_thread}
    sentence = SENTENCES[bottleneck].replace("{obstacle}", OBSTACLES.get(measured.obstacle, ""))
    if bottleneck == "not measurable" and measured.contention:  # that needs no quiet machine, and any batch will do
        sentence += f". T{SENTENCES['threads'][1:]}"
    if bottleneck == "step":
        sentence = UNMEASURED if measured.free is None else SLOWED if measured.is_slowed else sentence
    finding = sentence.format(
        **{name: 1000 * seconds for name, seconds in milliseconds.items()},
        **{name: each and each.map(lambda seconds: 1000 * seconds) for name, each in intervals.items()},
        phase=phase,
        num_threads=measured.num_threads,
        others=measured.others,
        least=measured.sizes[0],
        most=measured.sizes[1],
        phase_seconds=measured.phases.get(bottleneck, 0.0),
        cores=measured.cores,
        workers=measured.num_workers,
        idle=measured.idle,
        deaths=measured.workers.get("deaths"),
    )
    hint = {"transform": "augment" * measured.augments, "collate": "collate_fn" * measured.collates}.get(bottleneck)
    return Verdict(bottleneck, finding, gain, cores_gain=measured.cores_gain, hint=HINTS.get(hint or bottleneck, ""))
