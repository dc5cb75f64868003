"""Each example trains from its own folder's configs, and learns what it is about."""

import csv
import json
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import train as script
from examples.detection import detection
from examples.finetuning.images import Balanced
from examples.finetuning.images import write as write_images
from examples.mixture.noisy import write as write_mixture
from examples.segmentation import segmentation
from examples.table.table import write as write_table
from examples.text.lines import write as write_lines
from examples.training_steps import gan
from examples.video.video import write as write_videos
from tests.configs import CONF, checkpoint, composed_by_hydra, separate, steps
from training.config import ConfigError

EXAMPLES = CONF.parent / "examples"
FINISHED = CONF.parent / "extras" / "finished"  # its scripts evaluate and predict, if they are there
PRETRAINED = CONF.parent / "extras" / "pretrained" / "conf"
WRITE = {"lines": lambda folder: write_lines(folder, shards=4), "table": write_table, "finetuning": write_images}
WRITE["video"] = lambda folder: write_videos(folder, count=64)
WRITE["mixture"] = lambda folder: write_mixture(folder, clean=8, noisy=12)
FEW = separate(
    "train.max_steps=2 train.epochs=1 train.eval_steps=2 train.batch_size=16 train.log_interval=1 "
    "loader=workers loader.num_workers=0 callbacks/standard=[best]"
)
SMALL = "data.length=32 model.width=4"
EXPERIMENTS = {  # the folder, settings of a small run, and the score that chooses the best checkpoint
    "segmentation": ("segmentation", SMALL, "test_miou"),
    "simclr": ("simclr", SMALL, "test_nearest"),
    "moco": ("simclr", SMALL, "test_nearest"),
    "text": ("text", "data.length=64", "test_accuracy"),
    "lines": ("text", "loader.streams=4 train.steps_per_epoch=4", "test_accuracy"),
    "gan": ("training_steps", "", "test_loss"),
    "distillation": ("training_steps", "", "test_accuracy"),
    "table": ("table", "", "test_mae"),
    "detection": ("detection", SMALL, "test_loss"),
    "transforms": ("transforms", "", "test_accuracy"),
    "pictures": ("pictures", "callbacks.pictures.rows=2", "test_accuracy"),
    "mixture": ("mixture", "train.last_batch=keep", "test_accuracy"),
    "keypoints": ("keypoints", SMALL, "test_found"),
    "video": ("video", "model.width=4", "test_accuracy"),
    "finetuning": ("finetuning", "model.pretrained=false data.image_size=32", "test_accuracy"),
}


@pytest.fixture
def fork(tmp_path):
    """Trains an experiment of an example in the folder `run` of tmp_path, and returns its summary."""

    def train(experiment, *overrides):
        folder, small, _ = EXPERIMENTS[experiment]
        if experiment == "finetuning" and not PRETRAINED.exists():
            pytest.skip("extras/pretrained was deleted")
        where = f"hydra.searchpath=[file://{EXAMPLES}/{folder}/conf,file://{PRETRAINED}]"  # as --config-dir
        if experiment in WRITE:
            WRITE[experiment](tmp_path / "data")
            root = "data.parts.clean.root" if experiment == "mixture" else "data.root"
            small = f"{root}={tmp_path}/data {small}"
        given = {text.partition("=")[0]: text for text in (*FEW, *small.split(), *overrides)}
        return script.train_model(
            composed_by_hydra(where, f"experiment={experiment}", *given.values()), tmp_path / "run"
        )

    return train


def test_the_mean_iou_leaves_out_pixels_that_are_no_class():
    outputs = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(32).reshape(2, 4, 4) % 3
    labels[:, 2:] = 255
    scores = []
    for rows in (slice(None), slice(2)):
        metric = segmentation.MeanIoU(num_classes=3)
        metric.update(outputs[:, :, rows], labels[:, rows])
        scores.append(metric.compute())
    assert scores[0] == scores[1]


@pytest.mark.parametrize("some", [True, False])
def test_images_without_a_box_have_a_finite_loss_and_no_score(some):
    """All images of a batch, or all but one: their boxes are an empty tensor of one dimension, or of two."""
    box = {"boxes": torch.tensor([[8.0, 8, 20, 24]]), "labels": torch.tensor([1])}
    empty = {"boxes": torch.tensor([]), "labels": torch.tensor([])}
    labels = [box if some else empty, empty, {"boxes": torch.zeros(0, 4), "labels": torch.zeros(0, dtype=torch.long)}]
    task = detection.Detection(detection.Squares(train=False))
    outputs = torch.randn(3, 7, 8, 8, requires_grad=True)
    loss = task.loss(outputs, labels)
    loss.backward()
    assert loss.isfinite() and outputs.grad.isfinite().all()
    assert task.scored_mask(labels).tolist() == [some, False, False]
    assert task.all_scores(outputs, labels)["found"].isfinite().all()


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_an_example_trains_and_finishes(tmp_path, fork, experiment, caplog):
    summary = fork(experiment)
    assert "after the last checkpoint" not in caplog.text, "as the statistics of batch norm, in training mode"
    assert summary["score"] == EXPERIMENTS[experiment][2] and summary[summary["score"]] >= 0
    logged = {"gan": {"generator_loss", "discriminator_loss"}, "distillation": {"distance"}}.get(experiment, set())
    assert all(logged <= line.keys() for line in steps(tmp_path / "run"))
    if experiment == "moco":
        model = checkpoint(tmp_path / "run")["model"]
        assert {int(model[key]) for key in model if key.endswith("num_batches_tracked")} == {2}
    if experiment == "pictures":
        with Image.open(tmp_path / "run" / "pictures" / "epoch-01.png") as picture:
            assert picture.size[0] > 1000 and np.unique(np.asarray(picture)).size > 50
    if FINISHED.exists() and experiment in FINISH:
        FINISH[experiment](tmp_path / "run", summary)


def test_a_gan_computes_in_the_precision_of_the_run(fork, monkeypatch):
    dtypes = set()
    judged = gan.GAN.judged

    def noting(self, images, truth):
        if torch.is_grad_enabled():
            dtypes.add(self.model.discriminator(images).dtype)
        return judged(self, images, truth)

    monkeypatch.setattr(gan.GAN, "judged", noting)
    fork("gan", "train.precision=bf16")
    assert dtypes == {torch.bfloat16}


def test_a_teacher_of_the_same_classes_in_another_order_is_refused(tmp_path, fork):
    fork("distillation")
    file = tmp_path / "teacher.pt"
    state = checkpoint(tmp_path / "run")
    for classes in (state["classes"], state["classes"][::-1]):
        torch.save(state | {"classes": classes}, file)
        with nullcontext() if classes == state["classes"] else pytest.raises(ConfigError, match="has the classes"):
            fork("distillation", f"trainer.teacher={file}", "trainer.width=8", "train.resume=null")
    fork("distillation", f"trainer.teacher={tmp_path / 'run'}", "trainer.width=8", "train.resume=null")


def check_masks(run, summary):
    table = Path(import_module("extras.finished.predict").main([str(run)]))
    rows = list(csv.DictReader(table.read_text().splitlines()))
    with Image.open(rows[0]["mask"]) as mask:
        assert len(rows) == 8 and mask.size == (32, 32) and np.asarray(mask).max() <= 2


def check_boxes(run, summary):
    table = Path(import_module("extras.finished.predict").main([str(run)]))
    boxes = [json.loads(line)["boxes"] for line in table.read_text().splitlines()]
    assert len(boxes) >= 8 and (any(boxes) or summary["test_found"] < 0.5)
    assert all(left < right and top < bottom for some in boxes for left, top, right, bottom in some)


FINISH = {"segmentation": check_masks, "detection": check_boxes}
WHOLE = "train.max_steps=null"
LEARNED = {  # experiments, settings, the score, and the worst that it may be
    "table": ("train.max_steps=200 train.epochs=20 train.batch_size=64", "mae", 0.15),
    "detection": ("data.length=256 model.width=12 train.max_steps=80 train.epochs=10", "found", 0.5),
    "segmentation": ("train.max_steps=40 train.epochs=10 optim.lr=0.01", "miou", 0.35),
    "keypoints": ("data.length=512 train.max_steps=160 train.epochs=10 train.batch_size=32", "found", 0.7),
    "video": (f"{WHOLE} train.epochs=8", "accuracy", 0.8),
    "text": (f"data.length=400 {WHOLE} train.epochs=6", "accuracy", 0.7),
    "lines": (f"{WHOLE} train.epochs=2 train.steps_per_epoch=150 loader.num_workers=1", "accuracy", 0.7),
}


@pytest.mark.slow
@pytest.mark.parametrize("experiment", LEARNED)
def test_an_example_learns_what_it_is_about(tmp_path, fork, experiment):
    settings, score, worst = LEARNED[experiment]
    summary = fork(experiment, "train.eval_steps=null", *settings.split())
    assert (summary[f"test_{score}"] > worst) != (score == "mae"), summary
    if FINISHED.exists() and experiment in FINISH:
        FINISH[experiment](tmp_path / "run", summary)


def test_balanced_sampling_draws_rare_classes_as_often_as_others():
    labels = np.repeat([0, 1, 2], [900, 90, 10])
    counts = np.bincount(labels[list(Balanced(labels))])
    assert counts.sum() == 1000 and counts.min() > 250
    assert list(Balanced(np.array([3, 3]))) in ([0, 0], [0, 1], [1, 0], [1, 1]), "other classes have no sample"
