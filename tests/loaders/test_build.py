"""build_loader makes what a config names; settings that cannot work are refused with their value and the remedy."""

import pytest
import torch
from every_loader import ordered
from example_datasets import Numbers, Stream, Written, contents, rows

from loaders import LoaderConfig, LoaderConfigError, ResidentLoader, TorchLoader, WorkerLoader, build_loader

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


# One table for what is refused: the value, and the remedy.

CONFIGS = [
    ({"num_workers": -1}, "num_workers=-1", "from 0, or auto"),
    ({"num_workers": "many"}, "num_workers=many", "from 0, or auto"),
    ({"prefetch_factor": 0}, "prefetch_factor=0", "from 1, or auto"),
    ({"preload_depth": -1}, "preload_depth=-1", "from 0"),
    ({"timeout": -0.5}, "timeout=-0.5", "a number from 0"),
    ({"timeout": float("nan")}, "timeout=nan", "a number from 0"),
    ({"retries": -1}, "retries=-1", "from 0"),
    ({"start_method": "loky"}, "start_method=loky", "one of fork, forkserver, spawn"),
    ({"on_error": "shrug"}, "on_error=shrug", "one of raise, skip"),
    ({"name": "torch", "on_error": "skip"}, "loader=torch", "use loader=workers"),
    ({"name": "resident", "on_error": "skip"}, "loader=resident", "use loader=workers"),
    ({"name": "prefech"}, "prefech", "one of cached.*workers"),
]
ARGUMENTS = [
    ({"max_restarts": -1, "seed": 0}, "max_restarts=-1", "an integer from 0"),
    ({"rank": 1, "world_size": 2}, "world_size=2", "need a seed"),
    ({"rank": 2, "world_size": 2, "seed": 0}, "rank=2 and world_size=2", "from 0 to world_size - 1"),
    ({"timeout": float("inf")}, "timeout=inf", "a number from 0"),
    ({"num_workers": "many"}, "num_workers=many", "or auto"),
    ({"num_workers": 1, "prefetch_factor": "much"}, "prefetch_factor=much", "or auto"),
    ({"seed": 1, "generator": torch.Generator()}, "seed=1", "leave out the generator"),
    ({"seed": 1.5}, "seed=1.5", r"from 0 to 2\^64 - 1"),
    ({"worker_method": "threads"}, "worker_method=threads", "multiprocessing, thread"),
    ({"worker_method": "thread", "multiprocessing_context": "fork", "num_workers": 1}, "thread", "leave out multipro"),
    ({"on_error": "ignore"}, "on_error=ignore", "one of raise, skip"),
    ({"retries": 1.5}, "retries=1.5", "an integer from 0"),
    ({"retries": 1}, "retries", "give seed=0"),
    ({"last_batch": "rolover"}, "last_batch=rolover", "keep, drop"),
    ({"last_batch": "keep", "drop_last": True}, "last_batch='keep'", "only one of them"),
]
REFUSED = [*CONFIGS, *ARGUMENTS]


@pytest.mark.parametrize(("settings", "value", "remedy"), REFUSED, ids=[value for _, value, _ in REFUSED])
def test_a_setting_that_cannot_work_is_refused_with_its_value_and_the_remedy(settings, value, remedy):
    is_config = (settings, value, remedy) in CONFIGS
    with pytest.raises(LoaderConfigError if is_config else ValueError, match=remedy) as refusal:
        if is_config:
            LoaderConfig(**settings)
        else:
            WorkerLoader(Numbers(8), **{"batch_size": 2, **settings})
    assert value in str(refusal.value)


def test_without_workers_arguments_that_concern_only_them_are_ignored():
    chosen = {"prefetch_factor": 4, "persistent_workers": True, "multiprocessing_context": "fork", "timeout": 5}
    with WorkerLoader(Numbers(8), 2, seed=0, **chosen) as loader:
        assert len(list(loader)) == 4
