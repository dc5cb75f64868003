"""Finds the bottleneck of a run from its measurements. A pure function, so that made-up measurements can test it.

Data are free if a batch is already on the device; steps with free data are measured after the run. How much longer the
steps of the run took is their loss to the data. It includes more than waiting: on a CPU, workers also take cores from
the step. The loss is then split among its causes: `reading` samples, the `loader` that passes batches on, the
`transform` that makes them ready, and too few `cores`; without a loss it is the `step` itself. A phase outside of the
steps may cost more than all of these. Where the measurements contradict one another, the verdict says so.
"""

from __future__ import annotations

from dataclasses import dataclass

from training.callbacks.report.measured import LEAST_LOSS, Interval, Measured

# A phase that takes more than this share of the run is its bottleneck, unless data cost more.
PHASES = {"start-up": 0.3, "evaluation": 0.3, "checkpoint": 0.1}
NO_DATA = ("step", "not measurable", *PHASES)  # bottlenecks for which training does not wait for data
ALWAYS_BUSY = 0.1  # workers count as always busy if they are idle for less than this share of the time
BUSY = 0.6  # workers that read for more than this share of the time are the limit; else it is the delivery of batches

CAUSES = ("step", "reading", "loader", "transform", "cores", *PHASES)
CACHED = "loader=cached: this is what training costs with free data: compare its images/s with those of other loaders"
HINTS = {
    "start-up": "make the dataset's first samples cheaper, or train longer per start",
    "checkpoint": "save less often: train.checkpoint_every=10min",
    "cores": "make samples cheaper, or give the run more cores",
    "reading": "make samples cheaper, as by smaller or decoded files, or files on a faster disk (image folders: "
    "scripts/pack_images.py), and let a dataset that is no stream write whole batches (read_batch)",
    "transform": "use smaller images, or less of augment.*",
    "loader": "use larger batches or smaller samples",
}


@dataclass(frozen=True)
class Verdict:
    """What bounds a run. Gains are factors: 2.0 is twice as fast."""

    bottleneck: str  # one of CAUSES, or "not measurable"
    finding: str  # the sentence about it
    free_gain: Interval | None = None  # if the bottleneck cost no time; None: unknown
    changes: tuple[str, ...] = ()  # the overrides to try
    measured_gain: Interval | None = None  # of the changes, if they were tried

    @property
    def gain(self) -> float | None:
        """The measured gain; without one, that of free data."""
        gain = self.measured_gain or self.free_gain
        return gain and gain.middle

    @property
    def sentence(self) -> str:
        parts, gain = [self.finding], self.measured_gain
        # A change that took work off the cores may be faster than free data was.
        if self.free_gain and self.bottleneck not in NO_DATA and (not gain or gain.middle < self.free_gain.middle):
            parts.append(f"With free data, training would be {self.free_gain:.1f} times as fast")
        if self.changes and (gain or self.bottleneck != "step"):  # fewer threads often make a step slower
            measured = "" if gain is None else f": {gain:.2f} times as fast, measured after this run"
            parts.append(f"Try {' '.join(self.changes)}{measured}")
        elif hint := HINTS.get(self.bottleneck):
            parts.append(hint[0].upper() + hint[1:])
        return ". ".join(parts)


def diagnose(measured: Measured) -> Verdict:
    """Returns the bottleneck of the run, and how much faster the run would be without it."""
    if measured.loader.name == "cached":
        return Verdict("step", CACHED, Interval.of([1.0]))
    losses, total = losses_of(measured), sum(measured.phases.values()) or 1.0
    lost = sum(losses.values())
    is_lost = lost > LEAST_LOSS * measured.step
    share = is_lost * lost * measured.steps / total
    if measured.obstacle:  # any part of the training may have been lost
        share = measured.phases.get("training", 0.0) / total
    shares = {phase: measured.phases.get(phase, 0.0) / total for phase in PHASES}
    shares = {phase: taken for phase, taken in shares.items() if taken > max(PHASES[phase], share)}
    if shares:
        phase = max(shares, key=shares.__getitem__)
        return Verdict(phase, finding(measured, phase, shares[phase]), Interval.of([1 / (1 - shares[phase])]))
    if measured.obstacle:
        return Verdict("not measurable", finding(measured, "not measurable"))
    free = measured.free or Interval.of([measured.computing])
    gain = free.map(lambda seconds: measured.step / (measured.step - sum(losses_of(measured, seconds).values())))
    bottleneck = max(losses, key=losses.__getitem__) if is_lost else "step"
    return Verdict(bottleneck, finding(measured, bottleneck), gain)


def losses_of(measured: Measured, free: float | None = None) -> dict[str, float]:
    """The seconds that a step loses to its data, by cause. free: of a step with free data, if not the median."""
    middle = measured.computing if measured.free is None else measured.free.middle
    free = min(middle if free is None else free, measured.step)
    losses = {"reading": 0.0, "loader": 0.0, "cores": 0.0, "transform": measured.for_ready}
    cause = cause_of_waiting(measured)
    losses[cause] += measured.for_loader
    # Workers slow down the step by no more than their CPU time, or twice that: threads also wait for one another.
    slowed = min(max(0.0, measured.computing - free), 2 * measured.of_batch("cpu"))
    # If workers are always busy, a step that they did not slow down would wait for them instead: same cause.
    if measured.idle >= ALWAYS_BUSY or measured.loader.name == "threads":
        cause = "reading" if measured.loader.name == "threads" else "cores"  # threads take turns, on any core
    losses[cause] += slowed
    excess = sum(losses.values()) - (measured.step - free)  # no more is lost than free data would save
    largest = max(losses, key=losses.__getitem__)
    losses[largest] = max(0.0, losses[largest] - max(0.0, excess))
    return losses


def cause_of_waiting(measured: Measured) -> str:
    """Why the batches of the loader are late: one of CAUSES."""
    busy, workers = measured.of_batch("busy"), measured.workers
    if not workers:  # loader=resident makes batches in the training process
        return "transform"
    if workers.get("retry_wait_seconds", 0.0) > 0.5 * workers.get("wait_seconds", 0.0) > 0:
        return "reading"  # workers died
    is_inline = measured.loader.num_workers == 0  # then the time of reading is a part of the waiting
    rarely_reads = busy < BUSY * measured.for_loader if is_inline else measured.idle > 1 - BUSY
    if rarely_reads:
        return "loader"
    is_short = measured.num_workers > measured.cores or measured.of_batch("queued") > 0.5 * busy
    return "cores" if is_short and measured.computes and measured.loader.name != "threads" else "reading"


def candidates(bottleneck: str, measured: Measured) -> list[tuple[str, ...]]:
    """Changes that may help against the bottleneck, each some overrides; the most promising is the first."""
    loader, workers = measured.loader, measured.num_workers
    one_thread: list[tuple[str, ...]] = [("train.num_threads=1",)] if measured.num_threads > 1 else []
    if loader.name == "cached" or bottleneck in NO_DATA:
        return one_thread if bottleneck == "step" and loader.name != "cached" else []
    if loader.name == ("resident" if bottleneck == "transform" else "torch"):
        return [("loader=prefetch",)]
    if bottleneck == "loader":  # batches come in order: if more are loaded ahead, a slow one delays the others less
        factor = 4 if loader.prefetch_factor == "auto" else int(loader.prefetch_factor)
        return [(f"loader.prefetch_factor={4 * factor}",), *one_thread, ("loader=threads",)]
    is_fixed = loader.num_workers != "auto"
    if bottleneck == "cores":
        fewer = [(f"loader.num_workers={workers - 1}",)] if is_fixed and workers > 1 else []
        return [*one_thread, *fewer, *([("loader=resident",)] if measured.in_memory else [])]
    if bottleneck == "transform":
        return []
    changes = [("loader=prefetch",)] if loader.name == "threads" else []  # threads of Python code take turns
    if not measured.computes:
        return [*changes, (f"loader.num_workers={4 * workers}",)]
    more = is_fixed and workers < measured.cores
    return [*changes, *([(f"loader.num_workers={measured.cores}",)] if more else one_thread)]


def finding(run: Measured, bottleneck: str, share: float = 0.0) -> str:
    """The sentence about a bottleneck, with its figures in milliseconds; share: the part of the run of a phase."""
    free = (run.free or Interval.of([run.computing])).map(lambda seconds: 1000 * seconds)
    step, computing, waiting, copy = (1000 * seconds for seconds in (run.step, run.computing, run.waiting, run.copy))
    reading, cpu, collate, queued = (1000 * run.of_batch(key) for key in ("busy", "cpu", "collate", "queued"))
    ready = copy + 1000 * run.transform if run.workers or run.transform else waiting
    seconds, deaths = run.phases.get(bottleneck, 0.0), run.workers.get("deaths")
    if bottleneck == "step" and run.free is None:
        return f"compute-bound: a step takes {step:.1f} ms, and waits for data for {waiting:.1f} ms of them"
    if bottleneck == "step" and run.is_slowed:
        return (
            "compute-bound, and slowed down by something else than its data: computing takes "
            f"{computing:.1f} ms per step, and took {free:.1f} ms right after the run"
        )
    reasons = {
        "workers": "loader=torch does not measure how long its workers read a stream: compare loaders by a sweep",
        "others": f"other programs kept {run.others:.0%} of the cores busy: run it again on an idle machine",
        "sizes": f"batches vary in size ({min(run.sizes):,} to {max(run.sizes):,} numbers), and free data are one "
        "batch: compare loaders by a sweep",
        "repetitions": f"repetitions of a step with free data disagree, {free:.1f} ms: run it again, or raise "
        "timing.trial_seconds",
        "free": f"a step takes {free:.1f} ms with free data, which is not faster, although it waits for data: "
        "run it again",
    }
    return {
        "step": f"compute-bound: a step takes {step:.1f} ms, and {free:.1f} ms with free data: a faster loader cannot "
        "help",
        "reading": f"data-bound: reading a batch takes a worker {reading:.1f} ms, in {cpu:.1f} of which it computes "
        f"and in {collate:.1f} collates, and a step takes {free:.1f} ms with free data"
        + (f"; {deaths} workers died (see the log), and their batches were retried" if deaths else ""),
        "loader": "data-bound: passing a batch from a worker to training is the limit: workers are idle "
        f"{run.idle:.0%} of the time, and training waits for them for {1000 * run.for_loader:.1f} ms per step",
        "transform": f"data-bound: making batches ready in the training process takes {ready:.1f} ms per step, "
        f"{copy:.1f} of which for copies to the device",
        "cores": f"short of cores ({run.cores} for workers and training): computing takes {computing:.1f} ms per "
        f"step, and {free:.1f} ms while no worker runs; a worker waits {queued:.1f} ms for a core in each batch",
        "start-up": f"start-up took {share:.0%} of the run: {seconds:.1f} s until the first batch arrived",
        "evaluation": f"evaluation took {share:.0%} of the run, {seconds:.1f} s",
        "checkpoint": f"saving checkpoints took {share:.0%} of the run, {seconds:.1f} s",
        "not measurable": f"not measurable: {reasons.get(run.obstacle)}. A step takes {step:.1f} ms, {waiting:.1f} of "
        "which it waits for data",
    }[bottleneck]
