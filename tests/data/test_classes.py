"""Classes are known by their names: labels of a dataset with another order are translated, other names are refused."""

import pickle
from collections import namedtuple
from unicodedata import normalize

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import IterableDataset

from data.array_dataset import ArrayDataset
from data.classes import alike, are_same, lists_among, numbers_in, with_classes
from data.images.crops import class_indices
from data.subset import Subset, unaugmented
from loaders import ResidentLoader, WorkerLoader, offers
from tests.data.reading import read_batch, refused

NAMES = ["apple", "Berry", "cherry", "Äpfel", "grüne Äpfel", "é", "10", "9"]
ABOUT = {"mean": [0.5], "std": [0.5]}


Sample = namedtuple("Sample", "image label")
Reversed = namedtuple("Reversed", "label image")


class Plain:
    """A dataset of someone else, with samples in the form `form`."""

    def __init__(self, names, labels, form):
        self.classes = names
        self.labels = labels
        self.form = form

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        label = self.labels[index]
        return {
            "tuple": (index, label),
            "list": [index, label],
            "namedtuple": Sample(index, label),
            "reversed": Reversed(label, index),
            "dict": {"image": index, "label": torch.tensor(label)},
            "column": {"image": index, "label": np.array([label])},
            "shares": (index, np.eye(len(self.classes))[label]),
        }[self.form]


class Stream(IterableDataset):
    def __init__(self, names, labels):
        self.classes = names
        self.samples = list(zip(range(len(labels)), labels, strict=True))

    def __iter__(self):
        return iter(self.samples)

    def state_dict(self):
        return {"place": 1}


def arrays(names, labels):
    images = np.arange(len(labels), dtype=np.uint8).reshape(-1, 1, 1, 1)
    return ArrayDataset(images, labels, classes=names, train=True, **ABOUT)


def respelled(name, way):
    return {"same": name, "upper": name.upper(), "lower": name.lower(), "NFD": normalize("NFD", name)}[way]


@st.composite
def brought(draw):
    """A network's classes, and a dataset's: some of them, in another order and spelling, with a label per sample."""
    classes = draw(st.permutations(NAMES))
    names = draw(st.lists(st.sampled_from(classes), min_size=2, unique=True))
    ways = draw(st.lists(st.sampled_from(["same", "upper", "lower", "NFD"]), min_size=len(names), max_size=len(names)))
    labels = draw(st.lists(st.integers(0, len(names) - 1), min_size=1, max_size=9))
    return classes, names, [respelled(*pair) for pair in zip(names, ways, strict=True)], labels


def translated(dataset, classes):
    return with_classes(dataset, classes, "the network", "the test set")


def label_of(sample):
    return sample["label"] if isinstance(sample, dict) else getattr(sample, "label", sample[1])


@given(brought(), st.sampled_from(["tuple", "list", "namedtuple", "reversed", "dict", "column", "shares"]))
def test_each_sample_keeps_the_name_of_its_class_whatever_the_order_and_the_case_of_the_names(case, form):
    classes, names, spelled, labels = case
    dataset = translated(Plain(spelled, labels, form), classes)
    if form == "shares" and len(names) < len(classes):
        with refused("a value for each of .*, and the network has the classes .*") as info:
            dataset[0]
        assert all(name in str(info.value) for name in [*classes, *spelled])
        return
    assert type(dataset[0]) is type(Plain(spelled, labels, form)[0])
    expected = [classes.index(names[label]) for label in labels]
    found = [np.asarray(label_of(sample)) for sample in map(dataset.__getitem__, range(len(labels)))]
    if form == "shares":
        assert all(label.shape == (len(classes),) and label.sum() == 1 for label in found)
        found = [label.argmax() for label in found]
    assert [label.item() for label in found] == expected
    assert list(dataset.labels) == expected and len(dataset) == len(labels)


@given(brought())
def test_labels_that_are_names_are_compared_as_the_names_of_classes_are(case):
    classes, names, spelled, labels = case
    numbers = class_indices(np.array([spelled[label] for label in labels]), classes, str, "")
    assert numbers.tolist() == [classes.index(names[label]) for label in labels]
    both = [*classes, "APPLE"]  # "Apple" may be either
    with refused("^0 has the label Apple, which is not one of the classes .*APPLE; correct it"):
        class_indices(np.array(["Apple"]), both, str, "correct it")


@given(brought())
def test_whole_batches_resident_arrays_subsets_and_streams_are_translated_as_samples_are(case):
    classes, names, spelled, labels = case
    expected = [classes.index(names[label]) for label in labels]
    stream = translated(Stream(spelled, labels), classes)
    assert [label for _, label in pickle.loads(pickle.dumps(stream))] == expected
    dataset = translated(arrays(spelled, labels), classes)
    for copied in (dataset, unaugmented(dataset), pickle.loads(pickle.dumps(dataset))):
        assert offers(copied, "read_batch") and read_batch(copied, len(labels))["label"].tolist() == expected
        assert copied.arrays()["label"].tolist() == expected
        last = Subset(copied, np.array([len(labels) - 1]))
        assert last.labels.tolist() == [last[0]["label"].item()] == expected[-1:]


def test_loaders_read_translated_batches():
    dataset = translated(arrays(["b", "a"], [0, 1, 1]), ["a", "b", "c"])
    for loader in (WorkerLoader(dataset, 3, seed=0, num_workers=1), ResidentLoader(dataset, 3, seed=0)):
        with loader:
            (batch,) = loader
        assert batch["label"].tolist() == [1, 0, 0]
    stream = translated(Stream(["b", "a"], [0, 1, 1]), ["a", "b"])
    assert stream.state_dict() == {"place": 1}


@given(brought(), st.data())
def test_a_class_that_the_network_does_not_have_is_refused_with_both_lists_if_a_sample_has_it(case, data):
    classes, names, spelled, labels = case
    spelled = [*spelled, "tomato"]
    unused = translated(arrays(spelled, labels), classes)
    assert unused.labels.tolist() == [classes.index(names[label]) for label in labels]
    for dataset in (arrays(spelled, [*labels, len(names)]), Stream(spelled, labels)):
        with refused("the test set has classes that the network does not have, tomato") as info:
            translated(dataset, classes)
        assert all(name in str(info.value) for name in [*classes, *spelled])


def test_a_dataset_with_the_same_order_or_without_names_is_returned_as_it_is():
    same = arrays(["A", "b"], [0, 1])
    for dataset, classes in ((same, ["a", "B"]), (same, None), ([(0, 1)], ["a"])):
        assert translated(dataset, classes) is dataset
    assert are_same(["a", "b"], ["B", "A"]) and not are_same(["a", "b"], ["a", "b", "c"])
    assert not are_same(["a", "A"], ["a", "a"])


def test_classes_with_equal_names_stay_apart():
    names = ["crane", "maillot", "crane", "maillot", "other"]
    assert numbers_in(names, names).tolist() == [0, 1, 2, 3, 4]
    assert numbers_in(names, [names[4], *names[:4]]).tolist() == [4, 0, 1, 2, 3]
    for one, other in ((names[2:], names), (names, names[2:])):  # which crane is it?
        found = numbers_in(one, other).tolist()
        assert [other[place] for place, number in enumerate(found) if number >= 0] == ["other"]


@pytest.mark.parametrize(
    ("classes", "found"),
    [
        (["Mass", "Edema|Mass", "Edema", "No finding"], ["Edema|Mass"]),
        (["a; b", "b; c", "c", "a"], ["a; b", "b; c"]),
        (["0", "0 16", "16", "16 0"], ["0 16", "16 0"]),
        (["maillot", "maillot, tank suit", "corn", "ear, spike"], []),  # of ImageNet
        (["ice cream", "ice", "cream", "small dog", "small cat"], []),
    ],
)
def test_names_that_seem_to_be_lists_of_classes_are_found(classes, found):
    assert lists_among(classes) == found


def test_names_that_differ_only_in_case_are_two_classes_if_the_network_has_both():
    dataset = translated(arrays(["A", "a"], [0, 1]), ["a", "A"])
    assert dataset.labels.tolist() == [1, 0]
    assert alike(["a", "b", "A", "é", normalize("NFD", "é"), "b"]) == ["a", "A", "é", normalize("NFD", "é")]
    with refused("does not have, CAT"):
        with_classes(arrays(["CAT"], [0]), ["Cat", "cat"], "the training set", "the test set")
    with refused("does not have, Ä"):
        translated(arrays(["Ä"], [0]), ["a"])


@given(st.sets(st.integers(0, 9), min_size=1).filter(lambda numbers: max(numbers) >= len(numbers)))
def test_numbers_that_are_no_places_in_the_datasets_own_names_are_refused(numbers):
    own = sorted(numbers)  # as sorted(set(labels)) gives them
    classes = [str(number) for number in range(10)]
    for dataset in (Plain([*map(str, own)], own, "tuple"), Stream([*map(str, own)], own)):
        with refused(f"the classes .*, 0 to {len(own) - 1}: "):
            [*with_classes(dataset, classes, "the network", "the test set")]


@pytest.mark.parametrize("label", [np.zeros((4, 4), int), {"boxes": 1}, 0.5, np.array([0, 1])])
def test_labels_that_have_no_class_are_refused_and_not_guessed(label):
    dataset = Plain(["b", "a"], [0], "tuple")
    dataset.__class__ = type("Odd", (Plain,), {"__getitem__": lambda self, index: (index, label)})
    with refused("cannot be translated"):
        translated(dataset, ["a", "b"])[0]


@given(st.permutations(range(3)), st.lists(st.integers(0, 1), min_size=3, max_size=3), st.sampled_from([int, bool]))
def test_integers_are_a_value_per_class_if_the_task_or_the_dataset_says_so_and_booleans_always_are(
    order, label, dtype
):
    class Kinds(Plain):
        def __getitem__(self, index):
            return index, np.array(label, dtype)

    dataset = Kinds([f"class {number}" for number in order], [0], "tuple")
    classes = ["class 0", "class 1", "class 2"]
    expected = [label[order.index(number)] for number in range(3)]
    assert with_classes(dataset, classes, "the network", "it", is_multilabel=True)[0][1].tolist() == expected
    dataset.fits_task = "multilabel"
    assert with_classes(dataset, classes, "the network", "it")[0][1].tolist() == expected
    if dtype is bool:
        del dataset.fits_task
        assert with_classes(dataset, classes, "the network", "it")[0][1].tolist() == expected
