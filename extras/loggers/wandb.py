"""Weights & Biases: files in the run's folder, which a process of wandb uploads. `logger=wandb`."""

import logging
import os
from typing import Any
from uuid import uuid4

from extras.loggers.logger import Logger
from training.run import Run

# What wandb reads of the environment, unless an option says it.
VARIABLES = {"name": "WANDB_NAME", "group": "WANDB_RUN_GROUP", "dir": "WANDB_DIR"}
UPLOAD_SECONDS = 60  # the longest that a finished run waits for an upload; `wandb sync` uploads the rest later
log = logging.getLogger(__name__)


class WandB(Logger):
    """Options are those of wandb.init, which come before ours. id: also in WANDB_RUN_ID, such as that of an agent."""

    package = "wandb"

    def start(self, run: Run) -> None:
        import wandb

        ours = {"name": self.run_name, "group": self.group, "dir": str(self.folder)}
        usual = {name: value for name, value in ours.items() if VARIABLES[name] not in os.environ}
        identifier = self.earlier_id or os.environ.get("WANDB_RUN_ID") or uuid4().hex
        defaults = {**usual, "config": self.config, "id": identifier, "resume": "allow", "reinit": "finish_previous"}
        options: dict[str, Any] = {**defaults, **self.options}
        has_mode = "mode" in options or "WANDB_MODE" in os.environ
        if not has_mode and not wandb.login(prompt=False, verify=False):  # wandb.init would prompt
            options["mode"] = "offline"
            folder = options.get("dir") or os.environ.get("WANDB_DIR", ".")
            upload = f"`wandb login`, then `wandb sync {folder}/wandb/offline-run-*` uploads it"
            log.warning("logger=wandb: there is no login, so the run stays on this machine; %s", upload)
        # console: train.log has the terminal's lines.
        settings = {"console": "off", "finish_timeout": UPLOAD_SECONDS, **(options.get("settings") or {})}
        options["settings"] = wandb.Settings(**settings)
        self._run = wandb.init(**options)
        self.save_id(self._run.id)
        # wandb's step counter never decreases: it would drop the steps that a resumed run repeats.
        self._run.define_metric("*", step_metric="step")

    def metrics(self, step: int, values: dict[str, float]) -> None:
        self._run.log({"step": step, **values})

    def finish(self, summary: dict[str, Any] | None) -> None:
        self._run.summary.update(summary or {})
        self._run.finish(exit_code=int(summary is None))
