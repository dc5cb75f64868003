"""data.streaming=true of the image datasets that have it: the same samples, in the order of their files."""

import re
from contextlib import suppress

import pytest
import torch
from tests.data.fakes import save_images, write_images, write_shards, write_tar

from data.errors import DataError
from tests.configs import NO_TRIALS, composed
from tests.training.test_resume import differences, state, stop
from train import run
from training.datasets import open_dataset
from training.stopping import Stopped

FORMS = ["tars", "parquet", "saved"]


def section(form: str, folder) -> dict:
    """The keys of data=webdataset or data=huggingface for two files of 6 training images and one of 4 test images."""
    write_images(folder / "images", count=6)
    if form == "tars":
        pytest.importorskip("data.webdataset", reason="a fork may have deleted it")
        return {**write_shards(folder), "classes": ["cat", "dog"]}
    pytest.importorskip("data.huggingface", reason="a fork may have deleted it")
    datasets = pytest.importorskip("datasets")
    for split, rows in datasets.load_from_disk(saved := save_images(folder)).items():
        for number in range(2):
            rows.shard(2, number).to_parquet(folder / "parquet" / f"{split}-{number:05}-of-00002.parquet")
    return {"path": str(saved if form == "saved" else folder / "parquet")}


def opened(form: str, train: bool, streaming: bool = True, **keys):
    """The dataset that train.py makes."""
    module, name = ("data.webdataset", "WebDataset") if form == "tars" else ("data.huggingface", "HuggingFace")
    pytest.importorskip(module, reason="a fork may have deleted it")
    return open_dataset({"_target_": f"{module}.{name}", "streaming": streaming, **keys}, train, 0)


def contents(samples) -> list:
    return [(sample["image"].tolist(), int(sample["label"])) for sample in samples]


@pytest.mark.parametrize("form", FORMS)
def test_a_stream_has_all_samples_and_goes_on_where_its_state_was_taken(tmp_path, form):
    keys = section(form, tmp_path) | {"image_size": 16}
    assert contents(opened(form, False, **keys)) == contents(opened(form, False, streaming=False, **keys))
    stream, other = (opened(form, True, **keys, flip=False, min_area=1.0) for _ in range(2))
    torch.manual_seed(0)
    whole, random = [], []
    for sample in stream:
        whole.append(sample)
        random.append((torch.get_rng_state(), stream.state_dict()))
    assert sorted(int(sample["label"]) for sample in whole) == [0] * 6 + [1] * 6
    for number in (1, 5, 6, 8):
        torch.set_rng_state(random[number - 1][0])
        other.load_state_dict(random[number - 1][1])
        assert contents(other) == contents(whole[number:])
        assert len(list(other)) == 12, "the next pass begins at the start"


@pytest.mark.parametrize("form", FORMS[:2])
def test_a_run_over_a_stream_is_resumed_with_another_number_of_workers_to_the_same_bits(tmp_path, form):
    keys = [f"data.{key}={value}" for key, value in section(form, tmp_path).items()]
    keys += [f"data={'webdataset' if form == 'tars' else 'huggingface'}", "data.streaming=true", "data.image_size=16"]
    keys += ["train.steps_per_epoch=5", "train.epochs=2", "train.batch_size=3", "loader.streams=2", *NO_TRIALS]
    for folder, workers in (("whole", 1), ("stopped", 0), ("stopped", 2)):
        with pytest.MonkeyPatch.context() as patch, suppress(Stopped):
            if workers == 0:
                stop(patch, 7, "SIGTERM")
            run(composed(*keys, f"loader.num_workers={workers}", "loader.shuffle_buffer=4"), tmp_path / folder)
    assert state(tmp_path / "whole")["step"] == 10
    assert differences(state(tmp_path / "whole"), state(tmp_path / "stopped")) == []


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"0.jpg": b"", "0.cls": b"cow"}, "SHARD/0.jpg has the label cow, which is not one of the 2 classes"),
        ({"0.jpg": b"", "0.cls": b"1"}, "SHARD/0.jpg cannot be read as an image (the file is empty)"),
    ],
)
def test_a_sample_that_cannot_train_is_named(tmp_path, files, words):
    shard = write_tar(tmp_path / "a.tar", files)
    with pytest.raises(DataError, match=re.escape(words.replace("SHARD", str(shard)))):
        list(opened("tars", True, urls=str(shard), classes=["cat", "dog"]))


@pytest.mark.parametrize(
    ("form", "keys", "words"),
    [
        ("tars", {"classes": None}, "data.classes is not set: a stream does not look for the classes"),
        ("tars", {"decode_on": "device"}, "data.decode_on=device: workers decode the samples of a stream"),
        ("saved", {"train_split": "train[:50%]"}, "data.train_split=train[:50%]: a stream is a whole split; set it"),
    ],
)
def test_settings_that_do_not_fit_a_stream_are_refused(tmp_path, form, keys, words):
    with pytest.raises(DataError, match=re.escape(words)):
        opened(form, True, **section(form, tmp_path) | keys)
