"""What data/__init__.py promises about datasets, checked for every dataset and its yaml file."""

import importlib
import inspect
import pickle
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from fakes import save_images, write_cifar, write_fashion, write_images, write_pack, write_shards
from reading import assert_equal_batches, read_batch

from data.cifar import CIFAR10
from data.fashion import FashionMini, FashionMNIST
from data.image_folder import ImageFolder
from data.synthetic import Synthetic
from loaders import Random, WorkerLoader

CONFIGS = sorted((Path(__file__).parents[2] / "conf" / "data").glob("*.yaml"))
NAMES = [path.stem for path in CONFIGS]


def part(module: str, name: str):
    """A class of a part that a fork may have deleted."""
    return getattr(pytest.importorskip(f"data.{module}", reason="a fork may have deleted it"), name)


SOURCES = {  # of encoded images: how they are read, from a folder that is made for the test
    "packed": lambda folder: partial(part("packed", "Packed"), root=write_pack(folder, "--format", "jpeg")),
    "webdataset": lambda folder: partial(part("webdataset", "WebDataset"), **write_shards(folder)),
    "huggingface": lambda folder: partial(part("huggingface", "HuggingFace"), path=save_images(folder)),
}


@pytest.fixture(params=NAMES)
def make(request, tmp_path):
    """A function train -> dataset."""
    use = request.getfixturevalue
    if request.param in SOURCES:
        return partial(SOURCES[request.param](tmp_path), image_size=32)
    makers = {
        "fashion_mini": lambda: FashionMini,
        "fashion_mnist": lambda: partial(FashionMNIST, root=write_fashion(tmp_path)),
        "cifar10": lambda: use("any_cifar") or partial(CIFAR10, root=write_cifar(tmp_path)),
        "image_folder": lambda: partial(ImageFolder, root=write_images(tmp_path), image_size=32),
        "photographs": lambda: partial(part("photographs", "Photographs"), root=use("few_photographs"), image_size=32),
        "synthetic": lambda: partial(Synthetic, length=30, test_length=20),
    }
    return makers[request.param]()


@pytest.mark.parametrize("train", [True, False])
def test_samples_match_the_spec(make, train):
    dataset = make(train)
    spec = dataset.sample_spec()
    for index in (0, len(dataset) - 1, -1):
        sample = dataset[index]
        assert {name: (tuple(field.shape), field.dtype) for name, field in sample.items()} == spec
        assert sample["image"].is_contiguous()
        assert 0 <= sample["label"] < len(dataset.classes)
    channels = spec["image"][0][2]
    assert len(dataset.mean) == len(dataset.std) == channels


def test_a_test_sample_is_always_the_same_and_draws_no_random_numbers(make):
    dataset, before = make(False), torch.get_rng_state()
    original = dataset[1]["image"].clone()
    dataset[1]["image"].fill_(7)  # changes the sample, and not the dataset
    assert torch.equal(dataset[1]["image"], original)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(pickle.loads(pickle.dumps(dataset))[1]["image"], original)
    with pytest.raises(IndexError):
        dataset[len(dataset)]


def test_new_images_are_prepared_to_the_size_of_a_sample(make):
    dataset = make(False)
    shape = dataset[0]["image"].shape
    image = np.random.default_rng(0).integers(256, size=(50, 70, shape[2]), dtype=np.uint8)
    prepared = torch.as_tensor(dataset.prepare(image))
    assert (prepared.shape, prepared.dtype) == (shape, torch.uint8)
    assert not torch.equal(prepared, torch.as_tensor(dataset.prepare(image[10:])))
    augmenting = make(True)
    assert torch.equal(torch.as_tensor(augmenting.prepare(image)), prepared)


def test_getitem_prepares_its_images(make, monkeypatch):
    dataset = make(False)
    kind = next(kind for kind in type(dataset).__mro__ if "prepare" in vars(kind))
    name = "write" if kind.__name__ == "CroppedDataset" else "prepare"  # the first is all that prepare does
    monkeypatch.setattr(kind, name, lambda *_: 1 / 0)
    for use in (lambda: dataset[0], lambda: dataset.prepare(np.zeros((50, 50, 3), np.uint8))):
        with pytest.raises(ZeroDivisionError):
            use()


@pytest.mark.parametrize("policy", [None, "trivial", "rand"])
@pytest.mark.parametrize("train", [True, False])
def test_a_row_is_the_same_in_a_batch_alone_and_as_a_sample(make, train, policy):
    try:
        dataset = make(train) if policy is None else make(train, policy=policy)
    except TypeError:
        pytest.skip("it does not augment")
    indices, positions = np.array([3, 0, 3, 1]), np.arange(4)
    batch = read_batch(dataset, indices, Random(7, 0, positions, indices))
    for row in (slice(number, number + 1) for number in range(4)):
        alone = read_batch(dataset, indices[row], Random(7, 0, positions[row], indices[row]))
        assert_equal_batches({name: field[row] for name, field in batch.items()}, alone)

    class FromTorch:
        def uniform(self, k):
            return torch.rand(1, k).double().numpy()

    torch.manual_seed(5)  # a sample depends on nothing else
    sample = dataset[3]
    torch.manual_seed(5)
    alone = read_batch(dataset, [3], FromTorch())
    assert_equal_batches({name: field[None] for name, field in sample.items()}, alone)


def defaults(cls):
    """The constructor's arguments, and those that it passes on to its base class, without `train`."""
    arguments = inspect.signature(cls).parameters.values()
    passed_on = defaults(cls.__base__) if any(each.kind is each.VAR_KEYWORD for each in arguments) else {}
    named = {each.name: each.default for each in arguments if each.kind is not each.VAR_KEYWORD}
    return {name: default for name, default in (passed_on | named).items() if name != "train"}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_yaml_has_the_constructors_arguments_with_their_defaults_and_a_comment_on_each(path):
    config = yaml.safe_load(path.read_text())
    module, _, name = config.pop("_target_").rpartition(".")
    assert config == defaults(getattr(importlib.import_module(module), name))
    assert all(" # " in line or line.startswith("# ") for line in path.read_text().splitlines())


@pytest.mark.parametrize("name", SOURCES)
def test_every_source_of_image_files_gives_the_batches_of_the_folder_in_workers_too(tmp_path, name):
    source = SOURCES[name](tmp_path)
    for train in (True, False):
        ours = source(train, image_size=24)
        folder = ImageFolder(train, tmp_path / "images", image_size=24)
        assert (ours.classes, ours.labels.tolist()) == (folder.classes, folder.labels.tolist())
        expected = read_batch(folder, 4)
        assert_equal_batches(read_batch(ours, 4), expected)
        assert b"JFIF" not in pickle.dumps(ours)
        with WorkerLoader(ours, 4, seed=0, num_workers=1, shuffle=False) as loader:
            assert_equal_batches(next(iter(loader)), expected)
