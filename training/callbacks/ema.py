"""train.ema: evaluates a running mean of the weights. See conf/callbacks/standard/ema.yaml."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from training.config import ConfigError, Keys
from training.run import Run


@dataclass
class EmaKeys(Keys):
    ema: float | None

    def __post_init__(self) -> None:
        if self.ema is not None and not 0 < self.ema < 1:
            raise ConfigError(f"train.ema={self.ema}: give a decay between 0 and 1, such as 0.999, or null for no EMA")
        super().__post_init__()


class EMA:
    """Keeps a running mean of the weights and buffers, which evaluations and checkpoints use; null: none.

    A buffer of integers (positions, counts), or with infinities (a mask), has no mean: the newest is used.
    """

    keys: ClassVar = {"train": EmaKeys}

    def on_start(self, run: Run) -> None:
        self._run, self._decay = run, run.config.train.ema
        if self._decay is not None:
            model = run.trainer.model
            self._mean = AveragedModel(model, multi_avg_fn=self._average, use_buffers=True)
            self._copied = [n for n, x in model.named_buffers() if not (x.is_floating_point() and x.isfinite().all())]
            run.trainer.evaluate_with(self._mean)

    def on_step(self, run: Run) -> None:
        if self._decay is not None:
            self._mean.update_parameters(run.trainer.model)
            means, newest = (dict(one.named_buffers()) for one in (self._mean.module, run.trainer.model))
            for name in self._copied:
                means[name].copy_(newest[name])

    def _average(self, means: Any, weights: Any, count: Any) -> None:
        """Updates the running mean. The decay rises from 0.1 to train.ema, so that the first weights fade."""
        step = self._run.trainer.step - 1
        get_ema_multi_avg_fn(min(self._decay, (1 + step) / (10 + step)))(means, weights, count)
