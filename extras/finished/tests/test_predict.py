"""predict.py: a row for each sample, in order, by batches of its own."""

import csv
import json

import finished_doors
import numpy as np
import pytest
import torch
from PIL import Image

from data.subset import Subset
from extras.finished import predict
from extras.finished.finished_run import FinishedRun
from extras.finished.samples import name_of
from tests.configs import train
from training.config import ConfigError

DOORS = "finished_doors"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    train(folder, "model=linear", "data.num_classes=6", "data.test_length=20")
    return folder


@pytest.fixture
def photos(trained, tmp_path):
    """The run's test images as files, in two folders, and one that cannot be read."""
    images = FinishedRun(trained).dataset("test")
    for number in range(20):
        path = tmp_path / "photos" / "ab"[number % 2] / f"{number:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(images[number]["image"].numpy()).save(path)
    (tmp_path / "photos" / "a" / "00x.png").write_bytes(b"no image")
    (tmp_path / "photos" / "b" / ".hidden.png").write_bytes(b"")
    (tmp_path / "photos" / "b" / "notes.md").write_text("not an image")
    return tmp_path / "photos"


def rows(path):
    with path.open(newline="", errors="surrogateescape") as file:
        return list(csv.DictReader(file))


def run(folder, out, *inputs):
    return rows(predict.main([str(folder), *map(str, inputs), "train.batch_size=8", "--out", str(out)]))


@pytest.mark.parametrize(("workers", "slash"), [(0, ""), (2, "/")])
def test_files_get_the_predictions_of_the_networks_outputs_in_order(trained, photos, tmp_path, workers, slash, caplog):
    (photos / ".hidden.png").touch()
    found = run(trained, tmp_path / "p", f"{photos}{slash}", f"loader.num_workers={workers}")
    assert [row["file"] for row in found] == sorted(map(str, photos.glob("?/[!.]?*.png")))
    assert f"{photos}{slash}: 3 files are not read, such as b/notes.md" in caplog.text
    network = FinishedRun(trained)
    images = network.dataset("test")
    for row in found:
        if row["file"].endswith("x.png"):
            assert "cannot be read as an image" in row["error"] and row["class"] == ""
            continue
        number = int(row["file"][-6:-4])
        probabilities = network.outputs(network.data.transform({"image": images[number]["image"][None]})).softmax(1)[0]
        best = probabilities.topk(5)
        names = [row[column] for column in ("class", *(f"class_{place}" for place in range(2, 6)))]
        assert names == [images.classes[label] for label in best.indices.tolist()] and row["error"] == ""
        assert float(row["probability"]) == pytest.approx(best.values[0].item(), abs=2e-6)


def test_the_table_is_written_anew_each_time(trained, photos, tmp_path):
    before = run(trained, tmp_path / "p", photos / "b")
    for path in (photos / "b").glob("??.png"):  # the same names for other images
        Image.new("RGB", (8, 8), (255, 0, 0)).save(path)
    after = run(trained, tmp_path / "p", photos / "b")
    assert [row["file"] for row in after] == [row["file"] for row in before]
    assert len({row["probability"] for row in after}) == 1 < len({row["probability"] for row in before})


def test_lists_of_paths_and_odd_names_are_read_and_a_missing_file_is_named(trained, photos, tmp_path, monkeypatch):
    odd = photos / "a, \u00e9 \udce9.png"
    (photos / "a" / "00.png").rename(odd)
    (tmp_path / "list.txt").write_text(f"\ufeff{odd}\n\n~/b/01.png\n\n", errors="surrogateescape")
    monkeypatch.setenv("HOME", str(photos))
    found = run(trained, tmp_path / "p", tmp_path / "list.txt", photos / "b" / "01.png")
    assert [row["file"] for row in found] == [str(odd), f"{photos}/b/01.png"] and not any(r["error"] for r in found)
    with pytest.raises(ValueError, match=r"nowhere\.png does not exist"):
        run(trained, tmp_path / "p", photos / "nowhere.png")


def test_without_files_the_runs_dataset_is_predicted_and_a_part_has_the_names_of_the_whole(trained, tmp_path):
    assert [row["file"] for row in run(trained, tmp_path / "p", "data.test_length=9")] == [str(n) for n in range(9)]

    class Named(list):
        def path(self, index: int) -> str:
            return f"{index}.jpg"

    assert [name_of(Subset(Named("abcd"), np.array([1, 3])), index) for index in (0, 1)] == ["1.jpg", "3.jpg"]
    assert name_of(Subset(["a", "b"], np.array([1])), 0) == "1"


def test_batches_are_predicts_own_and_images_of_several_sizes_are_predicted_alone(tmp_path, monkeypatch):
    sizes = [f"data._target_={DOORS}.Sizes", f"data.collate={{_target_: {DOORS}.cropped}}"]
    train(tmp_path, *sizes, "model=linear", "data.test_length=10", "loader.on_error=skip", "loader=workers")
    network = FinishedRun(tmp_path)
    monkeypatch.setattr(finished_doors.cropped, "works", False)  # not called any more
    monkeypatch.setattr(predict, "FinishedRun", lambda *_: network)
    found = run(tmp_path, tmp_path / "p")
    assert [row["error"] for row in found] == ["", "", "", "damaged", *[""] * 6]
    for row in found:
        if not row["error"]:
            image = network.dataset("test")[int(row["file"])]["image"]
            probabilities = network.outputs(network.data.transform({"image": image[None]})).softmax(1)
            assert float(row["probability"]) == pytest.approx(probabilities.max().item(), abs=2e-6)


def test_a_network_that_returns_boxes_writes_them_as_json_lines(tmp_path):
    boxes = [f"model._target_={DOORS}.Boxes", f"trainer._target_={DOORS}.Detection", "task=own"]
    train(tmp_path, *boxes, f"task._target_={DOORS}.Plain", "data.test_length=5", "data.image_size=8")
    (tmp_path / "p.csv").write_text("of an earlier network\n")
    path = predict.main([str(tmp_path), "--out", str(tmp_path / "p")])
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert path.name == "p.jsonl" and not (tmp_path / "p.csv").exists()
    assert [line["file"] for line in lines] == [str(number) for number in range(5)]
    assert all(np.shape(line["boxes"]) == (8, 4) and line["labels"] == list(range(8)) for line in lines)


TABLE = [f"data._target_={DOORS}.Table", "task=regression", "task.inputs=[left,right]", "task.label=y"]
TABLE += [f"model._target_={DOORS}.MLP"]


def test_a_tables_numbers_have_a_column_and_a_task_may_write_files(tmp_path):
    train(tmp_path / "run", *TABLE)
    network = FinishedRun(tmp_path / "run")
    found, table = run(tmp_path / "run", tmp_path / "p"), network.data.test
    expected = network.trainer.model(torch.from_numpy(table.left), torch.from_numpy(table.right))[:, 0].tolist()
    assert [float(row["value"]) for row in found] == pytest.approx(expected, abs=1e-5)
    train(tmp_path / "files", *TABLE, f"task._target_={DOORS}.Written")
    found = run(tmp_path / "files", tmp_path / "written")
    assert all((tmp_path / "written" / row["file"]).read_text() for row in found)
    assert found[0]["file of it"] == str(tmp_path / "written" / "0")
    with pytest.raises(ConfigError, match="needs left, right: files give one image"):
        run(tmp_path / "run", tmp_path / "p", __file__)
