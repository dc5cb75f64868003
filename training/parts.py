"""Parts of a batch, for train.accumulate: which fields have a row for each sample, and which are of the whole."""

import itertools
from collections.abc import Callable
from numbers import Number
from typing import Any

from torch import Tensor, cat

from data.errors import DataError
from loaders import move


def parts_of(batch: dict[str, Any], count: int, number: int) -> list[dict[str, Any]]:
    """The batch of `count` samples in `number` parts of nearly one size, or in fewer: none is empty."""
    number = min(number, count)
    if number <= 1:
        return [batch]
    ends = [count * part // number for part in range(number + 1)]
    return [rows_of(batch, slice(start, end), count) for start, end in itertools.pairwise(ends)]


def rows_of(batch: Any, part: slice, count: int) -> Any:
    """A part of the `count` samples of a batch. Raises DataError for a tensor without a row for each sample."""

    def part_of(field: Any) -> Any:
        if isinstance(field, Tensor) and len(field) != count:
            raise DataError(
                f"a batch of {count} samples has a field {tuple(field.shape)}, which has no row for each of them, "
                "and so cannot be divided: set train.accumulate=1"
            )
        return field[part]

    return map_rows(batch, part_of, count)


def repeated(batch: Any, times: int, count: int) -> Any:
    """The `count` samples of a batch, `times` times."""
    return map_rows(batch, lambda field: cat([field] * times) if isinstance(field, Tensor) else field * times, count)


def map_rows(batch: Any, change: Callable[[Any], Any], count: int) -> Any:
    """Applies `change` to tensors (count, ...), also those in containers, and to lists with an item per sample.

    A number, a text and a tensor () are of the whole batch: they stay as they are.
    """
    if batch is None or isinstance(batch, str | bytes | Number) or getattr(batch, "ndim", None) == 0:
        return batch
    if isinstance(batch, dict):
        return {name: map_rows(value, change, count) for name, value in batch.items()}
    if isinstance(batch, list | tuple):
        are_fields = all(isinstance(item, Tensor) and item.shape[:1] == (count,) for item in batch)
        if are_fields or len(batch) != count:
            return move(batch, lambda field: map_rows(field, change, count))
    return change(batch)
