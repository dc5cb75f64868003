"""What a left-out argument means, the least that one may be, and which loader build_loader makes of a config."""

import inspect

import pytest
import torch
from example_datasets import Numbers

from loaders import LoaderConfig, ResidentLoader, TorchLoader, WorkerLoader, build_loader

LEFT_OUT = {
    "num_workers": 0,
    "timeout": 0,
    "drop_last": False,
    "pin_memory": False,
    "rank": 0,
    "world_size": 1,
    "pad": True,
    "last_batch": None,
}


@pytest.mark.parametrize(
    ("loader", "own"),
    [
        (WorkerLoader, {"shuffle": None, "seed": None, "prefetch_factor": None, "max_restarts": 3}),
        (TorchLoader, {"shuffle": False, "seed": 0, "prefetch_factor": 2}),
        (ResidentLoader, {"shuffle": False, "seed": 0, "augment": True}),
    ],
)
def test_an_argument_that_is_left_out_means_the_same_in_every_loader(loader, own):
    defaults = {name: argument.default for name, argument in inspect.signature(loader).parameters.items()}
    assert defaults == {**defaults, **{name: LEFT_OUT[name] for name in LEFT_OUT.keys() & defaults}, **own}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_restarts": "3"}, "max_restarts='3': give an integer from 0"),
        ({"rank": 1}, "rank=1 and world_size=1 need a seed, from which all ranks compute the same order"),
        ({"last_batch": "rollover"}, "'rollover' needs a seed and the loader's own order"),
        ({"last_batch": "rollover", "seed": 0, "sampler": [1]}, "'rollover' needs a seed and the loader's own order"),
        ({"timeout": -1}, "timeout option should be non-negative"),
        ({"timeout": float("inf")}, "timeout=inf: give a number of seconds"),
        ({"batch_size": -2}, "batch_size"),
        ({"num_workers": -1}, "num_workers option should be non-negative"),
        ({"num_workers": True, "seed": 0}, "num_workers=True: give an integer from 0"),
        ({"num_workers": 1, "prefetch_factor": 1.5, "seed": 0}, r"prefetch_factor=1\.5: give an integer from 0"),
        ({"rank": 0.5, "world_size": 2, "seed": 0}, r"rank=0\.5: give an integer from 0"),
        ({"seed": 1, "generator": torch.Generator()}, "seed=1 and a generator were given"),
        ({"rank": 1, "world_size": 2}, "rank=1 and world_size=2 need a seed"),
        ({"rank": 2, "world_size": 2, "seed": 0}, "rank=2 and world_size=2: ranks are numbered from 0"),
        ({"seed": -1}, "seed=-1: give an integer from 0"),
        ({"seed": 1.5}, "seed=1.5: give an integer from 0"),
        ({"worker_method": "threads"}, "worker_method=threads: did you mean thread"),
        ({"worker_method": "thread", "multiprocessing_context": "fork", "num_workers": 1}, "starts no processes"),
        ({"on_error": "ignore"}, "on_error=ignore: it is one of raise, skip"),
        ({"max_restarts": -1}, "max_restarts=-1: give an integer from 0"),
        ({"prefetch_batches": 0}, "prefetch_batches=0: give the total number of batches"),
        ({"prefetch_batches": 3, "prefetch_factor": 4, "num_workers": 1}, "leave out prefetch_factor"),
    ],
)
def test_arguments_that_make_no_sense_are_refused_in_words(settings, message):
    with pytest.raises(ValueError, match=message):
        WorkerLoader(Numbers(8), **{"batch_size": 2, **settings})


def test_libraries_that_rebuild_a_loader_can_read_its_arguments():
    given = {
        "seed": 3,
        "rank": 1,
        "world_size": 2,
        "pad": False,
        "last_batch": "keep",
        "prefetch_batches": 5,
        "worker_method": "thread",
        "on_error": "skip",
        "max_restarts": 7,
        "num_workers": 1,
        "timeout": 4,
    }
    loader = WorkerLoader(Numbers(8), 2, **given)
    assert {name: getattr(loader, name) for name in given} == given


def test_without_workers_arguments_that_concern_only_them_are_ignored():
    given = {"prefetch_factor": 4, "persistent_workers": True, "multiprocessing_context": "fork", "timeout": 5}
    loader = WorkerLoader(Numbers(8), 2, seed=0, **given)
    assert (loader.prefetch_factor, loader.persistent_workers) == (None, False)
    assert (loader.multiprocessing_context, loader.timeout) == (None, 0)


def built(name: str, device: str = "cpu", **options):
    config = LoaderConfig(name, num_workers=1, preload_depth=0)
    with build_loader(config, Numbers(8), batch_size=2, seed=0, device=device, **options) as preloader:
        return preloader


@pytest.mark.parametrize(
    ("name", "kind"),
    [("torch", TorchLoader), ("resident", ResidentLoader), ("workers", WorkerLoader), ("threads", WorkerLoader)],
)
def test_each_name_of_a_config_makes_its_own_loader(name, kind):
    loader = built(name).loader
    assert isinstance(loader, kind)
    if kind is WorkerLoader:
        assert loader._added.worker_method == ("thread" if name == "threads" else "multiprocessing")
        assert loader.persistent_workers


def test_batches_for_a_gpu_and_for_nothing_else_are_page_locked(monkeypatch):
    assert not built("workers").loader.pin_memory
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert built("workers", device="cuda").loader.pin_memory
