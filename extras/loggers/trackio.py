"""Trackio: a database in $TRACKIO_DIR, by default in ~/.cache/huggingface/trackio. `logger=trackio`."""

from typing import Any

from extras.loggers.logger import Logger, numbers
from training.config import ROOT, flat
from training.run import Run


class Trackio(Logger):
    """Options are those of trackio.init."""

    package = "trackio"

    def start(self, run: Run) -> None:
        import trackio

        options = {"name": self.run_name, "group": self.group, "config": flat(self.config), **self.options}
        options["project"] = options.get("project") or ROOT.name
        if self.earlier_id:
            options |= {"name": self.earlier_id, "resume": "allow"}
        self._step = run.progress.step
        self._run = trackio.init(**options)
        self.save_id(self._run.name)  # another one than was asked for, if the project has a run of this name

    def metrics(self, step: int, values: dict[str, float]) -> None:
        self._step = step
        self._run.log(values, step=step)

    def finish(self, summary: dict[str, Any] | None) -> None:
        self._run.log(numbers(summary or {}, "summary/"), step=self._step)
        self._run.finish()
