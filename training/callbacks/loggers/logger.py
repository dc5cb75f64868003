"""The loggers that `logger=` chooses: TensorBoard, Weights & Biases, MLflow. See conf/logger/.

A logger's package is imported when the run starts. A logger that fails is dropped with one warning; training and
metrics.jsonl go on.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

from training.config import ConfigError, flat, one_line
from training.files import write_whole

UPLOAD_SECONDS = 60  # the longest that a finished run waits for an upload
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Run:
    """What a logger needs to know about the run."""

    folder: Path  # absolute
    step: int  # the last step before training continues; 0 for a new run
    config: dict[str, Any]

    @property
    def sweep(self) -> Path | None:
        """The folder of the sweep, if the run is a job of one."""
        return self.folder.parent if (self.folder.parent / "multirun.yaml").exists() else None

    @property
    def name(self) -> str:
        return f"{self.sweep.name}/{self.folder.name}" if self.sweep else self.folder.name

    def earlier_id(self, logger: str) -> str | None:
        """The id that `logger` gave to the run before it was interrupted; None for a new run."""
        file = self._id_file(logger)
        return file.read_text().strip() if self.step and file.exists() else None

    def save_id(self, logger: str, identifier: str) -> None:
        write_whole(self._id_file(logger), identifier + "\n")

    def _id_file(self, logger: str) -> Path:
        return self.folder / f"{logger}_run_id.txt"


class Logger(Protocol):
    """Takes the metrics of a run. The constructor gets the Run and the keys of the logger's section."""

    def metrics(self, step: int, values: dict[str, float]) -> None: ...

    def finish(self, summary: dict[str, Any] | None) -> None:
        """Closes the logger at the end of the run; summary is None if the run was interrupted or failed."""


class TensorBoard:
    """Event files in the run's folder."""

    def __init__(self, run: Run, **options: Any) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._config = {
            key: value if isinstance(value, (int, float)) else str(value) for key, value in flat(run.config).items()
        }
        # From purge_step on, TensorBoard hides what the run wrote in this folder before it was interrupted.
        self._writer = SummaryWriter(str(run.folder), purge_step=run.step + 1, **options)

    def metrics(self, step: int, values: dict[str, float]) -> None:
        for key, value in values.items():
            self._writer.add_scalar(key, value, step)

    def finish(self, summary: dict[str, Any] | None) -> None:
        if summary is not None:
            self._writer.flush()  # add_hparams starts a new file, and TensorBoard reads the files in order
            self._writer.add_hparams(self._config, numbers(summary, "summary/"), run_name=".")
        self._writer.close()


class WandB:
    """A run of Weights & Biases: files in the run's folder, which a process of wandb uploads."""

    def __init__(self, run: Run, **options: Any) -> None:
        import wandb

        has_mode = "mode" in options or "WANDB_MODE" in os.environ
        if not has_mode and not wandb.login(prompt=False, verify=False):  # wandb.init would prompt
            options = {"mode": "offline", **options}
            log.warning(
                "logger=wandb: there is no login, so the run stays on this machine; `wandb login`, then "
                "`wandb sync %s/wandb/offline-run-*` uploads it",
                run.folder,
            )
        # console: train.log has the terminal's lines. finish_timeout: the rest can be uploaded by `wandb sync` later.
        settings = wandb.Settings(console="off", finish_timeout=UPLOAD_SECONDS)
        identifier = run.earlier_id("wandb") or uuid4().hex
        self._run = wandb.init(
            id=identifier,
            resume="allow",
            reinit="finish_previous",
            dir=run.folder,
            config=run.config,
            settings=settings,
            **{"name": run.name, "group": run.sweep and run.sweep.name, **options},
        )
        run.save_id("wandb", identifier)
        # wandb's step counter never decreases: it would drop the steps that a resumed run repeats.
        self._run.define_metric("*", step_metric="step")

    def metrics(self, step: int, values: dict[str, float]) -> None:
        self._run.log({"step": step, **values})

    def finish(self, summary: dict[str, Any] | None) -> None:
        self._run.summary.update(summary or {})
        self._run.finish(exit_code=int(summary is None))


class MLflow:
    """A run of MLflow: on the server in MLFLOW_TRACKING_URI, or in a file in the run's or the sweep's folder."""

    def __init__(self, run: Run, experiment: str | None) -> None:
        # By default each call waits minutes for a server that is down. mlflow reads these at each request.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        from filelock import FileLock  # torch depends on it
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        self._metric = Metric
        folder = run.sweep or run.folder
        if set("?#%") & set(str(folder)) and not os.environ.get("MLFLOW_TRACKING_URI"):
            raise ValueError(f"mlflow.db cannot be in a folder with ?, # or % in its name, such as {folder}")
        with FileLock(folder / ".mlflow.lock"):  # jobs of a sweep may create the tables at the same time
            self._client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{folder}/mlflow.db")
            name = experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "Default"
            found = self._client.get_experiment_by_name(name)
            identifier = found.experiment_id if found else self._client.create_experiment(name)
        if earlier := run.earlier_id("mlflow"):
            self._id = earlier
            self._client.update_run(self._id, status="RUNNING")
            return
        tags = {"sweep": run.sweep.name} if run.sweep else {}
        self._id = self._client.create_run(identifier, run_name=run.name, tags=tags).info.run_id
        run.save_id("mlflow", self._id)
        self._client.log_batch(self._id, params=[Param(key, str(value)) for key, value in flat(run.config).items()])

    def metrics(self, step: int, values: dict[str, float]) -> None:
        now = int(time.time() * 1000)
        self._client.log_batch(self._id, [self._metric(key, value, now, step) for key, value in values.items()])

    def finish(self, summary: dict[str, Any] | None) -> None:
        self.metrics(0, numbers(summary or {}, "summary/"))
        self._client.set_terminated(self._id, "FAILED" if summary is None else "FINISHED")


CLASSES: dict[str, Callable[..., Logger]] = {"tensorboard": TensorBoard, "wandb": WandB, "mlflow": MLflow}


class Loggers:
    """The loggers of a run that were started and have not failed."""

    def __init__(self) -> None:
        self._open: dict[str, Logger] = {}

    def start(self, run: Run) -> None:
        """Starts the loggers in the config. Raises ConfigError for an unknown key of a logger."""
        for name, options in run.config["logger"].items():
            with self._drop_if_it_fails(name):
                try:
                    self._open[name] = CLASSES[name](run, **options)
                except TypeError as error:  # an unknown key
                    raise ConfigError(f"logger.{name}: {error}") from error

    def metrics(self, values: dict[str, Any]) -> None:
        """Passes the numbers in `values` to the loggers, with values["step"] as their step."""
        figures = numbers(values)
        step = int(figures.pop("step"))
        for name, logger in list(self._open.items()):
            with self._drop_if_it_fails(name):
                logger.metrics(step, figures)

    def finish(self, summary: dict[str, Any] | None = None) -> None:
        """Closes the loggers; summary is None if the run was interrupted or failed."""
        while self._open:
            name, logger = self._open.popitem()
            with self._drop_if_it_fails(name):
                logger.finish(summary)

    @contextmanager
    def _drop_if_it_fails(self, name: str) -> Iterator[None]:
        try:
            yield
        except ConfigError:
            raise
        except Exception as error:
            self._open.pop(name, None)
            reason = f"{type(error).__name__}: {one_line(error)}"
            log.warning("logger=%s failed and is left out from here on: %s", name, reason)


def numbers(values: dict[str, Any], prefix: str = "") -> dict[str, float]:
    """The numbers among the values; those in nested dictionaries get keys such as "seconds.training"."""
    return {
        prefix + key: value
        for key, value in flat(values).items()
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    }
