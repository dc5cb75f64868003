"""Where a run's time went: a table for the terminal and report.md, what bounded the run, and what may help."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import psutil
import torch

from loaders import Preloader
from loaders.machine import available_cores
from loaders.timeline import TRAINING, Timeline
from loaders.timing import StepTimer, Window
from training.config import Config
from training.reports.trial import Trials
from training.reports.verdict import Measured, Verdict, candidates, diagnose
from training.sets import Sets
from training.table import table

MADE = "making the dataset's files, once"
NOT_MEASURED = "the run ended before it was measured what bounded it"
NOT_TRAINED = "nothing was left to train: the checkpoint was evaluated"
WORTH = 1.05  # a change that was tried is suggested if it is at least so many times as fast


class Report:
    """A run's clock, and what it shows at the end.

    The clock always runs for one phase: set-up at first, and inside `with report.phase("evaluation")` that one.
    """

    def __init__(self, config: Config, device: torch.device) -> None:
        self._config, timing = config, config.timing
        self.timeline = Timeline(device) if timing.timeline else None
        self.timer = StepTimer(device, timing.warmup_steps, self.timeline, timing.timeline)
        self._phase, self._changed = "set-up", time.perf_counter()
        phases = ("set-up", "start-up", "training", "evaluation", "checkpoint", "the rest")
        self._seconds = dict.fromkeys(phases, 0.0)
        self._cpu_seconds = 0.0  # of this process, while training
        self._memory, self._active_workers = 0, None
        self._device_memory: int | None = None  # the most that tensors took on a GPU
        self._verdict: Verdict | None = None  # what `finish` found
        self.text = NOT_TRAINED

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Counts the time in the block for phase `name`; one inside another interrupts it."""
        before = self._change(name)
        try:
            yield
        finally:
            self._change(before)

    def _change(self, name: str) -> str:
        before, now, cpu = self._phase, time.perf_counter(), time.process_time()
        self._seconds[before] += now - self._changed
        if self.timeline is not None and before in ("evaluation", "checkpoint"):
            self.timeline.add(TRAINING, before, self._changed, now, None)
        self._phase, self._changed = name, now
        self._cpu_seconds += cpu * ((before == "training") - (name == "training"))
        return before

    def beginning(self, sets: Sets, steps: int) -> str:
        """Returns a sentence on what is about to run."""
        config, what = self._config, "images" if sets.image is not None else "samples"
        classes = f" of {sets.task.label_below} classes" if sets.task.label_below else ""
        validation = "" if sets.val is None else f"{len(sets.val):,} to validate, "
        return (
            f"{sets.name}: {len(sets.train):,} {what}{classes}, {validation}{len(sets.test):,} to test; "
            f"loader={config.loader.name}, {config.loader.num_workers} workers; "
            f"{steps:,} steps of {config.train.batch_size} {what}, learning rate {config.optim.get('lr')}"
        )

    def leave_out_of_start_up(self, made: float) -> None:
        """Counts the seconds that the datasets took to make their files on their own: the next run has them."""
        if made:
            self._seconds[MADE] = made
            self._seconds["start-up"] -= made

    def begin_training(self) -> None:
        """Ends the set-up; what belongs to no phase is now the rest."""
        self._change("the rest")

    def finish(self, total: Window, loader: Preloader, trials: Trials | None) -> None:
        """Finds what bounded the run: measures steps with free data, and tries the changes that promise most.

        `total` are the run's steps, `loader` the training loader, which is closed here. Without `trials`, after a
        signal, nothing is measured any more.
        """
        self._memory, phases = peak_memory(), self.phases()
        if loader.device.type == "cuda":
            self._device_memory = torch.cuda.max_memory_allocated(loader.device)
        stats = loader.stats()
        self._active_workers = stats.get("workers", {}).get("active_workers")
        loader.close()  # its workers would take cores from what is measured
        step = total.seconds / total.steps
        measured = self._measured(total, stats, loader, phases, trials.free(step) if trials else None)
        verdict = diagnose(measured)
        for changes in candidates(verdict.bottleneck, measured):
            if trials is None:
                break
            tried = trials.change(changes, step)
            if tried is None or step >= WORTH * tried:
                verdict = replace(verdict, changes=changes, measured_gain=tried and step / tried)
                break
        self._verdict, self.text = verdict, self._text(measured, verdict)

    def summary(self) -> dict[str, Any]:
        """Returns what summary.json says of the run's time."""
        verdict = self._verdict
        return {
            "seconds": {phase: round(seconds, 3) for phase, seconds in self.phases().items()},
            "memory_bytes": self._memory,
            "device_memory_bytes": self._device_memory,
            "active_workers": self._active_workers,
            "verdict": verdict.sentence if verdict else NOT_MEASURED if self.timer.whole().steps else NOT_TRAINED,
            "bottleneck": verdict and verdict.bottleneck,
            "gain": verdict and verdict.gain,
            "try": verdict and list(verdict.changes),
        }

    def _measured(
        self, total: Window, stats: dict[str, Any], loader: Preloader, phases: dict[str, float], free: float | None
    ) -> Measured:
        steps, workers = max(1, self.timer.whole().steps), stats.get("workers", {})
        batch = {key: stats["preloader"][f"{key}_seconds"] / steps for key in ("loader_wait", "copy", "transform")}
        if loader.device.type == "cpu":  # there is no other device to copy to
            batch["transform"] += batch["copy"]
            batch["copy"] = 0.0
        inline = batch if loader.depth == 0 else dict.fromkeys(batch, 0.0)
        return Measured(
            loader=self._config.loader,
            cores=available_cores(),
            num_threads=torch.get_num_threads() if loader.device.type == "cpu" else 1,
            steps=steps,
            phases=phases,
            step=total.seconds / total.steps,
            waiting=max(0.0, total.wait_seconds / total.steps - inline["copy"] - inline["transform"]),
            copy=inline["copy"],
            transform=inline["transform"],
            free=free,
            cpu=self._cpu_seconds / steps,
            num_workers=max(1, workers.get("active_workers", 1)),
            workers=workers,
            ahead=(0.0, 0.0, 0.0) if loader.depth == 0 else tuple(batch.values()),
        )

    def phases(self) -> dict[str, float]:
        """Returns the seconds of each phase until now. The wait for the first batch belongs to the start-up."""
        self._change(self._phase)
        first = self.timer.first_batch_seconds or 0.0
        phases = dict(self._seconds)
        phases["start-up"] += first
        phases["training"] = max(0.0, phases["training"] - first)
        return phases

    def _text(self, measured: Measured, verdict: Verdict) -> str:
        """Returns two tables, of the whole run and of a step, and the verdict."""
        whole, phases = self.timer.whole(), measured.phases
        first = self.timer.first_batch_seconds or 0.0
        copy, transform = measured.copy * measured.steps, measured.transform * measured.steps
        waiting = max(0.0, whole.wait_seconds - first - copy - transform)
        computing = whole.seconds - whole.wait_seconds
        rows = {
            "set-up": phases["set-up"],
            MADE: phases.get(MADE, 0.0),
            "dataset and first batch": phases["start-up"],
            "waiting for data": waiting,
            "copying to the device": copy,
            "transforming": transform,
            "computing": computing,
            "evaluation": phases["evaluation"],
            "saving checkpoints": phases["checkpoint"],
        }
        total = sum(phases.values())
        rows |= {"the rest": total - sum(rows.values()), "the whole run, without imports": total}
        rare = (MADE, "copying to the device")
        rows = {name: seconds for name, seconds in rows.items() if name not in rare or seconds}
        columns = [
            ["phase", *rows],
            ["seconds", *(f"{seconds:.1f}" for seconds in rows.values())],
            ["share", *(f"{100 * seconds / total:.0f} %" for seconds in rows.values())],
        ]
        parts = ("step", "waiting", "computing")
        figures = [self.timer.step_ms(50, 95, 100, part=part) for part in parts]
        step = [["milliseconds", *parts]]
        step += [
            [heading, *(f"{values[number]:.1f}" for values in figures)]
            for number, heading in enumerate(("median", "95 %", "worst"))
        ]
        lines = [*table(columns), "", *table(step), ""]
        lines.append(
            f"First batch: waited {first:.2f} s; memory: at most {self._memory / 2**30:.2f} GiB, workers included"
        )
        if self._device_memory is not None:
            lines[-1] += f"; on the GPU {self._device_memory / 2**30:.2f} GiB"
        if measured.workers:
            busy, cpu, queued, collate = (
                1000 * measured.of_batch(key) for key in ("busy", "cpu", "queued", "collate")
            )
            who = f"Workers: {measured.num_workers}, busy {1 - measured.idle:.0%} of the time; one"
            if self._config.loader.num_workers == 0:
                who = "The training process reads: it"
            lines.append(
                f"{who} takes {busy:.1f} ms for a batch: {cpu:.1f} ms of CPU time, {queued:.1f} ms waiting for a "
                f"core; collating takes {collate:.1f} ms of it"
            )
        return "\n".join([*lines, verdict.sentence])


def peak_memory() -> int:
    """Returns bytes: the most that this process used, and what its workers use now; what they share counts once."""
    this = psutil.Process()
    total = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - this.memory_info().rss
    for process in (this, *this.children(recursive=True)):
        with suppress(psutil.Error):  # it has exited meanwhile
            total += process.memory_full_info().pss
    return total
