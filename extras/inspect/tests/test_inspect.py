"""inspect_data.py reads every sample, and says which cannot be read, repeat, or have an unusual form."""

import csv
import os
import shutil
import signal
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from data.synthetic import Synthetic
from extras.inspect import inspect_data
from loaders import WorkerFailure
from tests.configs import train
from tests.data.fakes import noise
from tests.data.reading import refused

HERE = __name__.rpartition(".")[2]


class Numbers:
    """Rows of numbers, and a number to predict; row 3 cannot be read. The test set is the same."""

    def __init__(self, train, **_):
        self.rows = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        if index == 3:
            raise KeyError("row 3")
        return {"row": self.rows[index], "y": self.rows[index].sum()}


class Stream(torch.utils.data.IterableDataset):
    def __init__(self, train, **_):
        pass

    def __iter__(self):
        return iter(())


@pytest.fixture
def photos(tmp_path):
    """Class folders with images of noise, four in train/ and two in val/ for each of two classes."""
    for number in range(12):
        name = ("cat", "dog")[number % 2]
        file = tmp_path / "photos" / ("val" if number >= 8 else "train") / name / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(noise(40, 60, 3, seed=number)).save(file)
    return tmp_path / "photos"


def cut(path):
    path.write_bytes(path.read_bytes()[:3000])


def inspected(folder, *settings):
    """The exit code, the rows of samples.csv by the end of their names, and the page."""
    code = 0
    try:
        inspect_data.main([*settings, "--out", str(folder / "out"), "--workers", "0"])
    except SystemExit as end:
        code = 0 if end.code is None else 1
    with (folder / "out" / "samples.csv").open() as file:
        rows = {row["file"].removeprefix(f"{folder}/photos/"): row for row in csv.DictReader(file)}
    return code, rows, (folder / "out" / "index.html").read_text()


def test_each_file_that_cannot_be_read_is_named_with_the_reason(photos, tmp_path):
    cut(photos / "train/cat/0.png")
    (photos / "val/dog/text.jpg").write_text("a text")
    code, rows, page = inspected(tmp_path, "data=image_folder", f"data.root={photos}")
    errors = {name: row["error"] for name, row in rows.items() if row["error"]}
    assert (code, len(rows), list(errors)) == (1, 13, ["train/cat/0.png", "val/dog/text.jpg"])
    assert "truncated" in errors["train/cat/0.png"] and "unknown format" in errors["val/dog/text.jpg"]
    assert all(error in page for error in errors.values())


def test_unusual_images_are_told_apart(photos, tmp_path):
    def save(name, image, **options):
        image.save(photos / "train/cat" / name, **options)

    exif = Image.Exif()
    exif[0x112] = 6
    save("turned.jpg", Image.fromarray(noise(40, 60, 3, seed=20)), exif=exif)
    save("cmyk.jpg", Image.fromarray(noise(40, 60, 4, seed=21), "CMYK"))
    save("clear.png", Image.fromarray(noise(40, 60, 4, seed=22)))
    save("palette.png", Image.fromarray(noise(40, 60, 3, seed=23)).convert("P"))
    save("pixel.png", Image.new("RGB", (1, 1)))
    save("line.png", Image.new("RGB", (20000, 1)))
    code, rows, page = inspected(tmp_path, "data=image_folder", f"data.root={photos}", "data.image_size=32")
    found = {name: " ".join([row["mode"], row["width"], row["height"], row["notes"]]) for name, row in rows.items()}
    assert code == 0
    for name, expected in {
        "turned.jpg": "RGB 40 60 EXIF-rotated",
        "cmyk.jpg": "CMYK 60 40 CMYK",
        "clear.png": "RGBA 60 40 transparent",
        "palette.png": "P 60 40 ",
        "pixel.png": "RGB 1 1 very small",
        "line.png": "RGB 20000 1 very small, very long",
    }.items():
        assert found[f"train/cat/{name}"] == expected
    assert page.count("<figure>") == 14


def test_equal_pictures_in_two_sets_or_under_two_labels_are_found_whatever_their_files(photos, tmp_path, capsys):
    Image.open(photos / "train/cat/0.png").save(photos / "val/cat/again.bmp")
    shutil.copy(photos / "train/cat/2.png", photos / "train/dog/again.png")
    code, rows, _ = inspected(tmp_path, "data=image_folder", f"data.root={photos}", "data.image_size=32")
    assert rows["train/cat/0.png"]["pixels"] == rows["val/cat/again.bmp"]["pixels"]
    assert len({row["pixels"] for row in rows.values()}) == len(rows) - 2
    told = capsys.readouterr().out
    assert code == 0 and "in more than one set: 1;" in told and "more than one label: 1;" in told


def test_mean_and_deviation_are_those_of_the_training_pixels(tmp_path):
    _, rows, page = inspected(tmp_path, "data=synthetic", "data.length=20", "data.test_length=5", "data.image_size=8")
    images = Synthetic(train=True, length=20, image_size=8)
    pixels = np.stack([images[index]["image"] for index in range(20)]) / 255
    assert len(rows) == 20  # by their numbers, which repeat in the test set
    assert f"data.mean={pixels.mean((0, 1, 2)).round(4).tolist()}" in page
    assert f"data.std={pixels.std((0, 1, 2)).round(4).tolist()}" in page


def test_the_table_says_which_samples_validate_and_their_labels(photos, tmp_path):
    rows = [f"{path.relative_to(photos)},{path.parent.name}" for path in sorted(photos.glob("*/*/*.png"))]
    (photos / "table.csv").write_text("\n".join(["image,label", *rows]))
    settings = ["data=image_table", f"data.table={photos}/table.csv", "data.val_fraction=0.5"]
    _, rows, _ = inspected(tmp_path, *settings)
    assert {row["set"] for row in rows.values()} == {"train", "val"}
    assert all(row["label"] in name for name, row in rows.items())


def test_any_dataset_can_be_inspected_but_a_stream(tmp_path):
    settings = [f"data._target_={HERE}.Numbers", "task=regression", "task.inputs=row", "task.label=y"]
    code, rows, page = inspected(tmp_path, "data=synthetic", *settings)
    assert code == 1 and rows["3"]["error"] == "KeyError: 'row 3'" and "In more than one set: 5" in page
    with pytest.raises(SystemExit, match="has no 'image', only row, y"):
        inspect_data.main(["data=synthetic", *settings[:2], f"--out={tmp_path}"])
    with refused("Stream is a stream"):
        inspect_data.main(["data=synthetic", f"data._target_={HERE}.Stream"])


class Photos:
    """Images of noise, as someone's own class reads them: the errors of Pillow do not name a damaged file."""

    classes = ("cat", "dog")

    def __init__(self, train, root, **_):
        self.files = sorted(Path(root, "train" if train else "val").glob("*/*.png"))

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        with self.files[index].open("rb") as file:
            return np.array(Image.open(file).resize((8, 8))), int(self.files[index].parent.name == "dog")

    def path(self, index):
        return self.files[index]


def test_files_of_the_test_set_are_listed_too_if_a_validation_set_chooses(photos, tmp_path):
    damaged = photos / "val/dog/11.png"
    cut(damaged)
    settings = (
        f"data._target_={HERE}.Photos +data.root={photos} data.val_fraction=0.5 train.batch_size=4 loader=workers"
    )
    settings += " train.epochs=1 loader.num_workers=1 loader.on_error=skip callbacks/standard=[unreadable]"
    summary = train(tmp_path, settings)
    assert summary["skipped_files"] == summary["skipped_samples"] == 1
    assert (tmp_path / "unreadable.tsv").read_text().startswith(f"set\tindex\tpath\terror\ntest\t2\t{damaged}\t")


@pytest.mark.parametrize("on_error", ["skip", "raise"])
def test_a_run_lists_the_files_that_it_could_not_read(photos, tmp_path, caplog, on_error):
    damaged = [photos / "train/cat/6.png", photos / "val/dog/11.png"]
    for file in damaged:
        cut(file)
    skips = on_error == "skip"
    settings = f"data._target_={HERE}.Photos +data.root={photos} train.batch_size=8 train.epochs=3 loader=workers"
    settings += f" loader.num_workers=1 loader.on_error={on_error} callbacks/standard=[unreadable]"
    with nullcontext() if skips else pytest.raises(OSError, match="truncated"):
        summary = train(tmp_path, settings)
        assert summary["skipped_files"] == 2 and summary["skipped_samples"] >= 6
    _, *lines = [line.split("\t") for line in (tmp_path / "unreadable.tsv").read_text().splitlines()]
    expected = [["train", "3", str(damaged[0])], ["test", "2", str(damaged[1])]]
    assert [line[:3] for line in lines] == (expected if skips else expected[:1])
    assert all("OSError: image file is truncated" in line[3] for line in lines)
    assert caplog.text.count("loader.on_error=skip") == (0 if skips else 1)


class Deadly(Photos):
    """A file ends the process that reads it, as a codec's fault or a lack of memory does."""

    def __getitem__(self, index):
        if self.files[index].name == "6.png":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def test_a_sample_that_kills_its_workers_is_named_with_its_file(photos, tmp_path, caplog):
    settings = f"data._target_={HERE}.Deadly +data.root={photos} data.val_fraction=0.3 train.batch_size=1"
    settings += " train.epochs=1 loader=workers loader.num_workers=1 callbacks/standard=[unreadable]"
    with pytest.raises(WorkerFailure, match="workers in a row died while reading sample"):
        train(tmp_path, settings)
    _, line = (tmp_path / "unreadable.tsv").read_text().splitlines()
    part, number, path, error = line.split("\t")
    assert path == str(photos / "train/cat/6.png") and error.endswith(f"died while reading sample {number}")
    assert f"sample {number} of the {part} set could not be read; its file: {path}" in caplog.text


@pytest.mark.parametrize("damaged", ["train/cat/0.png", "train/cat/6.png"])
def test_the_error_of_a_damaged_file_names_it_and_how_to_leave_it_out(photos, tmp_path, damaged):
    cut(photos / damaged)
    settings = f"data=image_folder data.root={photos} data.image_size=8 model=linear train.batch_size=4 loader=workers"
    with refused(f"{damaged} cannot be read as an image.*loader.on_error=skip"):
        train(tmp_path, settings)
