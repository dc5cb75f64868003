"""TrustWarning: says at a run's start if evaluate.py, predict.py and export.py would refuse to use it."""

from __future__ import annotations

import logging
from dataclasses import asdict

from training.config import ConfigError
from training.run import Run
from training.trust import check_config

log = logging.getLogger(__name__)

OPTION = "--trust {0} to evaluate.py, predict.py and export.py, and train.trust=[{0}] to resume"


class TrustWarning:
    """Logs what has to be added to the commands of these scripts."""

    def on_start(self, run: Run) -> None:
        try:
            check_config(asdict(run.config), "this run", option=OPTION)
        except ConfigError as error:
            log.warning("%s", error)
