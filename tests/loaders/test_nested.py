"""Nests of tensors keep their types and all else when their tensors are replaced."""

import copy
import dataclasses
import itertools
import logging
from array import array
from collections import Counter, OrderedDict, UserDict, UserList, defaultdict, deque, namedtuple
from collections.abc import Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from loaders.nested import MOST_VALUES, is_dense, leaves, move, rows, tensors

Point = namedtuple("Point", "x y")


@dataclasses.dataclass
class Example:
    image: torch.Tensor
    extra: Any = None
    length: int = dataclasses.field(init=False, default=7)


@dataclasses.dataclass(frozen=True, slots=True)
class SlottedBase:
    first: torch.Tensor


@dataclasses.dataclass(frozen=True, slots=True)
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


class Movable:
    """Not a nest, but with a `.to` of its own."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def to(self, device, non_blocking: bool = False) -> "Movable":
        return Movable(self.tensor.to(device))


def add_one(leaf):
    """What stands for a move in these tests."""
    return Movable(leaf.tensor + 1) if isinstance(leaf, Movable) else leaf + 1


# Each makes a nest of two values, of which one is a tensor or another nest; and how to get them back.
KINDS = {
    **{kind.__name__: kind for kind in (list, tuple, UserList, deque)},
    **{
        kind.__name__: lambda pair, kind=kind: kind({"b": pair[0], ("a",): pair[1]})
        for kind in (dict, OrderedDict, UserDict, FixedMapping, MappingProxyType)
    },
    "defaultdict": lambda pair: defaultdict(list, b=pair[0], a=pair[1]),
    "bounded deque": lambda pair: deque(pair, maxlen=3),
    "Record": lambda pair: Record("camera", b=pair[0], a=pair[1]),
    "Point": lambda pair: Point(*pair),
    "Example": lambda pair: Example(*pair),
    "SlottedChild": lambda pair: SlottedChild(*pair),
}


def content(nest) -> list:
    """The values of a nest of KINDS."""
    if dataclasses.is_dataclass(nest):
        return [getattr(nest, field.name) for field in dataclasses.fields(nest) if field.init]
    return list(nest.values() if isinstance(nest, Mapping) else nest)


def about(nest) -> Any:
    """What a nest has beside its values."""
    keys = list(nest) if isinstance(nest, Mapping) else None
    return type(nest), keys, [getattr(nest, name, None) for name in ("maxlen", "source", "default_factory", "length")]


@pytest.mark.parametrize("inner", KINDS)
@pytest.mark.parametrize("outer", ["list", "dict", "Point", "Example"])
def test_nests_keep_their_types_keys_and_attributes_and_the_batch_given_stays_as_it_was(outer, inner):
    given = KINDS[outer]([torch.zeros(2), KINDS[inner]([torch.zeros(2), "text"])])
    before = copy.deepcopy(given) if inner != "mappingproxy" else given
    moved = move(given, add_one)
    for nest, was in ((moved, given), (content(moved)[1], content(given)[1])):
        assert about(nest) == about(was)
        assert content(nest)[0].tolist() == [1, 1]
    assert content(content(moved)[1])[1] == "text"
    assert [tensor.tolist() for tensor in tensors(given)] == [tensor.tolist() for tensor in tensors(before)]
    assert [tensor.tolist() for tensor in tensors(given)] == [[0, 0]] * 2
    assert [id(leaf) for leaf in leaves(given)] == [id(tensor) for tensor in tensors(given)]


@pytest.mark.parametrize(
    "leaf",
    ["text", b"bytes", memoryview(b"ab"), None, 2.5, object(), {1, 2}, range(3), np.arange(3), torch.float32, int],
    ids=lambda leaf: type(leaf).__name__,
)
def test_objects_without_tensors_are_left_alone(leaf):
    assert move(leaf, add_one) is leaf
    assert move([leaf], add_one)[0] is leaf
    assert list(tensors([leaf])) == []


@pytest.mark.parametrize(
    "leaf",
    [bytearray(b"ab"), array("i", [1, 2]), torch.Size([2, 3]), Counter(cat=2), [], (), {}],
    ids=lambda leaf: type(leaf).__name__,
)
def test_containers_of_mere_numbers_keep_type_and_value(leaf):
    moved = move({"leaf": leaf}, add_one)["leaf"]
    assert type(moved) is type(leaf)
    assert moved == leaf


def test_an_object_with_a_to_method_is_moved_by_it_and_its_tensors_are_found():
    packed = pack_sequence([torch.ones(3), torch.ones(1)])
    moved, other = move([packed, Movable(torch.zeros(2))], lambda leaf: leaf.to(torch.float64))
    assert type(moved) is PackedSequence
    assert moved.data.dtype == other.tensor.dtype == torch.float64
    assert torch.equal(moved.batch_sizes, packed.batch_sizes)
    assert any(tensor is packed.data for tensor in tensors(packed))
    assert [tensor.tolist() for tensor in tensors(Movable(torch.zeros(2)))] == [[0, 0]]


def test_tensors_in_attributes_are_found_once_in_a_cycle_too():
    parent = SimpleNamespace(x=torch.zeros(2))
    parent.children = [SimpleNamespace(parent=parent, y=torch.ones(1))]
    assert [tensor.tolist() for tensor in tensors({"of": parent})] == [[0, 0], [1]]
    assert move(parent, add_one) is parent
    assert rows([parent, torch.zeros(3)]) == 3, "an object's tensors come last: they may have no row for each sample"


class Private:
    """Has a tensor in a slot of a private name."""

    __slots__ = ("__first",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self.__first = tensor


class Fields(dict):
    """A dict with an attribute."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def with_attribute(tensor: torch.Tensor) -> torch.Tensor:
    holder = torch.zeros(0)
    holder.tensor = tensor
    return holder


@pytest.mark.parametrize(
    "hide",
    [Fields, Private, with_attribute, lambda tensor: {tensor}, lambda tensor: np.array([tensor, None], object)],
    ids=["dict", "private", "tensor", "set", "array"],
)
def test_tensors_are_found_wherever_a_batch_refers_to_them(hide):
    tensor = torch.ones(2)
    assert any(found is tensor for found in tensors([hide(tensor)]))


@pytest.mark.parametrize(
    ("cache", "fill"),
    [
        ({0: torch.zeros(1), 1: torch.zeros(1)}, lambda cache: cache.update({2: torch.zeros(1)})),
        (deque([torch.zeros(1), torch.zeros(1)]), lambda cache: cache.append(torch.zeros(1))),
    ],
    ids=["dict", "deque"],
)
def test_an_object_may_be_filled_by_another_thread_while_it_is_walked(cache, fill):
    walk = tensors(cache)
    next(walk)
    fill(cache)
    assert len([*walk]) == 1


class ClosedFile(FixedMapping):
    def __iter__(self):
        raise ValueError("the file is closed")


def test_what_an_attribute_refers_to_may_be_closed():
    batch = SimpleNamespace(x=torch.zeros(2), file=ClosedFile({"y": torch.ones(1)}))
    assert [tensor.tolist() for tensor in tensors(batch)] == [[0, 0], [1]], "its attributes are walked"


def test_a_batch_that_refers_to_a_whole_dataset_is_walked_in_bounds_and_the_log_says_so(caplog):
    read = itertools.count()

    class Names(UserList):
        def __iter__(self):
            for name in self.data:
                next(read)
                yield name

    dataset = SimpleNamespace(names=Names(["a name"] * 200_000))
    batch = [SimpleNamespace(x=torch.zeros(2), of=dataset) for _ in range(3)]
    with caplog.at_level(logging.WARNING, logger="loaders"):
        assert len(list(tensors(batch))) == 3
    assert next(read) <= MOST_VALUES
    assert "leave out what does not belong to the batch" in caplog.text


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
        ({"name": "x", "image": torch.zeros(3, 5), "label": torch.zeros(4)}, 3),
        ([[], torch.zeros(6)], 6),
        (torch.tensor(1.0), 1),
        (torch.zeros(0, 3), 0),
        (["a", "b"], 0),
    ],
)
def test_rows_are_the_length_of_the_first_tensor(batch, count):
    assert rows(batch) == count
