import json
import os
import re
from functools import partial
from pathlib import Path

import pytest
import torch

from extras.webdataset import tar_index
from extras.webdataset.tests.shards import write_shards, write_tar
from extras.webdataset.webdataset import WebDataset, WebDatasetStream, find_shards, read_classes
from tests.data.contract import TransformedDataset, assert_goes_on, assert_reads_as_the_folder, contents
from tests.data.fakes import write_images
from tests.data.reading import refused


class TestWebDataset(TransformedDataset):
    yaml = Path(__file__).parents[1] / "conf" / "data" / "webdataset.yaml"

    @pytest.fixture
    def make(self, tmp_path):
        return partial(WebDataset, **write_shards(tmp_path), image_size=32)


def test_shards_give_the_batches_of_the_folder(tmp_path):
    assert_reads_as_the_folder(partial(WebDataset, **write_shards(tmp_path)), tmp_path / "images")


def test_a_stream_has_all_samples_and_goes_on_where_its_state_was_taken(tmp_path):
    keys = {**write_shards(tmp_path, count=6), "classes": ["cat", "dog"], "image_size": 16}
    assert contents(WebDatasetStream(False, **keys)) == contents(WebDataset(False, **keys))
    make = partial(WebDatasetStream, True, **keys, transform="crop", min_area=1.0)
    assert_goes_on(make, [0] * 6 + [1] * 6)


@pytest.fixture
def jpeg(tmp_path):
    """The bytes of a JPEG."""
    return (write_images(tmp_path / "one") / "train" / "cat" / "0.jpg").read_bytes()


def test_urls_have_braces_and_wildcards(tmp_path):
    for name in ("a-009", "a-010", "b-009", "b-010"):
        (tmp_path / f"{name}.tar").touch()
    for url, names in (("{a,b}-0{09..10}", "a-009 a-010 b-009 b-010"), ("?-*[9]", "a-009 b-009")):
        expected = [f"{tmp_path}/{name}.tar" for name in names.split()]
        assert find_shards("data.urls", [f"{tmp_path}/{url}.tar"]) == expected


LABELS = [  # of each sample, data.classes, and what they become
    ([b"10", b"9", b"9\n"], None, (("9", "10"), [1, 0, 0])),  # numbers are sorted as numbers
    ([b"1", b"0", b"1"], ["dog", "cat"], (("dog", "cat"), [1, 0, 1])),
    (["é", "é", "a"], None, (("a", "é"), [1, 1, 0])),
    ([b"2.0", b"1.0"], None, (("1.0", "2.0"), [1, 0])),
]


def write_labels(folder, jpeg, labels):
    """A tar of an image for each label: bytes are a file .cls, texts are in a file .json."""
    files = {}
    for index, label in enumerate(labels):
        kind, text = ("cls", label) if isinstance(label, bytes) else ("json", json.dumps({"label": label}).encode())
        files |= {f"{index}.{kind}": text, f"{index}.JPG": jpeg}
    return str(write_tar(folder / "a.tar", files))


@pytest.mark.parametrize(("labels", "classes", "expected"), LABELS)
def test_labels_are_numbers_or_names_in_cls_or_json(tmp_path, jpeg, labels, classes, expected):
    dataset = WebDataset(True, write_labels(tmp_path, jpeg, labels), classes=classes, image_size=8)
    assert (dataset.classes, dataset.labels.tolist()) == expected


def test_a_tar_has_the_samples_that_webdataset_reads_and_what_is_left_out_is_said_in_one_line(tmp_path, jpeg, caplog):
    """webdataset's rule: a key ends at the first dot of a name, and kinds are in any case."""
    files = {"./0.jpg": jpeg, "./0.cls": b"\xef\xbb\xbfdog", "d.e/2.seg.png": jpeg, "d.e/2.json": b'{"label": "cat"}'}
    files |= {"d.e/2.tif": jpeg, "._A0.JPG": jpeg, "A0.JPG": jpeg, "._A0.CLS": b"dog", "A0.CLS": b"dog"}
    files |= {"0001.v2.jpg": jpeg, "0001.v2.cls": b"dog", ".ipynb_checkpoints/A0.jpg": jpeg, "a.jpg": None}
    shard = str(write_tar(tmp_path / "a.tar", files))
    keys = {"classes": ["cat", "dog"], "image_size": 8}
    for _ in range(2):  # also by the index that is kept
        dataset = WebDataset(True, shard, **keys)
        assert [dataset.path(row)[len(shard) :] for row in range(3)] == ["/./0.jpg", "/d.e/2.tif", "/A0.JPG"]
        assert dataset.labels.tolist() == [1, 0, 1]
    assert len(contents(WebDatasetStream(True, shard, **keys))) == 3
    said = [f"data.urls: files that are not read: 7, such as {shard}/0001.v2.cls"] * 2
    assert caplog.messages == said


def test_the_headers_of_a_shard_are_read_again_only_if_it_has_changed(tmp_path, jpeg, monkeypatch):
    shard = write_tar(tmp_path / "a.tar", {"0.jpg": jpeg, "0.cls": b"cat"})
    index = tmp_path / ".a.tar.index.npz"
    expected = WebDataset(True, str(shard))[0]["image"]
    with monkeypatch.context() as patch:
        patch.setattr(tar_index, "scan", None)
        assert torch.equal(WebDataset(True, f"{tmp_path}/*a*")[0]["image"], expected)  # * does not match the index
    write_tar(shard, {"0.cls": b"dog", "0.jpg": jpeg[:300]})
    for _ in range(2):
        dataset = WebDataset(True, str(shard))
        assert dataset.classes == ("dog",)
        os.truncate(index, 100)
    with refused(re.escape(f"{shard}/0.jpg cannot be read as an image")):
        dataset[0]
    shard.write_bytes(shard.read_bytes() + bytes(512))
    with refused(re.escape(f"{shard} has changed since its index was read")):
        dataset[0]
    shard.unlink()
    with refused(re.escape(f"{shard} cannot be read (")):  # not its image
        dataset[0]


def test_what_the_system_refuses_is_not_put_down_to_the_shard(tmp_path):
    with refused(r"cannot be read \(.*Is a directory"), tar_index.opened(str(tmp_path)):
        pass


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda tar: b"", "SHARD"),
        (lambda tar: b"hello" * 500, "SHARD"),
        (lambda tar: tar[:700], "SHARD cannot be read as an uncompressed tar (unexpected end of data)"),
        (lambda tar: tar.replace(b"0.cls", b"1.cls"), "uncompressed tar (the header at byte "),
        ({"a/0.jpg": b""}, "SHARD: the key a/0 has no label (.cls or .json); add it"),
        ({"0.cls": b"1", "0.jpg": None}, "SHARD: the key 0 has no image (.jpg or another); add it"),
        ({"0.jpg": b"", "0.json": b"{}"}, "SHARD: 0.json has no label (KeyError: 'label'); write"),
        ({"0.jpg": b"", "0.cls": b""}, "SHARD: 0.cls has no label"),
        ({"0.jpg": b"", "0.cls": b"\xff\xfe"}, "SHARD: 0.cls has no label"),
        ({"0.jpg": b"", "0.cls": b"ant"}, "SHARD/0.jpg has the label ant, which is not one of the classes cat"),
    ],
)
def test_a_damaged_shard_and_a_key_without_an_image_or_a_label_are_named_in_a_stream_too(tmp_path, jpeg, spoil, words):
    files = spoil if isinstance(spoil, dict) else {"0.jpg": jpeg, "0.cls": b"cat"}
    shard = write_tar(tmp_path / "a.tar", files)
    if callable(spoil):
        shard.write_bytes(spoil(shard.read_bytes()))
    for kind in (WebDataset, WebDatasetStream):
        with refused(re.escape(words.replace("SHARD", str(shard)))):
            list(kind(True, str(shard), classes=["cat"]))


def test_a_stream_is_told_that_the_files_of_a_key_lie_apart(tmp_path, jpeg):
    shard = str(write_tar(tmp_path / "a.tar", {"0.jpg": jpeg, "1.jpg": jpeg, "0.cls": b"cat", "1.cls": b"cat"}))
    assert len(list(WebDataset(True, shard, classes=["cat"]))) == 2
    with refused(r"the key 0 has no label .*beside one another: tar --sort=name"):
        list(WebDatasetStream(True, shard, classes=["cat"]))


def test_a_tar_without_a_file_is_named(tmp_path):
    with refused(re.escape(f"{tmp_path}/a.tar has no images")):
        WebDataset(True, str(write_tar(tmp_path / "a.tar", {})))


@pytest.mark.parametrize(
    ("classes", "labels", "numbers"),
    [
        (["1", "2", "3"], [b"1", b"3", b"2"], [0, 2, 1]),
        (["1", "0"], [b"0", b"1", b"1"], [1, 0, 0]),
        (["00", "01"], [b"01", b"00", b"00"], [1, 0, 0]),
        (["a", "b", "c"], [b"2", b"0", b"1"], [2, 0, 1]),
        (["cat", "dog"], [b"Dog", b"CAT", b"dog", b"cat"], [1, 0, 1, 0]),
    ],
)
def test_a_label_is_the_name_of_a_class_in_any_case_before_it_is_its_place_in_a_stream_too(
    tmp_path, jpeg, classes, labels, numbers
):
    keys = {"test_urls": write_labels(tmp_path, jpeg, labels), "classes": classes}
    for samples in (WebDatasetStream(False, **keys), map(WebDataset(False, **keys).__getitem__, range(len(labels)))):
        assert [sample["label"].item() for sample in samples] == numbers


def test_a_setting_that_names_no_file_is_refused():
    with refused(r"data.urls=none.tar: there is no file /.+/none.tar; set it to tar files such as"):
        WebDataset(True, "none.tar")
    for classes in ([], ["cat", "dog", "cat"]):
        with refused(rf"data.classes=.*{len(classes)} names"):
            read_classes(classes)
    for classes in ([True, False], 3, "/nowhere.txt"):  # the first is what YAML reads in yes and no
        with refused(re.escape(f"data.classes={classes}")):
            read_classes(classes)
    with refused(r"data.test_urls is not set"):
        WebDataset(False, "a.tar")
