"""What a base class keeps in its attributes, a subclass does not replace by mistake, and its own is not replaced."""

import pickle
from copy import copy

import numpy as np
import pytest
import torch

import data.cifar
import data.fashion
from data.array_dataset import ArrayDataset
from data.errors import DataError
from data.guarded import Guarded
from data.image_folder import ImageFiles, ImageFolder
from data.image_table import ImageTable
from data.images.crops import CroppedDataset
from data.images.stream import CroppedStream
from data.transform import ImageDataset
from tests.configs import FAST, composed
from tests.data.fakes import write_images, write_table
from training.config import checked
from training.datasets import Datasets
from training.processes import Processes
from training.resume import Origin
from training.tasks import Classification, Multilabel, Regression, Task
from training.trainer import Trainer


class Foreign:
    """What a subclass has for something else."""


class Stream(CroppedStream):
    like = ImageFolder

    def open(self, options):
        return ["cat", "dog"]


def of_a_trainer(folder):
    config = checked(composed(*FAST))
    processes = Processes("cpu", config.train)
    return {"config": config, "data": Datasets(config, Origin(), processes), "processes": processes, "steps": 4}


IMAGES = {"labels": [0, 1], "classes": ["cat", "dog"], "mean": [0.5], "std": [0.2]}
TABLE = {"split": "split", "image_size": 8}
BASES = {
    ImageDataset: lambda folder: {"train": True},
    ArrayDataset: lambda folder: {"train": True, "images": np.zeros((2, 4, 4, 1), np.uint8), **IMAGES},
    CroppedDataset: lambda folder: {"train": True},
    ImageFiles: lambda folder: {"train": True},
    ImageFolder: lambda folder: {"train": True, "root": write_images(folder)},
    ImageTable: lambda folder: {"train": True, "table": write_table(write_images(folder, count=4)), **TABLE},
    Stream: lambda folder: {"train": True},
    Task: lambda folder: {"dataset": None},
    **dict.fromkeys([Classification, Multilabel], lambda folder: {"dataset": Named()}),
    Regression: lambda folder: {"dataset": None},
    Trainer: of_a_trainer,
}


class Named:
    classes = ("cat", "dog")


def kept(base, instance):
    """The public attributes that its constructor sets, without the free ones, and its methods and properties."""
    of_classes = [vars(kind) for kind in base.__mro__ if issubclass(kind, Guarded)]
    set_in_class = {name: value for attributes in of_classes[::-1] for name, value in attributes.items()}
    methods = [name for name, value in set_in_class.items() if isinstance(value, property) or callable(value)]
    attributes = [name for name, value in vars(instance).items() if name not in base._free and value is not None]
    return sorted(name for name in {*methods, *attributes} - {"like", "training"} if name[0] != "_")


def derived(base, before, after):
    """A class that sets these attributes before and after the constructor of `base`."""

    def construct(self, **arguments):
        for name, value in before.items():
            setattr(self, name, value)
        base.__init__(self, **arguments)
        for name, value in after.items():
            setattr(self, name, value)

    return type("Mine", (base,), {"__init__": construct})


@pytest.mark.parametrize("base", BASES, ids=lambda base: base.__name__)
def test_what_a_base_class_keeps_is_refused_by_name_before_and_after_its_constructor_and_in_a_class(base, tmp_path):
    arguments = BASES[base](tmp_path)
    instance = base(**arguments)
    names = kept(base, instance)
    assert names
    value = Foreign()
    for name in names:
        attempts = [derived(base, {}, {name: value}), derived(base, {name: value}, {})]
        if name in vars(instance) and not hasattr(base, name):
            attempts.append(type("Mine", (base,), {name: value}))
        for kind in attempts:
            with pytest.raises(DataError, match=rf"Mine has set self\.{name} to a Foreign"):
                kind(**arguments)


def test_every_class_with_a_constructor_is_among_these_or_sets_nothing_that_a_subclass_could_miss():
    kinds = [Guarded]
    for kind in kinds:
        kinds += [each for each in kind.__subclasses__() if each.__module__.split(".")[0] in ("data", "training")]
    with_constructor = {kind for kind in kinds if "__init__" in vars(kind)} - {CroppedStream}
    only_pass_on = {data.cifar.CIFAR10, data.fashion.FashionMini, data.fashion.FashionMNIST}
    assert with_constructor - only_pass_on == BASES.keys() - {Stream}


def test_what_may_be_set_is_kept(tmp_path):
    transform = [torch.nn.Identity()]
    settings = {"image_size": 8, "transform": transform}
    own = {"classes": ["a"], "labels": [0], "image_size": 8, "transform": transform, "files": ["a"], "cache": {}}
    kind = derived(ImageFiles, own, {"classes": ["b"], "labels": np.array([1]), "image_size": 16, "files": 3})
    mine = kind(train=True, **settings)
    assert (mine.classes, mine.image_size, mine.files, mine.cache) == (["b"], 16, 3, {})
    after = {"labels": [1, 0], "classes": ["b", "a"], "mean": torch.ones(1), "std": [1.0], "images": np.ones(3)}
    derived(ArrayDataset, IMAGES, after)(**BASES[ArrayDataset](tmp_path))
    own = {"metric": "f1", "own_loss": torch.nn.ReLU(), "net": torch.nn.ReLU(), "label_below": None}
    assert derived(Classification, {}, own)(dataset=Named()).metric == "f1"
    assert type("Mine", (ImageFiles,), {"classes": ("cat", "dog")})(train=True, **settings).image_size == 8


class Restored(ArrayDataset):
    def __setstate__(self, state):
        self.__dict__ = state


def test_an_instance_may_be_restored_by_its_attributes(tmp_path):
    dataset = Restored(**BASES[ArrayDataset](tmp_path))
    for other in (copy(dataset), pickle.loads(pickle.dumps(dataset))):
        assert vars(other).keys() == vars(dataset).keys()


@pytest.mark.parametrize("name", ["metric", "stacked", "loss", "scores", "num_outputs", "half"])
def test_a_module_by_the_name_of_what_a_task_has_is_refused_as_python_would_not_find_it(name):
    with pytest.raises(DataError, match=f"Mine has set self.{name} to a ReLU"):
        derived(Task, {}, {name: torch.nn.ReLU()})(dataset=None)
