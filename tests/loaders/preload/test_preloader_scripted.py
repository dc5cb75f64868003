"""Preloader over loaders that do what a test's script says: what it keeps, counts and passes on."""

import logging
import sys

import pytest
import torch

from loaders import Preloader, TorchLoader
from loaders.preload import preloader as module
from loaders.preload.epoch import PreloadedEpoch
from loaders.randomness import Random


class Resumable:
    """Counts its own epochs, from `epoch` on; its batches are the numbers from 0."""

    def __init__(self, epoch: int = 0, samples: int = 0, **attributes) -> None:
        self.state = {"epoch": epoch, "samples": samples, "global_batch_size": 2}
        vars(self).update(attributes)

    def __iter__(self):
        return iter([torch.zeros(1)] * 3)

    def state_dict(self) -> dict:
        return dict(self.state)

    def load_state_dict(self, state: dict) -> None:
        self.state = dict(state)


def drawn(loader) -> list[float]:
    """What the transform draws in an epoch."""
    return [batch.item() for batch in Preloader(loader, "cpu", 0, lambda _, random: torch.tensor(random.uniform(1)))]


def test_without_seed_rank_and_state_the_transform_draws_as_with_those_of_0():
    plain = drawn([torch.zeros(1)] * 3)
    assert plain[0] == pytest.approx(Random(0, 0, 0, 0).uniform(1).item())
    assert plain == drawn(Resumable(seed=0, rank=0))
    for other in (Resumable(seed=1), Resumable(rank=1), Resumable(epoch=1), Resumable(samples=2)):
        assert not set(plain[:1]) & set(drawn(other)[:1])


def test_a_resumed_epoch_goes_on_with_the_random_numbers_of_its_batches():
    assert drawn(Resumable(samples=2))[:2] == drawn(Resumable())[1:]


def test_over_a_loader_that_cannot_load_its_state_a_preloader_has_no_state():
    class Half(Resumable):
        load_state_dict = None

        def __getattribute__(self, name):
            if name == "load_state_dict":
                raise AttributeError(name)
            return super().__getattribute__(name)

    assert hasattr(Preloader(Resumable(), "cpu", 0), "load_state_dict")
    assert not hasattr(Preloader(Half(), "cpu", 0), "state_dict")


def test_a_loaders_dataset_and_samplers_are_the_preloaders():
    loader = Preloader(Resumable(dataset="the dataset", sampler="its sampler", batch_sampler="of batches"), "cpu", 0)
    assert (loader.dataset, loader.sampler, loader.batch_sampler) == ("the dataset", "its sampler", "of batches")


def test_the_length_of_an_epoch_is_its_iterators_if_it_knows_one():
    inner = Preloader(TorchLoader([1, 2, 3], 1), "cpu", 0)
    assert len(iter(Preloader(inner, "cpu", 0))) == 3
    with pytest.raises(TypeError, match="number of batches is unknown"):
        len(iter(Preloader((number for number in range(3)), "cpu", 0)))


@pytest.mark.parametrize("depth", [0, 2])
def test_an_interrupted_next_loses_no_batch_and_moves_no_state(monkeypatch, depth):
    def interrupted(*_) -> None:
        raise KeyboardInterrupt

    with Preloader(TorchLoader([1, 2, 3], 1), "cpu", depth) as loader:
        iterator = iter(loader)
        for number in range(3):
            with monkeypatch.context() as patch:
                patch.setattr(module.DeviceCopier, "hand_over", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    next(iterator)
            assert loader.state_dict()["samples"] == number
            assert next(iterator).item() == number + 1
        assert loader.stats()["preloader"]["batches"] == 3


@pytest.mark.parametrize("depth", [0, 2])
def test_an_exception_between_a_batchs_arrival_and_its_delivery_loses_no_batch(depth):
    def interrupt(frame, event, _):
        if frame.f_code is not PreloadedEpoch.next.__code__:
            return None
        if event == "return":
            sys.settrace(None)
            raise KeyboardInterrupt
        return interrupt

    with Preloader([1, 2], "cpu", depth) as loader:
        iterator = iter(loader)
        before = sys.gettrace()
        try:
            sys.settrace(interrupt)
            with pytest.raises(KeyboardInterrupt):
                next(iterator)
        finally:
            sys.settrace(before)
        assert list(iterator) == [1, 2]


def test_a_loader_that_cannot_be_closed_now_is_named_in_the_log(caplog):
    class Busy(list):
        def close(self) -> None:
            raise ValueError("generator already executing")

    with caplog.at_level(logging.WARNING, logger="loaders"):
        Preloader(Busy([1]), "cpu", 0).close()
    assert "could not be closed: generator already executing" in caplog.text


class Rotated:
    """A sampler that begins at the epoch's number."""

    epoch = 0

    def __len__(self) -> int:
        return 4

    def __iter__(self):
        return iter([(number + self.epoch) % 4 for number in range(4)])

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("named_after", [1, 2, 3])
def test_without_batches_left_the_state_is_that_of_the_epoch_that_set_epoch_has_named(depth, named_after):
    states = []
    for make in (lambda loader: loader, lambda loader: Preloader(loader, "cpu", depth)):
        with make(TorchLoader(range(4), 2, sampler=Rotated())) as loader:
            loader.set_epoch(4)
            iterator = iter(loader)
            for number, is_end in ((1, False), (2, False), (3, True)):
                assert (next(iterator, None) is None) == is_end
                if number == named_after:
                    loader.set_epoch(7)
                if number > 1:
                    states.append(loader.state_dict())
    assert states[:2] == states[2:]


def test_a_state_of_another_kind_is_returned_as_it_is():
    class Counting(Resumable):
        def state_dict(self) -> dict:
            return {"batches": 1}

    with Preloader(Counting(), "cpu", 2) as loader:
        next(loader)
        loader.set_epoch(5)
        assert loader.state_dict() == {"batches": 1}


def test_a_loader_that_refuses_its_state_refuses_it_in_the_middle_of_an_epoch_too():
    class Refusing(Resumable):
        def state_dict(self) -> dict:
            raise ValueError("this order cannot be resumed")

    loader = Preloader(Refusing(), "cpu", 0)
    next(loader)
    with pytest.raises(ValueError, match="this order cannot be resumed"):
        loader.state_dict()


def test_a_loaded_state_forgets_where_a_broken_off_epoch_was_and_which_epoch_was_named():
    loader = Preloader(TorchLoader([1, 2, 3], 1), "cpu", 1)
    state = {**loader.state_dict(), "epoch": 7, "samples": 2}
    next(loader)
    loader.set_epoch(5)
    loader.load_state_dict(state)
    assert loader.state_dict() == state
    assert len(list(loader)) == 1


def test_a_closed_preloader_tells_what_its_consumer_had_received():
    loader = Preloader(TorchLoader([1, 2, 3], 1), "cpu", 2)
    iterator = iter(loader)
    assert loader.state_dict()["samples"] == 0
    next(iterator)
    assert loader.state_dict()["samples"] == 1
    loader.close()
    assert loader.state_dict()["samples"] == 1


def test_the_state_of_a_broken_off_epoch_is_forgotten_when_the_next_begins():
    with Preloader(TorchLoader([1, 2, 3], 1), "cpu", 1) as loader:
        next(loader)
        assert len(list(loader)) == 3
        assert loader.state_dict()["epoch"] == 2


def test_between_epochs_set_epoch_is_passed_on_at_once():
    with pytest.raises(ValueError, match="an epoch is an integer from 0"):
        Preloader(TorchLoader([1, 2, 3], 1), "cpu", 1).set_epoch(-1)


def test_of_the_loaders_error_and_its_states_the_first_is_reported():
    class Broken(Resumable):
        calls = 0

        def __iter__(self):
            return map(int, ["bad"])

        def state_dict(self) -> dict:
            self.calls += 1
            if self.calls > 1:
                raise RuntimeError("no state")
            return super().state_dict()

    with pytest.raises(ValueError, match="invalid literal"):
        next(Preloader(Broken(), "cpu", 0))
