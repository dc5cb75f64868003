"""Generators that a dataset and its transforms hold are seeded for each sample: nothing repeats in forked workers."""

import itertools
import random
import sys
from collections import UserList
from collections.abc import Iterable
from functools import cache, partial, reduce
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from example_datasets import contents
from torch.utils.data import IterableDataset, get_worker_info

from loaders import Preloader, ResidentLoader, WorkerLoader
from loaders.errors import warn_once
from loaders.generators import Seeder

COUNT = 128


class Draws:
    """A transform with a generator of its own."""

    def __init__(self, make):
        self.generator = make()

    def __call__(self, value):
        draw = getattr(self.generator, "random", None) or (lambda: torch.rand((), generator=self.generator))
        return value + float(draw())


class Late:
    """A transform that makes its generator when it is first called."""

    generator = None

    def __call__(self, value):
        self.generator = self.generator or np.random.default_rng(0)
        return value + self.generator.random()


TRANSFORMS = {
    "numpy": lambda: Draws(np.random.default_rng),
    "mt19937": lambda: Draws(lambda: np.random.Generator(np.random.MT19937())),
    "random state": lambda: Draws(np.random.RandomState),
    "python": lambda: Draws(random.Random),
    "torch": lambda: Draws(torch.Generator),
}


class Numbers(torch.utils.data.Dataset):
    def __init__(self, *transforms):
        self.steps = {"transforms": [*transforms]}

    def __len__(self):
        return COUNT

    def __getitem__(self, index):
        return torch.tensor([step(0.0) for step in self.steps["transforms"]], dtype=torch.float64)


class NumberStream(IterableDataset):
    def __init__(self, transform):
        self.transform = transform
        self.own = np.random.default_rng(0)

    def __iter__(self):
        stream = get_worker_info()
        for _ in range(stream.id, COUNT, stream.num_workers):
            yield torch.tensor([self.transform(0.0), self.own.random()], dtype=torch.float64)


def draws(dataset, workers, epochs=1, **options):
    with WorkerLoader(dataset, 16, num_workers=workers, **{"seed": 3, **options}) as loader:
        return torch.cat([batch for _ in range(epochs) for batch in loader])


def test_two_generators_of_a_dataset_draw_different_numbers_and_none_twice():
    transforms = [make() for make in TRANSFORMS.values()]
    dataset = Numbers(*transforms, *(partial(make()) for make in TRANSFORMS.values()))
    expected = draws(dataset, 0, epochs=2)
    for number in range(len(transforms)):
        pair = expected[:, [number, number + len(transforms)]]
        assert len(pair.unique()) == 4 * COUNT


# Where code may keep a generator


def new():
    generator = np.random.default_rng()
    HIDDEN.append(generator)
    return generator


HIDDEN = []
MODULE, IN_HELPER, IN_LAMBDA, IN_COMPREHENSION, IN_INNER, IN_STATIC, IN_CLASS_METHOD, IN_PROPERTY = (
    new() for _ in range(8)
)
HELPERS = ModuleType("helpers")
HELPERS.generator = new()
HELPERS.inner = ModuleType("helpers.inner")
HELPERS.inner.generator = new()
IMPORTED = ModuleType("imported_by_a_test")
IMPORTED.generator = new()
sys.modules[IMPORTED.__name__] = IMPORTED


class InClass:
    generator = new()

    def __call__(self, value):
        return value + self.generator.random()


class Derived(InClass):
    pass


class InSlot:
    __slots__ = ("generator",)

    def __init__(self):
        self.generator = new()

    __call__ = InClass.__call__


class InModule:
    def __call__(self, value):
        return value + MODULE.random()


def in_default(value, generator=new()):  # noqa: B008
    return value + generator.random()


def in_module(value):
    return value + MODULE.random()


def in_closure():
    generator = new()
    return lambda value: value + generator.random()


def in_method_of_closure():
    generator = new()

    class Local:
        def __call__(self, value):
            return value + generator.random()

    return Local()


@cache
def cached():
    return new()


cached()


def draw():
    return IN_HELPER.random()


def draw_more():
    return draw()


draw_more.generator = new()


def with_import():
    from imported_by_a_test import generator

    return generator.random()


def in_inner():
    def inner():
        return IN_INNER.random()

    return inner()


class Methods:
    @staticmethod
    def static():
        return IN_STATIC.random()

    @classmethod
    def of_class(cls):
        return IN_CLASS_METHOD.random()

    @property
    def property(self):
        return IN_PROPERTY.random()


class Attributes:
    """Draws from what it gets in `hidden`, as `drawn` does."""

    def __init__(self, hidden, drawn=lambda hidden: hidden.random()):
        self.hidden = hidden
        self.drawn = drawn

    def __call__(self, value):
        return value + self.drawn(self.hidden)


CONTAINERS = {
    "set": lambda generator: {generator},
    "long list": lambda generator: [(0, InClass)] * 100 + [(1, generator)],
    "user's list": lambda generator: UserList([generator]),
    "30 lists": lambda generator: reduce(lambda inner, _: [inner], range(30), generator),
}
GLOBAL = {name: contain(new()) for name, contain in CONTAINERS.items()}


def draw_from(hidden):
    """Draws from the generator that is the last in a container, or in the container that is the last in it."""
    while isinstance(hidden, Iterable):
        *_, hidden = hidden
    return hidden.random()


PLACES = {
    "class": InClass,
    "derived class": Derived,
    "slot": InSlot,
    "default argument": lambda: in_default,
    "module": lambda: in_module,
    "module, by a method": InModule,
    "closure": in_closure,
    "method": in_method_of_closure,
    "partial": lambda: partial(in_default, generator=new()),
    "helper": lambda: lambda _: draw_more(),
    "lambda": lambda: lambda _: (lambda: IN_LAMBDA.random())(),
    "comprehension": lambda: lambda _: sum(IN_COMPREHENSION.random() for _ in range(2)),
    "inner function": lambda: lambda _: in_inner(),
    "static method": lambda: lambda _: Methods.static(),
    "class method": lambda: lambda _: Methods.of_class(),
    "property": lambda: lambda _: Methods().property,
    "attribute of a module": lambda: lambda _: HELPERS.generator.random(),
    "module in a module": lambda: lambda _: HELPERS.inner.generator.random(),
    "import": lambda: lambda _: with_import(),
    "attribute of a function": lambda: lambda _: draw_more.generator.random(),
    "cache": lambda: lambda _: cached().random(),
    "method of a generator": lambda: Attributes(new().random, lambda draw: draw()),
    "bit generator": lambda: Attributes(new().bit_generator, lambda bits: np.random.Generator(bits).random()),
    **{f"global {name}": partial(lambda name: lambda _: draw_from(GLOBAL[name]), name) for name in CONTAINERS},
    **{
        f"{name} of an object": partial(lambda contain: Attributes(contain(new()), draw_from), contain)
        for name, contain in CONTAINERS.items()
    },
}


def forget():
    """What a new process would have: other states."""
    for generator in HIDDEN:
        generator.bit_generator.state = type(generator.bit_generator)().state


class Collating:
    def __init__(self, step):
        self.step = step

    def __call__(self, samples):
        return self.step(torch.stack(samples))


class Writing(Numbers):
    """Draws past the `random` that it gets."""

    def sample_spec(self):
        return {"value": ((1,), torch.float64)}

    def read_batch(self, indices, out, random):
        out["value"][:] = self.steps["transforms"][0](0.0)


class Arrays(Numbers):
    def arrays(self):
        return {"value": np.zeros((COUNT, 1))}


def apply(step, batch, random=None):
    return {name: step(field) for name, field in batch.items()}


def loader_of(dataset, workers, **settings):
    return WorkerLoader(dataset, 16, num_workers=workers, seed=3, **settings)


def of_dataset(make, workers):
    return loader_of(Numbers(make()), workers)


CALLED = {  # what else a loader calls, with a number of workers
    "collate": lambda make, workers: loader_of(Numbers(float), workers, collate_fn=Collating(make())),
    "read_batch": lambda make, workers: loader_of(Writing(make()), workers),
    "stream's collate": lambda make, workers: loader_of(
        NumberStream(float), workers, streams=2, collate_fn=Collating(make())
    ),
    "preloader's transform": lambda make, workers: Preloader(
        loader_of(Writing(float), workers), "cpu", 2 * workers, partial(apply, make())
    ),
    "preloader's finish": lambda make, workers: Preloader(
        loader_of(Writing(float), workers), "cpu", 2, finish=partial(apply, make())
    ),
    "resident's augment": lambda make, workers: ResidentLoader(Arrays(), 16, seed=3, augment=partial(apply, make())),
}
BUILDS = {name: partial(of_dataset, make) for name, make in (PLACES | TRANSFORMS).items()}
BUILDS |= {
    f"{place} of {name}": partial(called, PLACES[place])
    for name, called in CALLED.items()
    for place in ("class", "slot", "module", "closure")
}


@pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)
def test_what_a_loader_calls_draws_the_same_with_any_workers_and_after_a_resume(build):
    with build(0) as loader:
        iterator = iter(loader)
        first = contents([next(iterator), next(iterator)])
        state = loader.state_dict()
        rest = contents(iterator)
    forget()
    assert first[0] != first[1]
    with build(2) as loader:
        assert contents(loader) == first + rest
        forget()
        loader.load_state_dict(state)
        assert contents(loader) == rest


def test_a_generator_that_cannot_be_seeded_is_named_once(caplog):
    warn_once.cache_clear()
    draws(Numbers(Draws(random.SystemRandom)), 0, epochs=2)
    (record,) = caplog.records
    assert "random.SystemRandom" in record.message and "global generators" in record.message


class Advancing(Numbers):
    def __init__(self, iterator):
        super().__init__(COUNT)
        self.iterator = iterator

    def __getitem__(self, index):
        return torch.tensor(float(next(self.iterator)))


ITERATORS = {
    "cycle": lambda: itertools.cycle([1, 2, 3]),
    "count": itertools.count,
    "generator": lambda: (number for number in range(999)),
    "map": lambda: map(float, range(999)),
}


@pytest.mark.parametrize(("kind", "make"), ITERATORS.items(), ids=ITERATORS)
def test_an_iterator_that_reading_would_advance_is_named_once(kind, make, caplog):
    warn_once.cache_clear()
    draws(Advancing(make()), 0, epochs=2)
    (record,) = caplog.records
    assert f"iterator ({kind})" in record.message


def test_without_a_seed_workers_repeat_nothing():
    assert len(draws(Numbers(TRANSFORMS["numpy"]()), 3, seed=None).unique()) == COUNT


LATE = None


def late(value):
    global LATE
    LATE = LATE or np.random.default_rng(0)
    return value + LATE.random()


@cache
def late_cached(name):
    return np.random.default_rng(len(name))


def late_import(value):
    from imported_by_a_sample import draw

    return value + draw()


LATE_TRANSFORMS = {
    "attribute": Late,
    "global variable": lambda: lambda value: late(value),
    "module": lambda: lambda value: late_import(value),
    "cache": lambda: lambda value: value + late_cached("noise").random(),
}


@pytest.mark.parametrize("place", ["dataset", "collate"])
@pytest.mark.parametrize("make", LATE_TRANSFORMS.values(), ids=LATE_TRANSFORMS)
def test_a_generator_that_is_made_by_a_sample_is_seeded_for_its_batch_too(make, place, monkeypatch, tmp_path):
    module = "import numpy\ngenerator = numpy.random.default_rng(0)\ndef draw(): return generator.random()\n"
    tmp_path.joinpath("imported_by_a_sample.py").write_text(module)
    monkeypatch.syspath_prepend(tmp_path)
    drawn = []
    for workers in (0, 3):
        monkeypatch.setattr(sys.modules[__name__], "LATE", None)
        sys.modules.pop("imported_by_a_sample", None)
        late_cached.cache_clear()
        if place == "dataset":
            drawn.append(draws(Numbers(make()), workers))
        else:
            drawn.append(draws(Numbers(float), workers, collate_fn=Collating(make())))
    assert torch.equal(*drawn)
    assert len(drawn[0].unique()) == (COUNT if place == "dataset" else COUNT // 16)


class Renewing:
    """Makes another object, with a generator in it, for each sample; and draws from global ones, too."""

    def __init__(self):
        self.newest = Attributes(np.random.default_rng(0))

    def __call__(self, value):
        self.newest = Attributes(np.random.default_rng(0))
        return self.newest(value) + MODULE.random() + draw()


def test_what_code_leads_to_is_seeded_as_before_after_a_sample_has_replaced_an_object():
    first = draws(Numbers(Renewing()), 0)
    forget()
    assert torch.equal(draws(Numbers(Renewing()), 3), first)


def test_a_streams_transforms_are_seeded_and_its_own_generator_goes_on():
    stream = NumberStream(TRANSFORMS["numpy"]())
    first, other = (draws(stream, workers, streams=4) for workers in (0, 3))
    assert torch.equal(first, other)
    assert len(first[:, 0].unique()) == COUNT
    assert len(first[:, 1].unique()) == COUNT // 4, "its order may depend on it, so it is the stream's own affair"


def test_generators_are_found_in_attributes_lists_and_arguments_and_global_ones_are_not_counted():
    ours = np.random.default_rng()
    owner = SimpleNamespace(list=[ours, ours], dict={"a": random.Random()}, partial=partial(print, torch.Generator()))
    owner.itself = owner
    owner.method = Draws(random.Random).__call__
    assert len(Seeder(owner).reseeds) == 4
    shared = [torch.default_generator, random._inst, np.random.mtrand._rand]
    assert not Seeder(SimpleNamespace(shared=shared)).reseeds


def test_threads_do_not_seed_what_they_share():
    dataset = Numbers(TRANSFORMS["numpy"]())
    dataset.steps["transforms"][0].generator = np.random.default_rng(5)
    drawn = draws(dataset, 1, worker_method="thread")
    assert torch.equal(drawn[:, 0], torch.from_numpy(np.random.default_rng(5).random(COUNT)))


class Settings:
    """Gives its values as attributes, and KeyError for others."""

    def __init__(self, **values):
        self.values = values

    def __getattr__(self, name):
        return vars(self)["values"][name]


class Configured:
    def __init__(self):
        self.settings = Settings(size=3)
        self.generator = np.random.default_rng(0)

    def __len__(self):
        return 6

    def __getitem__(self, index):
        return self.generator.random(self.settings.size)


def test_the_search_passes_over_attributes_that_raise_key_error():
    expected = contents(WorkerLoader(Configured(), 2, seed=0))
    with WorkerLoader(Configured(), 2, seed=0, num_workers=2) as loader:
        assert contents(loader) == expected
