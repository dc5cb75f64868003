"""report.html: what is on it, that all is escaped, that it is small, and that it fails no run."""

import json
import re
import shlex
import shutil
import subprocess
from html.parser import HTMLParser
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from PIL import Image

from data.transform import Transform
from extras.report import first_batch, page
from extras.report.curves import charts_of
from tests.configs import CONF, checkpoint, logged, train
from tests.data.reading import refused
from tests.training.extensions import Images, Stream

HERE = __name__.rpartition(".")[2]
REPORT = "+callbacks.report={_target_: extras.report.report.Report, seconds: 0}"
EVIL = "<script>alert('1')</script>&"
PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010800000000"
    "3a7e9b550000000a49444154789c63600000000200015e39d9a50000000049454e44ae426082"
)


class Evil(Images):
    classes = (EVIL, "light")


def clipping(images):
    """As a transform that clamps to 0..1 does with images of another range."""
    return (images - 5).clamp(0, 1)


class Parts(HTMLParser):
    """The tags, the attributes that could be addresses, and the text of a page."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.addresses, self.texts = [], [], []
        self.feed(text)
        self.text = " ".join("".join(self.texts).split())

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.addresses += [value for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data):
        self.texts.append(data)


def parts(folder):
    return Parts((folder / "report.html").read_text())


def facts(folder):
    return json.loads((folder / "report.json").read_text())


class Witness:
    """Notes whether a page says how far the run is, and its score, before its end."""

    running: list

    def on_evaluation(self, run, scores):
        epoch = run.progress.epoch
        says = rf" running at 20[-\d]+ [:\d]+: epoch {epoch} of 2 .*\dbest test accuracy, epoch {epoch}"
        Witness.running.append(re.search(says, parts(run.folder).text))


def test_a_page_has_all_of_a_run_escaped_and_needs_no_other_file(tmp_path, monkeypatch):
    for module in ("training.results", "extras.report.report"):
        monkeypatch.setattr(f"{module}.git_commit", lambda: "0a1b2c3d")
    monkeypatch.setattr("extras.report.report.device_name", lambda device: "Card 9000")
    monkeypatch.setattr("extras.report.report.uncommitted_files", lambda: ["M train.py"])
    monkeypatch.setattr("extras.report.report.PAGES", float("inf"))  # after each evaluation
    (tmp_path / "command.yaml").write_text(json.dumps({"flags": [], "overrides": [f"data.note={EVIL}"]}))
    (tmp_path / "train.log").write_text(f"[now][data][WARNING] - {EVIL}\n[now][data][INFO] - not this\n")
    (tmp_path / "evaluation" / "test").mkdir(parents=True)
    (tmp_path / "evaluation" / "test" / "confusion.png").write_bytes(PNG)
    Witness.running = []
    evil = f"data._target_={HERE}.Evil"
    witness = f"+callbacks.witness._target_={HERE}.Witness"
    summary = train(tmp_path, REPORT, witness, evil, "timing.warmup_steps=0")
    found = parts(tmp_path)
    assert all(Witness.running) and len(Witness.running) == 2, "it is written while the run trains"
    assert found.text.index(EVIL) < found.text.index("Where the time went"), "warnings are on the first screen"
    assert " finished " in found.text and summary["verdict"] in found.text
    assert found.text.count(EVIL) >= 3, "in the settings, the warnings and the labels"
    assert found.tags.count("script") == 1 and "not this" not in found.text
    assert all(address.startswith("data:") for address in found.addresses)
    assert found.tags.count("polyline") == 7 and found.tags.count("svg") == 5
    assert "evaluation/test/confusion.png" in found.text
    assert shlex.join(["python", "train.py", f"data.note={EVIL}"]) in found.text, "the command can be copied"
    assert all(text in found.text for text in ("Where the time went", "0a1b2c3d", "Card 9000", "M train.py"))
    page.main([str(tmp_path)])
    assert parts(tmp_path).text == found.text, "it is made again of what is in the folder"
    kept = facts(tmp_path)
    (tmp_path / "first_batch.json").write_text(json.dumps(kept.pop("first_batch")))
    (tmp_path / page.FACTS).write_text(json.dumps(kept))
    page.main([str(tmp_path)])
    assert parts(tmp_path).text == found.text, "an earlier run has it in a file of its own"
    (tmp_path / page.FACTS).write_text(json.dumps(kept | {"status": "running at 10:00"}))
    page.main([str(tmp_path)])
    assert "last written while running at 10:00" in parts(tmp_path).text, "it may have been killed"
    with refused("has trained"):
        page.main([str(tmp_path / "other")])


def test_the_first_batch_is_shown_as_it_was_before_it_was_normalised_with_its_range(tmp_path):
    train(tmp_path, REPORT, f"data._target_={HERE}.Evil augment.mixup=1.0 optim.lr=0.01")
    seen = facts(tmp_path)["first_batch"]
    stages = [(row["stage"], row["dtype"], row["shape"], row["highest"]) for row in seen["rows"]]
    assert stages == [
        ("first samples of the dataset", "uint8", "2 x 8 x 8 x 3", 200),
        ("normalised", "float32", "2 x 3 x 8 x 8", pytest.approx(1.137, abs=1e-3)),
        ("augment.mixup, augment.cutmix", "float32", "2 x 3 x 8 x 8", stages[2][3]),
        ("the batch of the step", "float32", "32 x 3 x 8 x 8", stages[3][3]),
    ]
    assert len(seen["tiles"]) == 16 and any("%" in tile["label"] for tile in seen["tiles"])
    assert "warnings" not in facts(tmp_path)


@pytest.mark.parametrize(
    ("settings", "remedy"),
    [
        (f"data._target_={HERE}.Noise augment.transform._target_={HERE}.clipping", "does it expect another range?"),
        (f"data._target_={HERE}.WithMean", "networks train well on about -3 to 3"),
    ],
)
def test_a_wrong_range_is_a_warning_in_the_log_and_on_the_page(tmp_path, caplog, settings, remedy):
    train(tmp_path, REPORT, settings)
    assert remedy in caplog.text and remedy in parts(tmp_path).text


class Noise(Images):
    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randint(256, (8, 8, 3), dtype=torch.uint8, generator=generator), index % 2


class WithMean(Noise):
    mean = (-40.0,) * 3


class Own:
    """The first image has one color."""

    def __init__(self, *steps):
        self.transform = Transform("data.transform", steps)

    def __len__(self):
        return 3

    def __getitem__(self, index):
        image = torch.arange(60, dtype=torch.uint8).view(3, 4, 5) if index else torch.zeros(3, 4, 5, dtype=torch.uint8)
        return self.transform.call(self.transform.before, image, "an image")


def as_floats(image):
    return image / 255


def test_an_image_is_noted_before_and_after_each_step_of_data_transform_and_the_dataset_is_as_before():
    dataset = Own(torch.neg, as_floats)
    noted = first_batch.own_steps(dataset, 0)
    assert [(stage, values.dtype, values.shape) for stage, values in noted] == [
        ("the whole image", torch.uint8, (1, 3, 4, 5)),
        ("data.transform: neg", torch.uint8, (1, 3, 4, 5)),
        ("data.transform: as_floats", torch.float32, (1, 3, 4, 5)),
    ]
    assert len(dataset.transform.steps) == 2


def test_an_image_of_one_color_is_no_reason_for_a_warning_and_a_transform_that_makes_all_of_them_so_is():
    for steps, warns in (([torch.neg], False), ([torch.zeros_like], True)):
        *rows, last = first_batch.own_stages(Own(*steps), "image")
        assert bool(first_batch.warnings_of(last, rows)) == warns


class Streamed(Stream):
    """Has its transform in a dataset that cannot be indexed, as streams of images do."""

    def __init__(self, train, **_):
        super().__init__(train)
        self.dataset = SimpleNamespace(transform=Transform("data.transform", [torch.neg]))


def test_the_first_batch_of_a_stream_with_its_own_transform_is_shown(tmp_path, caplog):
    train(tmp_path, REPORT, f"data._target_={HERE}.Streamed train.steps_per_epoch=2")
    assert facts(tmp_path)["first_batch"] and "failed" not in caplog.text


def test_looking_at_a_batch_changes_no_number_of_a_run(tmp_path):
    drawing = "augment.transform._target_=torchvision.transforms.v2.RandomErasing"
    settings = (f"data._target_={HERE}.Noise", drawing)
    plain = train(tmp_path / "plain", *settings)
    shown = train(tmp_path / "shown", REPORT, *settings)
    assert plain["test_loss"] == shown["test_loss"]
    assert logged(tmp_path / "plain", "loss") == logged(tmp_path / "shown", "loss")


class Broken(Images):
    def __getitem__(self, index):
        if index == 40:
            raise ValueError("an image without pixels")
        return super().__getitem__(index)


def test_the_page_of_a_run_that_an_error_ended_names_the_error(tmp_path):
    with pytest.raises(ValueError, match="an image without pixels"):
        train(tmp_path, REPORT, f"data._target_={HERE}.Broken")
    text = parts(tmp_path).text
    assert "ended by an error" in text and "error: an image without pixels" in text and "Where the time went" in text


def test_the_page_begins_with_the_best_score_its_epoch_and_checkpoint_and_the_most_common_class(tmp_path):
    labels = f"data._target_={HERE}.Common train.batch_size=16 model._target_=tests.training.extensions.linear"
    train(tmp_path, REPORT, labels, "optim.lr=0.5")
    best = max(logged(tmp_path, "test_accuracy"))
    step = checkpoint(tmp_path, "best")["step"]
    first, *_ = parts(tmp_path).text.partition("Where the time went")
    assert f"{best:.4g}best test accuracy, epoch {step // 16}" in first
    assert f"checkpoints/step-{step:07}.pt" in first and "0.75accuracy of always naming the most common class" in first
    assert "the test set chose it" in first
    train(tmp_path / "val", REPORT, labels, "data.val_fraction=0.25")
    assert "the validation set chose it" in parts(tmp_path / "val").text


class Common(Images):
    """Three of four samples are of the first class."""

    @property
    def labels(self):
        return np.arange(len(self)) % 4 // 3

    def __getitem__(self, index):
        image, _ = super().__getitem__(index)
        return image, int(self.labels[index])


def test_the_page_has_the_settings_that_differ_from_the_defaults_and_commands_to_paste(tmp_path):
    train(tmp_path, REPORT, "optim.lr=0.003")
    text = parts(tmp_path).text
    settings = facts(tmp_path)["settings"]
    assert settings["optim.lr"] == 0.003 and settings["data.image_size"] == 8 and "optim.lr0.003" in text
    assert not {"seed", "optim.momentum", "train.max_steps"} & settings.keys(), "they are the defaults"
    assert f"python train.py train.resume={tmp_path} train.epochs=4" in text
    in_two = page.commands_of(tmp_path, facts(tmp_path) | {"processes": 2})
    assert in_two["Resume"].startswith("torchrun --nproc-per-node=2 train.py train.resume=")


def test_the_page_of_a_resumed_run_says_what_is_about_which_part(tmp_path, caplog):
    """A run that resumes at the end of an epoch begins with an evaluation, not with a step."""
    train(tmp_path, REPORT, "train.epochs=1")
    earlier = facts(tmp_path)
    (tmp_path / "report.json").write_text(json.dumps(earlier | {"began": "2026-01-01 00:00"}))
    train(tmp_path, REPORT, "train.epochs=2")
    later = facts(tmp_path)
    assert "The batch of step 9" in later["first_batch"]["text"] and "failed, but not the run" not in caplog.text
    assert later["began"] == "2026-01-01 00:00", "of the first part"
    assert later["earlier_seconds"] == sum(earlier["phase_seconds"].values())
    text = parts(tmp_path).text
    assert "Where the time went, since it resumed after step 8" in text and "Began 2026-01-01 00:00; " in text


def test_a_file_of_settings_that_was_chosen_is_named_in_place_of_its_keys(tmp_path, monkeypatch):
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose("config", ["data=synthetic", "model=linear"], return_hydra_config=True)
    monkeypatch.setattr(HydraConfig.instance(), "cfg", cfg)  # as in a run that Hydra begins
    train(tmp_path, REPORT)
    settings = facts(tmp_path)["settings"]
    assert (settings["data"], settings["model"], settings["data.image_size"]) == ("synthetic", "linear", 8)
    assert not {"data._target_", "model._target_", "optim"} & settings.keys()


def test_a_loss_that_explodes_is_a_warning_that_names_the_rate(tmp_path, caplog):
    train(tmp_path / "high", REPORT, "optim.lr=1000 train.clip_norm=null schedule=constant")
    warning = r"the loss exploded: it was \d\S* in the first step, and \d\S* by step \d+: lower optim.lr \(now 1000"
    assert re.search(warning, caplog.text) and re.search(warning, parts(tmp_path / "high").text)
    assert caplog.text.count("exploded") == 1
    caplog.clear()
    train(tmp_path / "usual", REPORT)
    assert "exploded" not in caplog.text


def test_warnings_are_whole_and_counted_and_those_that_begin_alike_are_one_box(tmp_path):
    texts = [f"{letter} warning\nits second line\n" for letter in "abcdefghijklmnopqrstuv"]
    texts += [f"sample {number} could not be read and is left out: {number}.png\n" for number in range(30)]
    entries = [f"[now][data][WARNING] - {text}" for text in texts]
    entries.append("[now][train][ERROR] - no disk\nTraceback (most recent call last):\n  File x\nOSError: no disk\n")
    (tmp_path / "train.log").write_text("".join(entries) + entries[5])
    page.write(tmp_path)
    text = parts(tmp_path).text
    assert "Warnings: 53" in text and "The last of them" in text and "no disk" in text
    assert "e warning its second line" in text and "d warning" not in text and "File x" not in text
    assert "30 warnings that begin alike: sample 0 could" in text and "2.png ... train.log has all" in text


@pytest.mark.parametrize("broken", ["page.write", "first_batch.seen", "git_commit"])
def test_a_page_that_cannot_be_written_is_a_warning_and_fails_no_run(tmp_path, monkeypatch, caplog, broken):
    def fail(*_, **__):
        raise OSError("no space left")

    monkeypatch.setattr(f"extras.report.report.{broken}", fail)
    summary = train(tmp_path, REPORT)
    assert summary["phase_seconds"] and "no space left" in caplog.text and (tmp_path / "report.md").exists()
    if broken == "git_commit":
        assert facts(tmp_path)["settings"] and facts(tmp_path)["versions"]


def long_run(folder):
    """The files of a run with 1,000 evaluations, of which one has a NaN."""
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, 100_001, 10):
            row = {"step": step, "epoch": 1, "lr": 0.1, "loss": 100 / step, "accuracy": step / 1e5}
            file.write(json.dumps(row | {"images_per_second": 1e5 + step % 77, "data_wait_fraction": 0.1}) + "\n")
            if step % 100 == 1:
                loss = None if step == 1001 else 1 / step
                file.write(json.dumps({"step": step, "epoch": 1, "test_loss": loss, "test_accuracy": 0.5}) + "\n")
        file.write('{"step": 100001, "cut')
    for name, size in (("large.png", 20_000_000), ("damaged.png", 300_000)):
        (folder / name).write_bytes(bytes(size))
    phases = {"computing": 3725.0, "checkpoint": 0.01}
    (folder / "report.json").write_text(json.dumps({"phase_seconds": phases}))
    page.write(folder)


def test_a_thousand_evaluations_are_under_2_mb_and_a_too_large_picture_is_only_named(tmp_path):
    long_run(tmp_path)
    assert (tmp_path / "report.html").stat().st_size < 500_000
    found = parts(tmp_path)
    assert "large.png is too large" in found.text and "damaged.png is too large" in found.text
    assert "loss, logarithmic" in found.text
    assert "computing 1 h 2 min" in found.text and "checkpoint 0.0 s" not in found.text


def test_large_pictures_are_shown_as_jpegs_as_far_as_time_allows(tmp_path, monkeypatch):
    noise = np.random.default_rng(0).integers(256, size=(600, 600, 3), dtype=np.uint8)
    for name in ("first.png", "second.png"):
        Image.fromarray(noise).save(tmp_path / name)
    size = (tmp_path / "first.png").stat().st_size
    assert size > page.MOST_BYTES
    monkeypatch.setattr(page, "MOST_LARGE", size)
    page.write(tmp_path)
    assert [address[:16] for address in parts(tmp_path).addresses[1:]] == ["data:image/jpeg;", "second.png"]


def test_a_curve_has_round_ticks_and_its_unit():
    rows = [{"step": step, "loss": loss, "data_wait_fraction": 0.25} for step, loss in ((1, 1.0), (2, 39.0))]
    loss, waiting = charts_of(rows)
    assert [text for text, _ in loss.ticks] == ["1", "2", "5", "10", "20"]
    assert waiting.title == "waiting for data, % of a step"
    assert (waiting.lines[0]["name"], waiting.lines[0]["last"]) == ("", "25")
    assert waiting.ticks[-1][0] == "100", "a small share looks small"
    for low, high in ((0.45, 0.75), (0.4, 0.7), (0.2, 0.5)):  # of which a third is rounded down to less than 0.1
        assert charts_of([{"step": step, "test_accuracy": value} for step, value in ((1, low), (2, high))])
    (rates,) = charts_of([{"step": 1, "lr": 0.1, "lr_1": 0.05}])
    assert (rates.title, [line["name"] for line in rates.lines]) == ("learning rate", ["lr", "lr 1"])


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
def test_a_browser_shows_the_page_without_an_error_on_its_console(tmp_path):
    long_run(tmp_path)
    options = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    options += " --disable-component-update --disable-sync --enable-logging=stderr --v=0"
    files = [f"--user-data-dir={tmp_path}/browser", f"--screenshot={tmp_path}/shot.png"]
    command = ["chromium", *options.split(), *files, f"file://{tmp_path}/report.html"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert "CONSOLE" not in result.stderr and (tmp_path / "shot.png").stat().st_size > 10_000
