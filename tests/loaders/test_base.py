import json
import pickle
import weakref
from contextlib import suppress
from copy import copy

import pytest

from loaders.arguments import check_choice, did_you_mean
from loaders.base import (
    ENDED,
    VERSION,
    Delivery,
    EpochIterator,
    Epochs,
    Position,
)
from loaders.optional_methods import OptionalMethods, missing_attribute
from loaders.order import Order
from loaders.workers.tasks import OwnTasks


def epochs(length: int = 10, batch_size: int = 4, **settings) -> Epochs:
    settings = {"length": length, "batch_size": batch_size, "shuffle": True, "seed": 5, **settings}
    return Epochs(OwnTasks(Order(**settings)))


def begin(one: Epochs) -> tuple[int, int]:
    one.start(lambda epoch, first: Scripted(), None)
    return one.position.epoch, one.position.batch


def place(one: Epochs) -> tuple[int, int]:
    state = one.state_dict()
    return state["epoch"], state["samples"]


def test_the_state_says_all_that_must_match_and_is_plain_json():
    state = epochs(world_size=2).state_dict()
    assert state == {
        "version": VERSION,
        "epoch": 0,
        "samples": 0,
        "seed": 5,
        "dataset_length": 10,
        "global_batch_size": 8,
        "order": "shuffled",
    }
    assert json.loads(json.dumps(state)) == state


@pytest.mark.parametrize("epoch", [-1, 0.0, "1", None, True])
def test_an_epoch_is_an_integer_from_0(epoch):
    with pytest.raises(ValueError, match="an epoch is an integer from 0"):
        epochs().set_epoch(epoch)


@pytest.mark.parametrize("key", ["version", "seed", "dataset_length", "global_batch_size", "order"])
@pytest.mark.parametrize("theirs", [3, None, "missing"])
def test_a_state_that_does_not_match_is_refused_with_both_values(key, theirs):
    one = epochs()
    state = one.state_dict()
    ours = state.pop(key)
    if theirs != "missing":
        state[key] = theirs
    with pytest.raises(ValueError) as refusal:
        one.load_state_dict(state)
    assert f"{key}={state.get(key)!r}" in str(refusal.value)
    assert f"{key}={ours!r}" in str(refusal.value)
    assert begin(one) == (0, 0)


def test_a_copy_stands_in_the_same_place_and_moves_alone():
    one = epochs()
    begin(one)
    one.position.batch += 1
    twin = copy(one)
    assert place(twin) == place(one) == (0, 4)
    twin.position.batch += 1
    assert (place(twin), place(one)) == ((0, 8), (0, 4))
    assert begin(twin) == begin(one) == (1, 0)


# Iterators


class Scripted:
    """A source of the given deliveries; each is returned again until it is taken."""

    def __init__(self, *deliveries: Delivery) -> None:
        self.deliveries = list(deliveries)
        self.closed = 0
        self.processes = ["a process"]

    def next(self) -> Delivery | None:
        while self.deliveries and self.deliveries[0].is_taken:
            self.deliveries.pop(0)
        return self.deliveries[0] if self.deliveries else None

    def close(self) -> None:
        self.closed += 1


def test_an_iterator_returns_batches_and_errors_and_moves_its_position():
    source = Scripted(Delivery(4, "a"), Delivery(5, error=ValueError("bad")), Delivery(6, "b"))
    position = Position(2, 4)
    iterator = EpochIterator(source, position, 3)
    assert iter(iterator) is iterator
    assert len(iterator) == 3
    assert next(iterator) == "a"
    assert position.batch == 5
    with pytest.raises(ValueError, match="bad"):
        next(iterator)
    assert position.batch == 6
    assert next(iterator) == "b"
    assert (position.batch, position.finished, iterator.is_running) == (7, False, True)
    assert iterator._workers == ["a process"]
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(iterator)
    assert (position.batch, position.finished) == (7, True)
    assert (iterator.is_running, iterator._workers, source.closed) == (False, [], 1)


def test_an_interrupted_next_loses_no_batch_and_moves_no_position(monkeypatch):
    source, position = Scripted(Delivery(0, "a"), Delivery(1, "b")), Position(0)
    iterator, fetch = EpochIterator(source, position), source.next

    def interrupted() -> None:
        fetch()
        raise KeyboardInterrupt

    monkeypatch.setattr(source, "next", interrupted)
    with pytest.raises(KeyboardInterrupt):
        next(iterator)
    monkeypatch.undo()
    assert position.batch == 0
    assert list(iterator) == ["a", "b"]


class Refused(Exception):
    """An error that can be referred to weakly."""


def test_neither_the_iterator_nor_its_source_keeps_a_batch_or_an_error_alive():
    error = Refused()
    source = Scripted(Delivery(0, {1, 2}), Delivery(1, error=error))
    iterator = EpochIterator(source, Position(0))
    watched = [weakref.ref(next(iterator)), weakref.ref(error)]
    del error
    with suppress(Refused):
        next(iterator)
    assert [reference() for reference in watched] == [None, None]


def test_a_batch_without_a_number_does_not_move_the_position():
    position = Position(0)
    iterator = EpochIterator(Scripted(Delivery(None, "a"), Delivery(None, error=ValueError("bad"))), position)
    assert next(iterator) == "a"
    with pytest.raises(ValueError, match="bad"):
        next(iterator)
    assert position.batch == 0


def test_an_ended_iterator_says_so_and_closes_its_source_once():
    source = Scripted(Delivery(0, "a"))
    iterator = EpochIterator(source, Position(0))
    iterator.end()
    iterator.end()
    assert source.closed == 1
    with pytest.raises(RuntimeError) as error:
        next(iterator)
    assert str(error.value) == ENDED


def test_an_iterator_of_unknown_length_says_so():
    with pytest.raises(TypeError, match="its sampler has no length"):
        len(EpochIterator(Scripted(), Position(0)))


# Methods that only some loaders have


class Kind:
    """A loader's class."""

    def __init__(self, has_methods: bool) -> None:
        self.note = "kept"
        Methods.give(self, has_methods)

    def __setstate__(self, state) -> None:
        vars(self).update(state)


class Methods(OptionalMethods):
    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


def test_a_loader_has_the_optional_methods_or_its_class_lacks_them():
    with_them, without = Kind(True), Kind(False)
    assert hasattr(with_them, "set_epoch")
    assert hasattr(type(with_them), "set_epoch")
    assert type(without) is Kind
    assert not hasattr(without, "set_epoch")
    assert isinstance(with_them, Kind)
    assert type(with_them).__name__ == "Kind"
    assert type(with_them) is type(Kind(True))


def test_a_loader_built_by_the_class_of_another_has_its_own_methods():
    kind = type(Kind(True))
    assert type(kind(True)) is kind
    assert type(kind(False)) is Kind


def test_a_pickled_loader_keeps_its_methods_and_its_state():
    loader = pickle.loads(pickle.dumps(Kind(True)))
    assert (type(loader), loader.note) == (type(Kind(True)), "kept")
    loader.set_epoch(3)
    assert loader.epoch == 3


@pytest.mark.parametrize("name", ["set_epoch", "state_dict", "load_state_dict", "other"])
def test_an_attribute_that_is_missing_for_want_of_a_seed_says_so(name):
    loader = Kind(False)
    error = missing_attribute(loader, name)
    assert (error.name, error.obj) == (name, loader)
    assert str(error).startswith(f"'Kind' object has no attribute {name!r}")
    assert ("it needs a loader with a seed" in str(error)) == (name != "other")


# Names


def test_a_choice_that_is_close_to_a_known_one_is_corrected():
    check_choice("kind", "apple", ["apple", "pear"])
    with pytest.raises(ValueError, match=r"^kind=aple: did you mean apple\? it is one of apple, pear$"):
        check_choice("kind", "aple", ["apple", "pear"])
    with pytest.raises(ValueError, match=r"^kind=x: it is one of apple, pear$"):
        check_choice("kind", "x", ["apple", "pear"])
    assert did_you_mean("aple", ["apple", "apples"]) == "did you mean apple? "
    assert did_you_mean("x", ["apple"]) == ""


@pytest.mark.parametrize("wrong", [{"samples": 11}, {"samples": -1}, {"samples": None}, {"epoch": "1"}, {"epoch": -1}])
def test_a_position_that_no_epoch_has_is_refused_in_a_sentence(wrong):
    one = epochs()
    with pytest.raises(ValueError, match="use a state that state_dict"):
        one.load_state_dict({**one.state_dict(), **wrong})
