"""Marks the best checkpoint as checkpoints/best.pt: conf/callbacks/standard/best.yaml."""

from __future__ import annotations

import logging

from training.checks import is_stream
from training.run import Run

log = logging.getLogger(__name__)


class Best:
    """Links best.pt to the checkpoint of each evaluation whose score no other one exceeds."""

    def on_start(self, run: Run) -> None:
        extreme = "highest" if run.data.task.higher_is_better else "lowest"
        log.info("best.pt is the checkpoint with the %s %s", extreme, run.results.score_name)
        if run.data.val is None:
            remedy = ": data.val_fraction=0.1 chooses it on a part of the training set"
            remedy = "" if is_stream(run.data.train) else remedy
            log.info("best.pt will be chosen on the test set, so its test score will be too good%s", remedy)

    def on_evaluation(self, run: Run, scores: dict[str, float]) -> None:
        if run.results.is_best(run.trainer.step):
            run.checkpoints.mark_best(run.trainer.step)
