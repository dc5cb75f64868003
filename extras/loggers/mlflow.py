"""MLflow: the server in MLFLOW_TRACKING_URI, else mlflow.db in the run's or the sweep's folder. `logger=mlflow`."""

import os
import re
import time
from typing import Any

from extras.loggers.logger import Logger, numbers
from training.config import flat
from training.run import Run


class MLflow(Logger):
    """experiment: its name; None: that in MLFLOW_EXPERIMENT_NAME, or Default."""

    package = "mlflow"

    def __init__(self, experiment: str | None = None) -> None:
        super().__init__(experiment=experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "Default")

    def start(self, run: Run) -> None:
        # By default each call waits minutes for a server that is down. mlflow reads these at each request.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        from filelock import FileLock  # torch depends on it
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        name = self.options["experiment"]
        folder = self.sweep or self.folder
        with FileLock(folder / ".mlflow.lock"):  # jobs of a sweep may create the tables at the same time
            self._client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{folder}/mlflow.db")
            existing = self._client.get_experiment_by_name(name)
            experiment = existing.experiment_id if existing else self._client.create_experiment(name)
        if self.earlier_id:
            self._id = self.earlier_id
            return self._client.update_run(self._id, status="RUNNING")
        tags = {"sweep": self.group} if self.group else {}
        self._id = self._client.create_run(experiment, run_name=self.run_name, tags=tags).info.run_id
        self.save_id(self._id)
        params = [Param(allowed(key), str(value)) for key, value in flat(self.config).items()]
        self._client.log_batch(self._id, params=params)

    def metrics(self, step: int, values: dict[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self._client.log_batch(self._id, [Metric(allowed(key), value, now, step) for key, value in values.items()])

    def finish(self, summary: dict[str, Any] | None) -> None:
        self.metrics(0, numbers(summary or {}, "summary/"))
        self._client.set_terminated(self._id, "FAILED" if summary is None else "FINISHED")


def allowed(key: str) -> str:
    """The key without what MLflow refuses, as in acc@1 or f1(macro), of a score and of a setting."""
    return re.sub(r"[^\w\-. /:]", "_", key)
