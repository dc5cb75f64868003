"""Finds the tensors in a nested batch, and replaces them without changing the structure around them.

Dicts, lists, tuples, namedtuples, dataclasses, and other mappings and sequences are walked and keep their types.
An object with a `.to` method (a PackedSequence, a tokenizer's batch) moves itself. Everything else stays as it is.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, MutableSequence, Sequence, Set
from functools import cache
from itertools import islice
from types import MappingProxyType, ModuleType
from typing import Any

import numpy as np
import torch

NOT_WALKED = (str, bytes, bytearray, memoryview, range, int, float, complex, type, ModuleType)  # they hold no tensors
WITHOUT_ATTRIBUTES = (dict, list, tuple)
CONTAINERS = (dict, MappingProxyType, list, tuple, set, frozenset, deque)
REFUSING_CHANGES = (Mapping, Set, deque)  # copied before a walk, because another thread may fill them
MOST_VALUES = 50_000  # in attributes of a batch's objects, which may refer to a dataset: a walk takes up to 25 ms

log = logging.getLogger(__name__)


def move(batch: Any, to: Callable[[Any], Any]) -> Any:
    """Returns the same structure with `to` applied to each tensor and to each object that has a `.to` method."""
    if isinstance(batch, NOT_WALKED):
        return batch
    if isinstance(batch, torch.Tensor) or callable(getattr(batch, "to", None)):
        return to(batch)
    if isinstance(batch, Mapping):
        moved = {key: move(value, to) for key, value in batch.items()}
        if type(batch) is dict:
            return moved
        return _refilled(batch, moved.items()) if isinstance(batch, MutableMapping) else _rebuilt(batch, moved)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(move(value, to) for value in batch))
    if isinstance(batch, Sequence):
        values = [move(value, to) for value in batch]
        if type(batch) is list:
            return values
        return _refilled(batch, enumerate(values)) if isinstance(batch, MutableSequence) else _rebuilt(batch, values)
    if dataclasses.is_dataclass(batch):
        clone = copy.copy(batch)
        for field in dataclasses.fields(batch):
            # A frozen dataclass refuses a plain setattr; nobody else has seen the clone yet.
            object.__setattr__(clone, field.name, move(getattr(batch, field.name), to))
        return clone
    return batch


def leaves(batch: Any) -> list[Any]:
    """Returns what `move` moves: each tensor, and each object that has a `.to` method."""
    found: list[Any] = []

    def note(leaf: Any) -> Any:
        found.append(leaf)
        return leaf

    move(batch, note)
    return found


def tensors(batch: Any) -> Iterator[torch.Tensor]:
    """Yields every tensor of the batch; last the others in attributes of objects, each of which is walked once.

    Of all attributes together the first MOST_VALUES are looked at, and a warning says if there are more. What they
    refer to may be in use elsewhere (a closed file, a queue): Python's own containers alone are walked there.
    """
    objects: list[Any] = []
    found: set[int] = set()
    walked: set[int] = set()
    for tensor in _tensors(_values(batch, (Mapping, Sequence, Set), objects)):
        found.add(id(tensor))
        yield tensor
    left = MOST_VALUES
    for item in objects:  # which grows meanwhile
        if id(item) not in walked:
            walked.add(id(item))
            attributes = {**_slots(item), **getattr(item, "__dict__", {})}
            values = list(islice(_values(attributes, CONTAINERS, objects), left))
            for tensor in _tensors(values):
                if id(tensor) not in found:
                    found.add(id(tensor))
                    yield tensor
            left -= len(values)
        if left <= 0:
            warn_of_size(type(batch).__name__, type(item).__name__)
            return


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    return (value for value in values if isinstance(value, torch.Tensor))


def _values(batch: Any, containers: tuple[type, ...], objects: list[Any]) -> Iterator[Any]:
    """Yields what a nest of such containers holds, and adds the objects among it to `objects`."""
    if batch is None or isinstance(batch, NOT_WALKED):
        yield batch
        return
    if type(batch) not in WITHOUT_ATTRIBUTES and (type(batch) is not torch.Tensor or vars(batch)):
        objects.append(batch)
    if isinstance(batch, np.ndarray) and batch.dtype == object:
        batch = batch.ravel().tolist()
    if isinstance(batch, containers):
        held: Any = batch.values() if isinstance(batch, Mapping) else batch
        for value in [*held] if isinstance(batch, REFUSING_CHANGES) else held:
            yield from _values(value, containers, objects)
    else:
        yield batch


@cache
def warn_of_size(batch: str, item: str) -> None:
    log.warning(
        "a batch (%s) refers to more than %d values, through an object of class %s: tensors beyond them might be "
        "freed while the device still reads them; leave out what does not belong to the batch, such as the dataset",
        batch,
        MOST_VALUES,
        item,
    )


def rows(batch: Any) -> int:
    """Returns how many samples a batch holds: the length of its first tensor, or 0 if it has no tensor."""
    return next((len(tensor) if tensor.dim() else 1 for tensor in tensors(batch)), 0)


def is_dense(tensor: torch.Tensor) -> bool:
    """Returns whether the elements fill their memory without gaps or overlaps, in any order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _refilled(batch: Any, items: Iterable[tuple[Any, Any]]) -> Any:
    """Returns a copy of a mutable container, attributes included, with the values of `items` under their keys."""
    clone = copy.copy(batch)
    for key, value in items:
        clone[key] = value
    return clone


def _rebuilt(batch: Any, content: Any) -> Any:
    return type(batch)(content)


def _slots(batch: Any) -> dict[str, Any]:
    found = {}
    for kind in type(batch).__mro__:
        names = vars(kind).get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            name = f"_{kind.__name__.lstrip('_')}{name}" if name.startswith("__") else name  # as Python stores it
            found[name] = getattr(batch, name, None)
    return found
