"""TensorBoard: event files in the run's folder. `logger=tensorboard`."""

from typing import Any

from extras.loggers.logger import Logger, numbers
from training.config import flat
from training.run import Run


class TensorBoard(Logger):
    """Options are those of torch.utils.tensorboard.SummaryWriter; log_dir: by default the run's folder."""

    package = "tensorboard"

    def start(self, run: Run) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # From purge_step on, TensorBoard hides what the run wrote in this folder before it was interrupted.
        options = {"log_dir": str(self.folder), "purge_step": run.progress.step + 1, **self.options}
        self._writer = SummaryWriter(**options)

    def metrics(self, step: int, values: dict[str, float]) -> None:
        for key, value in values.items():
            self._writer.add_scalar(key, value, step)

    def finish(self, summary: dict[str, Any] | None) -> None:
        if summary is not None:
            self._writer.flush()  # add_hparams starts a new file, and TensorBoard reads the files in order
            settings = {key: v if isinstance(v, (int, float)) else str(v) for key, v in flat(self.config).items()}
            self._writer.add_hparams(settings, numbers(summary, "summary/"), run_name=".")
        self._writer.close()
