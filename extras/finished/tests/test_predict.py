"""scripts/predict.py: the same predictions in order, none twice and none left out, whatever the interruption."""

import csv
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from PIL import Image

from data.subset import Subset
from scripts import predict
from training.config import ConfigError
from training.finished.finished_run import FinishedRun
from training.finished.predictions import Predictions, names_in, whole_rows

HERE = "loader.num_workers=0"


@pytest.fixture(scope="module")
def photos(trained, tmp_path_factory):
    """The run's 40 test images as files, in two folders, and five that cannot be read."""
    folder = tmp_path_factory.mktemp("photos")
    images = FinishedRun(trained, [HERE]).dataset("test")
    for number in range(40):
        path = folder / "ab"[number % 2] / f"{number:02}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(images[number]["image"].numpy()).save(path)
    for number in range(5):
        (folder / "b" / f"{number:02}x.png").write_bytes(b"no image")
    (folder / "b" / ".hidden.png").write_bytes(b"")
    (folder / "b" / "notes.md").write_text("not an image")
    return folder


def run(trained, out, *inputs):
    predict.main([str(trained), *map(str, inputs), HERE, "train.batch_size=8", "--out", str(out / "p.csv")])


def rows(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_files_get_the_predictions_of_the_networks_outputs_in_order(trained, photos, tmp_path):
    run(trained, tmp_path, photos)
    found = rows(tmp_path / "p.csv")
    assert [row["file"] for row in found] == sorted(map(str, photos.glob("*/??.png")))
    network = FinishedRun(trained, [HERE])
    images = network.dataset("test")
    for row in found:
        number = int(row["file"][-6:-4])
        batch = network.transform({"image": images[number]["image"][None]})
        probabilities = network.outputs(batch).softmax(1)[0]
        names = [row[column] for column in ("class", *(f"class_{place}" for place in range(2, 6)))]
        best = probabilities.topk(5)
        assert names == [images.classes[label] for label in best.indices.tolist()]
        assert float(row["probability"]) == pytest.approx(best.values[0].item(), abs=2e-6)


def test_images_that_cannot_be_read_are_listed_with_the_reason_even_if_they_fill_a_batch(trained, photos, tmp_path):
    run(trained, tmp_path, *sorted(photos.glob("b/*x.png")), photos / "a")
    failed = rows(tmp_path / "p_failed.csv")
    assert [row["file"] for row in failed] == sorted(map(str, photos.glob("b/*x.png")))
    assert all("cannot be read as an image (unknown format)" in row["reason"] for row in failed)
    assert len(rows(tmp_path / "p.csv")) == 20


def test_wherever_it_was_killed_the_same_command_completes_the_same_table(trained, photos, tmp_path):
    run(trained, tmp_path, photos)
    table, failed = tmp_path / "p.csv", tmp_path / "p_failed.csv"
    whole, whole_failed = table.read_bytes(), failed.read_bytes()
    last_line = whole.rindex(b"\n", 0, -1) + 1
    for kept in (3, 700, last_line, len(whole) - 1):
        table.write_bytes(whole[:kept])
        run(trained, tmp_path, photos)
        assert (table.read_bytes(), failed.read_bytes()) == (whole, whole_failed), f"{kept} bytes were left"
    failed.write_bytes(whole_failed[:-5])
    run(trained, tmp_path, photos)
    assert (table.read_bytes(), failed.read_bytes()) == (whole, whole_failed)


def test_files_of_another_checkpoint_or_of_somebody_else_stay_as_they_are(trained, photos, tmp_path):
    (tmp_path / "p_failed.csv").write_text("mine\n")
    with pytest.raises(
        ConfigError, match=r"p_failed\.csv exist, and are not predictions of this checkpoint for these"
    ):
        run(trained, tmp_path, photos / "a")
    assert (tmp_path / "p_failed.csv").read_text() == "mine\n"
    (tmp_path / "p_failed.csv").unlink()
    run(trained, tmp_path, photos / "a")
    (tmp_path / "p_about.json").write_text((tmp_path / "p_about.json").read_text().replace("step", "another step"))
    with pytest.raises(ConfigError, match=r"p\.csv, .* exist, and are not predictions .*: choose another"):
        run(trained, tmp_path, photos)


@pytest.mark.parametrize("name", ["a,b", 'say "x"', "caf\udce9", "file", " a ", "return\r"])
def test_any_file_name_on_one_line_is_found_again(tmp_path, name):
    for expected in (set(), {name}):
        predictions = Predictions(tmp_path / "p.csv", ["file", "class"], {})
        assert predictions.done == expected
        if not expected:
            predictions.append([[name, "x"]], [])
    content = (tmp_path / "p.csv").read_bytes()
    for cut in range(len(content)):
        (tmp_path / "p.csv").write_bytes(content[:cut])
        whole = whole_rows(tmp_path / "p.csv", ["file", "class"])
        assert whole == b"file,class\n" and names_in(whole) == set()


def test_a_sample_whose_reading_crashes_is_listed(trained, tmp_path, monkeypatch):
    """The loader leaves it out of its batch."""
    network = FinishedRun(trained, [HERE, "train.batch_size=4"])
    batch = {"image": torch.zeros(3, 3, 8, 8), "index": torch.tensor([0, 1, 3]), "reason": ["", "", ""]}
    monkeypatch.setattr(network, "loader", lambda *_, **__: nullcontext([batch]))
    predictions = Predictions(tmp_path / "p.csv", predict.header(network), {})
    assert predict.predict(network, network.dataset("test"), list("abcd"), np.arange(4), predictions) == 1
    assert [row["file"] for row in rows(tmp_path / "p.csv")] == ["a", "b", "d"]
    assert rows(tmp_path / "p_failed.csv") == [{"file": "c", "reason": predict.CRASHED}]


def test_without_files_the_runs_dataset_is_predicted_and_a_part_has_the_names_of_the_whole(trained, tmp_path):
    run(trained, tmp_path, "data.test_length=9")
    assert [row["file"] for row in rows(tmp_path / "p.csv")] == [str(number) for number in range(9)]

    class Named(list):
        def path(self, index: int) -> str:
            return f"{index}.jpg"

    assert [predict.name_of(Subset(Named("abcd"), np.array([1, 3])), index) for index in (0, 1)] == ["1.jpg", "3.jpg"]
    assert predict.name_of(Subset(["a", "b"], np.array([1])), 0) == "1"
