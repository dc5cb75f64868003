"""ResidentLoader: samples that differ in their fields, and what it asks of a GPU, where there is none."""

import pytest
import torch
from example_datasets import Numbers

from loaders import ResidentLoader
from loaders import resident_loader as module

GPU = torch.device("cuda", 0)


class Several(Numbers):
    """Samples 0, 1, ... are `samples`."""

    def __init__(self, *samples) -> None:
        super().__init__(len(samples))
        self.samples = samples

    def __getitem__(self, index: int):
        return self.samples[index]


@pytest.mark.parametrize(
    "other",
    [{"b": 20, "a": 10}, {"a": 10, "c": 20}, {"a": 10}, {"a": 10, "b": 20, "c": 30}, {"a": 10, "b": "twenty"}],
    ids=["in another order", "of another name", "too few", "too many", "no number"],
)
def test_samples_with_other_fields_are_refused_and_never_mixed_up(other):
    loader = ResidentLoader(Several({"a": 1, "b": 2}, other), 2)
    with pytest.raises(ValueError, match=r"samples 1 to 1 are \{.*\} where sample 0 is \{'a': 'torch"):
        iter(loader)


def test_close_lets_go_of_the_set_and_its_epoch():
    loader = ResidentLoader(Numbers(4), 2)
    iterator = iter(loader)
    next(iterator)
    loader.close()
    assert loader.stats() == {"resident": {"bytes": 0}}
    with pytest.raises(RuntimeError):
        next(iterator)


def test_what_torch_has_reserved_on_a_gpu_and_does_not_use_is_free(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 5000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 300)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 100)
    assert module.free_bytes(GPU) == 1200
