"""The loggers that `logger=` chooses beside metrics.jsonl: TensorBoard, Weights & Biases, MLflow. See conf/logger/.

A logger's package is imported when the run begins. A logger that fails is closed with one warning: training goes on,
and so does metrics.jsonl.
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

from training.command_line import flat
from training.config import ConfigError
from training.files import write_whole

UPLOAD_SECONDS = 60  # how long the end of a run waits for an upload
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Run:
    """What a logger is told about the run: its absolute folder, its config, the step from which it goes on."""

    folder: Path
    step: int  # 0 for a new run
    config: dict[str, Any]

    @property
    def sweep(self) -> Path | None:
        """The folder of the sweep that the run is a job of."""
        return self.folder.parent if (self.folder.parent / "multirun.yaml").exists() else None

    @property
    def name(self) -> str:
        return f"{self.sweep.name}/{self.folder.name}" if self.sweep else self.folder.name

    def earlier_id(self, logger: str) -> str | None:
        """The id under which `logger` has this run already, if this is its continuation."""
        file = self._id_file(logger)
        return file.read_text().strip() if self.step and file.exists() else None

    def keep_id(self, logger: str, identifier: str) -> None:
        write_whole(self._id_file(logger), identifier + "\n")

    def _id_file(self, logger: str) -> Path:
        return self.folder / f"{logger}_run_id.txt"


class Logger(Protocol):
    """Where the figures of a run go. The constructor takes the Run and the keys of the logger's section."""

    def metrics(self, step: int, values: dict[str, float]) -> None: ...

    def finish(self, summary: dict[str, Any] | None) -> None:
        """Closes the logger at the end of the run; without a summary the run was interrupted or failed."""


class TensorBoard:
    """Event files in the run's folder."""

    def __init__(self, run: Run, **options: Any) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._config = {
            key: value if isinstance(value, (int, float)) else str(value) for key, value in flat(run.config).items()
        }
        # TensorBoard hides what an earlier run in this folder wrote from purge_step on.
        self._writer = SummaryWriter(str(run.folder), purge_step=run.step + 1, **options)

    def metrics(self, step: int, values: dict[str, float]) -> None:
        for key, value in values.items():
            self._writer.add_scalar(key, value, step)

    def finish(self, summary: dict[str, Any] | None) -> None:
        if summary is not None:
            self._writer.flush()  # add_hparams begins another file, and TensorBoard reads one after the other
            self._writer.add_hparams(self._config, numbers(summary, "summary/"), run_name=".")
        self._writer.close()


class WandB:
    """A run of Weights & Biases, kept in the run's folder and uploaded by a process of wandb's own."""

    def __init__(self, run: Run, **options: Any) -> None:
        import wandb

        asked = "mode" in options or "WANDB_MODE" in os.environ
        if not asked and not wandb.login(prompt=False, verify=False):  # wandb.init would ask on the terminal, and wait
            options = {"mode": "offline", **options}
            log.warning(
                "logger=wandb: there is no login, so the run stays on this machine; `wandb login`, then "
                "`wandb sync %s/wandb/offline-run-*` uploads it",
                run.folder,
            )
        # It leaves the terminal's lines to train.log. What it has not uploaded in time can be synced later.
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
        run.keep_id("wandb", identifier)
        # wandb's own steps never go back: it would drop what a resumed run computes again.
        self._run.define_metric("*", step_metric="step")

    def metrics(self, step: int, values: dict[str, float]) -> None:
        self._run.log({"step": step, **values})

    def finish(self, summary: dict[str, Any] | None) -> None:
        self._run.summary.update(summary or {})
        self._run.finish(exit_code=int(summary is None))


class MLflow:
    """A run of MLflow: on the server that MLFLOW_TRACKING_URI names, else in a file in the run's or sweep's folder."""

    def __init__(self, run: Run, experiment: str | None) -> None:
        # Otherwise each call waits for minutes for a server that is down; read when mlflow sends a request.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        from filelock import FileLock  # torch needs it, too
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        self._metric = Metric
        folder = run.sweep or run.folder
        if set("?#%") & set(str(folder)) and not os.environ.get("MLFLOW_TRACKING_URI"):
            raise ValueError(f"its file cannot lie in a folder with ?, # or % in its name, as {folder} has")
        with FileLock(folder / ".mlflow.lock"):  # else the jobs of a sweep make the same tables at the same time
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
        run.keep_id("mlflow", self._id)
        self._client.log_batch(self._id, params=[Param(key, str(value)) for key, value in flat(run.config).items()])

    def metrics(self, step: int, values: dict[str, float]) -> None:
        now = int(time.time() * 1000)
        self._client.log_batch(self._id, [self._metric(key, value, now, step) for key, value in values.items()])

    def finish(self, summary: dict[str, Any] | None) -> None:
        self.metrics(0, numbers(summary or {}, "summary/"))
        self._client.set_terminated(self._id, "FAILED" if summary is None else "FINISHED")


CLASSES: dict[str, Callable[..., Logger]] = {"tensorboard": TensorBoard, "wandb": WandB, "mlflow": MLflow}


class Loggers:
    """The loggers of a run that have not failed. There are none before `start`."""

    def __init__(self) -> None:
        self._open: dict[str, Logger] = {}

    def start(self, run: Run) -> None:
        for name, options in run.config["logger"].items():
            with self._left_out_if_it_fails(name):
                try:
                    self._open[name] = CLASSES[name](run, **options)
                except TypeError as error:  # from a key that it does not have
                    raise ConfigError(f"logger.{name}: {error}") from error

    def metrics(self, values: dict[str, Any]) -> None:
        """Passes on the numbers in `values`, of which `step` is one."""
        figures = numbers(values)
        step = int(figures.pop("step"))
        for name, logger in list(self._open.items()):
            with self._left_out_if_it_fails(name):
                logger.metrics(step, figures)

    def finish(self, summary: dict[str, Any] | None = None) -> None:
        """Closes them; without a summary the run was interrupted or failed."""
        while self._open:
            name, logger = self._open.popitem()
            with self._left_out_if_it_fails(name):
                logger.finish(summary)

    @contextmanager
    def _left_out_if_it_fails(self, name: str) -> Iterator[None]:
        try:
            yield
        except ConfigError:
            raise
        except Exception as error:
            self._open.pop(name, None)
            reason = str(error).partition("\n")[0]
            log.warning("logger=%s failed and is left out from here on: %s: %s", name, type(error).__name__, reason)


def numbers(values: dict[str, Any], prefix: str = "") -> dict[str, float]:
    """The numbers among the values, also of nested dictionaries: {"versions.torch": ...}."""
    return {
        prefix + key: value
        for key, value in flat(values).items()
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    }
