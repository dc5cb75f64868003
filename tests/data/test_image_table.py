"""Tables of images: what labels are, which rows are which part, and a sentence with the row for each mistake."""

import json
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from PIL import Image

from data.image_folder import ImageFolder
from data.image_table import ImageTable
from data.subset import split
from data.table import read_table
from tests.data.contract import TransformedDataset
from tests.data.fakes import write_images, write_table
from tests.data.reading import paths, read_batch, refused

PARTS = [f"{number}.jpg,{'ab'[number % 2]},{number // 2},{part}" for number, part in enumerate(["train"] * 4)]
HEADER = "image,label,g,s"


class TestTables(TransformedDataset):
    yaml = Path(__file__).parents[2] / "conf" / "data" / "image_table.yaml"

    @pytest.fixture
    def make(self, tmp_path):
        table = write_table(write_images(tmp_path, count=4))
        return lambda train, **keys: ImageTable(train, **{"table": table, "split": "split", "image_size": 32, **keys})


@pytest.fixture
def make(tmp_path):
    """Writes a table of six images, and returns a dataset of it."""
    for number in range(6):
        Image.new("RGB", (20, 20), (40 * number, 0, 0)).save(tmp_path / f"{number}.jpg")

    def make(content, train=True, name="table.csv", **keys):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return ImageTable(train, table=path, image_size=8, **keys)

    return make


def rows(*labels, header="image,label"):
    return "\n".join([header, *(f"{number}.jpg,{label}" for number, label in enumerate(labels))])


def test_a_table_of_a_folders_files_has_the_folders_samples(tmp_path):
    folder = ImageFolder(True, write_images(tmp_path, count=4), image_size=8)
    table = ImageTable(True, write_table(tmp_path), split="split", image_size=8)
    assert paths(table)[:8] == paths(folder)
    assert table.classes == folder.classes and table.mean == folder.mean
    ours, theirs = (read_batch(dataset, 8) for dataset in (table, folder))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize(
    ("labels", "classes", "fits", "values"),
    [
        ("b a b", "a b", "classification", [1, 0, 1]),
        ("10 9 -1", "-1 9 10", "classification", [2, 1, 0]),
        ("01 02 10", "01 02 10", "classification", [0, 1, 2]),
        ("NA a NA", "NA a", "classification", [0, 1, 0]),
        ("1 none", "1 none", "classification", [0, 1]),
        ("1.0 2. 1", "1 2", "classification", [0, 1, 0]),
        ("1_1 1_2", "1_1 1_2", "classification", [0, 1]),
        ("\u00b2 \u00b3", "\u00b2 \u00b3", "classification", [0, 1]),  # squares
        ("1 2.5 1e1", "", "regression", [1, 2.5, 10]),
        ("0,1 True,false", "x y", "multilabel", [[0, 1], [1, 0]]),
        ("0,1.5 2,0", "", "regression", [[0, 1.5], [2, 0]]),
    ],
)
def test_labels_are_classes_numbers_or_several_classes_by_their_columns(make, labels, classes, fits, values, caplog):
    columns = ["x", "y"] if "," in labels else ["label"]
    table = rows(*labels.split(), header=",".join(["image", *columns]))
    dataset = make(table, label=columns if "," in labels else "label")
    assert (dataset.classes, dataset.fits_task, dataset.labels.tolist()) == (tuple(classes.split()), fits, values)
    assert read_batch(dataset, len(values))["label"].tolist() == values
    assert [sample["label"].tolist() for sample in dataset] == values
    assert ("a class as any other" in caplog.text) == (not {"NA", "none"}.isdisjoint(dataset.classes))


def test_whole_numbers_are_no_classes_if_the_settings_say_so(make):
    assert make(rows(1, 2, 10), numbers=True).labels.tolist() == [1.0, 2.0, 10.0]


def test_parts_are_those_of_the_column_and_val_rows_are_the_test_set_if_there_is_no_other(make):
    named = "\n".join([HEADER, *PARTS, "4.jpg,b,4,val", "5.jpg,a,5,test"])
    train = make(named, split="s")
    test = make(named, False, split="s")
    assert [Path(test.path(0)).name, len(test)] == ["5.jpg", 1] and test.classes == train.classes
    rest, part = split(train, 0)
    assert len(rest) == 4 and Path(part.path(0)).name == "4.jpg" and part.dataset.transform.crop == "center_crop"
    with refused(r"val_fraction=0.5: ImageTable .*data.split"):
        split(train, 0.5)
    without = named.replace("5.jpg,a,5,test", "")
    assert len(make(without, split="s")) == 4 and len(make(without, False, split="s")) == 1
    assert len(make(named, False)) == 0, "what val_fraction splits off is the test set"
    assert make(named, group="g").val_groups.tolist() == [*"001145"]


def test_a_tables_samples_are_known_by_names_that_do_not_depend_on_where_its_folder_is(make, tmp_path):
    relative = make(rows("a", "b"))
    absolute = make(f"image,label\n{tmp_path}/0.jpg,a\n{tmp_path}/1.jpg,b")
    assert relative.sample_ids().tolist() == absolute.sample_ids().tolist()


def link(folder):
    """Makes names of the images 0 to 5: again/ of all, zero.jpg of one, and elsewhere/../ of other images."""
    write_images(folder / "other")
    for number in range(6):
        Image.new("RGB", (20, 20)).save(folder / "other" / f"{number}.jpg")
    (folder / "again").symlink_to(folder)
    (folder / "zero.jpg").symlink_to("again/0.jpg")
    (folder / "elsewhere").symlink_to(folder / "other" / "train")


def test_rows_that_name_one_file_by_links_are_one_sample_of_a_split(make, tmp_path):
    link(tmp_path)
    names = ["0.jpg", "1.jpg", "again/1.jpg", "zero.jpg", "./again/again/0.jpg"]
    ids = make("\n".join(["image,label", *(f"{name},a" for name in names)])).sample_ids().tolist()
    assert [ids.index(name) for name in ids] == [0, 1, 1, 0, 0]
    assert ids[:2] == make(rows("a", "a")).sample_ids().tolist(), "a link changes nothing but what it leads to"


def test_a_test_table_has_its_own_rows_and_folder_and_the_classes_of_the_training_rows(make, tmp_path):
    write_images(tmp_path / "other")
    (tmp_path / "other" / "test.csv").write_text("image,label\nval/cat/0.jpg,b\n")
    test = make(rows("a", "b"), False, test_table=tmp_path / "other" / "test.csv")
    assert test.path(0) == f"{tmp_path}/other/val/cat/0.jpg" and test.labels.tolist() == [1]
    (tmp_path / "other" / "test.csv").write_text("image,label\nval/cat/0.jpg,c\n")
    with refused(r"test.csv, row 2 .*\bc\b"):
        make(rows("a", "b"), False, test_table=tmp_path / "other" / "test.csv")


@pytest.mark.parametrize("train", [True, False])
def test_a_group_of_the_training_table_is_not_in_the_test_table(make, tmp_path, train):
    table = "image,label,g\n0.jpg,a,1\n1.jpg,b,2"
    keys = {"group": "g", "test_table": tmp_path / "test.csv"}
    for columns in ("image,label,g\n2.jpg,a,3\n3.jpg,b,4", "image,label\n2.jpg,a"):
        (tmp_path / "test.csv").write_text(columns)
        make(table, train, **keys)
    (tmp_path / "test.csv").write_text("image,label,g\n2.jpg,a,3\n3.jpg,b,2")
    with refused("g=2"):
        make(table, train, **keys)


def test_an_image_that_trains_and_is_evaluated_is_warned_of_once(make, tmp_path, caplog):
    parts = ["0.jpg,a,1,train", "0.jpg,b,2,train", "1.jpg,b,2,train", "./1.jpg,b,2,val", "2.jpg,a,1,test"]
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test.csv").write_text("image,label\n../0.jpg,a\n../3.jpg,b\n../1.jpg,b\n")
    link(tmp_path)
    for tested, keys, images in (
        (parts, {"split": "s"}, f"1 of them, such as {tmp_path}/1.jpg"),
        ([*parts[:3], "again/1.jpg,b,2,val"], {"split": "s"}, f"1 of them, such as {tmp_path}/1.jpg"),
        ([*parts[:3], "zero.jpg,b,2,val"], {"split": "s"}, f"1 of them, such as {tmp_path}/0.jpg"),
        ([*parts[:3], "elsewhere/../1.jpg,b,2,val"], {"split": "s"}, None),
        (parts[:3], {"test_table": tmp_path / "tests" / "test.csv"}, f"2 of them, such as {tmp_path}/0.jpg"),
        ([*parts[:3], parts[4]], {"split": "s"}, None),
        (parts[:3], {}, None),
    ):
        caplog.clear()
        for train in (True, False):
            make("\n".join([HEADER, *tested]), train, **keys)
        assert [images in line for line in caplog.messages] == ([] if images is None else [True])


@pytest.mark.parametrize(
    ("content", "keys", "sentence"),
    [
        (rows("a", ""), {}, "row 3: 'label'"),
        ("image,label\n0.jpg\n", {}, "row 2: 'label'"),
        ("image,label\n0.jpg,a,b\n", {}, "row 2 has more cells than the header: put double quotes"),
        ('image,label,note\n0.jpg,a,"two\nlines"\n9.jpg,b,\n', {}, "row 3: FOLDER/9.jpg"),
        (
            rows("a"),
            {"root": "/nowhere"},
            "row 2: /nowhere/0.jpg",
        ),
        (rows("a"), {"label": "kind"}, "'kind', only 'image', 'label': set data.image, data.label"),
        (rows("a,b", header="image,label,label"), {}, "'label' twice"),
        (rows("ä").encode("utf-16"), {}, "give a .csv in UTF-8"),
        ("", {}, "it has no rows"),
        ("image,label\n", {}, "it has no rows"),
        (rows(1.5, "nan"), {}, "row 3: 'label' is nan"),
        ("image;label\n0.jpg;3\n1.jpg;3,5", {}, "'label' has numbers with a decimal comma, such as 3,5"),
        (rows("x,1", header="image,x,y"), {"label": ["x", "y"]}, "row 2: 'x' is x"),
        (f"{HEADER}\n0.jpg,a,1,dev", {"split": "s"}, "row 2: s=dev"),
        (f"{HEADER}\n0.jpg,a,1,val", {"split": "s"}, "s=train"),
        (f"{HEADER}\n0.jpg,a,1,train\n1.jpg,a,1,test", {"split": "s", "group": "g"}, "g=1"),
        ('[{"image": "0.jpg", "label": "a"}, {"image": "1.jpg"}]', {"name": "t.json"}, "row 2: 'label'"),
        ('[{"image": "0.jpg", "label": ["a", "b"]}]', {"name": "t.json"}, "number; for several classes a column"),
        ('[{"image": {"bytes": "x"}, "label": "a"}]', {"name": "t.json"}, "Parquet file contains are for data=hugg"),
        ("image,label\n.,a", {}, "row 2: FOLDER"),
        (rows("a"), {"label": 3}, "'3'"),
    ],
)
def test_a_mistake_in_a_table_is_a_sentence_with_its_row(make, tmp_path, content, keys, sentence):
    with refused(re.escape(sentence.replace("FOLDER", str(tmp_path)))):
        make(content, **keys)


UNREADABLE = {
    "t.csv": [rows('"a'), bytes(range(256)), b"image,label\n\0\0,1\n", b"image,label\n0.jpg,caf\xe9\n"],
    "large.csv": [rows("a" * 200_000), rows("1" * 400, "2")],
    "t.json": [
        *("null", "3", "[1, 2]", "[" * 100_000, '[{"image": "0.jpg"', '[{"image": "\\ud800.jpg", "label": 1}]'),
        *('[{"image": ["0.jpg"], "label": {"a": 1}}]', '[{"image": "0.jpg", "label": ["a", "b"]}]'),
    ],
    "t.jsonl": ['{"image": "0.jpg"'],
    "t.parquet": [b"PAR1", b"PAR1xxxxPAR1"],
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_a_file_that_is_no_table_is_named(make, name):
    for content in UNREADABLE[name]:
        with refused(re.escape(name)):
            make(content, name=name)


def test_paths_of_windows_are_named(make, tmp_path):
    (tmp_path / "pets").mkdir()
    (tmp_path / "0.jpg").rename(tmp_path / "pets" / "0.jpg")
    with refused(r"does not exist .*write / in place of .* in the table"):
        make("image,label\npets\\0.jpg,a\n1.jpg,b")


def test_csv_of_every_kind_json_and_parquet_have_the_same_rows(tmp_path):
    expected = [[2, "0.jpg", "a"], [3, "1.jpg", "2"]]
    text = 'image,label,note\n0.jpg,a,"x,\ny"\n 1.jpg , 2,z\n,,\n\n'
    texts = {"a.csv": text.encode(), "b.csv": b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode()}
    texts |= {"c.csv": text.replace("x,", "x").replace(",", ";").encode(), "d.tsv": text.replace(",", "\t").encode()}
    records = [{"image": "0.jpg", "label": "a", "n": None}, {"image": "1.jpg", "label": 2}]
    lines = "\n\n".join(map(json.dumps, records)) + "\n"
    for name, content in (texts | {"e.json": json.dumps(records).encode(), "f.jsonl": lines.encode()}).items():
        (tmp_path / name).write_bytes(content)
        cells = read_table(tmp_path / name, ["image", "label"])
        assert cells[:, 1:].tolist() == [row[1:] for row in expected], name
        assert cells[:, 0].tolist() == {"e": [1, 2], "f": [1, 3]}.get(name[0], [2, 3])
    if find_spec("pyarrow"):
        from pyarrow import parquet, table

        columns = {"image": ["0.jpg", "1.jpg"], "label": ["a", "2"], "z": [0, 1]}
        parquet.write_table(table(columns), tmp_path / "g.parquet")
        assert read_table(tmp_path / "g.parquet", ["image", "label"])[:, 1:].tolist() == [row[1:] for row in expected]
        with refused("no column 'kind', only 'image', 'label', 'z'"):
            read_table(tmp_path / "g.parquet", ["image", "kind"])
