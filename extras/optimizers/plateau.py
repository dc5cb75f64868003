"""Lowers the learning rate when the score of the run no longer gets better: schedule=plateau."""

from typing import Any

from torch.optim.lr_scheduler import ReduceLROnPlateau

from training.run import Run

STATE = ("best", "num_bad_epochs", "cooldown_counter", "last_epoch")


class Plateau:
    """torch's ReduceLROnPlateau, which counts evaluations, by the score that chooses best.pt. options: its arguments.

    Checkpoints have the optimizers' rates, and here how long the score has not been better.
    """

    def __init__(self, **options: Any) -> None:
        self.options = options

    def on_start(self, run: Run) -> None:
        mode: Any = "max" if run.data.task.higher_is_better else "min"
        self.schedules = [ReduceLROnPlateau(optimizer, mode, **self.options) for optimizer in run.trainer.optimizers]

    def on_evaluation(self, run: Run, scores: dict[str, float]) -> None:
        for schedule in self.schedules:
            schedule.step(scores[f"{run.eval_split}_{run.data.task.metric}"])

    def state_dict(self) -> dict[str, Any]:
        return {key: getattr(self.schedules[0], key) for key in STATE}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for schedule in self.schedules:
            vars(schedule).update(state)
