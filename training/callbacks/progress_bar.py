"""The progress bar on the terminal: conf/callbacks/standard/progress_bar.yaml."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from training.run import Run


class ProgressBar:
    """A bar of the run's steps, with the newest loss and speed. It shows nothing if the output is no terminal."""

    def on_start(self, run: Run) -> None:
        self._cleanup, trainer = ExitStack(), run.trainer
        disable = None if run.is_main else True  # None: only if the output is not a terminal
        counts = {"total": trainer.last_step, "initial": trainer.step}
        self._bar = self._cleanup.enter_context(
            tqdm(desc="training", unit="step", leave=False, disable=disable, **counts)
        )
        self._cleanup.enter_context(logging_redirect_tqdm())

    def on_step(self, run: Run) -> None:
        self._bar.update()

    def on_log(self, run: Run, values: dict[str, Any]) -> None:
        shown = {name: value for name, value in values.items() if isinstance(value, float)}
        self._bar.set_postfix(shown, refresh=False)

    def on_end(self, run: Run, summary: dict[str, Any] | None) -> None:
        self._cleanup.close()
