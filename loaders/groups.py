"""Several batches of one length, made at once as one batch with all their rows: each operation is called once for all.

A group is handed out batch by batch. The batches are parts of the same memory: one that is kept keeps its group.
Invariant: a group has at most BATCHES batches, SAMPLES rows and BYTES. Random numbers are functions of a sample's or
a batch's key, so each batch has the bytes that it has when it is made alone.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

BATCHES = 64
SAMPLES = 2048  # with as many rows, the calls of a group take little time beside its arithmetic
BYTES = 4 << 20  # the rows of a larger group do not stay in a cache
ALIGNMENT = 64  # bytes, as torch aligns new memory

F = TypeVar("F", bound=Callable[..., Any])


def takes_groups(function: F) -> F:
    """Marks a function (batch, random) -> batch that gives the batches of a group the same bytes as each one alone.

    It may be an `augment_batch`, or the transform of a Preloader. `random` has a key per row for the first, and a key
    per batch for the second. It returns only tensors, with a row per sample, in dicts, lists and tuples. A method that
    overrides a marked one has to be marked itself.
    """
    vars(function)["takes_groups"] = True
    return function


def can_take_groups(function: Callable[..., Any] | None) -> bool:
    """Returns whether the function is marked; None, which means no function, counts as marked."""
    return function is None or getattr(function, "takes_groups", False) is True


def split_group(group: Any, count: int) -> list[Any]:
    """Returns the `count` batches of a group. Raises ValueError for anything but tensors with a row per sample."""
    if isinstance(group, torch.Tensor):
        length, rest = divmod(len(group) if group.ndim else 0, count)
        if rest or not length:
            raise ValueError(f"{count} batches cannot be cut from a tensor of shape {tuple(group.shape)}")
        parts = group.split(length)
        if group.stride(0) * length * group.itemsize % ALIGNMENT:  # a kernel may add up in another order then
            return [part.clone() for part in parts]
        # Not the views: they count changes in place together, so autograd would take a change of one for one of all.
        return [part.data for part in parts]
    if isinstance(group, dict):
        fields = [split_group(field, count) for field in group.values()]
        return [type(group)(zip(group, batch, strict=True)) for batch in zip(*fields, strict=True)]
    if isinstance(group, (list, tuple)):
        fields = [split_group(field, count) for field in group]
        make = getattr(group, "_make", type(group))  # a namedtuple's
        return [make(batch) for batch in zip(*fields, strict=True)]
    raise ValueError(f"a batch cannot be cut from {type(group).__name__}")
