"""Preloader over loaders that do what a test's script says: what it keeps, counts and passes on."""

import logging

import pytest
import torch

from loaders import Preloader
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


def test_over_a_loader_that_cannot_load_its_state_a_preloader_has_no_state():
    class Half(Resumable):
        load_state_dict = None

        def __getattribute__(self, name):
            if name == "load_state_dict":
                raise AttributeError(name)
            return super().__getattribute__(name)

    assert hasattr(Preloader(Resumable(), "cpu", 0), "load_state_dict")
    assert not hasattr(Preloader(Half(), "cpu", 0), "state_dict")


def test_a_loader_that_cannot_be_closed_now_is_named_in_the_log(caplog):
    class Busy(list):
        def close(self) -> None:
            raise ValueError("generator already executing")

    with caplog.at_level(logging.WARNING, logger="loaders"):
        Preloader(Busy([1]), "cpu", 0).close()
    assert "could not be closed: generator already executing" in caplog.text


def test_a_loader_that_refuses_its_state_refuses_it_in_the_middle_of_an_epoch_too():
    class Refusing(Resumable):
        def state_dict(self) -> dict:
            raise ValueError("this order cannot be resumed")

    loader = Preloader(Refusing(), "cpu", 0)
    next(loader)
    with pytest.raises(ValueError, match="this order cannot be resumed"):
        loader.state_dict()


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
