"""train.accumulate: splits a batch into parts that are computed one after the other."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from loaders.nested import rows
from training.config import ARGUMENT_ERRORS, ConfigError

if TYPE_CHECKING:
    from training.trainer import Trainer

ROWS = 8  # random samples on which a loss is compared with those of its parts
log = logging.getLogger(__name__)


def split_batch(batch: dict[str, Any], parts: int) -> list[dict[str, Any]]:
    """Splits tensors (B, ...) and lists of B items into parts of equal length, but for the last.

    Raises ConfigError for any other field: its parts would not belong to their samples.
    """
    if parts == 1:
        return [batch]
    count = rows(batch)
    for name, value in batch.items():
        length = len(value) if isinstance(value, list) or (isinstance(value, Tensor) and value.ndim) else None
        if length != count:
            kind = f"tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise ConfigError(
                f"train.accumulate={parts}: the batch has {count} samples, and its field {name!r} is a {kind}, which "
                "cannot be split into their parts: use train.accumulate=1, or return a tensor or list with an item "
                "per sample"
            )
    size = -(-count // parts)
    return [{name: value[at : at + size] for name, value in batch.items()} for at in range(0, count, size)]


def check_splitting(trainer: Trainer) -> None:
    """Warns if the loss of a batch is not the mean of its parts' losses, as for a loss over pairs of samples."""
    own, accumulate = type(trainer).__name__, trainer.config.accumulate
    if accumulate == 1:
        return
    if trainer.overrides("training_step"):
        log.warning(
            f"train.accumulate={accumulate} calls {own}.training_step once for each part of a batch: a loss over "
            "pairs of samples sees only the pairs within a part"
        )
    elif is_over_pairs(trainer):
        log.warning(
            f"train.accumulate={accumulate} changes what is trained: the loss of a batch is not the mean of its "
            "parts' losses, as for a loss over pairs of samples"
        )


@torch.no_grad()
def is_over_pairs(trainer: Trainer) -> bool:
    """Whether the task's loss of some random outputs differs from the mean over their halves."""
    labels: Any
    outputs, labels = trainer.first_outputs
    generator = torch.Generator().manual_seed(0)
    outputs = torch.randn((ROWS, *outputs.shape[1:]), generator=generator).to(outputs.device)
    if labels is not None:
        labels = torch.cat([labels] * ROWS)[:ROWS]
    halves = [slice(ROWS // 2), slice(ROWS // 2, None)]
    try:
        whole = trainer.task.loss(outputs, labels)
        parts = [trainer.task.loss(outputs[at], None if labels is None else labels[at]) for at in halves]
    except ARGUMENT_ERRORS:  # random outputs do not fit the loss
        return False
    return not torch.isclose(whole, torch.stack(parts).mean(), rtol=1e-3, atol=1e-5).item()
