"""TensorBoard: event files in the run's folder. `logger=tensorboard`."""

from __future__ import annotations

from typing import Any

from training.callbacks.loggers.logger import Logger, Place, numbers
from training.config import flat
from training.run import Run


class TensorBoard(Logger):
    """Options are those of torch.utils.tensorboard.SummaryWriter."""

    package = "tensorboard"

    def start(self, run: Run) -> None:
        from torch.utils.tensorboard import SummaryWriter

        place = Place(run, self.name)
        self._config = {
            key: value if isinstance(value, (int, float)) else str(value) for key, value in flat(place.config).items()
        }
        # From purge_step on, TensorBoard hides what the run wrote in this folder before it was interrupted.
        self._writer = SummaryWriter(str(place.folder), purge_step=run.trainer.step + 1, **self.options)

    def metrics(self, step: int, values: dict[str, float]) -> None:
        for key, value in values.items():
            self._writer.add_scalar(key, value, step)

    def finish(self, summary: dict[str, Any] | None) -> None:
        if summary is not None:
            self._writer.flush()  # add_hparams starts a new file, and TensorBoard reads the files in order
            self._writer.add_hparams(self._config, numbers(summary, "summary/"), run_name=".")
        self._writer.close()
