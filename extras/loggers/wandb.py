"""Weights & Biases: files in the run's folder, which a process of wandb uploads. `logger=wandb`."""

import logging
import os
from typing import Any
from uuid import uuid4

from extras.loggers.logger import Logger
from training.run import Run

UPLOAD_SECONDS = 60  # the longest that a finished run waits for an upload; `wandb sync` uploads the rest later
log = logging.getLogger(__name__)


class WandB(Logger):
    """Options are those of wandb.init."""

    package = "wandb"

    def start(self, run: Run) -> None:
        import wandb

        identifier = self.earlier_id or uuid4().hex
        options: dict[str, Any] = {"name": self.run_name, "group": self.group, "config": self.config, **self.options}
        has_mode = "mode" in options or "WANDB_MODE" in os.environ
        if not has_mode and not wandb.login(prompt=False, verify=False):  # wandb.init would prompt
            options["mode"] = "offline"
            upload = f"`wandb login`, then `wandb sync {self.folder}/wandb/offline-run-*` uploads it"
            log.warning("logger=wandb: there is no login, so the run stays on this machine; %s", upload)
        options |= {"id": identifier, "resume": "allow", "reinit": "finish_previous", "dir": self.folder}
        # console: train.log has the terminal's lines.
        options["settings"] = wandb.Settings(console="off", finish_timeout=UPLOAD_SECONDS)
        self._run = wandb.init(**options)
        self.save_id(identifier)
        # wandb's step counter never decreases: it would drop the steps that a resumed run repeats.
        self._run.define_metric("*", step_metric="step")

    def metrics(self, step: int, values: dict[str, float]) -> None:
        self._run.log({"step": step, **values})

    def finish(self, summary: dict[str, Any] | None) -> None:
        self._run.summary.update(summary or {})
        self._run.finish(exit_code=int(summary is None))
