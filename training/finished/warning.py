"""TrustWarning: says at a run's start if evaluate.py, predict.py and export.py would refuse to use it."""

from __future__ import annotations

import logging

from training.config import ConfigError
from training.run import Run
from training.trust import check_config

log = logging.getLogger(__name__)


class TrustWarning:
    """Logs what has to be added to the commands of these scripts."""

    def on_start(self, run: Run) -> None:
        try:
            sections = {"data": run.config.data, "task": run.config.task, "model": run.config.model}
            check_config(sections, "this run", option="--trust {} to evaluate.py, predict.py and export.py")
        except ConfigError as error:
            log.warning("%s", error)
