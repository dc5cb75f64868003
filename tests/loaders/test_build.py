"""build_loader makes what a config names; settings that cannot work are refused with their value and the remedy."""

import math
from functools import partial

import pytest
import torch
from every_loader import ordered
from example_datasets import Numbers, Stream, Written, contents, rows

from loaders import LoaderConfig, LoaderConfigError, ResidentLoader, TorchLoader, WorkerLoader, build_loader
from loaders.arguments import COUNTS
from loaders.build import LEAST

NAMES = ("cached", "prefetch", "resident", "threads", "torch", "workers")
EVERY = pytest.mark.parametrize("name", NAMES)
WHOLE = pytest.mark.parametrize("name", NAMES[1:])  # those whose training has every sample


@pytest.fixture
def build(closed_later):
    def build(name="prefetch", dataset=None, **settings):
        config = {key: settings.pop(key) for key in list(settings) if key in LoaderConfig.__dataclass_fields__}
        dataset = Numbers(10) if dataset is None else dataset
        config = LoaderConfig(**{"name": name, "num_workers": 0, **config})
        return closed_later(build_loader(config, dataset, **{"batch_size": 4, "seed": 0, **settings}))

    return build


@WHOLE
def test_every_loader_gives_the_order_and_the_sampler_that_was_asked_for(build, name):
    settings = {"batch_size": 2, "seed": 5, "shuffle": True, "rank": 1, "world_size": 2}
    for extra in ({"drop_last": True}, {"pad": False}):
        assert contents(build(name, Numbers(11), **settings, **extra)) == ordered(0, 11, **settings, **extra)
    sampled = build(name, sampler=[5, 3, 9, 3, 1], batch_size=2)
    assert contents(sampled) == [[5, 3], [9, 3], [1]]
    batches = build(name, batch_sampler=[[5], [3, 9], [1, 2, 4]])
    assert contents(batches) == [[5], [3, 9], [1, 2, 4]]


@pytest.mark.parametrize(
    ("name", "kind"),
    [("torch", TorchLoader), ("resident", ResidentLoader), ("workers", WorkerLoader), ("threads", WorkerLoader)],
)
def test_each_name_makes_its_own_loader_and_preload_depth_adds_a_thread_to_any_of_them(build, name, kind):
    for depth in (0, 3):
        built = build(name, Written(10), preload_depth=depth)
        assert isinstance(built.loader, kind) and built.depth == depth
        assert kind is not WorkerLoader or built.loader.persistent_workers is False  # there are no workers
    if kind is not ResidentLoader:  # on a CPU with workers no thread competes with the step
        assert build(name, num_workers=1, preload_depth=3).depth == 0
        assert build(name, num_workers=1, preload_depth=3, device="meta", shuffle=False).depth == 3
    if kind is WorkerLoader:
        loader = build(name, num_workers=1).loader
        assert loader.worker_method == ("thread" if name == "threads" else "multiprocessing")
        assert loader.persistent_workers and not loader.pin_memory


@EVERY
def test_the_transform_runs_in_every_loader(build, name):
    assert contents(build(name, transform=lambda batch, random: batch * 100))[0] == [0, 100, 200, 300]


@EVERY
def test_processes_start_by_the_method_that_the_config_names_and_loaders_without_them_ignore_it(build, name):
    loader = build(name, Written(10), num_workers=1, start_method="spawn").loader
    context = loader.multiprocessing_context
    assert (context and context.get_start_method()) == (None if name in ("threads", "resident") else "spawn")
    assert build(name, Written(10), num_workers=0, start_method="spawn").loader.multiprocessing_context is None


def test_settings_of_streams_are_said_to_change_nothing_over_other_data(build, caplog):
    build("workers", Numbers(10), streams=4, shuffle=False)
    assert "loader.streams" not in caplog.text
    build("workers", Numbers(10), streams=4, shuffle_buffer=7, shuffle=True)
    assert "loader.streams=4 and loader.shuffle_buffer=7 change nothing" in caplog.text
    for settings in ({"steps_per_epoch": 2}, {"shuffle_buffer": 7}):
        with pytest.raises(ValueError, match="for iterable datasets, and Numbers is none"):
            WorkerLoader(Numbers(10), 4, seed=0, **settings)


def test_cached_repeats_training_batches_and_an_evaluation_has_every_sample(build):
    training = build("cached", Numbers(50), batch_size=2, shuffle=True)
    evaluation = build("cached", Numbers(50))
    assert len(training) == len(batches := contents(training)) == 25
    assert len({row for batch in batches for row in batch}) <= 2 * 8
    assert sorted(rows(evaluation)) == list(range(50))


@EVERY
def test_processes_read_an_iterable_dataset_and_other_loaders_refuse_it_in_words(build, name):
    if name in ("workers", "prefetch", "torch"):
        assert sorted(contents(build(name, dataset=Stream(3), shuffle=False)))[0] == [0, 1, 2]
        return
    with pytest.raises(LoaderConfigError, match=f"loader={name} needs a map-style dataset"):
        build(name, dataset=Stream(3))


# What is refused: the value, and the remedy.

workers = partial(WorkerLoader, Numbers(8), 2)


@pytest.mark.parametrize(("make", "least"), [(LoaderConfig, LEAST), (partial(workers, seed=0), COUNTS)])
def test_a_number_is_an_integer_from_its_least_value_on_and_the_timeout_is_finite(make, least):
    for name, smallest in least.items():
        for wrong in (smallest - 1, smallest + 0.5, "4", True):
            shown = wrong if make is LoaderConfig else repr(wrong)
            with pytest.raises(LoaderConfigError, match=f"{name}={shown}: give an integer from {smallest}"):
                make(**{name: wrong})
    for wrong in (-0.5, math.nan, math.inf, None):
        with pytest.raises(LoaderConfigError, match=f"timeout={wrong}: give a number from 0"):
            make(timeout=wrong)


REFUSED = {
    "start_method=loky: give one of fork, forkserver, spawn": partial(LoaderConfig, start_method="loky"),
    "loader.on_error=shrug: give one of raise, skip": partial(LoaderConfig, on_error="shrug"),
    "loader=torch .*use loader=workers": partial(LoaderConfig, "torch", on_error="skip"),
    "loader=resident .*use loader=workers": partial(LoaderConfig, "resident", on_error="skip"),
    "prefech: give one of cached.*workers": partial(LoaderConfig, "prefech"),
    "world_size=2.* need a seed": partial(workers, rank=1, world_size=2),
    "rank=2 and world_size=2: .*from 0 to world_size - 1": partial(workers, rank=2, world_size=2, seed=0),
    "num_workers='many'.* or auto": partial(workers, num_workers="many"),
    "prefetch_factor='much'.* or auto": partial(workers, num_workers=1, prefetch_factor="much"),
    "seed=1.* leave out the generator": partial(workers, seed=1, generator=torch.Generator()),
    r"seed=1.5.* from 0 to 2\^64 - 1": partial(workers, seed=1.5),
    "worker_method=threads.* multiprocessing, thread": partial(workers, worker_method="threads"),
    "thread.*leave out multiprocessing_context": partial(
        workers, worker_method="thread", multiprocessing_context="fork", num_workers=1
    ),
    "on_error=ignore: give one of raise, skip": partial(workers, on_error="ignore"),
    "retries.* give seed=0": partial(workers, retries=1),
    "last_batch=rolover.* keep, drop": partial(workers, last_batch="rolover"),
    "last_batch='keep'.* only one of them": partial(workers, last_batch="keep", drop_last=True),
}


@pytest.mark.parametrize("said", REFUSED)
def test_a_setting_that_cannot_work_is_refused_with_its_value_and_the_remedy(said):
    with pytest.raises(ValueError, match=said):
        REFUSED[said]()


def test_without_workers_arguments_that_concern_only_them_are_ignored():
    chosen = {"prefetch_factor": 4, "persistent_workers": True, "multiprocessing_context": "fork", "timeout": 5}
    with WorkerLoader(Numbers(8), 2, seed=0, **chosen) as loader:
        assert len(list(loader)) == 4
