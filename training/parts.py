"""Parts of a batch, for train.accumulate. Its task knows which fields have a row for each sample."""

import itertools
from collections.abc import Callable
from numbers import Number
from typing import Any

from torch import Tensor, cat
from torch.nn.utils.rnn import PackedSequence

from data.errors import DataError
from loaders import move
from training.tasks import Batch, Task


def parts_of(task: Task, batch: Batch, number: int) -> list[Batch]:
    """The batch in `number` parts of nearly one size, or in fewer: none is empty."""
    count = task.batch_length(batch)
    number = min(number, count)
    if number <= 1:
        return [batch]
    ends = [count * part // number for part in range(number + 1)]
    return [rows_of(task, batch, slice(start, end)) for start, end in itertools.pairwise(ends)]


def rows_of(task: Task, batch: Batch, part: slice) -> Batch:
    """A part of the samples of a batch. Raises DataError for a tensor without a row for each sample."""
    count = task.batch_length(batch)

    def part_of(field: Any) -> Any:
        if isinstance(field, Tensor) and len(field) != count:
            raise DataError(
                f"a batch of {count} samples has a field {tuple(field.shape)}, which has no row for each of them, "
                "and so cannot be divided: set train.accumulate=1"
            )
        rows = field[part]
        if isinstance(rows, list | tuple) and not isinstance(field, list | tuple):  # as of a batch of graphs
            raise DataError(
                f"a batch has a {type(field).__name__}, whose rows are a {type(rows).__name__}, and so cannot be "
                "divided: set train.accumulate=1"
            )
        return rows

    return {name: map_rows(field, part_of, count, name in task.stacked) for name, field in batch.items()}


def repeated(task: Task, batch: Batch, times: int) -> Batch:
    """The samples of a batch, `times` times."""
    count = task.batch_length(batch)

    def times_as_long(field: Any) -> Any:
        return cat([field] * times) if isinstance(field, Tensor) else field * times

    return {name: map_rows(field, times_as_long, count, name in task.stacked) for name, field in batch.items()}


def map_rows(field: Any, change: Callable[[Any], Any], count: int, is_stacked: bool) -> Any:
    """Applies `change` to tensors (count, ...), also those in containers, and to lists with an item per sample.

    A number, a text and a tensor () are of the whole batch: they stay as they are.
    is_stacked: a list of `count` items has fields, and not samples (Task.stacked).
    """
    if isinstance(field, PackedSequence):
        raise DataError(
            "a PackedSequence in a batch can be neither divided into samples nor repeated: let data.collate pad the "
            "sequences, and pack them in the network"
        )
    if field is None or isinstance(field, str | bytes | Number) or getattr(field, "ndim", None) == 0:
        return field
    if isinstance(field, dict):
        return {name: map_rows(value, change, count, is_stacked) for name, value in field.items()}
    if isinstance(field, list | tuple) and (is_stacked or len(field) != count):
        return move(field, lambda item: map_rows(item, change, count, is_stacked))
    return change(field)
