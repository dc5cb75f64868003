"""A training step: the module that DDP wraps, and the parts that train.accumulate makes of a batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from training.config import ConfigError, flat

if TYPE_CHECKING:
    from training.trainer import Trainer


class Step(nn.Module):
    """The trainer's modules; the forward pass is its training step, which may use any part of them.

    DDP begins each with the main process's buffers, also those of modules without trained weights: a queue, a teacher.
    """

    def __init__(self, trainer: Trainer) -> None:
        super().__init__()
        self.parts = nn.ModuleList([trainer.model, *trainer.others.values()])
        self._trainer = [trainer]  # in a list: no part of this

    def forward(self, batch: dict[str, Any]) -> Tensor | None:
        (trainer,) = self._trainer
        trainer.is_in_step = True
        try:
            return trainer.training_step(batch)
        finally:
            trainer.is_in_step = False


def split_batch(batch: dict[str, Any], count: int, parts: int) -> list[tuple[dict[str, Any], int]]:
    """Splits a batch of `count` samples: tensors (B, ...) and lists of B items, in dicts too. Returns parts, and their
    samples.

    They are of equal length, but for the last. Raises ConfigError for any other field, which would not fit a part.
    """
    if parts == 1:
        return [(batch, count)]
    for name, value in flat(batch).items():
        has_rows = isinstance(value, list) or (isinstance(value, Tensor) and value.ndim)
        if not has_rows or len(value) != count:
            raise ConfigError(
                f"train.accumulate={parts}: the batch's field {name!r} is no tensor or list with an item for each of "
                f"the {count} samples, and cannot be split: use train.accumulate=1"
            )
    size = -(-count // parts)
    return [(_rows(batch, slice(at, at + size)), min(size, count - at)) for at in range(0, count, size)]


def _rows(field: Any, part: slice) -> Any:
    return {name: _rows(value, part) for name, value in field.items()} if isinstance(field, dict) else field[part]
