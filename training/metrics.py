"""What a run measures over many samples: means over samples, and the metrics of a whole epoch."""

from __future__ import annotations

import logging
import pickle
from contextlib import suppress
from itertools import chain, product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from training.config import ConfigError
from training.processes import Processes
from training.targets import build

log = logging.getLogger(__name__)


class Means:
    """Means over samples. The sums stay on the device until `read`, which all processes call at the same step.

    Checkpoints keep the sums of all processes, so that a resumed run reads the means of one that was not stopped.
    """

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self._sums: dict[str, tuple[Tensor | float, int]] = {}  # the sum and the number of samples, by name

    def add(self, samples: int, values: dict[str, Any]) -> None:
        """Adds the values of `samples` samples by name: one or more for each sample (B, ...), or their mean ()."""
        for name, value in values.items():
            total, count = self._sums.get(name, (0.0, 0))
            value = torch.as_tensor(value, dtype=torch.float64).detach()
            added = value.sum() if value.numel() == samples else value.mean() * samples
            self._sums[name] = total + added, count + samples

    def read(self) -> dict[str, float]:
        """Returns the means since the last call, over all processes. A process may have added nothing."""
        sums, self._sums = self.state_dict(), {}
        return {name: total / max(count, 1) for name, (total, count) in sums.items()}

    def state_dict(self) -> dict[str, tuple[float, int]]:
        """Returns the sums of all processes and their numbers of samples, by name. All processes have to call it."""
        every = self._processes.gather({name: (float(total), count) for name, (total, count) in self._sums.items()})
        names = dict.fromkeys(name for sums in every for name in sums)
        pairs = {name: [sums[name] for sums in every if name in sums] for name in names}
        return {name: (sum(t for t, _ in found), sum(n for _, n in found)) for name, found in pairs.items()}

    def load_state_dict(self, sums: dict[str, tuple[float, int]]) -> None:
        self._sums = dict(sums) if self._processes.is_main else {}


class EpochMetrics:
    """The metrics in `task.metrics`: scores that are no means over samples, such as the mean IoU or AUROC.

    A metric is an object with update(outputs, labels), compute() and reset(), as torchmetrics has them. It gets the
    network's outputs in float32 and the labels of each batch. compute() returns a number, or numbers by name.
    With several processes, torchmetrics gathers its own state. Any other metric gets the batches of all processes, by
    rank, before compute(): they are kept on the host until then. Raises ConfigError for one that cannot be built.
    """

    def __init__(self, section: dict[str, Any] | None, processes: Processes) -> None:
        self._processes, self._got_batches, self._kept = processes, False, list[tuple[Any, Any]]()
        self._metrics = {name: build(f"task.metrics.{name}", values) for name, values in (section or {}).items()}
        self.names = list(self._metrics)
        for name, metric in self._metrics.items():
            if missing := [method for method in ("update", "compute", "reset") if not hasattr(metric, method)]:
                raise ConfigError(f"task.metrics.{name}: {type(metric).__name__} has no {missing[0]}(): add it")
            if hasattr(metric, "to"):
                metric.to(processes.device)
        self._new = {name: content(metric) for name, metric in self._metrics.items()}
        alone = processes.world_size == 1
        self._waiting = [name for name, one in self._metrics.items() if not (alone or _gathers_itself(one))]

    def update(self, outputs: Tensor, labels: Any) -> None:
        """Adds a batch: outputs (B, ...) and labels (B, ...), whose dimensions of length 1 become the outputs'."""
        self._got_batches = True
        outputs = outputs.float() if isinstance(outputs, Tensor) else outputs
        if isinstance(labels, Tensor) and isinstance(outputs, Tensor):
            labels = labels.reshape(outputs.shape) if labels.squeeze().shape == outputs.squeeze().shape else labels
        for name, metric in self._metrics.items():
            if name not in self._waiting:
                metric.update(outputs, labels)
        if self._waiting:
            self._kept.append((outputs.cpu(), labels.cpu() if isinstance(labels, Tensor) else labels))

    def compute(self) -> dict[str, float]:
        """Returns the values by name since the last call, over all processes. All processes have to call it."""
        if not self._metrics:
            return {}
        values: dict[str, float] = {}
        kept, self._kept = self._processes.gather(self._kept), []
        for name, (outputs, labels) in product(self._waiting, chain.from_iterable(kept)):
            self._metrics[name].update(outputs, labels)
        for name, metric in self._metrics.items():
            found = metric.compute()
            metric.reset()
            for key, value in found.items() if isinstance(found, dict) else [("", found)]:
                if torch.as_tensor(value).numel() != 1:
                    raise ConfigError(
                        f"task.metrics.{name}: compute() returned values of shape {tuple(np.shape(value))}: return a "
                        "number, or a dict of numbers by name"
                    )
                values[f"{name}_{key}" if key else name] = float(value)
        return values

    def forget(self) -> None:
        """Drops what `update` got. Raises ConfigError if it got nothing."""
        if self._metrics and not self._got_batches:
            raise ConfigError(
                f"task.metrics.{self.names[0]} got no outputs: call self.metrics.update(outputs, labels) in the "
                "trainer's evaluation_step"
            )
        self._kept = []
        for name, metric in self._metrics.items():
            before = content(metric)
            metric.reset()
            if content(metric) == before != self._new[name]:
                log.warning("task.metrics.%s: its reset() changes nothing, so it counts earlier samples again", name)

    def higher_is_better(self, name: str, default: bool) -> bool:
        """Returns what the metric says of itself, as torchmetrics' do; `default` if it says nothing."""
        known = dict(self._metrics)
        for several, metric in self._metrics.items():  # of which torchmetrics' MetricCollection is a dict
            known |= {f"{several}_{key}": one for key, one in getattr(metric, "items", tuple)()}
            if name.startswith(f"{several}_"):
                known.setdefault(name, metric)
        found = getattr(known.get(name), "higher_is_better", None)
        return found if isinstance(found, bool) else default


def content(metric: Any) -> bytes | None:
    """All that a metric has, to see whether it changes; None if it cannot be pickled."""
    with suppress(Exception):
        return pickle.dumps(metric)
    return None


def _gathers_itself(metric: Any) -> bool:
    return type(metric).__module__.partition(".")[0] == "torchmetrics" or hasattr(metric, "sync")
