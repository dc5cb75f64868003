"""A run that only logs: what loggers see of a run, without training."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from training.callbacks.loggers.logger import Logger
from training.config import Config
from training.run import build_callbacks


class LoggedRun:
    """Starts the loggers of `config` in `folder`, after step `step`."""

    def __init__(self, folder: Path, config: Config, step: int = 0, is_main: bool = True) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.config, self.is_main = folder, config, is_main
        self.trainer = SimpleNamespace(step=step)
        self.loggers = [one for one in build_callbacks(config).values() if isinstance(one, Logger)]
        for logger in self.loggers:
            logger.on_start(self)

    def log(self, **values: Any) -> None:
        for logger in self.loggers:
            logger.on_log(self, values)

    def end(self, **summary: Any) -> None:
        """Ends the run; without a summary it was interrupted."""
        for logger in self.loggers:
            logger.on_end(self, summary or None)
