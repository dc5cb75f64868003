"""evaluate.py gives the scores that the run had; predict.py a row for each sample; export.py the same outputs."""

import csv
import json
import re
import shutil
import sys
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_dir
from PIL import Image
from torch import nn

from data.batch_transform import Normalize
from data.subset import Subset
from extras.finished import evaluate, export, predict
from extras.finished.evaluation import MISTAKES, Evaluation
from extras.finished.finished_run import FinishedRun, saying_what_has_moved
from extras.finished.samples import ImageFiles, Samples, batches_of, image_files, name_of
from tests.configs import EXTENSIONS, TWO_PARTS, composed, summary_of, train
from tests.data.fakes import write_fashion, write_images, write_table
from tests.data.reading import refused
from tests.training.test_resume import CONFIGS
from train import train_model
from training.checkpoint import best_or_newest
from training.config import ConfigError
from training.tasks import Classification, Multilabel
from training.trainer import Trainer

HERE = __name__.rpartition(".")[2]
ROOT = Path(__file__).resolve().parents[3]


class Table:
    """Rows of two tables of numbers, and a number to predict."""

    def __init__(self, train, length=64, **_):
        self.left, self.right = np.random.default_rng(train).normal(size=(2, length, 3)).astype(np.float32)

    def __len__(self):
        return len(self.left)

    def __getitem__(self, index):
        left = self.left[index]
        right = self.right[index]
        return {"left": left, "right": right, "y": left.sum() - right.sum()}


class InDicts(Table):
    def __getitem__(self, index):
        sample = super().__getitem__(index)
        return {**sample, "left": {"rows": sample["left"]}}


class MLP(nn.Module):
    """unlike: the exported program computes something else. decides: by values. counts: its samples. loops: over them.

    Takes a dict in place of `left`, too.
    """

    def __init__(self, unlike=False, decides=False, counts=False, loops=False, **_):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))
        self.unlike = unlike
        self.decides = decides
        self.counts = counts
        self.loops = loops

    def forward(self, left, right):
        if self.decides and left.sum() > 0:
            left = -left
        if isinstance(left, dict):
            left = left["rows"]
        if self.loops:
            left = torch.stack([row + 1 for row in left])
        if self.counts:
            left = left.reshape(int(left.shape[0]), 3)
        return self.layers(torch.cat([left, right], 1)) + (self.unlike and torch.compiler.is_exporting())


def test_a_stream_is_not_told_to_set_what_is_set(tmp_path):
    stream = f"data._target_={EXTENSIONS}.Stream train.steps_per_epoch=2 train.max_steps=1"
    train(tmp_path, stream)
    with refused("Stream is a stream, whose samples have no order: give files of images$"):
        predict.main([str(tmp_path)])


def test_a_run_is_opened_where_hydra_is_initialised_as_in_a_notebook(tmp_path):
    train(tmp_path, "train.epochs=1")
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        assert FinishedRun(tmp_path, ["device=cpu"]).step == 8
        assert compose("config", ["seed=3"]).seed == 3


class Crops:
    """Two crops of each file, of four classes; training samples are noise. Its attributes are arrays and tensors."""

    classes = np.array(["a", "b", "c", "d"])
    mean = torch.full((3, 1, 1), 0.5)
    std = np.full(3, 0.25)
    labels = torch.arange(40) % 4

    def __init__(self, train, **_):
        self.train = train

    def __len__(self):
        return 40

    def __getitem__(self, index):
        label = self.labels[index]
        image = torch.zeros(8, 8, 3, dtype=torch.uint8)
        image[2 * label : 2 * label + 2] = 200 + index
        return torch.randint(256, (8, 8, 3), dtype=torch.uint8) if self.train else image, label

    def path(self, index):
        return f"photo {index // 2}.jpg"

    def without_augmentation(self):
        return type(self)(False)


class Floats(Crops):
    """Images as floats, or rows of a table."""

    def __init__(self, train, shape=(3, 8, 8), **_):
        super().__init__(train)
        self.shape = shape

    def __getitem__(self, index):
        image, label = super().__getitem__(index)
        return image.reshape(*self.shape) / 255, label


class Heads(nn.Sequential):
    """Its outputs are logits (B, 4), or a dict of them, which the task DictOutputs takes."""

    def __init__(self, is_dict=False, **_):
        super().__init__(nn.Flatten(), nn.Linear(192, 4))
        self.is_dict = is_dict

    def forward(self, image):
        logits = super().forward(image)
        return {"logits": logits} if self.is_dict else logits


class DictOutputs(Classification):
    def loss(self, outputs, labels):
        return super().loss(outputs["logits"], labels)

    def all_scores(self, outputs, labels):
        return super().all_scores(outputs["logits"], labels)


class Several(Crops):
    """Images with any of two classes."""

    classes = ("a", "b")
    labels = torch.arange(80).reshape(40, 2) % 3 % 2

    def __getitem__(self, index):
        return torch.full((8, 8, 3), 6 * index, dtype=torch.uint8), self.labels[index]


class Unknown(Several):
    """Of some labels it is not known whether the sample has the class."""

    labels = torch.arange(80).reshape(40, 2) % 3 - 1


class Known(Multilabel):
    def scored_mask(self, labels):
        return labels >= 0


TABLE = f"data._target_={HERE}.Table task=regression task.inputs=[left,right] task.label=y model._target_={HERE}.MLP"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a run on images of 6 classes."""
    folder = tmp_path_factory.mktemp("trained")
    train(folder, "data.num_classes=6 data.test_length=20 train.epochs=1")
    return folder


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """The folder of a run on tables of numbers."""
    folder = tmp_path_factory.mktemp("table")
    train(folder, TABLE)
    return folder


@pytest.fixture
def photos(trained, tmp_path):
    """The run's test images as files, in two folders, and one that cannot be read."""
    folder = tmp_path / "photos"
    for below in "ab":
        (folder / below).mkdir(parents=True)
    for number, sample in enumerate(FinishedRun(trained).dataset("test")):
        Image.fromarray(sample["image"].numpy()).save(folder / "ab"[number % 2] / f"{number:02}.png")
    (folder / "a" / "00x.png").write_bytes(b"no image")
    (folder / "b" / "notes.md").touch()
    return folder


def predicted(folder, out, *inputs):
    path = predict.main([str(folder), *map(str, inputs), "train.batch_size=8", "--out", str(out)])
    with path.open(newline="", errors="surrogateescape") as file:
        return list(csv.DictReader(file))


def test_the_scores_are_those_of_the_run_and_all_is_written(trained, tmp_path, capsys):
    result = evaluate.main([str(trained / "checkpoints" / "last.pt"), "--out", str(tmp_path)])
    summary = summary_of(trained)
    assert (result["accuracy"], result["loss"]) == (summary["test_accuracy"], pytest.approx(summary["test_loss"]))
    assert json.loads((tmp_path / "evaluation.json").read_text()) == result
    assert len(result["classes"]) == 6 and result["samples"] == 20
    assert (tmp_path / "confusion.png").read_bytes().startswith(b"\x89PNG")
    assert result["mistakes"] == [] and not (tmp_path / "mistakes.png").exists()
    printed = capsys.readouterr().out
    assert "precision" in printed and "class 5" in printed and "of 20 samples (test)" in printed


@pytest.mark.skipif(not (ROOT / "extras/report").exists(), reason="needs extras/report")
def test_an_evaluation_is_on_the_page_of_the_run(tmp_path):
    train(tmp_path, "+callbacks.report={_target_: extras.report.report.Report, seconds: 0} optim.lr=1e-6")
    before = (tmp_path / "report.html").read_text()
    result = evaluate.main([str(tmp_path)])
    after = (tmp_path / "report.html").read_text()
    assert "precision" not in before and "The test set, by evaluate.py" in after
    assert all(f"{row['f1']:.3f}" in after and row["class"] in after for row in result["classes"])
    assert all(f"evaluation/test/{name}.png" in after for name in ("confusion", "mistakes"))
    evaluate.main([str(tmp_path), "data.test_length=3"])  # other data do not replace it
    page = (tmp_path / "report.html").read_text()
    assert "The test set, by evaluate.py<" in page and "The test set, by evaluate.py data.test_length=3<" in page
    assert json.loads((tmp_path / "evaluation/test-other/evaluation.json").read_text())["samples"] == 3
    assert json.loads((tmp_path / "evaluation/test/evaluation.json").read_text()) == result
    classes = {row["file"]: row["class"] for row in predicted(tmp_path, tmp_path / "p")}
    assert result["mistakes"] and all(classes[row["file"]] == row["predicted"] for row in result["mistakes"])


class Wide(nn.Sequential):
    def __init__(self, num_classes, in_channels, image_size, pretrained="wide", **_):
        width = {"narrow": 2, "wide": 4}[pretrained]
        super().__init__(nn.Flatten(), nn.Linear(in_channels * image_size**2, width), nn.Linear(width, num_classes))


class MeanTeacher(Trainer):
    """Evaluates an average of the weights that it keeps itself."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.ema_model = deepcopy(self.model)

    def train_step(self, batch):
        super().train_step(batch)
        for mean, weight in zip(self.ema_model.parameters(), self.model.parameters(), strict=True):
            mean.data.lerp_(weight.data, 0.5)


class Convolutional(nn.Sequential):
    """Its outputs are (B, K, 1, 1)."""

    def __init__(self, num_classes, in_channels, **_):
        super().__init__(nn.Conv2d(in_channels, num_classes, 3), nn.AdaptiveAvgPool2d(1))


@pytest.mark.parametrize(
    "overrides",
    [
        "model._target_=extras.finished.tests.test_finished.Convolutional",
        "trainer._target_=extras.finished.tests.test_finished.MeanTeacher",
        "callbacks.ema.decay=0.9",  # the mean of the weights was evaluated
        f"model._target_={EXTENSIONS}.FirstBatch callbacks.ema.decay=0.9",
        CONFIGS["what no state_dict has"],  # the average has another scale; the loss counts its calls
        f"+callbacks.averages._target_={EXTENSIONS}.Averages",
        f"{TWO_PARTS} train.epochs=2 +callbacks.alters._target_={EXTENSIONS}.Alters",
        "model._target_=extras.finished.tests.test_finished.Wide +model.pretrained=narrow",  # a text is no switch
        f"trainer._target_={EXTENSIONS}.Beside task.metric=loss",
        "schedule.every=epoch train.max_steps=1",  # fewer steps than epochs
    ],
)
def test_what_a_run_evaluated_is_evaluated(tmp_path, overrides):
    summary = train(tmp_path, overrides)
    network = FinishedRun(tmp_path / "checkpoints" / "last.pt")
    _, result, _ = evaluate.evaluate(network, network.dataset("test"))
    scores = {name: value for name, value in summary.items() if name.startswith("test_")}
    assert scores and scores == pytest.approx({name: result[name.removeprefix("test_")] for name in scores}, rel=1e-5)


def test_other_data_can_be_evaluated_by_single_keys_or_by_another_dataset(trained):
    assert len(FinishedRun(trained, ["data.test_length=3"]).dataset("test")) == 3
    for other, remark in (
        ("data.num_classes=7", "does not have, class 6"),
        ("model.size=9", "does not fit Sequ"),
    ):
        with refused(remark):
            FinishedRun(trained, [other])
    with refused("has no validation set"):
        FinishedRun(trained).dataset("val")
    for wrong in (
        "experiment=fashion_fast",
        "logger=[]",
        "+augment.mixup=1",
        "data=nothing",
        "data.root=[",
        "train.epochs=two",
        "trian.epochs=1",
        "=",
    ):
        with refused(rf"^{re.escape(wrong)} cannot be used|train\.epochs"):
            FinishedRun(trained, [wrong])


def test_a_value_is_read_as_train_py_reads_it(trained):
    assert FinishedRun(trained, ["train.init_from='plates #2'"]).config.train.init_from == "plates #2"
    with refused(r"train.init_from=plates #2 cannot be used .*type .*plates #2"):
        FinishedRun(trained, ["train.init_from=plates #2"])


def test_a_run_whose_training_folder_has_gained_a_class_is_used_with_the_classes_of_its_checkpoint(tmp_path, caplog):
    root = write_images(tmp_path / "images", classes=("cat", "dog"), count=4)
    small = "model=linear data.image_size=8 train.epochs=1 train.batch_size=4 loader.num_workers=0"
    train_model(composed("data=image_folder", f"data.root={root}", small), tmp_path / "run")
    before = evaluate.main([str(tmp_path / "run")])
    shutil.copytree(root / "train" / "dog", root / "train" / "ant")  # the first one by name
    after = evaluate.main([str(tmp_path / "run")])
    assert after == before and [row["class"] for row in after["classes"]] == ["cat", "dog"]
    assert "the training set has classes that the network does not have, which are left out: ant" in caplog.text
    assert evaluate.main([str(tmp_path / "run"), "--split", "train"])["samples"] == 8
    assert {row["class"] for row in predicted(tmp_path / "run", tmp_path / "p", root / "val")} <= {"cat", "dog"}


def test_the_best_checkpoint_is_used_else_the_newest(trained, tmp_path):
    assert best_or_newest(trained).name == "best.pt"
    shutil.copytree(trained / "checkpoints", tmp_path / "checkpoints", symlinks=True)
    newest = next((tmp_path / "checkpoints").glob("step-*.pt")).rename(tmp_path / "checkpoints" / "step-0000099.pt")
    assert best_or_newest(newest) == newest
    assert best_or_newest(tmp_path).resolve() == newest.resolve(), "best.pt leads nowhere now"
    newest.unlink()
    with refused(r"no checkpoints/step-\*\.pt below it"):
        best_or_newest(tmp_path)


def test_the_table_and_the_mistakes_are_those_of_the_predictions():
    evaluation = Evaluation(["a", "b", "c"], Normalize([0.5], [0.25]))
    images = torch.tensor([0.0, 51.0, 102.0, 255.0]).view(4, 1, 1, 1)
    probabilities = torch.tensor([[0.8, 0.2, 0.0], [0.9, 0.1, 0.0], [0.4, 0.6, 0.0], [0.6, 0.4, 0.0]])
    evaluation.add({"image": (images / 255 - 0.5) / 0.25}, torch.tensor([0, 1, 1, 1]), probabilities)
    names, *figures = zip(*map(dict.values, evaluation.by_class()), strict=True)
    assert names == ("a", "b", "c")
    assert figures == [(1, 3, 0), (1 / 3, 1.0, 0.0), (1.0, 1 / 3, 0.0), (0.5, 0.5, 0.0)], "precision, recall and F1"
    assert [int(mistake.image.item()) for mistake in evaluation.mistakes] == [51, 255], "the least probable first"
    assert evaluation.mistakes[0].predicted_probability == pytest.approx(0.9)
    many = Evaluation(range(100_000), Normalize([0.5], [0.25]))  # a matrix of them would take 80 GB
    many.add({"image": images}, torch.tensor([0, 1, 1, 1]), probabilities)
    assert [row["samples"] for row in many.by_class()[:3]] == [1, 3, 0] and many.draw_confusion() is None
    of_truth = torch.from_numpy(np.random.default_rng(0).permutation(60) / 200)
    for part in of_truth.split(30):
        evaluation.add({"image": torch.zeros(30, 1, 1, 1)}, torch.zeros(30).long(), torch.stack([part, 1 - part], 1))
    every = sorted([*of_truth.tolist(), 0.1, 0.4])
    kept = [mistake.truth_probability for mistake in evaluation.mistakes]
    assert kept == pytest.approx(every[:MISTAKES]), "the worst of all batches"


def test_samples_of_one_file_have_a_row_each_and_a_split_of_a_training_set_is_not_augmented(tmp_path):
    crops = f"data._target_={HERE}.Crops data.val_fraction=0.2 model=linear train.batch_size=8"
    train(tmp_path, crops, "train.epochs=1")
    network = FinishedRun(tmp_path)
    plain = Crops(False)
    for split, dataset in (("train", network.data.train), ("val", network.data.val)):
        rows = predicted(tmp_path, tmp_path / "p", "--split", split)
        assert [row["file"] for row in rows] == [f"photo {index // 2}.jpg" for index in dataset.indices]
        images = torch.stack([plain[index][0] for index in dataset.indices])
        outputs = network.outputs(network.data.transform({"image": images, "label": torch.zeros(len(images))}))
        assert [row["class"] for row in rows] == Crops.classes[outputs.argmax(1)].tolist()
        again = FinishedRun(tmp_path)
        _, scores, evaluation = evaluate.evaluate(again, again.dataset(split))
        right = outputs.argmax(1) == Crops.labels[dataset.indices]
        assert scores["accuracy"] == pytest.approx(right.float().mean().item()), "of images that are not augmented"
        assert [row["class"] for row in evaluation.by_class()] == ["a", "b", "c", "d"]
        of_pixels = [f"photo {(mistake.image.max() - 200) // 2}.jpg" for mistake in evaluation.mistakes]
        assert evaluate.files_of(evaluation, again.dataset(split)) == of_pixels
        assert evaluate.files_of(evaluation, [0]) == [""] * len(of_pixels), "samples were left out"
    names = predict.Names()
    assert [names.unused("x/a.png") for _ in range(3)] == ["x/a.png", "x/a_2.png", "x/a_3.png"]


class Damaged(Crops):
    def __getitem__(self, index):
        if index in (5, 6) and not self.train:
            raise ValueError("no image")
        return super().__getitem__(index)


def test_mistakes_have_their_files_where_samples_are_skipped(tmp_path):
    skips = "loader=workers loader.num_workers=1 loader.on_error=skip train.epochs=1 train.batch_size=8"
    train(tmp_path, f"data._target_={HERE}.Damaged model=linear {skips}")
    network = FinishedRun(tmp_path)
    samples, _, evaluation = evaluate.evaluate(network, network.dataset("test"))
    of_pixels = [f"photo {(mistake.image.max() - 200) // 2}.jpg" for mistake in evaluation.mistakes]
    assert samples == 38 and of_pixels
    assert evaluate.files_of(evaluation, network.dataset("test")) == of_pixels
    evaluation.mistakes = []
    assert evaluation.draw_mistakes([]) is None


@pytest.mark.parametrize(
    "name", ["predict", *(pytest.param(name, marks=pytest.mark.slow) for name in ("evaluate", "export"))]
)
def test_a_program_starts_in_any_folder_and_a_mistake_is_one_sentence(tmp_path, name, python, bound):
    program = ROOT / "extras" / "finished" / f"{name}.py"
    done = python.run(program, tmp_path, cwd=tmp_path, timeout=bound)
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("error: ") and "no checkpoint file" in done.stderr


@pytest.mark.parametrize(("workers", "slash"), [(0, ""), (2, "/")])
def test_files_get_the_predictions_of_the_networks_outputs_in_order(trained, photos, tmp_path, workers, slash, caplog):
    (tmp_path / "p.jsonl").write_text("of an earlier network\n")
    found = predicted(trained, tmp_path / "p", f"{photos}{slash}", f"loader.num_workers={workers}")
    assert not (tmp_path / "p.jsonl").exists()
    assert [row["file"] for row in found] == sorted(map(str, photos.glob("?/*.png")))
    assert f"{photos}{slash}: files that are not read: 1, such as b/notes.md" in caplog.text
    unreadable = found.pop(1)
    assert "cannot be read as an image" in unreadable["error"] and unreadable["class"] == ""
    network = FinishedRun(trained)
    assert not network.trainer.model.training
    images = network.dataset("test")
    for row in found:
        image = images[int(row["file"][-6:-4])]["image"]
        best = network.outputs(network.data.transform({"image": image[None]})).softmax(1)[0].topk(5)
        names = [row[column] for column in ("class", *(f"class_{place}" for place in range(2, 6)))]
        assert names == [images.classes[label] for label in best.indices.tolist()] and row["error"] == ""
        assert float(row["probability"]) == pytest.approx(best.values[0].item(), abs=2e-6)


def test_lists_of_paths_and_odd_names_are_read_and_a_missing_file_is_named(trained, photos, tmp_path):
    odd = photos / "a, \u00e9 \udce9.png"
    (photos / "a" / "00.png").rename(odd)
    (tmp_path / "list.txt").write_text(f"\ufeff{odd}\n\n{photos}/b/01.png\n\n", errors="surrogateescape")
    found = predicted(trained, tmp_path / "p", tmp_path / "list.txt", photos / "b" / "01.png")
    assert [row["file"] for row in found] == [str(odd), f"{photos}/b/01.png"] and not any(r["error"] for r in found)
    Image.new("RGB", (8, 8), (255, 0, 0)).save(odd)
    anew = predicted(trained, tmp_path / "p", tmp_path / "list.txt")
    assert anew[0]["probability"] != found[0]["probability"] and anew[1] == found[1], "the table is written anew"
    with pytest.raises(ValueError, match=r"nowhere\.png does not exist"):
        predicted(trained, tmp_path / "p", photos / "nowhere.png")


def test_samples_of_several_sizes_are_predicted_alone_and_one_that_cannot_be_read_not_at_all():
    def rows_of(*sizes):
        read = Samples("abc", lambda index: {"image": torch.zeros(sizes[index])})
        return [rows for rows, _ in batches_of([read[index] for index in range(3)])]

    assert rows_of(4, 4, 4) == [[0, 1, 2]] and rows_of(4, 5, 4) == [[0], [1], [2]]
    assert rows_of(4, -1, 4) == [[0, 2]], "torch refuses the size"
    named = SimpleNamespace(path="{}.jpg".format)
    assert [name_of(Subset(named, np.array([1, 3])), index) for index in (0, 1)] == ["1.jpg", "3.jpg"]


@pytest.mark.parametrize("column", ["file", "error"])
def test_a_prediction_of_the_name_of_a_column_of_the_table_is_refused(trained, photos, tmp_path, monkeypatch, column):
    monkeypatch.setattr(predict, "cells", lambda *_: {"score": 1, column: 2})
    with refused(f"a prediction has {column}, a column that the table has"):
        predicted(trained, tmp_path / "out", photos)


def test_a_score_of_the_name_of_a_key_of_the_result_is_refused(trained):
    network = FinishedRun(trained)
    network.task.extra_scores = {"samples": lambda outputs, labels: labels}
    with refused("samples, a score"):
        evaluate.evaluate(network, network.dataset("test"))


def test_predictions_that_are_nan_are_said_with_the_first_file(trained, photos, tmp_path, monkeypatch, caplog):
    outputs = FinishedRun.outputs
    monkeypatch.setattr(
        FinishedRun, "outputs", lambda *given: outputs(*given).index_fill(0, torch.tensor(1), torch.nan)
    )
    found = predicted(trained, tmp_path / "p", photos)  # in three batches; found[1] cannot be read
    assert f"NaN or infinity for 3 samples, first for {found[2]['file']}: " in caplog.text


@pytest.mark.parametrize("shape", ["[3,8,8]", "[192]"])
def test_every_classification_has_a_table_by_class_and_pictures_of_what_can_be_drawn(tmp_path, shape, capsys):
    floats = f"data._target_={HERE}.Floats +data.shape={shape} model._target_={HERE}.Heads"
    train(tmp_path, floats, "train.epochs=1 optim.lr=1e-4")
    result = evaluate.main([str(tmp_path)])
    rows = predicted(tmp_path, tmp_path / "p")
    columns = [[row["class"] for row in rows], [Crops.classes[label] for label in Crops.labels]]
    right = [name for name, truth in zip(*columns, strict=True) if name == truth]
    assert [row["class"] for row in result["classes"]] == [*"abcd"] and len(right) < 40
    assert [row["samples"] for row in result["classes"]] == [10] * 4
    assert [row["recall"] for row in result["classes"]] == [right.count(name) / 10 for name in "abcd"]
    mistakes = result["mistakes"]
    assert len(mistakes) == min(MISTAKES, 40 - len(right)) and mistakes[0]["file"].endswith(".jpg")
    written = (tmp_path / "evaluation" / "test").iterdir()
    assert sorted(path.name for path in written) == ["confusion.png", "evaluation.json"]
    assert "only images that the dataset gives as uint8 can be drawn" in capsys.readouterr().out


def test_outputs_that_are_not_a_number_per_class_have_scores_alone_and_a_sentence(tmp_path, caplog):
    task = f"task._target_={HERE}.DictOutputs model._target_={HERE}.Heads +model.is_dict=true train.epochs=1"
    train(tmp_path, f"data._target_={HERE}.Crops {task}")
    result = evaluate.main([str(tmp_path)])
    assert "classes" not in result and result["accuracy"] == summary_of(tmp_path)["test_accuracy"]
    assert "not a tensor (B, classes)" in caplog.text


def test_a_table_has_scores_alone_and_a_column_of_numbers(table, tmp_path):
    assert {"mae", "mse"} < evaluate.main([str(table), "--out", str(tmp_path / "out")]).keys()
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["evaluation.json"]
    network = FinishedRun(table)
    found = predicted(table, tmp_path / "p")
    data = network.data.test
    expected = network.trainer.model(torch.from_numpy(data.left), torch.from_numpy(data.right))[:, 0].tolist()
    assert [float(row["value"]) for row in found] == pytest.approx(expected, abs=1e-5)
    with refused("needs left, right: files give one image"):
        predicted(table, tmp_path / "p", __file__)


@pytest.mark.parametrize(
    ("data", "prefix"), [("data=image_table", "data"), ("data=mix +data@data.parts.one=image_table", "data.parts.one")]
)
def test_new_images_are_prepared_where_the_test_set_was_split_off_the_training_set(tmp_path, data, prefix, caplog):
    images = write_images(tmp_path / "images", count=4)
    keys = f"table={write_table(images)} image_size=8 cache=ram cache_dir={tmp_path}/cache"
    of_images = [f"{prefix}.{key}" for key in keys.split()]
    of_images += [f"{prefix}.{key}=[{{_target_: {HERE}.dark}}]" for key in ("transform", "test_transform")]
    small = "model=linear data.val_fraction=0.25 train.epochs=1 train.batch_size=4 loader.num_workers=1"
    train_model(composed(data, *of_images, small), tmp_path / "run")
    rows = predicted(tmp_path / "run", tmp_path / "p", images / "val" / "cat", images / "val" / "dog")
    assert len(rows) == 8 and {row["error"] for row in rows} == {""}
    assert len({row["probability"] for row in rows}) == 1  # all are dark
    assert "does not say by numbers alone how images are prepared, so the run's dataset is built" in caplog.text
    assert 0 < len(predicted(tmp_path / "run", tmp_path / "p")) < 16
    assert "was trained on" not in caplog.text
    FinishedRun(tmp_path / "run", ["data.val_fraction=0.9"])
    assert "the checkpoint's run was trained on" in caplog.text


def dark():
    return lambda image: image[:, :8, :8] * 0


def test_the_exported_program_in_the_readme_runs_without_the_repository(trained, tmp_path, python, bound):
    path = export.main([str(trained), "--out", str(tmp_path)])
    readme = (tmp_path / "README.md").read_text()
    code = readme.partition("```python\n")[2].partition("```")[0]
    code += "\nprint(abs(outputs - torch.from_numpy(example['outputs'])).max().item())"
    code += "\nimport sys; assert 'training' not in sys.modules"
    assert float(python.run("-c", code, cwd=tmp_path, env={}, timeout=bound, check=True).stdout) < 1e-5
    assert all(part in readme for part in ("[0.5, 0.5, 0.5]", "[0.2, 0.2, 0.2]", "`image`: float32", "class 5"))
    program = torch.export.load(path).module()
    network = FinishedRun(trained)
    for size in (1, 3, 40):
        images = torch.randn(size, 3, 8, 8)
        assert torch.allclose(program(images), network.outputs({"image": images}), atol=1e-5)


def test_a_network_of_two_inputs_is_exported(table, tmp_path):
    path = export.main([str(table), "--out", str(tmp_path)])
    example = np.load(tmp_path / "example.npz")
    outputs = torch.export.load(path).module()(*(torch.from_numpy(example[name][:5]) for name in ("left", "right")))
    assert torch.allclose(outputs, torch.from_numpy(example["outputs"][:5]), atol=1e-5)
    about = json.loads((tmp_path / "preprocessing.json").read_text())
    assert (about["outputs_are"], about["probabilities_by"]) == ("values", "none")
    readme = (tmp_path / "README.md").read_text()
    assert path.name in readme and "`right`: float32 (batch, 3)" in readme


def test_a_run_of_before_the_lists_of_steps_is_evaluated(tmp_path):
    root = write_images(tmp_path / "images", count=4)
    small = "data.image_size=16 model=linear train.epochs=1 train.batch_size=4"
    train_model(composed(f"data=image_folder data.root={root} {small}"), tmp_path / "run")
    path = best_or_newest(tmp_path / "run")
    state = torch.load(path)
    data = state["config"]["data"]
    data |= {"transform": None, "test_transform": None, "flip": True, "policy": "rand"}
    data |= {"transform_input": None, "transform_after": "decode"}
    torch.save(state, path)
    assert evaluate.main([str(tmp_path / "run")])["loss"] == summary_of(tmp_path / "run")["test_loss"]


@pytest.fixture(scope="module")
def without_data(tmp_path_factory):
    """The folder of a run whose data are gone, by the kind of its dataset; and new images."""
    folder = tmp_path_factory.mktemp("without_data")
    images = write_images(folder / "images", count=4)
    small = "model=linear train.epochs=1 train.batch_size=4 loader.num_workers=0"
    crops = "data.image_size=16 data.interpolation=bicubic data.test_crop=0.7 data.mean=auto data.std=auto"
    cache = f"data.cache=disk data.cache_side=20 data.cache_dir={folder}/cache"
    weights = "task.class_weights=balanced"
    runs = {
        "crops": ["data=image_folder", f"data.root={images}", crops, weights],
        "cached": ["data=image_folder", f"data.root={images}", crops, cache, "task.class_weights={cat: 1, dog: 2}"],
        "arrays": [f"data=fashion_mnist data.root={write_fashion(folder / 'fashion')} data.stratify=false"],
    }
    for name, settings in runs.items():
        train_model(composed(*settings, small), folder / name)
    random = np.random.default_rng(0)
    photos = folder / "photos"
    photos.mkdir()
    for number, shape in enumerate([(50, 70, 3), (90, 31, 3), (16, 16, 3), (28, 28)]):
        pixels = random.integers(64, 192, size=shape, dtype=np.uint8)  # bicubic does not leave 0 to 255
        Image.fromarray(pixels).save(photos / f"{number}.png")
    before = {name: predicted(folder / name, folder / "p", photos, "data.stratify=false") for name in runs}
    shutil.rmtree(images)
    shutil.rmtree(folder / "fashion")
    return folder, before


KINDS = ["crops", "cached", "arrays"]


@pytest.mark.parametrize("kind", KINDS)
def test_new_images_get_the_same_predictions_where_the_data_are_not(without_data, tmp_path, kind, caplog):
    folder, before = without_data
    assert predicted(folder / kind, tmp_path / "p", folder / "photos") == before[kind]
    assert "dataset is built" not in caplog.text
    with refused("data.root=(PATH|FOLDER)"):
        predicted(folder / kind, tmp_path / "p")


@pytest.mark.parametrize("kind", KINDS)
def test_the_numbers_beside_an_export_reproduce_the_inputs_with_pillow_and_numpy_alone(without_data, tmp_path, kind):
    folder, _ = without_data
    export.main([str(folder / kind), "--out", str(tmp_path)])
    about = json.loads((tmp_path / "preprocessing.json").read_text())
    run = FinishedRun(folder / kind, for_new_images=True)
    photos = sorted((folder / "photos").iterdir())
    read = ImageFiles(run, list(map(str, photos)))
    level = 1 / (255 * np.array(about["std"])[:, None, None])
    for index, photo in enumerate(photos):
        expected = run.data.transform({"image": torch.as_tensor(read(index)["image"])[None]})["image"].numpy()
        prepared = by_numbers(Image.open(photo), about)
        assert prepared.shape == expected.shape
        difference = np.abs(prepared - expected) / level
        assert difference.max() < 2.01 and difference.mean() < 0.5, f"{photo}: of noise, rounded in another order"
    assert about["classes"] == run.data.classes and about["inputs"] == ["image"]
    assert (about["outputs_are"], about["probabilities_by"]) == ("logits", "softmax")


def by_numbers(image, about):
    """What preprocessing.json says, word for word."""
    image = image.convert(about["mode"])
    for step in about["steps"]:
        w, h = image.size
        method = Image.Resampling[step.get("interpolation", "bilinear").upper()]
        width, height, shorter = step.get("width"), step.get("height"), step.get("shorter_side")
        if step["step"] == "limit_ratio":
            left, top = (max(0, side - step["ratio"] * min(w, h)) // 2 for side in (w, h))
            image = image.crop((left, top, w - left, h - top))
        elif step["step"] == "resize_shorter_side" or (step["step"] == "shrink" and min(w, h) > shorter):
            image = image.resize((w * shorter // min(w, h), h * shorter // min(w, h)), method)
        elif step["step"] == "center_crop":
            left, top = round((w - width) / 2), round((h - height) / 2)
            image = image.crop((left, top, left + width, top + height))
        elif step["step"] == "crop_to_ratio":
            wide, tall = min(w, round(h * width / height)), min(h, round(w / (width / height)))
            left, top = (w - wide) // 2, (h - tall) // 2
            image = image.crop((left, top, left + wide, top + tall))
        elif step["step"] == "resize":
            image = image.resize((width, height), method)
    pixels = np.asarray(image, np.float32).reshape(*image.size[::-1], -1)
    normalized = (pixels / 255 - about["mean"]) / about["std"]
    return normalized.transpose(2, 0, 1)[None]


@pytest.mark.slow  # it takes 5 seconds
def test_an_onnx_file_has_the_names_of_the_fields(table, tmp_path, python, bound):
    for package in ("onnx", "onnxscript"):
        pytest.importorskip(package)
    session_of = pytest.importorskip("onnxruntime").InferenceSession
    path = export.main([str(table), "--format", "onnx", "--out", str(tmp_path)])
    session = session_of(path)
    assert [field.name for field in session.get_inputs()] == ["left", "right"]
    assert [field.name for field in session.get_outputs()] == ["outputs"]
    example = np.load(tmp_path / "example.npz")
    (outputs,) = session.run(None, {name: example[name][:5] for name in ("left", "right")})
    assert np.allclose(outputs, example["outputs"][:5], atol=1e-5)
    code = (tmp_path / "README.md").read_text().partition("```python\n")[2].partition("```")[0]
    python.run("-c", f"{code}\nassert len(outputs) == 16", cwd=tmp_path, env={}, timeout=bound, check=True)


def test_weights_are_exported_as_safetensors_or_a_sentence_says_what_to_install(table, tmp_path, monkeypatch):
    load_file = pytest.importorskip("safetensors.torch").load_file
    weights = load_file(export.main([str(table), "--format", "safetensors", "--out", str(tmp_path)]))
    for name, weight in FinishedRun(table).trainer.model.state_dict().items():
        assert torch.equal(weights.pop(name), weight)
    assert not weights
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with refused("--format safetensors needs .* pip install safetensors"):
        export.main([str(table), "--format", "safetensors", "--out", str(tmp_path)])


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("+model.unlike=true", r"model\.pt2 computes different outputs: .* differ by up to 1, "),
        ("+model.counts=true", r"^torch.export cannot export MLP .* does not take batches of all sizes[^\n]+$"),
        ("+model.loops=true", r"^torch.export cannot export MLP .* or loops over the samples[^\n]+$"),
        (f"data._target_={__name__}.InDicts", "^'left' is a dict, and an exported network takes tensors alone$"),
        ("+model.decides=true", r"^torch.export cannot export MLP \([^\n]+\): if `forward` has an `if`[^\n]+$"),
    ],
)
def test_an_export_that_fails_or_has_other_outputs_is_refused_and_leaves_no_file(table, tmp_path, setting, said):
    with refused(said):
        export.main([str(table), setting, "--out", str(tmp_path)])
    assert not (tmp_path / "model.pt2").exists()


@pytest.mark.parametrize(("data", "task"), [(Several, "training.tasks.Multilabel"), (Unknown, f"{HERE}.Known")])
def test_a_run_with_several_classes_per_sample_has_a_column_and_a_row_for_each(tmp_path, capsys, data, task):
    several = f"data._target_={HERE}.{data.__name__} task=multilabel task._target_={task} model=linear"
    train(tmp_path, several, "train.batch_size=8 train.epochs=1")
    network = FinishedRun(tmp_path)
    images = torch.stack([network.data.test[index][0] for index in range(40)])
    probabilities = network.outputs(network.data.transform({"image": images, "label": None})).sigmoid()
    rows = predicted(tmp_path, tmp_path / "p")
    found = [[float(row[f"probability_{name}"]) for name in "ab"] for row in rows]
    assert torch.allclose(torch.tensor(found), probabilities, atol=1e-5)
    predicted_to_have = (probabilities > 0.5) & (data.labels >= 0)
    has = data.labels > 0
    right = (predicted_to_have & has).sum(0)
    rows = evaluate.main([str(tmp_path)])["classes"]
    assert [row["samples"] for row in rows] == has.sum(0).tolist()
    assert [row["recall"] for row in rows] == pytest.approx((right / has.sum(0)).tolist())
    assert [row["precision"] for row in rows] == pytest.approx((right / predicted_to_have.sum(0).clamp(1)).tolist())
    assert "precision" in capsys.readouterr().out
    export.main([str(tmp_path), "--out", str(tmp_path)])
    assert json.loads((tmp_path / "preprocessing.json").read_text())["probabilities_by"] == "sigmoid"


def test_an_error_names_the_settings_of_paths_that_are_not_there_and_of_no_word(tmp_path):
    data = {"root": str(tmp_path / "gone"), "label": "label", "table": "photos/t.csv"}
    sections = {"data": data, "trainer": {"teacher": {"path": "teacher.pt"}}}
    for error, moved in (
        (ConfigError(f"{tmp_path}/gone/train: no images"), "data.root=PATH"),
        (ConfigError("photos/t.csv: no"), "data.table=PATH"),
        (FileNotFoundError(2, "No such file", "teacher.pt"), "trainer.teacher.path=PATH"),
    ):
        with refused(f"if the files have moved, give {moved}$"), saying_what_has_moved(sections):
            raise error
    with pytest.raises(ConfigError) as raised, saying_what_has_moved(sections):
        raise ConfigError("row 3 has the label 3, which is not one of the classes")
    assert "moved" not in str(raised.value)


def test_a_table_is_no_image_and_what_to_give_is_said(tmp_path):
    (tmp_path / "new.CSV").write_text("image\n1.jpg\n")
    with refused(r"new.CSV is no image: give a .txt file .* data.test_table"):
        image_files([str(tmp_path / "new.CSV")])


def test_a_run_without_test_samples_is_told_of_both_remedies(tmp_path):
    with refused(r"no test samples: give it some .*data.test_table.* data.val_fraction=0.1"):
        train(tmp_path, "data.test_length=0")
