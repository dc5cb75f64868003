"""TrustWarning: says at a run's start if evaluate.py, predict.py and export.py would refuse to use it."""

from __future__ import annotations

import logging
from dataclasses import asdict

from training.config import ConfigError
from training.run import Run
from training.trust import to_trust

log = logging.getLogger(__name__)


class TrustWarning:
    """Logs what has to be added to the commands of these scripts."""

    def on_start(self, run: Run) -> None:
        try:
            names = to_trust(asdict(run.config))
        except ConfigError as error:
            log.warning("%s", error)
            return
        if names:
            log.warning(
                "this run uses code that could do anything; if you trust it, add %s to evaluate.py, predict.py and "
                "export.py, and train.trust=[%s] to resume",
                " ".join(f"--trust {name}" for name in names),
                ",".join(names),
            )
