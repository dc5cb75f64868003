"""Callbacks of a fork, which tests.training.doors has too."""

from __future__ import annotations

import os
import signal
from typing import Any

import numpy as np


class Spy:
    """Remembers how it was called, and has a state."""

    def __init__(self, every: int = 1) -> None:
        self.every, self.steps = every, 0
        Spy.calls = []

    def on_start(self, run: Any) -> None:
        assert run.config.train.batch_size == 32 and run.is_main and run.folder.is_dir()
        assert len(run.data.train) == 256 and run.train_loader is not None
        self.calls.append("start")

    def on_step(self, run: Any) -> None:
        self.steps += 1
        self.calls.append("step")
        if run.trainer.step % self.every == 0:
            run.log(twice=2 * run.trainer.step)

    def on_log(self, run: Any, values: dict[str, Any]) -> None:
        self.calls.append(f"log {values['step']}")

    def on_evaluation(self, run: Any, scores: dict[str, float]) -> None:
        assert {"test_loss", "test_accuracy"} <= scores.keys()
        self.calls.append("evaluation")

    def on_epoch_end(self, run: Any) -> None:
        run.log(epochs_done=run.trainer.epoch)
        self.calls.append("epoch end")

    def on_end(self, run: Any, summary: dict[str, Any] | None) -> None:
        self.calls.append("interrupted" if summary is None else "end")
        if summary is not None:
            summary["counted_steps"] = self.steps

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.calls.append(f"loaded {state['steps']}")
        self.steps = state["steps"]


class NumpyState:
    """From step 3 on it has a state that weights_only refuses."""

    def on_step(self, run: Any) -> None:
        self.best = 0.5 if run.trainer.step < 3 else np.float64(0.5)

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Stop:
    """Stops the run once, after a step or its evaluation, by a signal or an error.

    Tests set `Stop.at` and `Stop.how`; programs get them as arguments.
    """

    at, how = 0, ""

    def __init__(self, at: int | None = None, how: str = "") -> None:
        if at is not None:
            Stop.at, Stop.how = at, how

    def on_step(self, run: Any) -> None:
        if run.trainer.step == Stop.at and Stop.how != "evaluation":
            self._stop()

    def on_evaluation(self, run: Any, scores: dict[str, float]) -> None:
        if run.trainer.step >= Stop.at > 0 and Stop.how == "evaluation":
            self._stop()

    def _stop(self) -> None:
        how, Stop.at, Stop.how = Stop.how, 0, ""
        if not how.startswith("SIG"):
            raise ZeroDivisionError(how)
        os.kill(os.getpid(), getattr(signal, how))
