"""Parts of a batch, for train.accumulate: which fields have a row for each sample, and which are of the whole.

stacked: the names of the fields whose lists have fields, and not samples (Task.stacked).
"""

import itertools
from collections.abc import Callable, Set
from numbers import Number
from typing import Any

from torch import Tensor, cat

from data.errors import DataError
from loaders import move


def parts_of(batch: dict[str, Any], count: int, number: int, stacked: Set[str]) -> list[dict[str, Any]]:
    """The batch of `count` samples in `number` parts of nearly one size, or in fewer: none is empty."""
    number = min(number, count)
    if number <= 1:
        return [batch]
    ends = [count * part // number for part in range(number + 1)]
    return [rows_of(batch, slice(start, end), count, stacked) for start, end in itertools.pairwise(ends)]


def rows_of(batch: dict[str, Any], part: slice, count: int, stacked: Set[str]) -> dict[str, Any]:
    """A part of the `count` samples of a batch. Raises DataError for a tensor without a row for each sample."""

    def part_of(field: Any) -> Any:
        if isinstance(field, Tensor) and len(field) != count:
            raise DataError(
                f"a batch of {count} samples has a field {tuple(field.shape)}, which has no row for each of them, "
                "and so cannot be divided: set train.accumulate=1"
            )
        return field[part]

    return {name: map_rows(field, part_of, count, name in stacked) for name, field in batch.items()}


def repeated(batch: dict[str, Any], times: int, count: int, stacked: Set[str]) -> dict[str, Any]:
    """The `count` samples of a batch, `times` times."""

    def times_as_long(field: Any) -> Any:
        return cat([field] * times) if isinstance(field, Tensor) else field * times

    return {name: map_rows(field, times_as_long, count, name in stacked) for name, field in batch.items()}


def map_rows(field: Any, change: Callable[[Any], Any], count: int, is_stacked: bool) -> Any:
    """Applies `change` to tensors (count, ...), also those in containers, and to lists with an item per sample.

    A number, a text and a tensor () are of the whole batch: they stay as they are.
    is_stacked: a list of `count` items has fields, and not samples.
    """
    if field is None or isinstance(field, str | bytes | Number) or getattr(field, "ndim", None) == 0:
        return field
    if isinstance(field, dict):
        return {name: map_rows(value, change, count, is_stacked) for name, value in field.items()}
    if isinstance(field, list | tuple) and (is_stacked or len(field) != count):
        return move(field, lambda item: map_rows(item, change, count, is_stacked))
    return change(field)
