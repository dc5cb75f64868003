"""The Report of a run: where its time went, what bounded it, and what may help, for the terminal and report.md."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import psutil
import torch

from data.subset import offers
from loaders import Preloader
from loaders.machine import available_cores
from loaders.timeline import TRAINING, Timeline
from loaders.timing import StepTimer, Window
from training.callbacks.report.load import Load
from training.callbacks.report.measured import Measured
from training.callbacks.report.trial import Trials
from training.callbacks.report.verdict import Verdict, candidates, diagnose
from training.config import Config
from training.sets import Sets
from training.table import table

FILE_MAKING = "making the dataset's files, once"
NOT_MEASURED = "the run was stopped before its bottleneck was measured"
NOT_TRAINED = "nothing was left to train: the checkpoint was evaluated"
LEAST_GAIN = 1.05  # a tried change is suggested if it is at least this many times as fast


class Report:
    """Measures the phases of a run, and makes its report at the end.

    Every moment counts for one phase: inside `with report.phase("evaluation")` for that one, else for "set-up", and
    after `begin_training` for "the rest".
    """

    def __init__(self, config: Config, device: torch.device) -> None:
        self._config, timing = config, config.timing
        self.timeline = Timeline(device) if timing.timeline else None
        self.timer = StepTimer(device, timing.warmup_steps, self.timeline, timing.timeline)
        self._phase, self._phase_start = "set-up", time.perf_counter()
        phases = ("set-up", "start-up", "training", "evaluation", "checkpoint", "the rest")
        self._seconds = dict.fromkeys(phases, 0.0)
        self._cpu_seconds = 0.0  # of this process, while training
        self._memory, self._active_workers = 0, None  # bytes; number of workers that read
        self._device_memory: int | None = None  # bytes: the most that tensors took on a GPU
        self._load = Load()
        self._verdict: Verdict | None = None  # set by `finish`
        self.text = NOT_TRAINED

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Counts the time in the block for the phase `name`, and not for the phase around it."""
        outer = self._switch_to(name)
        try:
            yield
        finally:
            self._switch_to(outer)

    def _switch_to(self, name: str) -> str:
        """Ends the current phase and starts another. Returns the name of the one that ended."""
        before, now, cpu = self._phase, time.perf_counter(), time.process_time()
        self._seconds[before] += now - self._phase_start
        if self.timeline is not None and before in ("evaluation", "checkpoint"):
            self.timeline.add(TRAINING, before, self._phase_start, now, None)
        self._phase, self._phase_start = name, now
        self._cpu_seconds += cpu * ((before == "training") - (name == "training"))
        return before

    def describe_run(self, sets: Sets, steps: int) -> str:
        """Describes the data, the loader and the steps of the run in one line."""
        config, what = self._config, "images" if sets.image_shape is not None else "samples"
        classes = f" of {sets.task.label_below} classes" if sets.task.label_below else ""
        validation = "" if sets.val is None else f"{len(sets.val):,} to validate, "
        return (
            f"{sets.name}: {len(sets.train):,} {what}{classes}, {validation}{len(sets.test):,} to test; "
            f"loader={config.loader.name}, {config.loader.num_workers} workers; "
            f"{steps:,} steps of {config.train.batch_size} {what}, learning rate {config.optim.get('lr')}"
        )

    def count_file_making(self, seconds: float) -> None:
        """Moves the seconds in which datasets made files from the start-up to another phase: later runs save them."""
        if seconds:
            self._seconds[FILE_MAKING] = seconds
            self._seconds["start-up"] -= seconds

    def begin_training(self) -> None:
        """Ends the set-up: from now on, time outside of all phases counts as the rest."""
        self._switch_to("the rest")
        self._load = Load()

    def finish(self, total: Window, loader: Preloader, trials: Trials | None) -> None:
        """Finds what bounded the run: measures steps with free data, and tries changes until one helps.

        total: the run's timed steps, of all processes. loader: the training loader, which is closed here. trials: None
        after a signal, to measure nothing more.
        """
        self._memory, phases = peak_memory(), self.phases()
        if loader.device.type == "cuda":
            self._device_memory = torch.cuda.max_memory_allocated(loader.device)
        stats = loader.stats()
        self._active_workers = stats.get("workers", {}).get("active_workers")
        step, others = total.seconds / total.steps, self._load.of_others()
        threads = torch.get_num_threads() if loader.device.type == "cpu" else 1
        free: dict[str, Any] = {"sizes": trials.keep_batch(loader)} if trials else {}
        loader.close()  # its workers would slow down the measurements
        if trials:
            load = Load()
            free["free"] = trials.free(step)
            free["one_thread"] = trials.free(step, threads=1) if threads > 1 else None
            others = max(others, load.of_others())
        measured = self._measured(total, stats, loader, phases, num_threads=threads, others=others, **free)
        verdict = diagnose(measured)
        for changes in candidates(verdict.bottleneck, measured):
            if trials is None:
                break
            tried = trials.change(changes, step)
            gain = None if tried is None else tried.map(lambda seconds: step / seconds)
            if gain is None or (gain.middle >= LEAST_GAIN and gain.low >= 1):
                verdict = replace(verdict, changes=changes, measured_gain=gain)
                break
        self._verdict, self.text = verdict, self._text(measured, verdict)

    def summary(self) -> dict[str, Any]:
        """The entries of summary.json about time, memory and the verdict."""
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
        self, total: Window, stats: dict[str, Any], loader: Preloader, phases: dict[str, float], **trials: Any
    ) -> Measured:
        dataset, collate = loader.dataset, self._config.data.get("collate")
        steps, workers = max(1, self.timer.whole().steps), stats.get("workers", {})
        per_batch = {key: stats["preloader"][f"{key}_seconds"] / steps for key in ("loader_wait", "copy", "transform")}
        if loader.device.type == "cpu":  # there is no other device to copy to
            per_batch["transform"] += per_batch["copy"]
            per_batch["copy"] = 0.0
        inline = per_batch if loader.depth == 0 else dict.fromkeys(per_batch, 0.0)  # in the training thread
        return Measured(
            loader=self._config.loader,
            cores=available_cores(),
            steps=steps,
            phases=phases,
            step=total.seconds / total.steps,
            waiting=max(0.0, total.wait_seconds / total.steps - inline["copy"] - inline["transform"]),
            copy=inline["copy"],
            transform=inline["transform"],
            cpu=self._cpu_seconds / steps,
            num_workers=max(1, workers.get("active_workers", 1)),
            workers=workers,
            ahead=(0.0, 0.0, 0.0) if loader.depth == 0 else tuple(per_batch.values()),
            in_memory=offers(dataset, "arrays") and collate is None and getattr(dataset, "policy", None) is None,
            collates=collate is not None,
            augments=any(self._config.augment.values()),
            **trials,
        )

    def phases(self) -> dict[str, float]:
        """The seconds of each phase until now. The wait for the first batch counts as start-up, not as training."""
        self._switch_to(self._phase)  # adds the time until now
        first = self.timer.first_batch_seconds or 0.0
        phases = dict(self._seconds)
        phases["start-up"] += first
        phases["training"] = max(0.0, phases["training"] - first)
        return phases

    def _text(self, measured: Measured, verdict: Verdict) -> str:
        """The text of the report: tables of the whole run and of a step, memory, workers, and the verdict."""
        first = self.timer.first_batch_seconds or 0.0
        memory = f"First batch: waited {first:.2f} s; memory: at most {self._memory / 2**30:.2f} GiB, workers included"
        if self._device_memory is not None:
            memory += f"; on the GPU {self._device_memory / 2**30:.2f} GiB"
        lines = [*self._run_table(measured), "", *self._step_table(), "", memory]
        if measured.workers:
            lines.append(self._workers_line(measured))
        return "\n".join([*lines, verdict.sentence])

    def _run_table(self, measured: Measured) -> list[str]:
        """The lines of a table with the seconds of each phase, and its share of the run."""
        whole, phases, first = self.timer.whole(), measured.phases, self.timer.first_batch_seconds or 0.0
        copy, transform = measured.copy * measured.steps, measured.transform * measured.steps
        rows = {
            "set-up": phases["set-up"],
            FILE_MAKING: phases.get(FILE_MAKING, 0.0),
            "dataset and first batch": phases["start-up"],
            "waiting for the loader": max(0.0, whole.wait_seconds - first - copy - transform),
            "waiting for the copy": copy,
            "waiting for the transform": transform,
            "computing": whole.seconds - whole.wait_seconds,
            "evaluation": phases["evaluation"],
            "saving checkpoints": phases["checkpoint"],
        }
        total = sum(phases.values())
        rows |= {"the rest": total - sum(rows.values()), "the whole run, without imports": total}
        rare = (FILE_MAKING, "waiting for the copy")
        rows = {name: seconds for name, seconds in rows.items() if name not in rare or seconds}
        columns = [
            ["phase", *rows],
            ["seconds", *(f"{seconds:.1f}" for seconds in rows.values())],
            ["share", *(f"{100 * seconds / total:.0f} %" for seconds in rows.values())],
        ]
        return table(columns)

    def _step_table(self) -> list[str]:
        """The lines of a table with the milliseconds of a step: the median, the 95th percentile and the longest."""
        parts = ("step", "waiting", "computing")
        percentiles = zip(*(self.timer.step_ms(50, 95, 100, part=part) for part in parts), strict=True)
        columns = [["milliseconds", *parts]]
        for heading, values in zip(("median", "95 %", "worst"), percentiles, strict=True):
            columns.append([heading, *(f"{value:.1f}" for value in values)])
        return table(columns)

    def _workers_line(self, measured: Measured) -> str:
        busy, cpu, queued, collate = (1000 * measured.of_batch(key) for key in ("busy", "cpu", "queued", "collate"))
        reader = f"Workers: {measured.num_workers}, busy {1 - measured.idle:.0%} of the time; a worker"
        if self._config.loader.num_workers == 0:
            reader = "The training process reads: it"
        return (
            f"{reader} takes {busy:.1f} ms for a batch: {cpu:.1f} ms of CPU time, {queued:.1f} ms waiting for a core; "
            f"collating takes {collate:.1f} ms of it"
        )


def peak_memory() -> int:
    """Bytes: the most that this process used, plus what its workers use now. Shared memory counts once."""
    this = psutil.Process()
    total = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - this.memory_info().rss
    for process in (this, *this.children(recursive=True)):
        with suppress(psutil.Error):  # the process may have exited
            total += process.memory_full_info().pss
    return total
