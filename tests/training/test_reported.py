"""Kinds of faults that people reported of this repository and its neighbours, each tried in several ways."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from hydra.core.plugins import Plugins
from torch import Tensor, nn

from tests.configs import CONF, DOORS, LINEAR, checkpoint, metrics, steps, train
from tests.training.doors import Spy
from training.trainer import Trainer

HERE = __name__
ROOT = CONF.parent


# No guess decides what is kept


def falling(outputs: Tensor, labels: Tensor) -> Tensor:
    """A score of each sample that falls while the network learns."""
    return nn.functional.cross_entropy(outputs, labels, reduction="none")


class Directed:
    """A metric that says which value is the best, as torchmetrics' do."""

    higher_is_better = False

    def __init__(self) -> None:
        self.epoch = 0.0

    def update(self, outputs: Tensor, labels: Tensor) -> None: ...

    def compute(self) -> float:
        self.epoch += 1
        return -self.epoch

    def reset(self) -> None: ...


def score(name: str) -> list[str]:
    return [f"task.scores={{{name}: {{_target_: {HERE}.falling}}}}", f"task.metric={name}"]


@pytest.mark.parametrize(
    ("overrides", "lower"),
    [
        *[(score(name), True) for name in ("cross_entropy", "brier", "ece", "MSE")],
        ([*score("mine"), "task.higher_is_better=false"], True),
        ([*score("mine"), "task.higher_is_better=true"], False),
        ([f"task.metrics={{mine: {{_target_: {HERE}.Directed}}}}", "task.metric=mine"], True),
    ],
)
def test_the_best_checkpoint_is_the_best_in_the_direction_that_is_known_or_given(tmp_path, overrides, lower):
    summary = train(tmp_path, LINEAR, *overrides, "train.epochs=3", "optim.lr=0.01")
    name = summary["score"]
    values = {line["step"]: line[name] for line in metrics(tmp_path) if name in line}
    assert summary["lower_is_better"] is lower and len(set(values.values())) == 3
    assert checkpoint(tmp_path, "best")["step"] == (min if lower else max)(values, key=values.get)


@pytest.mark.parametrize("name", ["power", "lossless", "wear"])
def test_a_score_of_another_name_needs_a_direction_before_training(tmp_path, error, name):
    with error(f"task.metric={name}", r"task\.higher_is_better=true or false"):
        train(tmp_path, LINEAR, *score(name))
    assert not (tmp_path / "metrics.jsonl").exists()


# Lengths are measured


class Lying:
    """A sampler of `gives` samples that says it has `says`."""

    def __init__(self, gives: int, says: int) -> None:
        self.gives, self.says = gives, says

    def __len__(self) -> int:
        return self.says

    def __iter__(self) -> Any:
        return iter(range(self.gives))


@pytest.mark.parametrize("schedule", ["cosine", "one_cycle", "step"])
@pytest.mark.parametrize("loader", ["torch", "workers"])
@pytest.mark.parametrize(("gives", "says"), [(64, 128), (128, 64)])
def test_an_epoch_is_an_epoch_whatever_its_sampler_says(tmp_path, caplog, gives, says, loader, schedule):
    lying = [f"sampler._target_={HERE}.Lying", f"+sampler.gives={gives}", f"+sampler.says={says}"]
    summary = train(tmp_path, LINEAR, *lying, "train.epochs=3", f"loader={loader}", f"schedule={schedule}")
    assert summary["epochs"] == 3 and checkpoint(tmp_path)["step"] == 3 * gives // 32
    assert [line["epoch"] for line in metrics(tmp_path) if "test_loss" in line] == [1, 2, 3]
    warnings = [text for text in caplog.messages if "early or late" in text]
    assert len(warnings) == 1 and f"{gives // 32} steps" in warnings[0] and f"{says // 32}" in warnings[0]


def test_max_steps_below_what_was_done_trains_nothing_and_is_named(tmp_path, caplog):
    caplog.set_level("INFO")
    for every in ("step", "epoch"):
        folder, cycle = tmp_path / every, ["schedule=one_cycle", f"schedule.every={every}"]
        train(folder, LINEAR, *cycle)
        train(folder, LINEAR, *cycle, "train.max_steps=5")
        assert checkpoint(folder)["step"] == 16 and "raise train.max_steps=5" in caplog.text
        assert "raise train.epochs" not in caplog.text


def test_a_run_goes_on_with_another_batch_size_at_the_end_of_an_epoch(tmp_path, error):
    train(tmp_path, LINEAR, "train.epochs=1")
    assert train(tmp_path, LINEAR, "train.batch_size=64")["epochs"] == 2
    assert checkpoint(tmp_path)["step"] == 8 + 4
    train(tmp_path / "within", LINEAR, "train.max_steps=3")
    with error("32", "64"):
        train(tmp_path / "within", LINEAR, "train.batch_size=64")


# Batches of one, parts of one


class Sizes(nn.Module):
    """Notes how many samples it is given, and has a batch norm of one value a channel."""

    sizes: ClassVar[list[int]] = []

    def __init__(self, num_classes: int, in_channels: int, **_: Any) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64 * in_channels, 4), nn.BatchNorm1d(4), nn.Linear(4, 10))

    def forward(self, images: Tensor) -> Tensor:
        if self.training:
            self.sizes.append(len(images))
        return self.layers(images)


NORMED = f"model._target_={HERE}.Sizes"


@pytest.mark.parametrize(("batch", "parts", "sizes"), [(13, 4, [3, 3, 3, 4]), (8, 3, [2, 3, 3]), (5, 2, [2, 3])])
def test_the_parts_of_a_batch_are_of_nearly_one_size(tmp_path, batch, parts, sizes):
    Sizes.sizes = []
    train(tmp_path, NORMED, f"train.batch_size={batch}", f"train.accumulate={parts}", "train.max_steps=1")
    assert sorted(Sizes.sizes) == sorted(sizes)


@pytest.mark.parametrize(
    "overrides",
    [
        ["data.length=65", "train.last_batch=keep"],
        ["train.batch_size=4", "train.accumulate=3"],
        ["train.batch_size=1"],
        ["data.length=67", "train.last_batch=keep", "train.accumulate=2"],
    ],
)
def test_a_batch_norm_that_would_get_one_sample_is_named_before_training(tmp_path, error, overrides):
    with error(r"train\.last_batch=drop", r"train\.accumulate"):
        train(tmp_path, NORMED, *overrides)
    train(tmp_path / "linear", LINEAR, *overrides, "train.max_steps=3")


# Nothing of the user's is deleted


def test_files_that_only_look_like_checkpoints_are_kept_and_not_read(tmp_path):
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    names = ["step-0000008-good.pt", "step-0000008 (copy).pt", "step-99.pt", "step-.pt", "my step-0000001.pt"]
    for name in names:
        (folder / name).write_text("mine")
    train(tmp_path, LINEAR, "train.epochs=4", "train.keep_checkpoints=1")
    assert checkpoint(tmp_path)["step"] == 32 and not (folder / "step-0000008.pt").exists()
    assert {path.name for path in folder.iterdir()} >= set(names)


# Surroundings


def test_a_damaged_summary_is_named_and_the_run_goes_on_without_it(tmp_path, error):
    train(tmp_path, LINEAR, "train.epochs=1")
    (tmp_path / "summary.json").write_text("")
    with error(f"{tmp_path}/summary.json is damaged"):
        train(tmp_path, LINEAR, "train.epochs=1")
    (tmp_path / "summary.json").unlink()
    assert train(tmp_path, LINEAR, "train.epochs=1") == json.loads((tmp_path / "summary.json").read_text())


def test_an_error_in_a_callbacks_start_ends_those_that_were_started(tmp_path):
    with pytest.raises(ZeroDivisionError):
        train(tmp_path, f"+callbacks.spy._target_={DOORS}.Spy", f"+callbacks.then._target_={HERE}.Fails")
    assert Spy.calls == ["start", "interrupted"]


class Fails:
    def on_start(self, run: Any) -> None:
        raise ZeroDivisionError

    def on_end(self, run: Any, summary: Any) -> None:
        raise AssertionError("it was not started")


def test_modules_that_configure_optimizers_makes_are_there_in_the_check(tmp_path):
    train(tmp_path, LINEAR, f"trainer._target_={HERE}.LateHead", "train.max_steps=2", "task.metric=loss")
    assert checkpoint(tmp_path)["others"]["head"].keys() == {"weight", "bias"}


class LateHead(Trainer):
    """Makes a module in configure_optimizers."""

    def configure_optimizers(self) -> Any:
        self.head = nn.Linear(10, 10)
        return torch.optim.SGD([*self.model.parameters(), *self.head.parameters()], 0.1)

    def training_step(self, batch: dict[str, Any]) -> Tensor:
        (images,), labels = self.inputs_and_labels(batch)
        return self.task.loss(self.head(self.model(images)), labels)

    def evaluation_step(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        return {"loss": self.training_step(batch)}


def test_tilde_is_the_home_folder_in_every_path(command, fast, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert command(*fast, "hydra.run.dir=~/out").code == 0
    for name in ("~/out", "~/out/checkpoints/last.pt"):
        done = command(f"train.resume={name}", "train.epochs=2", "hydra.run.dir=~/more")
        assert done.code == 0, done.shown
    assert checkpoint(tmp_path / "more")["step"] == 4
    done = command("train.resume=~/out", "optim.lr=~nobody")
    assert done.code == 1 and "optim.lr=~nobody" in done.shown and "Traceback" not in done.shown


def test_a_relative_checkpoint_is_found_though_the_job_changes_its_folder(command, fast, tmp_path):
    assert command(*fast, "hydra.run.dir=out").code == 0
    given = ["train.resume=out/checkpoints/last.pt", "hydra.job.chdir=true", "hydra.run.dir=new", "train.epochs=2"]
    done = command(*given)
    assert done.code == 0, done.shown
    assert checkpoint(tmp_path / "new")["step"] == 4


@pytest.mark.parametrize("content", ["", "7", "[["])
def test_a_damaged_list_of_overrides_is_named(command, fast, tmp_path, content):
    assert command(*fast, "hydra.run.dir=out").code == 0
    (tmp_path / "out" / ".hydra" / "overrides.yaml").write_text(content)
    done = command("train.resume=out", "train.epochs=2")
    assert done.code == 1 and "Traceback" not in done.shown and "overrides.yaml" in done.shown


def test_a_wrong_setting_is_answered_with_one_sentence_alone(command, fast):
    done = command(*fast, "train.batch_size=1000", "hydra.run.dir=out")
    assert done.code == 1 and done.shown.count("\n") == 1 and "train.batch_size=1000" in done.shown


SWEEPER = """
import json
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper

class Recording(BasicSweeper):
    def sweep(self, arguments):
        (jobs,) = super().sweep(arguments)
        json.dump([job.return_value for job in jobs], open("returned.json", "w"))
        return [jobs]
"""


def test_a_sweeper_that_looks_for_the_best_score_gets_it(command, fast, tmp_path, monkeypatch):
    """As hydra-optuna-sweeper does."""
    (tmp_path / "hydra_plugins").mkdir()
    (tmp_path / "hydra_plugins" / "recording.py").write_text(SWEEPER)
    monkeypatch.syspath_prepend(tmp_path)
    Plugins.instance().register(importlib.import_module("hydra_plugins.recording").Recording)
    sweeper = "hydra.sweeper._target_=hydra_plugins.recording.Recording"
    done = command("-m", *fast, "optim.lr=0.001,0.1", sweeper, "hydra.sweep.dir=sweep", "model=glob(linear*)")
    assert done.code == 0, done.shown
    summaries = [json.loads((tmp_path / "sweep" / job / "summary.json").read_text()) for job in "01"]
    assert json.loads((tmp_path / "returned.json").read_text()) == [one[one["score"]] for one in summaries]


@pytest.mark.parametrize(
    ("program", "after"),
    [
        (ROOT / "train.py", "| head -n 1"),
        (ROOT / "train.py", "2>&-"),
        (ROOT / "train.py", ">&- 2>&-"),
        (ROOT / "train.py", "hydra/job_logging=disabled"),
        (Path("linked.py"), ""),
    ],
)
def test_a_run_ends_well_whatever_its_terminal_and_by_a_link(fast, tmp_path, program, after):
    (tmp_path / "linked.py").symlink_to(ROOT / "train.py")
    words = [sys.executable, str(program), *fast, "train.log_interval=1", "train.epochs=9", "hydra.run.dir=out"]
    shell = " ".join([*(f"'{word}'" for word in words), after])
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    options: dict[str, Any] = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True}
    done = subprocess.run(["sh", "-c", shell], timeout=200, check=False, **options)
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert (tmp_path / "out" / "summary.json").exists() and len(steps(tmp_path / "out")) == 18
    assert checkpoint(tmp_path / "out")["step"] == 18, "no output was written into a file"
