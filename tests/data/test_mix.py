"""Mixtures of datasets: they read as their parts do, fit together or say why not, and train as one run."""

import re
from functools import partial

import numpy as np
import pytest
import torch
from torch.utils.data import ChainDataset

from data import optional
from data.array_dataset import ArrayDataset
from data.image_folder import ImageFolder
from data.image_table import ImageTable
from data.mix import mixed
from data.subset import split, undivided
from loaders import Mixture, Random, WorkerLoader, offers
from tests.configs import MIXTURE, train
from tests.data import fakes
from tests.data.fakes import write_images, write_table
from tests.data.reading import assert_equal_batches, read_batch, refused


def arrays(train, count=30, first=0, side=8, **about):
    images = np.full((count, side, side, 3), first, np.uint8) + np.arange(count, dtype=np.uint8)[:, None, None, None]
    return fakes.arrays(train, images, **about)


PARTS = {"a": arrays, "b": partial(arrays, count=10, first=100)}


def sample_by_sample(train):
    return list(arrays(train, 6))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_mixture_reads_whole_batches_part_by_part_with_the_random_numbers_of_each_row(workers):
    mix = mixed(True, PARTS, {"a": 1, "b": 1})
    assert (len(mix), mix.classes, mix.labels.tolist()) == (40, ("a", "b"), [0, 1] * 20)
    assert mix.mixture == Mixture((30, 10), (1, 1)) and mixed(True, PARTS).mixture.weights == (30, 10)
    with WorkerLoader(mix, 40, sampler=mix.mixture, num_workers=workers, seed=0) as loader:
        (batch,) = loader
    order = mix.mixture.indices(0, np.arange(40))
    random = Random(0, 0, np.arange(40), order)
    parts = [build(True) for build in PARTS.values()]
    for row, index in enumerate(order.tolist()):
        part, own = (parts[0], index) if index < 30 else (parts[1], index - 30)
        expected = read_batch(part, [own], random.of_rows(np.array([row])))
        assert_equal_batches({name: field[row : row + 1] for name, field in batch.items()}, expected)
    assert mix[35]["image"].max() == 105 and mix[-1]["image"].max() == 109
    assert mix.without_augmentation()[3]["image"].unique().tolist() == [3]


def test_a_mixture_with_a_part_without_read_batch_reads_sample_by_sample():
    mix = mixed(True, PARTS | {"c": sample_by_sample}, classes=["a", "b"])
    assert not offers(mix, "read_batch") and offers(mixed(True, PARTS), "read_batch") and mix[45]["label"] == 1
    with WorkerLoader(mix, 4, sampler=mix.mixture, seed=0) as loader:
        assert len(list(loader)) == 12


@pytest.mark.parametrize("form", [tuple, dict])
@pytest.mark.parametrize("kinds", [(np.asarray, int), (torch.as_tensor, torch.as_tensor)])
def test_samples_of_a_part_without_read_batch_get_the_form_of_those_of_the_others(form, kinds):
    def plain(train):
        samples = [
            {name: kind(sample[name]) for name, kind in zip(sample, kinds, strict=True)} for sample in arrays(train, 6)
        ]
        return samples if form is dict else [tuple(sample.values()) for sample in samples]

    mix = mixed(True, {"plain": plain, "a": arrays}, classes=["a", "b"])
    with WorkerLoader(mix, 36, sampler=mix.mixture, seed=0) as loader:
        (batch,) = loader
    order = mix.mixture.indices(0, np.arange(36)).tolist()
    assert batch["label"].tolist() == [index % 2 for index in order]
    assert batch["image"].dtype == torch.uint8 and batch["image"].shape == (36, 8, 8, 3)


def test_a_part_whose_samples_have_another_number_of_fields_is_refused_in_a_sentence():
    mix = mixed(True, {"a": arrays, "plain": lambda train: [(np.zeros((8, 8, 3)), 1, "name")]}, classes=["a", "b"])
    with refused("gives 3 values per sample, .*image, label"):
        mix[len(mix) - 1]


def test_the_test_set_is_that_of_one_part_and_labels_of_other_classes_are_translated_by_name():
    parts = {"a": arrays, "b": partial(arrays, count=9, classes="bca")}
    mix = mixed(True, parts, classes=["a", "b", "c"])
    assert mix.labels.tolist() == [0, 1] * 15 + [1, 2, 0] * 3 and mix[30]["label"] == 1
    tested = mixed(
        False, {"a": lambda train: pytest.fail("is not needed"), "b": parts["b"]}, test="b", classes=[*"abc"]
    )
    assert tested.labels.tolist() == [1, 2, 0] * 3 and tested.classes == ("a", "b", "c")


def test_each_part_is_split_by_itself_and_the_rest_is_still_a_mixture(tmp_path):
    rest, part = split(mixed(True, PARTS, {"a": 1, "b": 3}), 0.2)
    lengths = [len(split(build(True), 0.2)[0]) for build in PARTS.values()]
    assert rest.mixture == Mixture(lengths, (1, 3))
    told = []
    undivided(rest.datasets[1]).set_epoch = told.append
    optional(rest, "set_epoch")(5)
    assert told == [5]
    assert len(part) == 40 - sum(lengths) > 0 and part[0]["image"].unique().numel() == 1
    table = partial(ImageTable, table=write_table(write_images(tmp_path, count=4)), split="split", image_size=8)
    parts = {"folder": partial(ImageFolder, root=tmp_path, image_size=8), "table": table}
    rest, part = split(mixed(True, parts), 0)
    assert rest.mixture.lengths == (8, 8) and len(part) == 4


class Named(ArrayDataset):
    """Its `read_batch` adds a field."""

    def __getitem__(self, index):
        return super().__getitem__(index)

    def read_batch(self, indices, out, random):
        super().read_batch(indices, out, random)
        out["name"] = [f"sample {index}" for index in indices.tolist()]


def named(train):
    images = np.zeros((4, 8, 8, 3), np.uint8)
    return Named(images, [0, 1, 0, 1], classes="ab", mean=[0.5] * 3, std=[0.5] * 3, train=train)


def test_a_field_that_a_part_adds_has_none_in_the_rows_of_other_parts():
    mix = mixed(True, PARTS | {"c": named})
    with WorkerLoader(mix, 4, sampler=[40, 3, 43, 31], seed=0, num_workers=1) as loader:
        (batch,) = loader
    assert batch["name"] == ["sample 0", None, "sample 3", None]
    assert batch["label"].tolist() == [0, 1, 1, 1]


def test_a_field_that_cannot_be_joined_is_refused_in_a_sentence(monkeypatch):
    monkeypatch.setattr(Named, "read_batch", lambda self, indices, out, random: out.update(name="c"))
    with refused("data.parts.c: .*'name'"):
        read_batch(mixed(True, {"c": named}), [0])


def test_a_mixture_prepares_new_images_as_the_part_does_whose_test_set_is_used():
    parts = {"a": arrays, "b": partial(arrays, test_transform=lambda image: 255 - image)}
    image = np.full((8, 8, 3), 10, np.uint8)
    for tested, value in (("a", 10), ("b", 245)):
        rest, part = split(mixed(True, parts, test=tested), 0.2)
        for mix in (rest, part):
            assert offers(mix, "prepare") and np.unique(mix.prepare(image)).tolist() == [value]
    assert not offers(mixed(True, {"c": sample_by_sample}, classes="ab"), "prepare")


@pytest.mark.parametrize(
    ("parts", "keys", "sentence"),
    [
        ({}, {}, "data.parts"),
        (PARTS, {"weights": {"a": 1}}, "data.weights={'a': 1}"),
        (PARTS, {"weights": {"a": 1, "b": 1, "c": 1}}, "a, b"),
        (PARTS, {"test": "c"}, "data.test=c"),
        (PARTS | {"c": lambda train: ChainDataset([])}, {}, "data.parts.c is a stream"),
        (
            PARTS | {"c": partial(arrays, classes="ac")},
            {},
            "data.parts.c has classes that data.parts.a does not have, c",
        ),
        (
            PARTS | {"c": partial(arrays, classes="ac")},
            {"classes": ["a", "b"]},
            "data.parts.c has classes that data.classes does not have, c",
        ),
        (
            PARTS | {"c": partial(arrays, side=9)},
            {},
            "data.parts.c has another sample_spec (as by image_size) than a: ",
        ),
    ],
)
def test_parts_that_do_not_fit_together_are_refused_in_a_sentence(parts, keys, sentence):
    with refused(re.escape(sentence)):
        mixed(True, parts, **keys)


def test_parts_with_different_classes_are_told_of_data_classes_which_works():
    parts = {name: partial(arrays, classes=name) for name in ("ab", "ac")}
    with refused(r"set data\.classes="):
        mixed(True, parts)
    assert mixed(True, parts, classes="abc").classes == "abc"


def test_a_sampler_beside_the_weights_of_a_mixture_is_refused(tmp_path):
    with refused(r"sampler: data.weights give the order"):
        train(tmp_path, MIXTURE, "sampler._target_=torch.utils.data.SubsetRandomSampler +sampler.indices=[0]")
