"""Run: the objects of a run, its log, and the door for callbacks.

A callback is an object with any of these methods. conf/ lists it under `callbacks:` by a name, with its `_target_`:

    on_start(run)                     all parts are built, and a checkpoint to resume from is loaded
    on_step(run)                      after each optimizer step, which has cleared the gradients: to see them, use
                                      optimizer.register_step_pre_hook
    on_log(run, values)               after each line of metrics.jsonl: `values` has its keys, with `step` and `epoch`
    on_evaluation(run, scores)        after the set that chooses the best checkpoint was evaluated, such as test_loss
    on_epoch_end(run)                 after an epoch and its evaluation, which a run that resumes there repeats
    on_end(run, summary)              `summary` will be summary.json, and may be added to; None after a signal or error

They are called in the order of the config, in every process: ask `run.is_main` before you write a file. A
checkpoint has the trainer's modules and optimizers, but no attribute of a callback: a resumed run makes those anew.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from loaders import LoaderConfig, Preloader, StepTimer, Window
from training.checkpoint import Checkpoints
from training.clock import Clock
from training.config import Config, ConfigError
from training.datasets import Datasets
from training.processes import Processes
from training.results import Results
from training.stopping import Stopped
from training.targets import build
from training.trainer import Trainer

METHODS = ("on_start", "on_step", "on_log", "on_evaluation", "on_epoch_end", "on_end")
log = logging.getLogger(__name__)


@dataclass(eq=False)
class Run:
    """What callbacks are given.

    folder: for files; is_main: whether this process writes them. timer: the run's steps
    log, logged_step: Trainer.log, and the step of the last line with the means of steps.
    signals: those that asked the run to stop.

    In a `with` block it calls `on_end(run, None)` if an error or a signal leaves the block.
    """

    config: Config
    data: Datasets  # the datasets and the task
    trainer: Trainer  # the network and its optimizers
    train_loader: Preloader  # of training batches
    make_train_loader: Callable[[LoaderConfig], Preloader]  # another one
    results: Results  # metrics.jsonl and its scores
    checkpoints: Checkpoints
    clock: Clock  # the phases of the run
    processes: Processes
    callbacks: dict[str, Any]
    stops_early: bool = False  # set it to True, and the run ends after the current epoch
    stopped: bool = False  # whether a signal ended the run, at the same step in all processes

    def __post_init__(self) -> None:
        self.folder, self.is_main, self.signals = self.results.folder, self.processes.is_main, self.checkpoints.signals
        self.timer = StepTimer(self.processes.device, self.config.timing.warmup_steps)
        self.log, self.logged_step = self.trainer.log, self.trainer.step
        self._started: list[str] = []  # the names of the callbacks that have started, and not ended

    def write(self, **values: Any) -> None:
        """Writes a line to metrics.jsonl, with `step`, `epoch`, `values` and what `log` got; calls on_log.

        All processes have to call it.
        """
        logged = self.trainer.logged.read()
        line = {"step": self.trainer.step, "epoch": self.trainer.epoch, **values}
        if taken := line.keys() & logged.keys():
            raise ConfigError(f"log({', '.join(sorted(taken))}=...): metrics.jsonl has that already: use another name")
        line |= logged
        self.results.metrics(**line)
        self.call("on_log", line)

    def call(self, method: str, *arguments: Any) -> None:
        """Calls the method of all callbacks that have it."""
        for name, callback in self.callbacks.items():
            if method == "on_end":
                self._started.remove(name)
            if function := getattr(callback, method, None):
                function(self, *arguments)
            if method == "on_start":
                self._started.append(name)

    def text_of(self, window: Window) -> str:
        """The speed and the waiting of some steps, in images or samples per second."""
        return str(window).replace("images/s", f"{self.data.what}/s")

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.stopped = isinstance(error, Stopped)
        for name in self._started:
            try:
                if hasattr(self.callbacks[name], "on_end"):
                    self.callbacks[name].on_end(self, None)
            except Exception as failure:  # must not replace the error that ended the run
                log.warning("callbacks.%s could not end: %s: %s", name, type(failure).__name__, failure)


def build_callbacks(config: Config) -> dict[str, Any]:
    """The callbacks of the config, by name. Raises ConfigError for one that cannot be built, or has no method."""
    callbacks = {}
    for name, section in config.callbacks.items():
        callbacks[name] = callback = build(f"callbacks.{name}", section)
        for other in {attribute for attribute in dir(callback) if attribute.startswith("on_")} - set(METHODS):
            log.warning("callbacks.%s: %s is not called: the methods are %s", name, other, ", ".join(METHODS))
        if not any(hasattr(callback, method) for method in METHODS):
            raise ConfigError(
                f"callbacks.{name}: {type(callback).__name__} needs at least one of the methods {', '.join(METHODS)}"
            )
    return callbacks
