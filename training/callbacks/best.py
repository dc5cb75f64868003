"""Marks the best checkpoint as checkpoints/best.pt: conf/callbacks/standard/best.yaml."""

from __future__ import annotations

from training.run import Run


class Best:
    """Links best.pt to the checkpoint of each evaluation whose score no other one exceeds."""

    def on_evaluation(self, run: Run, scores: dict[str, float]) -> None:
        if run.record.is_best(run.trainer.step):
            run.checkpoints.mark_best(run.trainer.step)
