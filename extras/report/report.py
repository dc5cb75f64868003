"""The Report of a run: where its time went, what bounded it, and what may help, for the terminal and report.md."""

from __future__ import annotations

import logging
import resource
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import psutil
import torch

from loaders import Accelerator, Preloader, Window, available_cores, offers
from training.callbacks.report.load import Load
from training.callbacks.report.measured import Measured
from training.callbacks.report.trial import Trials, size_of
from training.callbacks.report.verdict import Verdict, candidates, diagnose
from training.clock import FILE_MAKING
from training.config import Keys, check_least
from training.files import write_whole
from training.run import Run
from training.table import table

log = logging.getLogger(__name__)

NOT_MEASURED = "the run was stopped before its bottleneck was measured"
NOT_TRAINED = "nothing was left to train: the checkpoint was evaluated"
MOST_SIZES = 1000  # of the newest batches, which are compared with the one for free data
LEAST_GAIN = 1.05  # a tried change is suggested if it is at least this many times as fast


@dataclass
class ReportKeys(Keys):
    trial_seconds: float

    def __post_init__(self) -> None:
        check_least("timing.trial_seconds", self.trial_seconds, 0)
        super().__post_init__()


class Report:
    """Makes a run's report: report.md, and the entries of summary.json about time, memory and the verdict."""

    keys: ClassVar = {"timing": ReportKeys}

    def __init__(self) -> None:
        self._size, self._sizes = 0, deque[int](maxlen=MOST_SIZES)  # numbers in the batch of this step, and of others
        # Bytes, those of a GPU's tensors too, and the number of workers that read.
        self._used: dict[str, Any] = {"memory_bytes": 0, "device_memory_bytes": None, "active_workers": None}
        self._verdict: Verdict | None = None  # set by `finish`
        self.text = NOT_TRAINED

    def on_start(self, run: Run) -> None:
        self.run, self._load = run, Load()
        run.trainer.parallel.register_forward_pre_hook(self._count)

    def _count(self, _: object, batch: Any) -> None:
        self._size += size_of(batch)  # a batch, or with train.accumulate a part of it

    def on_step(self, run: Run) -> None:
        self._sizes.append(self._size)
        self._size = 0

    def on_end(self, run: Run, summary: dict[str, Any] | None) -> None:
        """Writes report.md, and adds to the summary. After a signal nothing more is measured."""
        if summary is None and not run.stopped:
            return
        total = run.processes.total(run.timer.run())
        if total.steps:
            if summary is not None:
                run.results.finish(**summary, **self.summary())  # the run is complete even if a trial fails
            self.finish(total, run.train_loader)
        if summary is not None:
            summary |= self.summary()
            log.info("\n%s", self.text)
        if run.is_main:
            text = f"# Run {run.folder.resolve().name}\n\n```\n{self.text}\n```\n"
            if (run.folder / "timeline.png").exists():
                text += "\n![What workers, preloader and training did, and when](timeline.png)\n"
            write_whole(run.folder / "report.md", text)

    def finish(self, total: Window, loader: Preloader) -> None:
        """Finds what bounded the run: measures steps with free data, and tries changes until one helps.

        total: the run's timed steps, of all processes. loader: the training loader, which is closed here.
        """
        run, measured, step = self.run, self._measured(total, loader), total.seconds / total.steps
        trials = Trials(run, 0.0 if run.stopped else min(run.config.timing.trial_seconds, total.seconds / 5))
        sizes = trials.keep_batch(loader), *self._sizes
        loader.close()  # its workers would slow down the measurements
        load, free = Load(), trials.free(step)
        measured = replace(measured, sizes=sizes, free=free, others=max(measured.others, load.of_others()))
        verdict = diagnose(measured)
        step = free.middle if verdict.bottleneck == "step" and free else step
        for changes in [] if run.stopped else candidates(verdict.bottleneck, measured):
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
            "seconds": {phase: round(seconds, 3) for phase, seconds in self._phases().items()},
            **self._used,
            "verdict": verdict.sentence if verdict else NOT_MEASURED if self.run.timer.whole().steps else NOT_TRAINED,
            "bottleneck": verdict and verdict.bottleneck,
            "gain": verdict and verdict.gain,
            "try": verdict and list(verdict.changes),
        }

    def _measured(self, total: Window, loader: Preloader) -> Measured:
        """What is known before anything more is measured."""
        stats, dataset, config = loader.stats(), loader.dataset, self.run.config
        workers, on_cpu = stats.get("workers", {}), loader.device.type == "cpu"
        self._used["memory_bytes"] = peak_memory()
        self._used["device_memory_bytes"] = Accelerator(loader.device).peak_bytes()
        self._used["active_workers"] = workers.get("active_workers")
        steps = max(1, self.run.timer.whole().steps)
        keys = ("loader_wait", "copy", "transform")
        ahead, copy, transform = (stats["preloader"][f"{key}_seconds"] / steps for key in keys)
        if on_cpu:  # there is no other device to copy to
            copy, transform = 0.0, copy + transform
        no_policy = config.data.get("collate") is None and getattr(dataset, "policy", None) is None
        return Measured(
            loader=config.loader,
            cores=available_cores(),
            num_threads=torch.get_num_threads() if on_cpu else 1,
            steps=steps,
            phases=self._phases(),
            step=total.seconds / total.steps,
            waiting=total.wait_seconds / total.steps,
            copy=copy,
            transform=transform,
            ahead=ahead if loader.depth else None,
            others=self._load.of_others(),
            num_workers=max(1, workers.get("active_workers", 1)),
            workers=workers,
            in_memory=offers(dataset, "arrays") and no_policy,
        )

    def _phases(self) -> dict[str, float]:
        """The seconds of each phase until now. The wait for the first batch counts as start-up, not as training."""
        return self.run.clock.phases(self.run.timer.first_batch_seconds)

    def _text(self, measured: Measured, verdict: Verdict) -> str:
        """The text of the report: tables of the whole run and of a step, memory, workers, and the verdict."""
        first, on_gpu = self.run.timer.first_batch_seconds or 0.0, self._used["device_memory_bytes"]
        memory = f"at most {self._used['memory_bytes'] / 2**30:.2f} GiB, workers included"
        memory += f"; on the GPU {on_gpu / 2**30:.2f} GiB" if on_gpu is not None else ""
        lines = [*self._run_table(measured), "", *self._step_table(), ""]
        lines.append(f"First batch: waited {first:.2f} s; memory: {memory}")
        if measured.workers:
            busy, cpu, queued = (1000 * measured.of_batch(key) for key in ("busy", "cpu", "queued"))
            readers = f"Workers: {measured.num_workers},"
            if measured.loader.num_workers == 0:
                readers = "No workers, the training process reads: it is"
            lines.append(
                f"{readers} busy {1 - measured.idle:.0%} of the time; {busy:.1f} ms for a "
                f"batch: {cpu:.1f} ms of CPU time, {queued:.1f} ms waiting for a core"
            )
        return "\n".join([*lines, verdict.sentence])

    def _run_table(self, measured: Measured) -> list[str]:
        """The lines of a table with the seconds of each phase, and its share of the run."""
        whole, phases, first = self.run.timer.whole(), measured.phases, self.run.timer.first_batch_seconds or 0.0
        in_thread = measured.steps if measured.ahead is None else 0  # batches that the training thread made ready
        copy, transform = measured.copy * in_thread, measured.transform * in_thread
        rows = {
            "set-up": phases["set-up"],
            **({FILE_MAKING: phases[FILE_MAKING]} if FILE_MAKING in phases else {}),
            "dataset and first batch": phases["start-up"],
            "waiting for the loader": max(0.0, whole.wait_seconds - first - copy - transform),
            **({"waiting for the copy": copy} if copy else {}),
            "waiting for the transform": transform,
            "computing": whole.seconds - whole.wait_seconds,
            "evaluation": phases["evaluation"],
            "saving checkpoints": phases["checkpoint"],
        }
        total = sum(phases.values())
        rows |= {"the rest": total - sum(rows.values()), "the whole run, without imports": total}
        seconds = ["seconds", *(f"{value:.1f}" for value in rows.values())]
        return table([["phase", *rows], seconds, ["share", *(f"{value / total:.0%}" for value in rows.values())]])

    def _step_table(self) -> list[str]:
        """The lines of a table with the milliseconds of a step: the median, the 95th percentile and the longest."""
        rows = {part: self.run.timer.step_ms(50, 95, 100, part=part) for part in ("step", "waiting", "computing")}
        columns = zip(("median", "95 %", "worst"), zip(*rows.values(), strict=True), strict=True)
        figures = [[heading, *(f"{value:.1f}" for value in values)] for heading, values in columns]
        return table([["milliseconds", *rows], *figures])


def peak_memory() -> int:
    """Bytes: the most that this process used, plus what its workers use now. Shared memory counts once."""
    this = psutil.Process()
    total = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - this.memory_info().rss
    for process in (this, *this.children(recursive=True)):
        with suppress(psutil.Error):  # the process may have exited
            total += process.memory_full_info().pss
    return total
