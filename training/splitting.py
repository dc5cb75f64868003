"""train.accumulate: splits a batch into parts that are computed one after the other."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from loaders.nested import rows
from training.config import ConfigError


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
