import dataclasses
from collections import OrderedDict, UserDict, UserList, defaultdict, deque, namedtuple
from collections.abc import Mapping, Sequence
from enum import Enum
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from loaders.nested import is_dense, move, rows, tensors

Point = namedtuple("Point", "x y")


@dataclasses.dataclass
class Example:
    image: torch.Tensor
    caption: str
    extra: Any = None
    length: int = dataclasses.field(init=False, default=7)


@dataclasses.dataclass(frozen=True)
class Frozen:
    image: torch.Tensor
    name: str


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    image: torch.Tensor


@dataclasses.dataclass(slots=True)
class SlottedBase:
    first: torch.Tensor


@dataclasses.dataclass(slots=True)
class SlottedChild(SlottedBase):
    second: torch.Tensor


class FixedMapping(Mapping):
    """Immutable, made from another mapping."""

    def __init__(self, content: Mapping) -> None:
        self._content = dict(content)

    def __getitem__(self, key):
        return self._content[key]

    def __iter__(self):
        return iter(self._content)

    def __len__(self) -> int:
        return len(self._content)


class Record(UserDict):
    """Mutable, with something beside its content and a constructor of its own."""

    def __init__(self, source: str, **content) -> None:
        super().__init__(content)
        self.source = source


class FixedSequence(Sequence):
    def __init__(self, items) -> None:
        self._items = tuple(items)

    def __getitem__(self, index):
        return self._items[index]

    def __len__(self) -> int:
        return len(self._items)


class Movable:
    """Not a nest, but with a `.to` of its own."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def to(self, device, non_blocking: bool = False) -> "Movable":
        return Movable(self.tensor.to(device))


class Color(Enum):
    RED = "red"


def zero() -> torch.Tensor:
    return torch.zeros(2)


def add_one(leaf):
    """What stands for a move in these tests."""
    return Movable(leaf.tensor + 1) if isinstance(leaf, Movable) else leaf + 1


def is_one(tensor: torch.Tensor) -> bool:
    return torch.equal(tensor, torch.ones(2))


@pytest.mark.parametrize(
    "kind",
    [dict, OrderedDict, UserDict, FixedMapping, MappingProxyType],
    ids=lambda kind: getattr(kind, "__name__", type(kind).__name__),
)
def test_mappings_keep_their_type_their_keys_and_the_keys_order(kind):
    moved = move(kind({"b": zero(), 1: "text", ("a",): zero()}), add_one)
    assert type(moved) is kind
    assert list(moved) == ["b", 1, ("a",)]
    assert is_one(moved["b"])
    assert is_one(moved["a",])
    assert moved[1] == "text"


@pytest.mark.parametrize(
    "kind",
    [list, tuple, UserList, deque, FixedSequence],
    ids=lambda kind: getattr(kind, "__name__", type(kind).__name__),
)
def test_sequences_keep_their_type(kind):
    moved = move(kind([zero(), "text", zero()]), add_one)
    assert type(moved) is kind
    assert is_one(moved[0])
    assert moved[1] == "text"
    assert is_one(moved[2])


def test_containers_keep_their_other_attributes():
    by_default = move(defaultdict(list, image=zero()), add_one)
    assert by_default["unheard of"] == []
    assert is_one(by_default["image"])
    record = move(Record("camera", image=zero()), add_one)
    assert type(record) is Record
    assert record.source == "camera"
    assert is_one(record["image"])
    bounded = move(deque([zero()], maxlen=3), add_one)
    assert bounded.maxlen == 3


def test_the_batch_given_is_left_as_it_was():
    given = {
        "list": [zero()],
        "example": Example(zero(), ""),
        "frozen": Frozen(zero(), ""),
        "record": Record("", a=zero()),
    }
    list(tensors(move(given, add_one)))
    assert len(list(tensors(given))) == 4
    assert all(torch.equal(tensor, zero()) for tensor in tensors(given))


@pytest.mark.parametrize(
    "leaf",
    [
        "text",
        b"bytes",
        None,
        1,
        2.5,
        1j,
        True,
        Color.RED,
        object(),
        {1, 2},
        range(3),
        np.arange(3),
        torch.float32,
        int,
    ],
    ids=lambda leaf: type(leaf).__name__,
)
def test_objects_without_tensors_are_left_alone(leaf):
    assert move(leaf, add_one) is leaf
    assert move([leaf], add_one)[0] is leaf
    assert list(tensors([leaf])) == []


def test_a_packed_sequence_moves_itself():
    packed = pack_sequence([torch.ones(3), torch.ones(1)])
    moved = move(packed, lambda leaf: leaf.to(torch.float64))
    assert type(moved) is PackedSequence
    assert moved.data.dtype == torch.float64
    assert torch.equal(moved.batch_sizes, packed.batch_sizes)
    assert packed.data in tensors_of(packed)


def tensors_of(batch) -> "Identities":
    return Identities(tensors(batch))


class Identities(list):
    def __contains__(self, tensor) -> bool:
        return any(tensor is one for one in self)


def test_every_tensor_is_found_wherever_it_is():
    hidden = [torch.full((1,), float(number)) for number in range(10)]
    batch = [
        hidden[0],
        {"a": hidden[1]},
        Point(hidden[2], FixedMapping({"b": hidden[3]})),
        Example(hidden[4], "", Movable(hidden[5])),
        Frozen(hidden[6], ""),
        Slotted(hidden[7]),
        SlottedChild(hidden[8], hidden[9]),
    ]
    found = tensors_of(batch)
    assert [number for number, tensor in enumerate(hidden) if tensor not in found] == []
    assert len(found) == len(hidden)


@pytest.mark.parametrize(
    ("tensor", "dense"),
    [
        (torch.zeros(2, 3, 4), True),
        (torch.zeros(2, 3, 4).permute(2, 0, 1), True),
        (torch.zeros(6)[1:4], True),
        (torch.zeros(()), True),
        (torch.zeros(3, 5)[:, :1].t(), False),
        (torch.zeros(1, 5)[:, :4], True),  # the stride of a dimension of size 1 does not matter
        (torch.zeros(6)[::2], False),
        (torch.zeros(2, 6)[:, :3], False),
        (torch.zeros(1).expand(3), False),
    ],
)
def test_a_dense_tensor_has_neither_gaps_nor_overlaps(tensor, dense):
    assert is_dense(tensor) is dense


@pytest.mark.parametrize(
    ("batch", "count"),
    [
        (torch.zeros(4, 2), 4),
        ({"name": "x", "image": torch.zeros(3, 5), "label": torch.zeros(3)}, 3),
        ([[], torch.zeros(6)], 6),
        (torch.tensor(1.0), 1),
        (torch.zeros(0, 3), 0),
        (["a", "b"], 0),
        (None, 0),
    ],
)
def test_rows_are_the_length_of_the_first_tensor(batch, count):
    assert rows(batch) == count
