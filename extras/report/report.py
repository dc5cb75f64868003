"""Report: where a run's time went, and what free data would save, for the terminal, report.md and summary.json.

While it trains, and at its end, the run has a page that says whether it learns, and shows this: report.html.
"""

import json
import logging
import math
import platform
import resource
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, replace
from functools import cache
from typing import Any

import numpy as np
import psutil
import torch
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.utils import create_config_search_path
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict

from data import optional
from data.errors import Range, check_range
from extras.report import first_batch, page
from extras.report.free_data import measure_free_steps
from extras.report.page import Facts
from loaders import Accelerator, LoaderStats, Window
from training.config import ROOT, checked, flat
from training.files import write_whole
from training.look import table
from training.results import VERDICT_KEYS, git_commit, only_warns, plain, sentence_of, versions
from training.run import Run

log = logging.getLogger(__name__)

PAGES = 0.02  # share of the time of a run that may go into writing report.html
EXPLODES = 10  # a loss of the first epoch that is this many times that of the first step tells of a too high rate


class Report:
    """Adds to the summary: phase_seconds, host, device_name, memory, others_cpu_fraction, free_step_ms and
    free_data_gain (ranges), queueing_ms, callbacks_ms, peak_fraction. Replaces its verdict by one that uses these.

    seconds: how long steps with free data are measured after the run, at most a fifth of its training; 0: not at all.
    """

    def __init__(self, seconds: float = 2.0) -> None:
        check_range("callbacks.report.seconds", seconds, Range(0))
        self.seconds = seconds

    def on_start(self, run: Run) -> None:
        self._has_looked = False  # at the first batch
        self._first_loss = math.inf  # of the first step
        self._next_page = 0.0  # when a page may be written, in seconds of time.monotonic
        self._facts: Facts = {}  # for the page
        if run.is_main:
            with only_warns("callbacks.report"):
                self._facts = facts_of(run)
                self._facts |= {"settings": changed_settings(run), "versions": versions()}
            with only_warns("the commit in report.html"):  # there may be no git
                self._facts |= {"git_commit": git_commit(), "uncommitted": uncommitted_files()}

    def on_log(self, run: Run, values: dict[str, float]) -> None:
        """At the first step: what the network saw. A resumed run may begin with an evaluation, which has no batch."""
        if not run.is_main:
            return
        self._check_loss(run, values)
        if not self._has_looked and run.batch is not None:
            self._has_looked = True
            with run.clock.phase("the rest"), only_warns("the look at the first batch"):
                seen = first_batch.seen(run)
                for text in seen.pop("warnings"):
                    self._warn(text)
                self._facts["first_batch"] = seen
            self._show(run)

    def _check_loss(self, run: Run, values: dict[str, float]) -> None:
        """Warns once if the loss explodes in the first epoch. Later it may still fall, but not as far."""
        loss = values.get("loss", 0.0)
        step = run.progress.step
        if step == 1:
            self._first_loss = loss
        elif run.progress.epoch == 0 and loss > EXPLODES * self._first_loss > 0:
            rate = run.config.optim.get("lr")
            self._warn(
                f"the loss exploded: it was {self._first_loss:.4g} in the first step, and {loss:.4g} by step {step}: "
                f"lower optim.lr (now {rate}), unless the loss of some samples is infinite"
            )
            self._first_loss = math.inf

    def _warn(self, text: str) -> None:
        log.warning("%s", text)
        self._facts.setdefault("warnings", []).append(text)

    def on_evaluation(self, run: Run, scores: dict[str, float]) -> None:
        if run.is_main and time.monotonic() >= self._next_page:
            self._show(run)

    def _show(self, run: Run) -> None:
        """Writes the page of a run that trains. If it fails, it is not tried again before the end."""
        self._next_page = float("inf")
        epoch = f"epoch {max(1, run.progress.epoch)} of {run.config.train.epochs}"
        with run.clock.phase("the rest"), only_warns("report.html"):
            self._write_page(run, facts_until_now(run), f"running at {now()}: {epoch}")

    def _write_page(self, run: Run, facts: Facts, status: str) -> None:
        began = time.monotonic()
        content = self._facts | facts | {"status": status}
        write_whole(run.folder / page.FACTS, json.dumps(plain(content)))
        page.write(run.folder, by_run=True)
        ended = time.monotonic()
        self._next_page = ended + (ended - began) / PAGES

    def on_end(self, run: Run, summary: Facts | None) -> None:
        """Writes report.md and report.html, and adds to the summary. After a signal nothing more is measured."""
        if summary is None and not run.stopped:
            if run.is_main:  # Run.end turns an error of this into a warning
                facts: Facts = {"phase_seconds": phases_of(run)}
                error = sys.exc_info()[1]
                if error is not None:
                    facts["error"] = f"error: {sentence_of(error)}"
                self._write_page(run, facts, "ended by an error")
            return
        total = run.processes.total(run.timer.run())
        stats = run.train_loader.loader_stats
        facts = {} if summary is None else summary
        for name, value in limit(run, total).items():
            facts.setdefault(name, value)
        facts |= {
            "phase_seconds": {name: round(seconds, 3) for name, seconds in phases_of(run).items()},
            **machine(run),
            "memory_bytes": peak_memory(),
            "device_memory_bytes": Accelerator(run.trainer.device).peak_bytes(),
            "others_cpu_fraction": run.timer.cores.others,
            "free_step_ms": None,
            "free_data_gain": None,
            "queueing_ms": None,
            "callbacks_ms": 1000 * callback_seconds(run),
            "peak_fraction": None,
        }
        if summary is not None and total.steps:
            self._measure(run, total, facts)
        lines = [facts["verdict"], "", *phase_table(facts["phase_seconds"])]
        if total.steps:
            lines += ["", *step_table(run), "", *worker_lines(stats), free_sentence(facts)]
        lines.append(memory_sentence(facts))
        log.info("%s\nAs a page: %s", "\n".join(lines[1:]), run.folder / "report.html")  # the verdict comes last
        if run.is_main:
            text = "\n".join(lines)
            write_whole(run.folder / "report.md", f"# Run {run.folder.resolve().name}\n\n```\n{text}\n```\n")
            self._write_page(run, facts, "finished" if summary is not None else "stopped")

    def _measure(self, run: Run, total: Window, facts: Facts) -> None:
        """Measures steps with free data, and adds what they tell to `facts`."""
        evidence = run.timer.evidence(run.train_loader, total)
        seconds = min(self.seconds, total.seconds / 5)
        measured = measure_free_steps(run, seconds, evidence.step, facts["device_name"]) if seconds else None
        if measured is None:
            return
        measured = replace(measured, callbacks=callback_seconds(run))
        facts["verdict"] = evidence.verdict(measured).sentence(VERDICT_KEYS)
        facts["free_step_ms"] = [1000 * min(measured.free), 1000 * max(measured.free)]
        facts["free_data_gain"] = [*evidence.gains(measured)]
        facts["queueing_ms"] = None if measured.queueing is None else 1000 * measured.queueing
        facts["peak_fraction"] = None if measured.peak is None else measured.peak[0]


def facts_of(run: Run) -> Facts:
    """What the page says of the whole run: what runs where, how far it is to go, when it began, and what counts."""
    progress = run.progress
    earlier = page.json_of(run.folder / page.FACTS) if progress.step else {}  # of the part before a resume
    return {
        **run.facts(),
        **machine(run),
        "score": f"{run.eval_split}_{run.data.task.metric}",
        "most_common": most_common(run),
        "planned_epochs": run.config.train.epochs,
        "planned_steps": progress.last_step,
        "resumed_step": progress.step,
        "began": earlier.get("began", now()),
        "earlier_seconds": page.seconds_of(earlier),
    }


def changed_settings(run: Run) -> dict[str, Any]:
    """The files of conf/ that are not the default ones, by group, and the settings that differ from theirs, by key."""
    settings = run.trainer.settings
    choices = HydraConfig.get().runtime.choices if HydraConfig.initialized() else {}
    usual = composed()["hydra"]["runtime"]["choices"]
    chosen = {key: name for key, name in choices.items() if key in settings and name != usual.get(key)}
    defaults = settings_of(*(f"{key}={name}" for key, name in chosen.items()))
    values = flat(plain(settings))
    return chosen | {key: value for key, value in values.items() if value != defaults.get(key)}


@cache
def composed(*overrides: str) -> DictConfig:
    """The config with these overrides, and with Hydra's own section. Composing it takes longer than writing a page."""
    hydra = GlobalHydra.instance()
    search_path = create_config_search_path(str(ROOT / "conf"))
    configs = hydra.config_loader() if hydra.is_initialized() else ConfigLoaderImpl(search_path)
    return configs.load_configuration("config", [*overrides], RunMode.RUN)


def settings_of(*overrides: str) -> dict[str, Any]:
    """The settings of a run with these overrides, by key; those that have to be given are None."""
    cfg = composed(*overrides).copy()
    with open_dict(cfg):
        del cfg["hydra"]
    for key in OmegaConf.missing_keys(cfg):
        OmegaConf.update(cfg, key, None)
    return flat(plain(asdict(checked(cfg))))


def uncommitted_files() -> list[str]:
    """The files that are not as in the commit, in git's notation: "M train.py", "?? my/new.py"."""
    command = ["git", "-C", str(ROOT), "status", "--porcelain"]
    output = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    return [line.strip() for line in output.splitlines()]


def most_common(run: Run) -> float | None:
    """The accuracy of a network that always predicts the most common class; None if that is not known."""
    if run.data.task.metric != "accuracy":
        return None
    labels = np.asarray(optional(getattr(run.data, run.eval_split), "labels"))
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        return None
    _, counts = np.unique(labels, return_counts=True)
    return float(counts.max() / counts.sum())


def now() -> str:
    return time.strftime("%Y-%m-%d %H:%M")


def machine(run: Run) -> Facts:
    """The names of the host and of the device; None if torch knows no name for the device."""
    return {"host": platform.node(), "device_name": device_name(run.trainer.device)}


def device_name(device: torch.device) -> str | None:
    name_of = getattr(torch.get_device_module(device), "get_device_name", None)
    return None if name_of is None else str(name_of(device))


def facts_until_now(run: Run) -> Facts:
    """The figures of this process alone: it must not wait for the others."""
    facts: Facts = {"phase_seconds": phases_of(run)}
    if run.timer.whole().steps > run.config.timing.warmup_steps:
        facts |= limit(run, run.timer.run())
    return facts


def limit(run: Run, total: Window) -> Facts:
    """What limits the speed of the timed steps."""
    return {
        "verdict": run.timer.evidence(run.train_loader, total).verdict().sentence(VERDICT_KEYS),
        "data_wait_fraction": total.data_wait_fraction if total.steps else None,
    }


def callback_seconds(run: Run) -> float:
    """The seconds that the callbacks' on_step took, per step."""
    return run.callback_seconds / max(1, run.timer.whole().steps)


def phases_of(run: Run) -> dict[str, float]:
    """The seconds of each phase of the run until now, with training in three parts."""
    whole = run.timer.whole()
    first = run.timer.first_batch_seconds or 0.0
    run.clock.switch_to("the rest")  # adds the time until now
    others = dict(run.clock.seconds)
    start_up = others.pop("start-up")
    training = others.pop("training")
    parts = {
        "first batch": first,
        "waiting for data": max(0.0, whole.wait_seconds - first),
        "computing": max(0.0, training - whole.wait_seconds),
    }
    return {"start-up": start_up, **parts, **others}


def phase_table(phases: dict[str, float]) -> list[str]:
    rows = {name: value for name, value in phases.items() if value >= 0.05}
    rows["the whole run, without imports"] = sum(phases.values())
    seconds = ["seconds", *(f"{value:.1f}" for value in rows.values())]
    shares = ["share", *(f"{value / (sum(phases.values()) or 1.0):.0%}" for value in rows.values())]
    return table([["phase", *rows], seconds, shares])


def step_table(run: Run) -> list[str]:
    """The milliseconds of a step: the median, the 95th percentile and the longest."""
    rows = {part: run.timer.step_ms(50, 95, 100, part=part) for part in ("step", "waiting", "computing")}
    columns = zip(("median", "95 %", "worst"), zip(*rows.values(), strict=True), strict=True)
    return table([["milliseconds", *rows], *([name, *(f"{value:.1f}" for value in each)] for name, each in columns)])


def worker_lines(stats: LoaderStats) -> list[str]:
    """What a batch costs its worker, and its copy to the device."""
    lines = []
    workers = stats.workers
    if workers is not None and workers.read_batches:
        ms = 1000 / workers.read_batches
        cpu = f"computing {ms * workers.worker_cpu_seconds:.1f} ms"
        queued = f"waiting for a core {ms * workers.worker_queued_seconds:.1f} ms"
        busy = f"Reading a batch takes {ms * workers.worker_busy_seconds:.1f} ms"
        lines.append(f"{busy} ({cpu}, {queued}); workers: {workers.active_workers}.")
    preloader = stats.preloader
    if preloader is not None and preloader.batches:
        ms = 1000 / preloader.batches
        copying = f"Copying a batch to the device takes {ms * preloader.copy_seconds:.1f} ms"
        lines.append(f"{copying}, transforming it {ms * preloader.transform_seconds:.1f} ms.")
    return lines


def free_sentence(summary: Facts) -> str:
    if summary["free_step_ms"] is None:
        return "How fast steps are with instant loading was not measured."
    low, high = summary["free_step_ms"]
    text = f"With instant loading a step takes {low:.1f} to {high:.1f} ms (after the run, on batches on the device)"
    if summary["queueing_ms"] is not None:
        text += f", and Python {summary['queueing_ms']:.1f} ms to queue it"
    return f"{text}; callbacks take {summary['callbacks_ms']:.2f} ms."


def memory_sentence(summary: Facts) -> str:
    on_device = summary["device_memory_bytes"]
    device = f"; on the device {on_device / 2**30:.2f} GiB" if on_device else ""
    return f"Memory: at most {summary['memory_bytes'] / 2**30:.2f} GiB, workers included{device}."


def peak_memory() -> int:
    """Bytes: the most that this process used, plus what its workers use now. Shared memory counts once."""
    this = psutil.Process()
    total = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - this.memory_info().rss
    for process in (this, *this.children(recursive=True)):
        with suppress(psutil.Error):  # the process may have exited
            total += process.memory_full_info().pss
    return total
