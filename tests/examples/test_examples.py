"""Each example trains from its own folder's configs, and a stopped run goes on to the same bits."""

import csv
import json
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import train as script
from examples.finetuning.images import balanced
from examples.finetuning.images import write as write_images
from examples.table.table import write as write_table
from examples.text.lines import write as write_lines
from tests.configs import CONF, DOORS, checkpoint, composed_by_hydra, differences, metrics, steps, untimed
from tests.training.doors import Stop
from training.stopping import Stopped

EXAMPLES = CONF.parent / "examples"
FINISHED = CONF.parent / "extras" / "finished"  # its scripts evaluate and predict, if they are there
PRETRAINED = CONF.parent / "extras" / "pretrained" / "conf"
WRITE = {"lines": lambda folder: write_lines(folder, shards=4), "table": write_table, "finetuning": write_images}
FEW = [
    *("train.max_steps=6", "train.epochs=3", "train.batch_size=16", "loader.num_workers=0", "train.log_interval=2"),
    *("loader=workers", "callbacks/standard=[best]", f"+callbacks.stop._target_={DOORS}.Stop"),
]
SMALL_VIEWS = ["data.length=64", "model.width=8"]
EXPERIMENTS = {  # the folder, settings of a small run, and the score that chooses the best checkpoint
    "segmentation": ("segmentation", ["data.length=64", "model.width=8"], "test_miou"),
    "simclr": ("simclr", SMALL_VIEWS, "test_nearest"),
    "moco": ("simclr", SMALL_VIEWS, "test_nearest"),
    "text": ("text", ["data.length=64"], "test_accuracy"),
    "lines": ("text", ["loader.streams=4", "train.steps_per_epoch=4"], "test_accuracy"),
    "gan": ("training_steps", [], "test_loss"),
    "distillation": ("training_steps", [], "test_accuracy"),
    "table": ("table", [], "test_mae"),
    "detection": ("detection", ["data.length=64", "model.width=8"], "test_loss"),
    "pictures": ("pictures", ["callbacks.pictures.rows=2"], "test_accuracy"),
    "finetuning": ("finetuning", ["model.pretrained=false", "data.image_size=32"], "test_accuracy"),
}


@pytest.fixture
def fork(tmp_path):
    """Trains an experiment of an example in the folder `run` of tmp_path, and returns its summary."""

    def train(experiment: str, *overrides: str, run: str = "run") -> dict[str, Any]:
        folder, small, _ = EXPERIMENTS[experiment]
        if experiment == "finetuning" and not PRETRAINED.exists():
            pytest.skip("extras/pretrained was deleted")
        where = f"hydra.searchpath=[file://{EXAMPLES}/{folder}/conf,file://{PRETRAINED}]"  # as --config-dir
        if experiment in WRITE:
            WRITE[experiment](tmp_path / "data")
            small = [f"data.root={tmp_path}/data", *small]
        given = {text.partition("=")[0]: text for text in (*FEW, *small, *overrides)}
        return script.run(composed_by_hydra(where, f"experiment={experiment}", *given.values()), tmp_path / run)

    return train


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_an_example_trains_and_after_sigterm_goes_on_to_the_same_bits(tmp_path, fork, experiment):
    summary = fork(experiment, run="whole")
    assert summary["score"] == EXPERIMENTS[experiment][2] and summary[summary["score"]] >= 0
    Stop.at, Stop.how = 3, "SIGTERM"
    with pytest.raises(Stopped):
        fork(experiment, "loader.num_workers=1")
    fork(experiment)
    whole, resumed = (checkpoint(tmp_path / name) for name in ("whole", "run"))
    assert whole["step"] == 6 and differences(whole, resumed) == []
    assert untimed(tmp_path / "whole") == untimed(tmp_path / "run")
    if experiment == "moco":
        assert all(whole["model"][key] == 6 for key in whole["model"] if key.endswith("num_batches_tracked"))
    logged = {"gan": {"generator_loss", "discriminator_loss"}, "distillation": {"distance"}}.get(experiment, set())
    assert all(logged <= line.keys() for line in steps(tmp_path / "run"))
    if FINISHED.exists() and experiment in ("text", "distillation"):
        evaluate = import_module("extras.finished.evaluate").main
        score = summary["score"].removeprefix("test_")
        assert evaluate([f"{tmp_path}/run/checkpoints/last.pt"])[score] == pytest.approx(summary[f"test_{score}"])


def test_a_table_is_learned_and_exported_to_onnx(tmp_path, fork):
    summary = fork("table", "train.max_steps=200", "train.epochs=20", "train.batch_size=64")
    assert summary["test_mae"] < 0.15  # of the spread of the prices
    if FINISHED.exists() and find_spec("onnxruntime") and find_spec("onnxscript"):
        path = import_module("extras.finished.export").main([f"{tmp_path}/run", "--format", "onnx"])
        session = import_module("onnxruntime").InferenceSession(path)
        assert session.run(None, {"features": np.zeros((3, 4), np.float32)})[0].shape == (3, 1)


def test_detection_learns_boxes_and_predict_writes_them(tmp_path, fork):
    settings = ["data.length=256", "model.width=12", "train.max_steps=80", "train.epochs=10", "train.batch_size=32"]
    summary = fork("detection", *settings)
    assert summary["test_found"] > 0.5
    if find_spec("torchmetrics") and find_spec("pycocotools"):
        assert summary["test_map_map_50"] > 0.3
    if FINISHED.exists():
        table = Path(import_module("extras.finished.predict").main([f"{tmp_path}/run"]))
        rows = [json.loads(line) for line in table.read_text().splitlines()]
        boxes = [box for row in rows for box in row["boxes"]]
        assert len(rows) == 32 and boxes and all(left < right and top < bottom for left, top, right, bottom in boxes)


def test_balanced_sampling_draws_rare_classes_as_often_as_others_and_an_early_stop_ends_the_run(tmp_path, fork):
    labels = np.repeat([0, 1, 2], [900, 90, 10])
    counts = np.bincount(labels[list(balanced(labels))])
    assert counts.sum() == 1000 and counts.min() > 250
    given = ["train.max_steps=null", "train.epochs=9", "optim.lr=1e-9", "callbacks.best.early_stop=1"]
    assert fork("finetuning", *given, "train.batch_size=128")["epochs"] == 2  # nothing was learned in the second


def test_a_callback_saves_a_grid_of_pictures_after_each_evaluation(tmp_path, fork):
    fork("pictures", "data=synthetic", "data.length=48", "train.epochs=2")
    files = sorted((tmp_path / "run" / "pictures").glob("*.png"))
    assert [file.name for file in files] == ["epoch-01.png", "epoch-02.png"]
    with Image.open(files[0]) as picture:
        assert picture.size[0] > 1000 and np.unique(np.asarray(picture)).size > 50


def test_segmentation_learns_shapes_and_predict_writes_masks(tmp_path, fork):
    summary = fork("segmentation", "train.max_steps=40", "train.epochs=10", "optim.lr=0.01")
    assert summary["test_miou"] > 0.35
    if not FINISHED.exists():
        return
    predict = import_module("extras.finished.predict").main
    table = Path(predict([f"{tmp_path}/run", "--out", f"{tmp_path}/masks"]))
    rows = list(csv.DictReader(table.open()))
    assert len(rows) == 16
    with Image.open(rows[0]["mask"]) as mask:
        assert mask.size == (32, 32) and np.asarray(mask).max() <= 2


def test_text_in_length_buckets_and_text_from_a_stream_is_learned(tmp_path, fork):
    summary = fork("text", "data.length=400", "train.max_steps=null", "train.epochs=6", run="buckets")
    assert summary["test_accuracy"] > 0.7
    assert [line["step"] for line in metrics(tmp_path / "buckets") if "test_accuracy" in line] == [*range(25, 151, 25)]
    settings = ["train.max_steps=null", "train.epochs=2", "train.steps_per_epoch=150", "loader.num_workers=1"]
    assert fork("lines", *settings, run="stream")["test_accuracy"] > 0.7
