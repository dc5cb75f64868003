"""What a dataset may offer counts only with the documented type and length; else a warning names it."""

import sys
from copy import copy
from types import SimpleNamespace
from zlib import crc32

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from data import OF_SAMPLES, OPTIONAL, not_used, optional, takes
from data.mix import Mix
from data.subset import Subset, split, unaugmented
from loaders import LoaderConfigError, WorkerLoader
from tests.configs import IMAGES, train
from tests.data.fakes import Foreign
from tests.data.reading import refused
from tests.training.extensions import Images
from training import checks
from training.checks import check_labels, checksum_of_labels
from training.dry_run import direction_of
from training.optimizer import set_optimizer_mode
from training.tasks import Classification, Task, classes_of

COUNT = Foreign.count
FITTING = {
    "classes": ["a", "b"],
    "class_to_idx": {"a": 0, "b": np.int64(1), "another": 7},
    "mean": (0.5, 0.4),
    "std": torch.ones(2),
    "labels": [0, 1] * 3,
    "is_val": np.arange(COUNT) < 2,
    "val_groups": np.array(list("aabbcc")),
    "stratify": True,
    "fits_task": "classification",
    "sample_ids": lambda: np.arange(COUNT),
    "path": lambda index: f"{index:d}.png",
    "prepare": lambda image: image,
    "without_augmentation": lambda: [0] * COUNT,
    "set_epoch": lambda epoch: None,
    "split_parts": lambda fraction: ([], []),
    "mixture": Mix({"a": [0]}, None, "a", {}).mixture,
}
FOREIGN = st.one_of(
    st.sampled_from(
        [False, True, 0, 2, 0.3, "text", "", b"x", lambda: 0, lambda one: 0, lambda one, two: 0, object()]
    ),
    st.lists(st.integers(0, 1), min_size=COUNT + 1),
    st.just([[0], [1, 2]] * (COUNT // 2)),
    st.builds(np.zeros, st.sampled_from([(), (COUNT + 1,), (COUNT, 2)])),
    st.dictionaries(st.text().filter(str.strip), st.integers(), max_size=2),  # a blank name of a class is refused
)


def test_each_name_counts_with_a_value_of_its_kind_also_in_a_subset():
    assert FITTING.keys() == OPTIONAL.keys()
    for name, value in FITTING.items():
        dataset = Foreign(**{name: value})
        assert optional(dataset, name) is not None and not not_used(dataset)
        assert optional(Foreign(), name) is None
    dataset = Foreign(**FITTING)
    some = Subset(dataset, np.array([1, 4]))
    assert [*optional(some, "labels")] == [1, 0] and optional(some, "path")(1) == "4.png"


def test_columns_of_pandas_are_read_by_places_or_by_the_numbers_of_their_classes():
    series = pytest.importorskip("pandas").Series
    dataset = Foreign(classes=series(["dog", "cat"], [1, 0]), labels=series(range(COUNT), range(7, 7 + COUNT)))
    assert optional(dataset, "classes") == ("cat", "dog")
    assert [*optional(dataset, "labels")] == [*range(COUNT)] and optional(dataset, "labels")[0] == 0
    dataset.classes = series(["dog", "cat"], [4, 7])
    assert optional(dataset, "classes") == ("dog", "cat")


@pytest.mark.parametrize("classes", [np.array([["cat"], ["dog"]]), [["cat"], ["dog"]], ["cat", "dog", ""]])
def test_a_name_that_is_a_list_or_empty_is_refused(classes):
    with refused("classes has .* as a name: give a flat list"):
        optional(Foreign(classes=classes), "classes")


class Forwards:
    """A dataset around another one, in another order."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __getattr__(self, name):
        return getattr(self.dataset, name)

    def __len__(self):
        return len(self.dataset)


class Inner(Foreign):
    """Has all methods that read samples."""

    def path(self, index):
        return f"{1 - index}.png"

    def prepare(self, image):
        return image

    def sample_ids(self):
        return np.arange(len(self))

    def without_augmentation(self):
        return copy(self)

    def split_parts(self, fraction):
        return []


@pytest.mark.parametrize("name", OF_SAMPLES)
def test_a_method_that_getattr_forwards_to_a_dataset_inside_is_not_used_as_it_may_be_of_other_samples(name):
    inner = Inner()
    dataset = Forwards(inner)
    assert optional(inner, name) is not None
    assert optional(dataset, name) is None
    assert f"Forwards.{name} is not used" in not_used(dataset)[name]
    setattr(dataset, name, getattr(inner, name))
    assert optional(dataset, name) is not None and name not in not_used(dataset)


@given(st.dictionaries(st.sampled_from(sorted(OPTIONAL)), FOREIGN, min_size=1))
def test_an_attribute_of_another_kind_is_never_used_and_always_named(attributes):
    dataset = Foreign(**attributes)
    unfit = [name for name in attributes if optional(dataset, name) is None]
    sentences = not_used(dataset)
    assert sentences.keys() == {*unfit}
    assert all(sentences[name].startswith(f"Foreign.{name} is not used: ") for name in unfit)
    for name in unfit:
        delattr(dataset, name)
    plain = Foreign(**vars(dataset))
    given_all = Foreign(**attributes)
    for use in (unaugmented, checksum_of_labels, lambda dataset: Subset(dataset, np.arange(2))[1]):
        assert type(use(given_all)) is type(use(plain))
    if {"is_val", "labels", "val_groups", "stratify", "split_parts", "without_augmentation"} & {*unfit} == {
        *attributes
    }:
        assert [len(side) for side in split(given_all, 0.5)] == [len(side) for side in split(Foreign(), 0.5)]


class Common(Images):
    """Uses every name for something of its own."""

    def __init__(self, train, **options):
        super().__init__(train, **options)
        self.is_val = not train
        self.path = "images/"
        self.prepare = True
        self.mixture = 0.3
        self.class_to_idx = {name: number + 1 for number, name in enumerate(self.classes)}
        self.stratify = "yes"
        self.val_groups = 5
        self.fits_task = self.sample_ids = self.split_parts = self.set_epoch = 1

    def labels(self):
        raise NotImplementedError

    mean = std = labels

    def without_augmentation(self, image):
        raise NotImplementedError


@pytest.mark.parametrize("error", [AttributeError, KeyError, OSError])
@pytest.mark.parametrize("name", OPTIONAL)
def test_a_property_that_fails_is_refused_with_its_error_and_not_taken_for_none(name, error):
    def fail(self):
        raise error("patient")

    dataset = type("Table", (Foreign,), {name: property(fail)})()
    for use in (not_used, lambda dataset: optional(dataset, name)):
        with refused(rf"Table\.{name} raised {error.__name__}.*patient"):
            use(dataset)


def test_a_dataset_that_uses_all_names_for_something_else_trains_as_one_without_them(tmp_path, caplog):
    settings = "data.val_fraction=0.25 train.epochs=1"
    plain = train(tmp_path / "plain", IMAGES, settings)
    assert "is not used" not in caplog.text
    summary = train(tmp_path / "common", IMAGES, settings, f"data._target_={__name__}.Common")
    assert summary["test_loss"] == plain["test_loss"]
    said = [text for text in caplog.messages if "is not used" in text]
    assert sorted(sentence.split()[0] for sentence in said) == sorted(
        f"Common.{name}" for name in {*OPTIONAL} - {"classes"}
    )


@given(
    st.lists(st.text().filter(str.strip), min_size=1, max_size=4, unique=True),
    st.sampled_from([int, str, np.int64]),
    st.randoms(),
)
def test_classes_are_names_in_the_order_of_their_numbers_in_any_form(names, number, random):
    order = [*range(len(names))]
    random.shuffle(order)
    by_number = {number(each): names[each] for each in order}
    by_name = {name: each for each, name in by_number.items()}
    as_json = {str(each): name for each, name in by_number.items()}
    for classes in (names, np.array(names, object), by_number, as_json, dict.fromkeys(names).keys()):
        assert classes_of(Foreign(classes=classes)) == tuple(names)
    if {*names} <= {*map(str, order)}:  # which may be numbers with names, too
        return
    assert classes_of(Foreign(classes=by_name)) == tuple(names)
    for mapped in ({name: [0] for name in names}, {name: each + 1 for each, name in enumerate(names)}):
        with refused("`classes`"):
            classes_of(Foreign(classes=mapped))


@pytest.mark.parametrize("classes", [2, "ab", lambda: ["a"], {"a": 1}, {"a", "b"}, [True, False]])
def test_classes_of_another_kind_without_an_order_or_made_booleans_by_yaml_are_a_sentence(classes):
    with refused("`classes`|classes="):
        classes_of(Foreign(classes=classes))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("classes", ["ant", "bee", "bee"] * (COUNT // 3)),  # of each sample
        ("mean", np.full((8, 8, 3), 0.5)),  # a mean image
        ("prepare", lambda overwrite=False: None),  # a downloader's
        ("split_parts", lambda fraction=0.1: None),
        ("path", lambda index=0: "images"),
        ("path", lambda name: f"images/{name}.png"),
        ("path", {"train": "images"}.__getitem__),
        ("path", lambda index: None),
        ("path", lambda index: index.name),
    ],
)
def test_what_is_meant_for_something_else_is_not_used_and_named(name, value):
    dataset = Foreign(**{name: value})
    assert optional(dataset, name) is None and [*not_used(dataset)] == [name]
    assert [len(side) for side in split(dataset, 0.5)] == [len(side) for side in split(Foreign(), 0.5)]


@pytest.mark.parametrize(
    ("classes", "numbers", "agrees"),
    [
        (["0", "1", "10", "2"], {"0": 0, "1": 1, "10": 10, "2": 2}, False),  # sorted as texts
        ([0, 1, 10], {0: 0, 1: 1, 10: torch.tensor(2)}, True),
        (["crane", "ant", "crane"], {"crane": 2, "ant": 1}, True),
        (["tench", "goldfish"], {"n01440764": 1, "n01443537": 0}, True),  # of other names
        (None, {"0": 1}, True),
    ],
)
def test_numbers_of_classes_that_contradict_their_order_are_named(classes, numbers, agrees):
    assert (not not_used(Foreign(classes=classes, class_to_idx=numbers))) == agrees


def test_names_as_many_as_samples_may_have_two_that_are_equal():
    names = ("crane", "maillot", "crane", "ant", "bee", "cow")
    assert optional(Foreign(classes=names), "classes") == names
    assert optional(Foreign(classes=torch.tensor([3, 4])), "classes") == ("3", "4")


def test_a_path_that_would_take_a_name_counts_only_if_its_file_exists(tmp_path):
    dataset = Foreign(path=lambda index: f"{tmp_path}/{index}.png")
    assert optional(dataset, "path") is None
    (tmp_path / "0.png").touch()
    assert optional(dataset, "path")(1) == f"{tmp_path}/1.png" and not not_used(dataset)


@pytest.mark.parametrize("ids", [None, {}, 3, [1, 2], [[1], [2, 3]] * 3, iter("abcdef"), {*range(COUNT)}])
def test_sample_ids_that_are_no_array_with_an_entry_for_each_sample_are_a_sentence(ids):
    with refused(r"Foreign.sample_ids\(\) cannot be used .*; return an array"):
        split(Foreign(sample_ids=lambda: ids), 0.5)


def test_a_read_batch_without_sample_spec_is_a_sentence():
    reads = type("Reads", (Foreign,), {"read_batch": lambda dataset, name: None})()
    for use in (lambda: WorkerLoader(reads, 2, seed=0), lambda: Mix({"a": reads}, None, "a", {})):
        with pytest.raises(LoaderConfigError, match=r"Reads has read_batch, but no sample_spec\(\): define both"):
            iter(use())


def test_a_label_that_is_no_class_is_named_with_its_place():
    dataset = Foreign(classes=["a", "b"], labels=[0, 1, 0, 2, 0, 1])
    with refused(r"labels\[3\] of Foreign is 2: .*0 to 1"):
        check_labels(dataset, Classification(dataset))


@pytest.mark.parametrize("dtype", ["u1", "i8", "f4"])
def test_labels_of_very_many_numbers_are_compared_by_their_bytes(dtype, monkeypatch):
    monkeypatch.setattr(checks, "MOST_AS_TEXT", 10)
    masks = np.zeros((COUNT, 2, 4), dtype)
    same = np.zeros((COUNT, 4, 2), dtype).swapaxes(1, 2)
    assert checksum_of_labels(Foreign(labels=masks)) == checksum_of_labels(Foreign(labels=same))
    masks[2, 1, 3] = 1
    assert checksum_of_labels(Foreign(labels=masks)) != checksum_of_labels(Foreign(labels=same))


@pytest.mark.parametrize("dtype", ["i8", "datetime64[D]", "datetime64[ns]", "timedelta64[s]", "U3", "O"])
def test_the_checksum_of_a_label_per_sample_is_the_one_of_earlier_checkpoints_however_many_there_are(
    dtype, monkeypatch
):
    monkeypatch.setattr(checks, "MOST_AS_TEXT", 2)
    labels = np.arange(COUNT).astype(dtype)
    found = checksum_of_labels(Foreign(labels=labels))
    assert found == crc32(str(labels.tolist()).encode())
    labels[[2, 3]] = labels[[3, 2]]
    assert checksum_of_labels(Foreign(labels=labels)) != found


def test_the_checksum_of_labels_that_are_sets_does_not_depend_on_the_order_of_the_sets():
    """Sets of texts have another order in each process; equal sets may have another order in one, too."""
    first, second = ({"a", "b", *map(str, range(count))} for count in (0, 50))
    second -= {str(number) for number in range(50)}
    labels = [[{8, 0}, {"x"}, first] * 2, [{0, 8}, {"x"}, second] * 2]
    assert len({checksum_of_labels(Foreign(labels=sets)) for sets in labels}) == 1


class Names:
    """An object of someone else, which uses a name for something of its own: in an attribute, or a property."""

    def __init__(self, name, value):
        vars(self)[name] = value

    def __call__(self, *arguments):
        return torch.zeros(len(arguments[0]))


def failing(name, kind):
    def fail(owner):
        raise kind("not yet")

    return type("Failing", (Names,), {name: property(fail)})("other", None)


OTHERS = [None, "text", "", 0.5, [1, 2], {}, object(), lambda: 0, lambda one, two: 0, torch.ones(3), np.ones(2)]


def of_someone_else(name):
    """Objects that have the name for something else."""
    return [*(Names(name, value) for value in OTHERS), failing(name, ValueError), failing(name, NotImplementedError)]


def test_a_setting_of_a_loss_counts_only_if_it_is_one_as_torch_has_it():
    labels = torch.tensor([0, 3, 1])
    for name in ("ignore_index", "reduction", "weight", "pos_weight"):
        for loss in of_someone_else(name):
            task = Task(None, loss=loss)
            assert task.ignored is None and task.scored_mask(labels) is None and task.loss_denominator(labels) is None
    assert Task(None, loss=Names("ignore_index", np.int64(3))).scored_mask(labels).tolist() == [True, False, True]


def test_a_direction_of_a_metric_counts_only_if_it_is_a_bool():
    def direction(metric, task):
        task = SimpleNamespace(metric="m", extra_scores={}, higher_is_better=task)
        return direction_of(SimpleNamespace(task=task, metrics=SimpleNamespace(metric_of=lambda name: metric)))

    for metric in of_someone_else("higher_is_better"):
        with refused("task.metric=m: say which is the best"):
            direction(metric, None)
        assert direction(metric, False) is False
    assert direction(Names("higher_is_better", np.False_), None) is False


def test_an_optimizer_that_uses_the_names_of_its_modes_for_something_else_is_left_alone():
    for value in (None, True, "text", 0.5, object()):
        optimizer = Names("train", value)
        optimizer.eval = value
        set_optimizer_mode("train", [optimizer, *of_someone_else("eval")])


@pytest.mark.skipif(sys.version_info < (3, 14), reason="a function of such annotations cannot be defined")
def test_annotations_may_name_what_is_not_imported():
    def path(index: OnlyOfTypeCheckers) -> OnlyOfTypeCheckers:  # noqa: F821
        return index

    assert takes(path, 0) and not takes(path)
