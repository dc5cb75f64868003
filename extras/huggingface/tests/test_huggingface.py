import re
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest

from data.image_folder import ImageFolder
from extras.huggingface.huggingface import HuggingFace, HuggingFaceStream
from tests.data.contract import TransformedDataset, assert_goes_on, assert_reads_as_the_folder
from tests.data.fakes import write_images
from tests.data.reading import refused
from tests.infrastructure.later import Later

datasets = Later("datasets")
pytestmark = pytest.mark.skipif(find_spec("datasets") is None, reason="datasets is not installed")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def save_rows(tmp_path):
    """A function that saves a dataset of one split for each argument, which is a dictionary of columns."""
    file = str(write_images(tmp_path / "one") / "train" / "cat" / "0.jpg")

    def save(features=None, **splits):
        features = features and datasets.Features({"image": datasets.Image(), **features})
        rows = datasets.DatasetDict()
        for name, columns in splits.items():
            images = [{"bytes": None, "path": file}] * len(next(iter(columns.values())))
            rows[name] = datasets.Dataset.from_dict({**columns, "image": images}, features)
        rows.with_format("numpy", columns=["image"]).save_to_disk(tmp_path / "rows")
        return tmp_path / "rows"

    return save


def cat_or_dog():
    return {"label": datasets.ClassLabel(names=["cat", "dog"])}


def save_images(folder, count=2):
    """folder/images; folder/saved, where the package datasets has saved them; folder/parquet, two files a split."""
    write_images(folder / "images", count=count)
    splits = datasets.DatasetDict()
    for split, name in (("train", "train"), ("val", "test")):
        images = ImageFolder(split == "train", folder / "images")
        columns = {"image": [{"bytes": images.encoded(index)[0], "path": None} for index in range(len(images))]}
        features = datasets.Features({"image": datasets.Image(), **cat_or_dog()})
        splits[name] = datasets.Dataset.from_dict(columns | {"label": images.labels.tolist()}, features)
        for number in range(2):
            splits[name].shard(2, number).to_parquet(folder / "parquet" / f"{name}-{number:05}-of-00002.parquet")
    splits.save_to_disk(folder / "saved")


class TestHuggingFace(TransformedDataset):
    yaml = Path(__file__).parents[1] / "conf" / "data" / "huggingface.yaml"

    @pytest.fixture
    def make(self, tmp_path):
        save_images(tmp_path)
        return partial(HuggingFace, path=tmp_path / "saved", image_size=32)


@pytest.mark.parametrize("form", ["saved", "parquet", "images"])
def test_every_form_gives_the_batches_of_the_folder(tmp_path, form):
    save_images(tmp_path)
    assert_reads_as_the_folder(partial(HuggingFace, path=tmp_path / form), tmp_path / "images")


@pytest.mark.parametrize("form", ["saved", "parquet"])
def test_a_stream_has_all_samples_and_goes_on_where_its_state_was_taken(tmp_path, form):
    save_images(tmp_path, count=6)
    make = partial(HuggingFaceStream, True, tmp_path / form, image_size=16, transform="crop", min_area=1.0)
    assert_goes_on(make, [0] * 6 + [1] * 6)
    with refused(r"data.train_split=train\[:50%\]: a stream is a whole split; set it"):
        make(train_split="train[:50%]")


@pytest.mark.parametrize(
    ("labels", "classes"),
    [([10, 9, 10], ("9", "10")), (["dog", "cat", "dog"], ("cat", "dog")), ([True, False, True], ("False", "True"))],
)
def test_labels_without_names_are_the_sorted_values_of_the_training_split(save_rows, labels, classes):
    path = save_rows(train={"kind": labels, "other": [1, 2, 3]}, test={"kind": labels[2:], "other": [4]})
    train, test = (HuggingFace(train, path, image="image", label="kind") for train in (True, False))
    assert (train.classes, train.labels.tolist()) == (classes, [1, 0, 1])
    assert (test.classes, test.labels.tolist()) == (classes, [1])


def test_a_split_may_be_a_part_of_one_or_several(save_rows):
    path = save_rows(cat_or_dog(), train={"label": [0, 1, 1, 0]}, validation={"label": [1]}, test={"label": [0, 0]})
    for split, labels in {None: [0, 0], "train[:75%]": [0, 1, 1], "train[3:]+validation": [0, 1]}.items():
        assert HuggingFace(False, path, test_split=split).labels.tolist() == labels
    assert HuggingFace(True, path, train_split="train[3:]+validation").labels.tolist() == [0, 1]


@pytest.fixture
def save_files(tmp_path):
    """A function that writes a file for each argument, with a sample for each of the classes' names."""

    def save(form="parquet", **files):
        for name, classes in files.items():
            features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=classes)})
            columns = {"image": [{"bytes": b"", "path": None}] * len(classes), "label": [*range(len(classes))]}
            rows = datasets.Dataset.from_dict(columns, features)
            file = tmp_path / "files" / f"{name}.{form}"
            file.parent.mkdir(exist_ok=True)
            if form == "parquet":
                rows.to_parquet(file)
            else:
                rows.save_to_disk(tmp_path / name)
                (tmp_path / name / "data-00000-of-00001.arrow").rename(file)
        return tmp_path / "files"

    return save


@pytest.mark.parametrize("classes", [["bee", "cow"], ["cow", "ant", "bee"], ["ant", "bee", "cow", "dog"]])
@pytest.mark.parametrize("form", ["parquet", "arrow"])
def test_each_split_of_a_folder_keeps_the_names_of_its_own_classes(save_files, form, classes):
    path = save_files(form, train=["ant", "bee", "cow"], test=classes)
    for kind in (HuggingFace, HuggingFaceStream):
        train, test = (kind(is_train, path) for is_train in (True, False))
        assert [*train.classes] == ["ant", "bee", "cow"] and [*test.classes] == classes
    with refused(r"data.train_split=train\+test: these splits cannot be joined \("):
        HuggingFace(True, path, train_split="train+test")


def test_files_of_one_split_with_different_classes_are_refused_with_both_lists(save_files):
    path = save_files(**{"train-00": ["ant", "bee"], "train-01": ["bee", "cow"]})
    with refused(r"01.parquet has the classes .*'bee', 'cow'.*'ant', 'bee'"):
        HuggingFace(True, path)


def test_what_cannot_work_is_refused(save_rows):
    values = {"note": datasets.Value("float64"), "gaps": datasets.Value("int64")}
    values["tags"] = datasets.Sequence(datasets.Value("string"))
    train = {"label": [0, 1], "note": [0.5, 1], "gaps": [0, None], "tags": [["a"], ["a", "b"]]}
    unlabelled = {"label": [-1], "note": [0.5], "gaps": [0], "tags": [[]]}
    path = save_rows(cat_or_dog() | values, train=train, unlabelled=unlabelled)
    for arguments, words in (
        ({"image": "picture"}, "data.image=picture: set it to one of the columns label (ClassLabel), "),
        ({"label": "note"}, f"data.label=note: {path}, train split has float64 in this column, not integers"),
        ({"label": "tags"}, f"data.label=tags: {path}, train split has List("),
        ({"train_split": "trian"}, "data.train_split=trian has no rows; set it to one of the splits train, un"),
        ({"train": False, "test_split": "unlabelled"}, f"{path}, test split, row 0 has the label -1, which is"),
        ({"label": "gaps"}, f"data.label=gaps: {path}, train split, row 1 has no label"),
        ({"path": "some/dataset"}, "data.path=some/dataset cannot be loaded ("),
    ):
        with refused(re.escape(words)):
            HuggingFace(**{"train": True, "path": path} | arguments)


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("/fork/datasets/__init__.py", "which /fork/datasets/__init__.py hides: rename it"),
        (None, r"not installed, so Python took the folder /fork/datasets for it\); pip install"),
    ],
)
def test_a_package_or_a_folder_of_the_fork_that_hides_datasets_is_named(tmp_path, monkeypatch, file, words):
    hiding = ModuleType("datasets")
    hiding.__file__ = file
    hiding.__path__ = ["/fork/datasets"]
    monkeypatch.setitem(sys.modules, "datasets", hiding)
    with refused(words):
        HuggingFace(True, path=tmp_path)
