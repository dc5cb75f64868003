"""Progress: where a run is, and where it ends. The trainer owns it; everything else reads it."""

import logging
import math
from typing import Any

from training.config import ConfigError, TrainConfig

log = logging.getLogger(__name__)


class Progress:
    """Counts the steps and epochs of a run.

    position: where the training loader was after the last step. Checkpoints save it, so a resume continues there.
    `epoch` is position.epoch but for two moments. After an epoch's last step the position is that of the next epoch
    already, and `epoch` follows in `end_epoch`: on_step, the log and schedule.every=epoch still see the old one. An
    epoch that train.max_steps has ended counts as complete, too, though the position stays in it.
    """

    def __init__(self, config: TrainConfig, steps_per_epoch: int, by_epoch: bool) -> None:
        self._epochs = config.epochs
        self._max_steps = config.max_steps
        self.steps_per_epoch = steps_per_epoch  # by the loader's length
        self.by_epoch = by_epoch  # schedule.every=epoch
        steps = config.epochs * steps_per_epoch
        self.last_step = min(steps, config.max_steps or steps)
        self.step = 0  # the batches that were trained so far, and those without samples, which are skipped
        self.epoch = 0  # complete epochs so far
        self.position: Any = None
        self._batches = 0  # of the newest epoch so far
        self._length = steps_per_epoch  # of this epoch, by the loader's length now
        self._has_warned = False

    def begin_epoch(self, length: int) -> None:
        """length: the loader's, now that dataset and sampler know the epoch."""
        self._length = length

    def end_step(self, position: Any) -> None:
        """Counts a step. Raises ConfigError in an epoch that goes on: its sampler may have no end."""
        self.step += 1
        self._batches = self.position.batch + 1
        self.position = position
        if position.batch > 2 * self._length:
            raise ConfigError(
                f"epoch {self.epoch + 1} goes on after twice as many steps as the loader's length says, "
                f"{self._length}: let the sampler, or the batch sampler, end after as many items as its __len__ says"
            )

    def end_epoch(self) -> None:
        """Counts an epoch. Warns of the first that was not as long as the loader had said: schedules rely on that."""
        self.epoch += 1
        is_cut = self._max_steps is not None and self.step >= self._max_steps
        difference = abs(self._batches - self.steps_per_epoch)
        if not self._has_warned and not is_cut and difference > 1:  # RolloverBatches has one more
            self._has_warned = True
            log.warning(
                "epoch %d had %d steps, by its loader's length %d, by which schedules count each epoch: in a longer "
                "one the learning rate stays for the rest, after a shorter one it jumps",
                self.epoch,
                self._batches,
                self.steps_per_epoch,
            )

    def resume(self, step: int, position: Any) -> None:
        """Continues after `step` steps, with the loader at `position`."""
        self.step = step
        self.position = position
        self.epoch = position.epoch

    @property
    def is_between_epochs(self) -> bool:
        """Whether an epoch has ended and no other has begun: a run that resumes there repeats the evaluation."""
        return self.step > 0 and (self.position.batch == 0 or self.limit_reached != "")

    @property
    def newest_epoch(self) -> int:
        """The number, from 0, of the epoch that has begun last."""
        return self.epoch - 1 if self.is_between_epochs else self.epoch

    @property
    def limit_reached(self) -> str:
        """The setting that ends the run at this step; empty if it continues."""
        return self.limit_at(self.step, self.epoch)

    def limit_at(self, step: int, epoch: int) -> str:
        """The setting that ends the run after so many steps and epochs; empty if it continues."""
        if self._max_steps is not None and step >= self._max_steps:
            return f"train.max_steps={self._max_steps}"
        if epoch >= self._epochs:
            return f"train.epochs={self._epochs}"
        return ""

    @property
    def schedule_position(self) -> int:
        """How often the schedules have been stepped.

        It depends on the loader's position, not on the steps so far: after a resume with another batch size an epoch
        begins where it would have begun in a run that always had this size.
        """
        if self.by_epoch:
            return min(self.epoch, math.ceil(self.last_step / self.steps_per_epoch))
        batch = min(self.position.batch, self.steps_per_epoch)
        return min(self.position.epoch * self.steps_per_epoch + batch, self.last_step - 1)
