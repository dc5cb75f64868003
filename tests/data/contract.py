"""What data/__init__.py promises of a dataset of images, as tests for any.

A subclass of `ImageDataset` has the path of its `yaml`, and a fixture `make`: train, **arguments -> dataset.
"""

import importlib
import inspect
import pickle
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml

from data.image_folder import ImageFolder
from loaders import Random, WorkerLoader, offers
from tests.data.fakes import noise
from tests.data.reading import assert_equal_batches, read_batch


class ImageDataset:
    yaml: Path

    @pytest.mark.parametrize("train", [True, False])
    def test_samples_match_the_spec(self, make, train):
        dataset = make(train)
        spec = dataset.sample_spec()
        for index in (0, len(dataset) - 1, -1):
            sample = dataset[index]
            assert {name: (tuple(field.shape), field.dtype) for name, field in sample.items()} == spec
            assert sample["image"].is_contiguous() and 0 <= sample["label"] < len(dataset.classes)
        assert len(dataset.mean) == len(dataset.std) == spec["image"][0][2]
        with pytest.raises(IndexError):
            dataset[len(dataset)]

    def test_a_test_sample_is_always_the_same_and_draws_no_random_numbers(self, make):
        dataset = make(False)
        before = torch.get_rng_state()
        original = dataset[1]["image"].clone()
        dataset[1]["image"].fill_(7)  # changes the sample, and not the dataset
        assert torch.equal(dataset[1]["image"], original)
        assert torch.equal(torch.get_rng_state(), before)
        assert torch.equal(pickle.loads(pickle.dumps(dataset))[1]["image"], original)

    def test_new_images_are_prepared_to_the_size_of_a_sample_with_and_without_augmentation(self, make):
        dataset = make(False)
        shape = dataset[0]["image"].shape
        image = noise(50, 70, shape[2])
        prepared = torch.as_tensor(dataset.prepare(image))
        assert (prepared.shape, prepared.dtype) == (shape, torch.uint8)
        assert not torch.equal(prepared, torch.as_tensor(dataset.prepare(image[10:])))
        assert torch.equal(torch.as_tensor(make(True).prepare(image)), prepared)

    @pytest.mark.parametrize("train", [True, False])
    def test_a_row_is_the_same_in_a_batch_alone_and_as_a_sample(self, make, train):
        dataset = pickle.loads(pickle.dumps(make(train)))
        indices = np.array([3, 0, 3, 1])
        positions = np.arange(4)
        batch = read_batch(dataset, indices, Random(7, 0, positions, indices))
        for row in (slice(number, number + 1) for number in range(4)):
            alone = read_batch(dataset, indices[row], Random(7, 0, positions[row], indices[row]))
            assert_equal_batches({name: field[row] for name, field in batch.items()}, alone)
        torch.manual_seed(5)  # a sample depends on nothing else
        sample = {name: field[None] for name, field in dataset[3].items()}
        torch.manual_seed(5)
        draws = SimpleNamespace(uniform=lambda k: torch.rand(1, k).double().numpy())  # those of __getitem__
        assert_equal_batches(sample, read_batch(dataset, [3], draws))

    def test_the_yaml_has_the_constructors_arguments_with_their_defaults(self, make):
        config = yaml.safe_load(self.yaml.read_text())
        module, _, name = config.pop("_target_").rpartition(".")
        arguments = defaults(getattr(importlib.import_module(module), name))
        assert config == {
            name: list(value) if isinstance(value, tuple) else value for name, value in arguments.items()
        }


class TransformedDataset(ImageDataset):
    """One that takes `transform` and `test_transform`."""

    def test_a_transform_gets_whole_images_or_crops(self, make):
        dataset = make(True, transform=mirrored)
        assert torch.equal(dataset[3]["image"].permute(2, 0, 1), mirrored(dataset.whole(3)))
        assert not offers(dataset, "read_batch")
        for train, key, crop in ((True, "transform", ["crop", "flip"]), (False, "test_transform", ["center_crop"])):
            torch.manual_seed(5)
            expected = mirrored(make(train)[3]["image"].permute(2, 0, 1))
            torch.manual_seed(5)
            assert torch.equal(make(train, **{key: [*crop, mirrored]})[3]["image"].permute(2, 0, 1), expected)

    def test_test_samples_new_images_and_samples_without_augmentation_get_the_test_transform(self, make):
        test = make(False, test_transform=mirrored)
        assert torch.equal(test[1]["image"].permute(2, 0, 1), mirrored(test.whole(1)))
        train = make(True, transform=torch.zeros_like, test_transform=mirrored)
        image = noise(20, 25, len(train.mean))
        for dataset in (test, train):
            assert np.array_equal(dataset.prepare(image), image[:, ::-1])
        plain = train.without_augmentation()
        assert torch.equal(plain[1]["image"].permute(2, 0, 1), mirrored(plain.whole(1)))
        fast = make(True, transform=torch.zeros_like).without_augmentation()
        assert offers(fast, "read_batch") and fast[1]["image"].shape == make(False)[1]["image"].shape

    def test_samples_with_a_random_transform_are_the_same_with_any_number_of_workers(self, make):
        batches = []
        for workers in (0, 2):
            dataset = make(True, transform=["crop", "flip", darkened])
            with WorkerLoader(dataset, 3, seed=0, shuffle=True, num_workers=workers) as loader:
                batches.append([{name: field.clone() for name, field in batch.items()} for batch in loader])
        for batch, other in zip(*batches, strict=True):
            assert_equal_batches(batch, other)


def mirrored(image):
    return image.flip(2)


def darkened(image):
    return (image * torch.rand(1)).byte()


def defaults(cls):
    """The constructor's arguments, and those that it passes on to its base class, without `train`."""
    arguments = inspect.signature(cls).parameters.values()
    passed_on = defaults(cls.__base__) if any(each.kind is each.VAR_KEYWORD for each in arguments) else {}
    named = {each.name: each.default for each in arguments if each.default is not each.empty}
    return {name: default for name, default in (passed_on | named).items() if name != "train"}


def assert_reads_as_the_folder(make, images):
    """`make(train, image_size=...)` has the images and labels of the folder that it was made from, in workers too."""
    for train in (True, False):
        ours = make(train, image_size=24)
        folder = ImageFolder(train, images, image_size=24)
        assert (ours.classes, ours.labels.tolist()) == (folder.classes, folder.labels.tolist())
        expected = read_batch(folder, 4)
        assert_equal_batches(read_batch(ours, 4), expected)
        assert b"JFIF" not in pickle.dumps(ours)
        with WorkerLoader(ours, 4, seed=0, num_workers=1, shuffle=False) as loader:
            assert_equal_batches(next(iter(loader)), expected)


def contents(samples):
    return [(sample["image"].tolist(), int(sample["label"])) for sample in samples]


def assert_goes_on(make, labels):
    """A stream that `make` opens has samples of these labels, and after load_state_dict those that were left."""
    stream = make()
    other = make()
    torch.manual_seed(0)
    seen = [(sample, torch.get_rng_state(), stream.state_dict()) for sample in stream]
    assert sorted(int(sample["label"]) for sample, *_ in seen) == labels
    for number in (1, len(labels) // 2, len(labels) - 1):
        _, random, state = seen[number - 1]
        torch.set_rng_state(random)
        other.load_state_dict(state)
        assert contents(other) == contents(sample for sample, *_ in seen[number:])
        assert len(list(other)) == len(labels), "the next pass begins at the start"
