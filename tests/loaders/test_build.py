import pytest
import torch
from example_datasets import Numbers, contents
from torch.utils.data import IterableDataset

from loaders import LoaderConfig, LoaderConfigError, Preloader, build_loader
from loaders.build import LOADERS
from loaders.order import Order


@pytest.fixture
def build(closed_later):
    def build(name: str = "prefetch", dataset=None, **settings) -> Preloader:
        config = {key: settings.pop(key) for key in list(settings) if key in LoaderConfig.__dataclass_fields__}
        dataset = Numbers(10) if dataset is None else dataset
        config = LoaderConfig(**{"name": name, "num_workers": 0, **config})
        return closed_later(build_loader(config, dataset, **{"batch_size": 4, "seed": 0, **settings}))

    return build


WHOLE = [name for name in LOADERS if name != "cached"]  # those whose training has every sample


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("num_workers", [0, 1])
def test_every_loader_gives_the_order_and_the_sampler_that_was_asked_for(build, name, num_workers):
    settings = {"batch_size": 2, "seed": 5, "shuffle": True, "rank": 1, "world_size": 2}
    for more in ({}, {"drop_last": True}, {"pad": False}):
        order = Order(length=11, **settings, **more)
        loader = build(name, Numbers(11), num_workers=num_workers, **settings, **more)
        assert contents(loader) == [order.indices(0, order.positions(number)).tolist() for number in range(len(order))]
    sampled = build(name, num_workers=num_workers, sampler=[5, 3, 9, 3, 1], batch_size=2)
    assert (len(sampled), contents(sampled)) == (3, [[5, 3], [9, 3], [1]])
    batches = build(name, num_workers=num_workers, batch_sampler=[[5], [3, 9], [1, 2, 4]])
    assert contents(batches) == [[5], [3, 9], [1, 2, 4]]


def test_a_resident_loader_refuses_a_sampler_of_names(build):
    with pytest.raises(TypeError, match="loader=resident gathers rows by integers, and the sampler gave"):
        next(build("resident", sampler=["a", "b", "c", "d"]))


@pytest.mark.parametrize("name", sorted(set(LOADERS) - {"cached"}))
@pytest.mark.parametrize("depth", [0, 3])
def test_preload_depth_adds_a_preloaders_thread_to_any_loader(build, name, depth):
    assert build(name, preload_depth=depth).depth == depth


@pytest.mark.parametrize("name", ["cached", "prefetch", "threads", "torch", "workers"])
@pytest.mark.parametrize("num_workers", [1, "auto"])
def test_on_a_cpu_with_workers_no_thread_competes_with_the_step(build, name, num_workers):
    assert build(name, num_workers=num_workers, preload_depth=3).depth == 0
    assert build(name, num_workers=num_workers, preload_depth=3, device="meta", shuffle=False).depth == 3


def test_with_auto_the_stock_loader_takes_the_cores_that_there_are(build, monkeypatch):
    monkeypatch.setattr("loaders.build.available_cores", lambda: 2)
    loader = build("torch", num_workers="auto", prefetch_factor="auto")
    assert next(loader).tolist() == [0, 1, 2, 3]
    assert len(loader.loader._loader._iterator._workers) == 2


@pytest.mark.parametrize("name", LOADERS)
def test_the_transform_runs_in_every_loader(build, name):
    loader = build(name, transform=lambda batch, random: batch * 100)
    assert contents(loader)[0] == [0, 100, 200, 300]


@pytest.mark.cuda
@pytest.mark.parametrize("name", LOADERS)
def test_batches_are_on_the_cuda_device(build, name):
    batches = list(build(name, device="cuda", num_workers=1))
    assert [batch.device for batch in batches] == [torch.device("cuda", torch.cuda.current_device())] * 3
    assert contents(batches) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))


class MeasuredStream(Stream):
    def __len__(self) -> int:
        return 3


@pytest.mark.parametrize("dataset", [Stream(), MeasuredStream()], ids=["without a length", "with a length"])
@pytest.mark.parametrize("name", LOADERS)
def test_processes_read_an_iterable_dataset_and_other_loaders_refuse_it_in_words(build, name, dataset):
    if name in ("workers", "prefetch", "torch"):
        assert sorted(contents(build(name, dataset=dataset, num_workers=0, shuffle=False)))[0] == [0, 1, 2]
        return
    with pytest.raises(LoaderConfigError, match=f"loader={name} needs a map-style dataset"):
        build(name, dataset=dataset)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_workers", -1),
        ("num_workers", "many"),
        ("prefetch_factor", 0),
        ("prefetch_factor", "much"),
        ("preload_depth", -1),
        ("timeout", -0.5),
        ("timeout", float("nan")),
        ("timeout", float("inf")),
        ("on_error", "shrug"),
    ],
)
def test_a_setting_that_cannot_work_is_named_with_its_value(key, value):
    with pytest.raises(LoaderConfigError) as refusal:
        LoaderConfig(**{key: value})
    assert f"loader.{key}={value}:" in str(refusal.value)


def test_more_workers_than_could_ever_help_are_refused_with_the_most(monkeypatch):
    monkeypatch.setattr("loaders.build.available_cores", lambda: 3)
    assert LoaderConfig(num_workers=192).num_workers == 192
    with pytest.raises(LoaderConfigError, match=r"loader\.num_workers=193: .* 3 cores, .*: give at most 192, or auto"):
        LoaderConfig(num_workers=193)


@pytest.mark.parametrize("name", ["resident", "torch"])
def test_some_loaders_cannot_leave_out_samples(name):
    with pytest.raises(LoaderConfigError, match=f"loader={name} cannot leave out samples, use loader=workers"):
        LoaderConfig(name=name, on_error="skip")


def test_a_misspelt_loader_is_answered_with_the_nearest():
    for name, meant in (("prefech", "prefetch"), ("residant", "resident")):
        with pytest.raises(LoaderConfigError, match=f"did you mean {meant}"):
            LoaderConfig(name=name)
    with pytest.raises(LoaderConfigError, match=f"it is one of {', '.join(LOADERS)}") as refusal:
        LoaderConfig(name="xyz")
    assert "did you mean" not in str(refusal.value)
