"""Checkpoints: written whole or not at all, and read without running code that they contain.

A run's `checkpoints/` holds step-0000500.pt, ... for the last few saves; last.pt and best.pt are links to the newest
checkpoint and to the one with the best score. Trainer.state_dict chooses their content.
"""

from __future__ import annotations

import logging
import os
import pickle
import re
import shutil
import time
import zipfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from signal import Signals
from typing import Any

import numpy as np
import torch
from torch import nn

from training.config import ConfigError, TrainConfig, one_line
from training.files import replacing
from training.processes import Processes
from training.stopping import Stopped, StopSignals

log = logging.getLogger(__name__)

KEYS = {"model", "optimizers", "optimizer_classes", "schedules", "loader", "step", "config"}


class CheckpointError(RuntimeError):
    """A checkpoint could not be written; the earlier ones are not damaged."""


class Checkpoints:
    """The checkpoints in a run's folder: when they are saved, and which are kept.

    All processes save or stop after the same step; only the main process writes. phase: a context manager around each
    save, which measures its time.
    """

    def __init__(
        self,
        folder: Path,
        config: TrainConfig,
        processes: Processes,
        signals: StopSignals,
        phase: Callable[[str], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self.folder, self._keep = folder / "checkpoints", config.keep_checkpoints
        self._every_steps, self._every_seconds = config.checkpoint_interval()
        self._processes, self.signals, self._phase = processes, signals, phase
        self._saved_at, self._saved_step = time.monotonic(), -1

    def after_step(self, step: int, state: Callable[[], dict[str, Any]]) -> None:
        """Saves what `state` returns if a checkpoint is due. After a signal, saves it and raises Stopped."""
        late = self._every_seconds is not None and time.monotonic() - self._saved_at >= self._every_seconds
        if late:
            self._saved_at = time.monotonic()  # `agree` answers one step later: do not ask a second time
        signal_number, late_anywhere = self._processes.agree(self.signals.received, int(late))
        if signal_number or late_anywhere or (self._every_steps is not None and step % self._every_steps == 0):
            self.save(state())
        self.stop_if(signal_number, step)

    def stop_if(self, signal_number: int, step: int) -> None:
        """Raises Stopped unless `signal_number` is 0. The checkpoint of `step` has to be saved before."""
        if signal_number:
            self._processes.gather()  # no process exits before the main one has saved the checkpoint
            raise Stopped(
                f"stopped by {Signals(signal_number).name}; saved the checkpoint of step {step}", signal_number
            )

    def save(self, state: dict[str, Any]) -> None:
        """Writes `state`, nested dicts of tensors, numbers and strings, unless its step has been saved already.

        Raises CheckpointError if it cannot be written.
        """
        self._saved_at = time.monotonic()
        if self._processes.is_main and state["step"] != self._saved_step:
            with self._phase("checkpoint"):
                self._write(state)

    def _write(self, state: dict[str, Any]) -> None:
        path = self.folder / f"step-{state['step']:07}.pt"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for partial in self.folder.glob(".*.pt.*"):  # a process that was killed during a save left them
                partial.unlink(missing_ok=True)
            with replacing(path) as file:
                torch.save(plain(state), file)
            if self._saved_step < 0:  # the first one: nothing is lost yet
                torch.load(path, map_location="cpu", mmap=True, weights_only=True)
            self._link("last.pt", path)
            self._saved_step = state["step"]
            self._remove_old(state["step"])
        except pickle.UnpicklingError as error:
            raise CheckpointError(
                f"{path} could not be read again: use tensors, numbers, texts, and dicts and lists of them, in the "
                f"states of modules, optimizers and schedules: {one_line(error)}"
            ) from error
        except (OSError, RuntimeError) as error:
            kept = next(iter(step_files(self.folder)), None)
            advice = f"{kept} is whole: make room, then resume from it" if kept else "make room; there is no other one"
            if isinstance(error, FileNotFoundError):
                advice = "another run seems to write into this folder: give each its own"
            raise CheckpointError(
                f"the checkpoint of step {state['step']} could not be written to {path}: {_reason(error)}; {advice}"
            ) from error

    def mark_best(self, step: int) -> None:
        """Links best.pt to the checkpoint of `step`."""
        if self._processes.is_main:
            self._link("best.pt", self.folder / f"step-{step:07}.pt")

    def find(self, resume: str | None) -> tuple[Path, dict[str, Any]] | None:
        """The path and content of the checkpoint to resume from, read by the main process; None for a fresh start.

        resume: train.resume. The newest checkpoint in the run's own folder comes first, because it is newer than the
        one that `resume` names: the run started from that one, and was interrupted later.
        """

        def found() -> tuple[Path, dict[str, Any]] | None:
            own = None if resume is None else newest_checkpoint(self.folder)
            if own or resume in (None, "auto"):
                return own
            path, content = find_checkpoint(Path(resume).expanduser())
            if path.parent.resolve() != self.folder.resolve() and (best := path.with_name("best.pt")).exists():
                log.warning("%s stays there: this folder's best.pt is chosen from the steps that follow", best)
            return path, content

        return self._processes.share(found)

    def _link(self, name: str, path: Path) -> None:
        link = self.folder / f".{name}.{os.getpid()}"
        link.unlink(missing_ok=True)
        try:
            link.symlink_to(path.name)
        except OSError:  # some file systems have no links
            shutil.copyfile(path, link)
        os.replace(link, self.folder / name)

    def _remove_old(self, step: int) -> None:
        """Keeps the newest checkpoints up to `step` and the best one, and removes the others.

        Checkpoints after `step` are damaged, or an earlier run in this folder wrote them and was not continued.
        """
        files, best = step_files(self.folder), self.folder / "best.pt"
        later = [path for path in files if step_of(path) > step]
        for path in (*later, *(path for path in files[len(later) + self._keep :] if path.resolve() != best.resolve())):
            path.unlink()
        if not best.exists():  # the checkpoint that it names was removed above
            best.unlink(missing_ok=True)


def step_files(folder: Path) -> list[Path]:
    """The checkpoint files in `folder`, the latest step first."""
    return sorted(filter(step_of, folder.glob("step-*.pt")), key=step_of, reverse=True)


def step_of(path: Path) -> int:
    """The step in the name of a checkpoint file; 0 for other files."""
    match = re.match(r"step-(\d+)", path.name)
    return int(match[1]) if match else 0


def newest_checkpoint(folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """The path and content of the newest checkpoint that can be read, or None if the folder has no checkpoints.

    Logs a warning for each damaged one. Raises ConfigError if all are damaged.
    """
    damaged = []
    for path in step_files(folder):
        try:
            return path, read_checkpoint(path)
        except ConfigError as error:
            damaged.append(path)
            log.warning("%s; trying the one before it", error)
    if damaged:
        raise ConfigError(
            f"train.resume: none of the {len(damaged)} checkpoints in {folder} can be read: train.resume=null starts "
            "afresh"
        )
    return None


def find_checkpoint(given: Path) -> tuple[Path, dict[str, Any]]:
    """The path and content of a checkpoint: the file `given`, or the newest one in a run's folder.

    Raises ConfigError if there is no checkpoint or it cannot be read.
    """
    if given.is_file():
        return given, read_checkpoint(given)
    found = newest_checkpoint(given / "checkpoints") or newest_checkpoint(given)
    if found is None:
        what = "has no checkpoints/step-*.pt" if given.is_dir() else "does not exist"
        raise ConfigError(f"{given} {what}: give a checkpoint file or the folder of a run that saved one")
    return found


def plain(state: Any) -> Any:
    """Returns nested dicts, lists and tuples with Python's numbers in place of numpy's, which are not read again."""
    if type(state) is dict:
        return {plain(key): plain(value) for key, value in state.items()}
    if type(state) in (list, tuple):
        return type(state)(map(plain, state))
    return state.item() if isinstance(state, np.generic) else state


def read_checkpoint(path: Path) -> dict[str, Any]:
    """The content of a checkpoint, its tensors on the CPU. Raises ConfigError for a damaged file or any other."""
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()  # torch.load does not compare checksums
        if damaged is not None:
            raise zipfile.BadZipFile(f"wrong checksum of {damaged}")
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # zipfile and torch raise many kinds for damaged bytes
        raise ConfigError(f"{path} cannot be read as a checkpoint: it is damaged, or not a checkpoint") from error
    if not isinstance(state, dict) or not state.keys() >= KEYS:
        raise ConfigError(f"{path} has no training state: give a checkpoint that train.py wrote")
    return state


def load_weights(model: nn.Module, weights: dict[str, torch.Tensor], path: Path) -> None:
    """Loads `weights` into `model`. Raises ConfigError with the first difference if they do not fit."""
    ours, theirs = (
        {name: str(tuple(getattr(value, "shape", ()))) for name, value in given.items()}
        for given in (model.state_dict(), weights)
    )
    for name in sorted(ours.keys() | theirs.keys()):
        here, there = ours.get(name, "missing"), theirs.get(name, "missing")
        if here != there:
            raise ConfigError(
                f"{path} does not fit this run's {type(model).__name__}: {name} is {there} in the "
                f"checkpoint and {here} in the model; use the model= and data= that the checkpoint was made with"
            )
    model.load_state_dict(weights)


def load_others(modules: dict[str, nn.Module], saved: dict[str, dict[str, torch.Tensor]], path: Path) -> None:
    """Loads the weights of the modules that a trainer keeps beside its network. Raises ConfigError if they differ."""
    if modules.keys() != saved.keys():
        raise ConfigError(
            f"{path} has {', '.join(saved) or 'no modules'} beside the network, and this run's trainer "
            f"{', '.join(modules) or 'none'}: make the same modules in its __init__ or configure_optimizers"
        )
    for name, module in modules.items():
        load_weights(module, saved[name], path)


def _reason(error: Exception) -> str:
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):  # torch.save hides why a write failed
        cause = cause.__cause__ or cause.__context__
    return getattr(cause, "strerror", None) or one_line(error)
