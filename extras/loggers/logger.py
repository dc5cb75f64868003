"""Logger: what the loggers share. If a logger fails, training continues without it."""

import logging
from collections.abc import Callable
from dataclasses import asdict
from importlib.util import find_spec
from typing import Any, ClassVar

from training.config import ConfigError, flat
from training.files import write_whole
from training.run import Run

log = logging.getLogger(__name__)


class Logger:
    """Passes what the main process logs to another program. A subclass has `package`, `start`, `metrics` and `finish`.

    options: the keys of the logger's section in `callbacks`. Before `start`, these are set: folder of the run; sweep
    and group, its folder and name if the run is a job of one; config, a dict; run_name; earlier_id, that of the run
    that is continued.
    """

    package: ClassVar[str]  # ConfigError says that it is not installed; it is imported when the run starts
    start: Callable[[Run], None]  # `run.progress.step` is 0 for a new run, else the last step before it continues
    metrics: Callable[[int, dict[str, float]], None]  # the step, and numbers by name
    finish: Callable[[dict[str, Any] | None], None]  # the summary; None if the run was interrupted or failed

    def __init__(self, **options: Any) -> None:
        self.name = type(self).__name__.lower()
        self.options = options
        self._works = False  # until the run starts, and in the main process alone
        if find_spec(self.package) is None:
            raise ConfigError(f"logger={self.name} needs another package: pip install {self.package}")

    def on_start(self, run: Run) -> None:
        self._works = run.is_main
        self.folder = run.folder.absolute()
        self.config = asdict(run.config)
        # Hydra writes multirun.yaml into the sweep's folder, whatever hydra.sweep.subdir calls those of its jobs.
        self.sweep = next((folder for folder in self.folder.parents if (folder / "multirun.yaml").exists()), None)
        self.group = self.sweep.name if self.sweep else None
        self.run_name = str(self.folder.relative_to(self.sweep.parent)) if self.sweep else self.folder.name
        self._id_file = self.folder / f"{self.name}_run_id.txt"
        is_continued = run.progress.step > 0 and self._id_file.exists()
        self.earlier_id = self._id_file.read_text().strip() if is_continued else None
        self._call(self.start, run)

    def on_log(self, run: Run, values: dict[str, Any]) -> None:
        figures = numbers(values)
        self._call(self.metrics, int(figures.pop("step")), figures)

    def on_end(self, run: Run, summary: dict[str, Any] | None) -> None:
        self._call(self.finish, summary)

    def save_id(self, identifier: str) -> None:
        write_whole(self._id_file, identifier + "\n")

    def _call(self, method: Callable[..., None], *arguments: Any) -> None:
        """Calls the method. If it fails, a warning says why, and this logger is left out from then on."""
        try:
            if self._works:
                method(*arguments)
        except Exception as error:
            self._works = False
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
            log.warning("logger=%s failed and is left out from here on: %s", self.name, reason)


def numbers(values: dict[str, Any], prefix: str = "") -> dict[str, float]:
    """The numbers among the values; those in nested dictionaries get keys such as "phase_seconds.evaluation"."""
    leaves = {prefix + key: value for key, value in flat(values).items() if not isinstance(value, bool)}
    return {key: value for key, value in leaves.items() if isinstance(value, (int, float))}
