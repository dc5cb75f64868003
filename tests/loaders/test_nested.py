"""Nests of tensors keep their types and all else when their tensors are replaced."""

import copy
import dataclasses
from array import array
from collections import Counter, UserDict, UserList, UserString, defaultdict, deque, namedtuple
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from loaders.nested import MOST_ITEMS, is_dense, move, rows, size_of, tensors

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

    def __init__(self, content):
        self._content = dict(content)

    def __getitem__(self, key):
        return self._content[key]

    def __iter__(self):
        return iter(self._content)

    def __len__(self):
        return len(self._content)


class Record(UserDict):
    """Mutable, with something beside its content and a constructor of its own."""

    def __init__(self, source, **content):
        super().__init__(content)
        self.source = source


class Attributes(dict):
    """Its items are its attributes, too."""

    __getattr__ = dict.__getitem__


class Movable:
    """Not a nest, but with a `.to` of its own."""

    def __init__(self, tensor):
        self.tensor = tensor

    def to(self, device, non_blocking=False):
        return Movable(self.tensor.to(device))


def add_one(leaf):
    """What stands for a move in these tests."""
    return Movable(leaf.tensor + 1) if isinstance(leaf, Movable) else leaf + 1


# Each makes a nest of two values, of which one is a tensor or another nest; and how to get them back.
KINDS = {
    "list": list,
    "tuple": tuple,
    "dict": lambda pair: {"b": pair[0], ("a",): pair[1]},
    "FixedMapping": lambda pair: FixedMapping({"b": pair[0], ("a",): pair[1]}),
    "defaultdict": lambda pair: defaultdict(list, b=pair[0], a=pair[1]),
    "bounded deque": lambda pair: deque(pair, maxlen=3),
    "Record": lambda pair: Record("camera", b=pair[0], a=pair[1]),
    "Point": lambda pair: Point(*pair),
    "Example": lambda pair: Example(*pair),
    "SlottedChild": lambda pair: SlottedChild(*pair),
}


def content(nest):
    """The values of a nest of KINDS."""
    if dataclasses.is_dataclass(nest):
        return [getattr(nest, field.name) for field in dataclasses.fields(nest) if field.init]
    return list(nest.values() if isinstance(nest, Mapping) else nest)


def about(nest):
    """What a nest has beside its values."""
    keys = list(nest) if isinstance(nest, Mapping) else None
    return type(nest), keys, [getattr(nest, name, None) for name in ("maxlen", "source", "default_factory", "length")]


@pytest.mark.parametrize("inner", KINDS)
@pytest.mark.parametrize("outer", ["list", "dict", "Point", "Example"])
def test_nests_keep_their_types_keys_and_attributes_and_the_batch_given_stays_as_it_was(outer, inner):
    original = KINDS[outer]([torch.zeros(2), KINDS[inner]([torch.zeros(2), "text"])])
    before = copy.deepcopy(original)
    moved = move(original, add_one)
    for nest, was in ((moved, original), (content(moved)[1], content(original)[1])):
        assert about(nest) == about(was)
        assert content(nest)[0].tolist() == [1, 1]
    assert content(content(moved)[1])[1] == "text"
    assert [tensor.tolist() for tensor in tensors(original)] == [tensor.tolist() for tensor in tensors(before)]
    assert [tensor.tolist() for tensor in tensors(original)] == [[0, 0]] * 2


class Private(UserList):
    """Cannot be made anew."""

    def __init__(self, *, secret):
        super().__init__([secret])


class Keyed(FixedMapping):
    """Cannot be made anew either."""

    def __init__(self, *, content):
        super().__init__(content)


class Versioned(tuple):
    def __new__(cls, version, *values):
        return super().__new__(cls, values)


def unset():
    example = Example(image=None, extra="no tensor")
    del example.image
    return example


@pytest.mark.parametrize(
    "leaf",
    [
        *("text", b"bytes", memoryview(b"ab"), None, object(), {1, 2}, range(3), np.arange(3), int, unset()),
        *(torch.float32, UserString("text"), bytearray(b"ab"), array("i", [1, 2]), torch.Size([2, 3]), Counter("cat")),
        *(Private(secret=1), Keyed(content={"a": [1]}), Versioned(3, 1, 2), Attributes(a=1)),
    ],
    ids=lambda leaf: type(leaf).__name__,
)
def test_objects_and_containers_in_which_nothing_moves_are_left_alone(leaf):
    assert move(leaf, add_one) is move({"leaf": [leaf]}, add_one)["leaf"][0] is leaf
    assert list(tensors([leaf])) == []


def test_a_container_that_cannot_be_made_anew_stays_as_it_is_and_is_named_if_a_tensor_moves():
    for nest in (Versioned(3, torch.zeros(1)), keyed := Keyed(content={"a": torch.zeros(1)})):
        assert move([nest], lambda leaf: leaf)[0] is nest
    with pytest.raises(TypeError, match="Keyed"):
        move([keyed], add_one)


@pytest.mark.parametrize("kind", [dict, list, Point])
def test_a_tree_that_refers_back_is_refused_in_words(kind):
    child = {}
    tree = {dict: {"child": child}, list: [child], Point: Point(child, 0)}[kind]
    child["parent"] = tree
    with pytest.raises(TypeError, match="contains itself"):
        move({"image": torch.zeros(2), "tree": tree}, add_one)


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


class Slotted:
    __slots__ = ("first",)

    def __init__(self, tensor):
        self.first = tensor


@pytest.mark.parametrize("hide", [Slotted, lambda tensor: {tensor}, lambda tensor: SimpleNamespace(x=[tensor])])
def test_tensors_are_found_wherever_a_batch_refers_to_them(hide):
    tensor = torch.ones(2)
    assert any(leaf is tensor for leaf in tensors([hide(tensor)]))


@pytest.mark.parametrize(
    "tensor", [torch.zeros(2, 3, 4).permute(2, 0, 1), torch.zeros(6)[1:4], torch.zeros(()), torch.zeros(1, 5)[:, :4]]
)
def test_a_dense_tensor_has_neither_gaps_nor_overlaps(tensor):  # the stride of a dimension of size 1 does not matter
    assert is_dense(tensor)
    for gapped in (
        torch.zeros(6)[::2],
        torch.zeros(2, 6)[:, :3],
        torch.zeros(3, 5)[:, :1].t(),
        tensor.expand(3, *tensor.shape),
    ):
        assert not is_dense(gapped)


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


def test_the_size_of_a_batch_counts_what_its_containers_and_objects_hold():
    image = torch.zeros(2, 8, dtype=torch.uint8)
    nest = [image, (np.zeros(4, np.uint8), {"name": "abc", "bytes": b"de", "other": [1, 2.0, None, True]})]
    nest.append(nest)
    assert size_of(nest) == 1 + 16 + 4 + 3 + 2
    for batch in (Example(image), SimpleNamespace(image=image), UserDict(image=image)):
        assert size_of(batch) == 1 + 16
    assert size_of([b"a"] * 2 * MOST_ITEMS) == MOST_ITEMS
    assert size_of(torch.ones(1).to_sparse()) == 1 + 8 + 4  # an index and a value
