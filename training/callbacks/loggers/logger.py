"""Logger: the base class of the loggers. One that fails is left out with a warning, and training goes on."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from training.config import ConfigError, flat, one_line
from training.files import write_whole
from training.run import Run

log = logging.getLogger(__name__)


class Logger:
    """Passes what the main process logs to another program. A subclass defines `package` and the three methods below.

    options: the keys of the logger's section in `callbacks`. The package is imported when the run starts.
    Raises ConfigError if `package` is not installed; `on_start` raises it for an unknown key.
    """

    package: ClassVar[str]

    def __init__(self, **options: Any) -> None:
        self.name, self.options, self._works = type(self).__name__.lower(), options, False
        if find_spec(self.package) is None:
            raise ConfigError(
                f"logger={self.name} needs {self.package}, which is not installed: pip install {self.package}"
            )

    def start(self, run: Run) -> None:
        """Opens the logger. `run.trainer.step` is 0 for a new run, else the last step before it continues."""
        raise NotImplementedError

    def metrics(self, step: int, values: dict[str, float]) -> None:
        raise NotImplementedError

    def finish(self, summary: dict[str, Any] | None) -> None:
        """Closes the logger at the end of the run; summary is None if the run was interrupted or failed."""
        raise NotImplementedError

    def on_start(self, run: Run) -> None:
        self._works = run.is_main
        self._call(self.start, run)

    def on_log(self, run: Run, values: dict[str, Any]) -> None:
        figures = numbers(values)
        self._call(self.metrics, int(figures.pop("step")), figures)

    def on_end(self, run: Run, summary: dict[str, Any] | None) -> None:
        self._call(self.finish, summary)

    def _call(self, method: Callable[..., None], *arguments: Any) -> None:
        if not self._works:
            return
        try:
            method(*arguments)
        except Exception as error:
            self._works = False
            if isinstance(error, TypeError) and method == self.start:
                raise ConfigError(f"callbacks.{self.name}: {error}") from error  # an unknown key
            reason = f"{type(error).__name__}: {one_line(error)}"
            log.warning("logger=%s failed and is left out from here on: %s", self.name, reason)


class Place:
    """Where a run lies, and the id that a logger gave it."""

    def __init__(self, run: Run, logger: str) -> None:
        self.folder, self.config = run.folder.absolute(), asdict(run.config)
        self._resumed, self._id_file = run.trainer.step > 0, run.folder / f"{logger}_run_id.txt"

    @property
    def sweep(self) -> Path | None:
        """The folder of the sweep, if the run is a job of one."""
        return self.folder.parent if (self.folder.parent / "multirun.yaml").exists() else None

    @property
    def name(self) -> str:
        return f"{self.sweep.name}/{self.folder.name}" if self.sweep else self.folder.name

    def earlier_id(self) -> str | None:
        """The id that the logger gave to the run before it was interrupted; None for a new run."""
        return self._id_file.read_text().strip() if self._resumed and self._id_file.exists() else None

    def save_id(self, identifier: str) -> None:
        write_whole(self._id_file, identifier + "\n")


def numbers(values: dict[str, Any], prefix: str = "") -> dict[str, float]:
    """The numbers among the values; those in nested dictionaries get keys such as "seconds.training"."""
    return {
        prefix + key: value
        for key, value in flat(values).items()
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    }
