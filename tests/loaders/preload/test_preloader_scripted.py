"""Preloader over loaders that do what a test's script says: what it keeps, counts and passes on."""

import logging

import pytest
import torch

from loaders import Preloader, TorchLoader
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


def test_a_loader_that_cannot_be_closed_now_is_named_in_the_log(caplog):
    class Busy(list):
        def close(self) -> None:
            raise ValueError("generator already executing")

    with caplog.at_level(logging.WARNING, logger="loaders"):
        Preloader(Busy([1]), "cpu", 0).close()
    assert "could not be closed: generator already executing" in caplog.text


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("named_after", [1, 2, 3])
def test_without_batches_left_the_state_is_that_of_the_epoch_that_set_epoch_has_named(depth, named_after):
    states = []
    for make in (lambda loader: loader, lambda loader: Preloader(loader, "cpu", depth)):
        with make(TorchLoader(range(4), 2, sampler=range(4))) as loader:
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
