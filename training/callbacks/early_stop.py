"""train.early_stop: ends a run whose score does not improve any more. See conf/callbacks/standard/early_stop.yaml."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import ClassVar

from training.config import Keys, check_least
from training.run import Run

log = logging.getLogger(__name__)


@dataclass
class EarlyStopKeys(Keys):
    early_stop: int | None

    def __post_init__(self) -> None:
        check_least("train.early_stop", self.early_stop, 1)
        super().__post_init__()


class EarlyStop:
    """Ends the run if its best score is older than the last `train.early_stop` evaluations; null: never."""

    keys: ClassVar = {"train": EarlyStopKeys}

    def on_start(self, run: Run) -> None:
        """A run that had stopped stays stopped when it is resumed."""
        evaluations = run.config.train.early_stop
        if has_stalled(run.results.scores, run.results.sign, evaluations):
            run.stops_early = True
            log.info("stops early: the best score is older than the last %d evaluations", evaluations)

    def on_evaluation(self, run: Run, scores: dict[str, float]) -> None:
        self.on_start(run)


def has_stalled(scores: dict[int, float], sign: int, evaluations: int | None) -> bool:
    """Whether the best of `scores` (by step) is older than the last `evaluations`. sign: -1 if lower is better."""
    if evaluations is None or not scores:
        return False
    values = [sign * scores[step] for step in sorted(scores)]
    return values.index(max(values)) + evaluations < len(values)
