"""A validation split, which reads as its dataset does."""

import copy
import pickle
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from data import length_of
from data.classes import Labels, Relabelled, with_classes
from data.errors import DataError
from data.subset import Fold, Subset, count_shared, ends_of, estimated, hashed, sketch, split, unaugmented
from loaders import ResidentLoader, WorkerLoader, offers
from tests.data import fakes
from tests.data.fakes import Foreign
from tests.data.reading import read_batch, refused

arrays = partial(fakes.arrays, count=50, classes="abc")


def test_a_subset_reads_whole_batches_and_arrays_only_if_its_dataset_does_and_has_its_part_of_other_attributes():
    some = Subset(arrays(train=False), np.array([4, 7]))
    assert torch.equal(read_batch(some, [1, 0])["label"], torch.tensor([7 % 3, 4 % 3]))
    assert np.array_equal(some.arrays()["label"], some.labels)
    plain = Subset([10, 11, 12], np.array([2, 0]))
    assert [plain[0], plain[1], len(plain)] == [12, 10, 2]
    assert not offers(plain, "read_batch") and not offers(plain, "arrays")
    some.dataset.ids = np.arange(50)
    some.dataset.names = list(range(50))
    assert some.ids.tolist() == some.names == [4, 7] and some.classes == ("a", "b", "c")


class Offering:
    """A dataset with every optional method and attribute."""

    classes = np.array(["a", "b"])
    mean = torch.zeros(3)
    std = np.ones(3)

    def __init__(self):
        self.labels = pytest.importorskip("pandas").Series(np.arange(6) % 2)

    def __len__(self):
        return 6

    def __getitem__(self, index):
        return int(index)

    def path(self, index):
        return f"{index:d}.png"

    def prepare(self, image):
        return -image

    def will_read(self, indices):
        self.asked = indices.tolist()

    def without_augmentation(self):
        plain = Offering()
        plain.note = "plain"
        return plain

    def row_of(self, index):
        return index


def test_a_subset_has_every_optional_method_of_its_dataset_for_its_samples_and_names_the_others():
    nested = Subset(Subset(Offering(), np.array([1, 3, 5])), np.array([0, 2]))
    for some in (nested, pickle.loads(pickle.dumps(nested))):
        assert [some[0], some[1]] == [1, 5] and [some.path(0), some.path(1)] == ["1.png", "5.png"]
        assert some.prepare(7) == -7 and np.array_equal(some.labels, [1, 1])
        plain = some.without_augmentation()
        assert plain.note == "plain" and [plain[0], plain[1]] == [1, 5]
        some.will_read(np.array([1]))
        assert some.dataset.dataset.asked == [5]
        with pytest.raises(AttributeError, match=r"row_of\(\).*dataset\.row_of"):
            some.row_of(0)
    plain = Subset([1, 2, 3], np.array([0]))
    assert not any(hasattr(plain, name) for name in ("path", "will_read", "without_augmentation"))
    assert plain.prepare is None


def test_loaders_use_the_whole_batches_and_arrays_of_a_subset(caplog):
    dataset = Subset(arrays(), np.arange(7, 27))
    for copied in (dataset, copy.copy(dataset), pickle.loads(pickle.dumps(dataset))):
        epochs = []
        for loader in (WorkerLoader(copied, 20, seed=0), ResidentLoader(copied, 20, seed=0)):
            with loader:
                first, second = [batch["image"] for _ in range(2) for batch in loader]
            assert not torch.equal(first, second)  # augmented afresh
            epochs.append(torch.stack([first, second]))
        assert torch.equal(*epochs)  # both draw by row, as read_batch does
    assert not caplog.records  # such as that it is read only once


def test_an_attribute_that_is_set_on_a_subset_reaches_the_dataset_unless_it_is_the_subsets_own():
    dataset = arrays(train=False)
    dataset.level = 1
    outer = Subset(Subset(dataset, np.arange(9)), np.array([2, 3]))
    relabelled = with_classes(outer, "cba", "the network", "the set")
    relabelled.level = 2
    assert dataset.level == outer.level == relabelled.level == 2
    outer.note = "mine"
    outer.note = "mine, too"
    assert not hasattr(dataset, "note")


@given(st.sampled_from(["indices", "dataset", "field", "translation", "labels", "classes", "__len__", "_read_batch"]))
def test_an_attribute_that_a_subset_has_is_refused_also_if_its_dataset_has_it_too(name):
    for dataset in (Foreign(classes="ab", labels=[0, 1] * 3), Foreign(**{"classes": "ab", name: [0, 1] * 3})):
        some = Subset(dataset, np.arange(2))
        for wrapper in (some, Relabelled(dataset, Labels("ab", "ba", False), "label"), Subset(some, np.arange(1))):
            before = dict(vars(wrapper))
            if name in vars(wrapper) or hasattr(type(wrapper), name):
                with refused(rf"{type(wrapper).__name__}\.{name} cannot be set"):
                    setattr(wrapper, name, None)
            assert vars(wrapper) == before


@pytest.mark.parametrize("kind", ["list", "array", "tensor", "column"])
def test_values_per_sample_that_are_set_on_a_subset_reach_its_samples_in_the_dataset(kind):
    pandas = pytest.importorskip("pandas")
    kinds = {"list": list, "array": np.array, "tensor": torch.tensor, "column": pandas.Series}
    dataset = arrays()
    dataset.weights = before = kinds[kind]([1.0] * 50)
    outer = Subset(Subset(dataset, np.arange(40, 49)), np.array([3, 2]))
    outer.weights = kinds[kind]([0.25, 0.5])
    assert list(outer.weights) == [0.25, 0.5]
    assert [float(value) for value in dataset.weights] == [1.0] * 42 + [0.5, 0.25] + [1.0] * 6
    assert type(dataset.weights) is type(before) and before[42] == 1.0, "another object, which workers notice"
    for wrong in (3.0, [1.0] * 50):
        with refused("weights of 2 samples"):
            outer.weights = wrong


def test_tables_of_pandas_stay_tables_in_a_subset():
    pandas = pytest.importorskip("pandas")
    dataset = arrays()
    dataset.rows = pandas.DataFrame({"label": np.arange(50) % 3, "age": 0.5}, index=np.arange(50)[::-1])
    dataset.sites = pandas.DataFrame({"country": ["no", "se"]})
    dataset.number_of = pandas.Series({"cat": 0, "dog": 1})
    some = Subset(dataset, np.array([7, 4]))
    assert some.rows["label"].to_dict() == {0: 1, 1: 1} and some.rows.loc[1, "age"] == 0.5
    assert some.sites is dataset.sites and some.number_of["dog"] == 1


class Files:
    """Samples with names, which may belong to classes and groups: a group begins the name, a class ends it."""

    stratify = False

    def __init__(self, names, root="", has_groups=False, stratify=False):
        self.names = names
        self.root = root
        self.labels = np.array([int(name[-1]) for name in names])
        self.stratify = stratify
        if has_groups:
            self.val_groups = [name[:2] for name in names]

    def __len__(self):
        return len(self.names)

    def __getitem__(self, index):
        return self.names[index]

    def path(self, index):
        return f"{self.root}/{self.names[index]}"


FRACTIONS = st.sampled_from([0.05, 0.25, 0.5, 0.9])
FOLDS = st.integers(2, 6).flatmap(lambda folds: st.builds(Fold, st.integers(0, folds - 1), st.just(folds)))


def names(least, most):
    """Texts of which two stay apart if one letter differs; drawn from a seed, as drawing letters takes long."""

    def named(count, seed):
        random = np.random.default_rng(seed)
        letters = random.integers(97, 103, (count, 10), dtype=np.uint8)
        texts = [bytes(row).decode() for row in letters]
        return [f"{text[:2]}/{text[2:]}{random.integers(4)}" for text in texts]

    return st.builds(named, st.integers(least, most), st.integers(0, 9999)).map(lambda texts: [*dict.fromkeys(texts)])


def sides(dataset, part):
    """The names of the training and of the validation samples. part: a fraction, or a fold."""
    training, validation = split(dataset, part)
    assert {*training} | {*validation} == {*dataset.names} and len(training) + len(validation) == len(dataset)
    return {*training}, {*validation}


def groups(texts):
    return {text[:2] for text in texts}


@given(names(300, 400), names(1, 20), FRACTIONS | FOLDS, st.randoms())
def test_a_sample_stays_on_its_side_when_others_come_and_all_move(old, new, part, random):
    is_fold = isinstance(part, Fold)
    has_groups = is_fold and random.choice([True, False])
    training, validation = sides(Files(old, "/data/2023", has_groups), part)
    assert not has_groups or not groups(training) & groups(validation)
    mixed = [*{*old, *new}]
    random.shuffle(mixed)
    root = random.choice(["/else/where", "/data/2023", "where", "C:\\where"])
    again, validated = sides(Files(mixed, root, has_groups), part)
    assert training <= again and validation <= validated
    expected = len(mixed) / part.folds if is_fold else len(mixed) * part
    assert has_groups or abs(len(validated) - expected) < 5 * expected**0.5
    assert is_fold or validated <= sides(Files(mixed), 0.95)[1]


@given(names(20, 60), names(1, 9), FRACTIONS)
def test_groups_are_never_separated_and_stay_where_they_were(old, new, fraction):
    for is_stratified in (False, True):
        trained, validated = sides(Files(old, has_groups=True, stratify=is_stratified), fraction)
        assert not groups(trained) & groups(validated)
    trained, validated = sides(Files(old, has_groups=True), fraction)
    again, validated_again = sides(Files([*{*new, *old}], has_groups=True), fraction)
    moved = groups((trained & validated_again) | (validated & again))
    assert len(moved) <= 1, "only the one that kept a side from being empty"


@given(names(2, 60), FRACTIONS)
def test_no_side_is_empty_and_with_stratify_no_class_misses_a_side_that_should_have_half_a_sample(texts, fraction):
    training, validation = sides(Files(texts), fraction)
    assert training and validation
    try:
        training, validation = sides(Files(texts, stratify=True), fraction)
    except DataError:
        training, validation = {*texts}, set()
    for label in "0123":
        trained, validated = ([name for name in side if name[-1] == label] for side in (training, validation))
        count = len(trained) + len(validated)
        assert bool(trained) == bool(count)
        assert validated or count < 2 or fraction * count < 0.5


@given(names(100, 200), names(1, 9), st.sampled_from([0.1, 0.5]))
def test_a_stratified_sample_changes_sides_only_if_a_class_would_have_missed_one(old, new, fraction):
    mixed = [*{*new, *old}]
    before, after = (sides(Files(texts, stratify=True), fraction) for texts in (old, mixed))
    natural, natural_after = (sides(Files(texts), fraction) for texts in (old, mixed))
    for label in "0123":
        of_class = [
            {name for name in side if name[-1] == label} for side in (*before, *after, *natural, *natural_after)
        ]
        if all(of_class[4:]):
            assert of_class[0] <= of_class[2] and of_class[1] <= of_class[3]


def in_folds(dataset, folds):
    """The names of the validation samples of each fold."""
    parts = [sides(dataset, Fold(fold, folds))[1] for fold in range(folds)]
    assert sum(map(len, parts)) == len(dataset), "each sample validates once"
    return parts


@given(names(6, 60), st.integers(2, 6))
def test_no_fold_is_empty_nor_with_stratify_without_a_class_that_has_a_sample_for_each(texts, folds):
    if len(texts) < folds:
        return
    assert all(in_folds(Files(texts), folds))
    try:
        parts = in_folds(Files(texts, stratify=True), folds)
    except DataError:
        assert all(sum(text[-1] == label for text in texts) < folds for label in "0123")
        return
    assert all(parts)
    for label in "0123":
        counts = [sum(name[-1] == label for name in part) for part in parts]
        assert all(counts) or sum(counts) < folds


def test_more_folds_than_samples_are_refused():
    with refused("data.folds=5 of 4 samples"):
        split([7] * 4, Fold(0, 5))


def test_a_class_that_is_a_single_group_is_trained_and_what_cannot_be_stratified_is_refused():
    dataset = Files(["aa/x0", "ab/y0", "bb/z1", "bb/w1"], has_groups=True, stratify=True)
    assert {"bb/z1", "bb/w1"} <= sides(dataset, 0.9)[0]
    with refused("each class has one sample or group"):
        split(Files(["aa/x0", "bb/z1"], stratify=True), 0.5)
    dataset.labels = np.zeros(4, np.float32)
    with refused(r"data.stratify=true.* there are float32 \(4,\)"):
        split(dataset, 0.5)
    column = Files(["aa/x0", "ab/x0", "bb/z1", "bb/w1"], stratify=True)
    expected = sides(column, 0.5)
    column.labels = column.labels[:, None]
    assert sides(column, 0.5) == expected


class Parted(Files):
    def split_parts(self, fraction):
        return self, self


def test_a_fold_that_no_class_could_fill_and_a_dataset_that_splits_itself_are_refused():
    texts = [f"{number:02}/{number}{label}" for label in range(10) for number in range(2)]
    empty = 0
    for seed in range(20):
        dataset = Files([f"{seed}{text}" for text in texts], stratify=True)
        try:
            assert all(in_folds(dataset, 5))
        except DataError as error:
            assert "no class has a sample or group for each fold" in str(error)
            empty += 1
    assert empty
    with refused(r"data.folds=3: Parted.split_parts\(fraction\) takes a share"):
        split(Parted(["a0", "b1"]), Fold(0, 3))


def test_samples_without_names_are_known_by_their_pixels_or_by_their_position_which_is_said(caplog):
    caplog.set_level("INFO")
    images = arrays().sample_ids()
    kept = {image["image"].numpy().tobytes() for image in split(arrays(), 0.2)[1]}
    for order in (np.arange(49, -1, -1), np.arange(1, 50)):
        other = arrays(False, images[order])
        assert {image["image"].numpy().tobytes() for image in split(other, 0.2)[1]} <= kept
    assert "ArrayDataset are known by sample_ids()" in caplog.text
    before = {*split(list(range(100, 200)), 0.3)[1]}
    assert {*split(list(range(100, 300)), 0.3)[1]} >= before and "known by their positions" in caplog.text
    caplog.clear()
    split(list(range(9)), Fold(0, 3))
    assert "known by their positions" in caplog.text


PARTS = st.lists(st.sampled_from("abc"), min_size=1, max_size=5).map("/".join)


@given(st.lists(PARTS), st.lists(PARTS))
def test_a_path_that_comes_changes_only_the_ends_of_those_that_it_collides_with(old, new):
    old, new = ([f"/data/{path}" for path in paths] for paths in (old, new))
    before = ends_of(old)
    assert all(path.endswith(end) and end.count("/") for path, end in zip(old, before, strict=True))
    assert len({*before}) == len({*old}), "each has its own"
    for path, end, grown in zip(old, before, ends_of(old + new), strict=False):
        assert grown == end or any(other.endswith(f"/{end}") and other != path for other in new)


def test_slices_of_scans_are_known_by_their_patients_also_when_patients_come():
    few, more = (
        [f"P{patient}/scan/{slice_:02}" for patient in range(count) for slice_ in range(12)] for count in (10, 15)
    )
    training, validation = sides(Files(few, "/data"), 0.25)
    again, validated = sides(Files(more, "/moved"), 0.25)
    assert training <= again and validation <= validated
    assert len({name[-2:] for name in validation} & {name[-2:] for name in training}) > 6


def test_a_dataset_whose_samples_all_validate_is_refused():
    with refused("all 6 samples of Foreign validate"):
        split(Foreign(is_val=np.ones(6, bool)), 0)


def test_samples_with_one_path_are_known_by_their_positions(caplog):
    caplog.set_level("INFO")
    assert all(split(Files(["videos.h5_0"] * 20), 0.3)) and "known by their positions" in caplog.text


def known_by(ids):
    return Foreign(count=len(ids), sample_ids=lambda: np.array(ids))


@given(st.integers(1, 400), st.integers(0, 400), st.integers(0, 200))
def test_a_sketch_counts_the_samples_that_two_sets_share(first, second, shared):
    common = [f"common {number}" for number in range(shared)]
    one = Subset(known_by([*common, *(f"one {number}" for number in range(first))]), np.arange(shared + first))
    other = known_by([f"other {number}" for number in range(second)] + common)
    assert count_shared(other, sketch(one)) == (shared, second)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("data.subset.KEPT", 128)
        kept = sketch(one)
        known, new = count_shared(other, kept)
        estimate = estimated(known, kept)
        assert abs(estimate - shared) <= 20 + shared / 2 and (known == 0 or shared) and (new == 0 or second)
        assert count_shared(one, kept) == (len(kept), 0), "all that it has"


@pytest.mark.parametrize(("samples", "fraction"), [(1, 0.5), (9, 1.0), (9, -0.1)])
def test_a_split_that_leaves_no_samples_is_refused(samples, fraction):
    with refused(rf"data.val_fraction={fraction}.*\b{samples}\b"):
        split([7] * samples, fraction)


@pytest.mark.parametrize("dtype", [str, object])
def test_rows_of_texts_have_hashes_that_do_not_depend_on_other_rows(dtype):
    rows = [["anna", "1"], ["bo", "2"]]
    hashes = hashed(np.array(rows, dtype)).tolist()
    assert hashed(np.array([*rows, ["a longer name", "3"]], dtype)).tolist()[:2] == hashes
    assert hashed(np.array([[*map(str, row)] for row in rows], object)).tolist() == hashes


def test_without_augmentation_of_another_length_as_a_wrapper_passes_it_on_is_not_used_which_is_said(caplog):
    dataset = Foreign(without_augmentation=lambda: [0] * 4)
    some = Subset(dataset, np.array([5]))
    assert unaugmented(dataset) is dataset and unaugmented(some)[0] == (5, 1)
    assert [*map(len, split(dataset, 0.5))] == [*map(len, split(Foreign(), 0.5))]
    assert "Foreign.without_augmentation() is not used: it returned 4 of 6 samples" in caplog.text


def test_without_augmentation_returns_another_dataset():
    dataset = Foreign()
    for result in (None, dataset):
        dataset.without_augmentation = lambda result=result: result
        with refused("without_augmentation"):
            split(dataset, 0.5)


def test_a_split_is_the_same_on_every_machine():
    assert split(list(range(20)), 0.3)[1].indices.tolist() == [3, 6, 9, 14, 16]
    assert split(Files(["aa/x0", "ab/y0", "cc/z1"]), 0.5)[1].indices.tolist() == [0, 1]


def test_samples_that_only_their_groups_tell_apart_are_not_taken_for_others_when_groups_come():
    numbers = np.repeat(np.arange(40), 5)
    earlier, earlier_val = split(Foreign(count=200, val_groups=numbers), 0.25)
    _, val = split(Foreign(count=225, val_groups=np.concatenate([np.full(25, 99), numbers])), 0.25)
    assert len(val) >= len(earlier_val) > 0 and count_shared(val, sketch(earlier))[0] == 0
    assert count_shared(earlier, sketch(earlier)) == (len(earlier), 0)


def test_a_length_that_is_no_number_is_named():
    class Half:
        def __len__(self):
            return 10 * 0.5

    with refused(r"len\(\) of Half"):
        length_of(Half())
