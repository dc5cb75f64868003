import json
import os
import signal
from itertools import count
from pathlib import Path

import pytest
import torch
from omegaconf import DictConfig

import train as train_module
from loaders import timing
from tests.configs import composed
from train import run
from training.config import ConfigError
from training.stopping import Stopped

SMALL = [
    "data=synthetic",
    "data.length=256",
    "data.test_length=64",
    "data.image_size=8",
    "train.batch_size=32",
    "train.epochs=2",
    "train.log_interval=3",
    "loader.num_workers=0",
    "loader=torch",
    "callbacks/standard=[best,ema]",
]


def compose_small(*overrides: str) -> DictConfig:
    given = {text.partition("=")[0]: text for text in [*SMALL, *overrides]}
    return composed(*given.values())


def train(folder: Path, *overrides: str) -> dict:
    return run(compose_small(*overrides), folder)


def metrics(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def weights(folder: Path, name: str = "last") -> dict[str, torch.Tensor]:
    return torch.load(folder / "checkpoints" / f"{name}.pt", weights_only=True)["model"]


def assert_equal_weights(one: Path, other: Path) -> None:
    theirs = weights(other)
    for name, tensor in weights(one).items():
        assert torch.equal(tensor, theirs[name]), name


def test_a_run_writes_its_metrics_summary_and_checkpoints(tmp_path):
    summary = train(tmp_path)
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
    promised = "loader num_workers batch_size device images_per_second data_wait_fraction first_batch_seconds "
    promised += "step_ms_p50 step_ms_p95 test_accuracy epochs git_commit versions"
    assert set(promised.split()) <= summary.keys()
    assert summary["loader"] == "torch" and summary["batch_size"] == 32 and summary["epochs"] == 2
    assert summary["images_per_second"] > 0 and 0 <= summary["data_wait_fraction"] <= 1
    steps = [line for line in metrics(tmp_path) if "loss" in line]
    assert len(steps) >= 2
    for line in steps:
        assert line.keys() == {"step", "epoch", "loss", "lr", "images_per_second", "data_wait_fraction", "accuracy"}
    assert [line["epoch"] for line in metrics(tmp_path) if "test_accuracy" in line] == [1, 2]
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {
        *("step-0000008.pt", "step-0000016.pt", "last.pt", "best.pt")
    }


def test_a_loss_that_is_not_finite_is_null_in_the_metrics(tmp_path):
    train(tmp_path, "optim.lr=1e30", "train.warmup_epochs=0", "train.log_interval=1")
    assert None in [line.get("loss", 0) for line in metrics(tmp_path)]
    assert "NaN" not in (tmp_path / "metrics.jsonl").read_text()


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_the_same_seed_gives_bit_equal_weights_whatever_the_loader_and_another_seed_others(tmp_path, two_threads):
    for name, loader, seed in (("one", "torch", 0), ("two", "prefetch", 0), ("other", "torch", 1)):
        short = ["loader.num_workers=1", "train.max_steps=2", "data.test_length=8"]
        train(tmp_path / name, f"loader={loader}", f"seed={seed}", *short)
    assert_equal_weights(tmp_path / "one", tmp_path / "two")
    with pytest.raises(AssertionError):
        assert_equal_weights(tmp_path / "one", tmp_path / "other")


def test_a_batch_in_parts_gives_the_gradient_of_the_whole_batch(tmp_path):
    # A linear model, because the result of batch norm depends on the parts.
    linear = ["model._target_=tests.test_train.linear_model", "~model.width", "train.epochs=1", "train.clip_norm=1.0"]
    for parts in (1, 3):
        train(tmp_path / str(parts), *linear, f"train.accumulate={parts}")
    split = weights(tmp_path / "3")
    for name, tensor in weights(tmp_path / "1").items():
        torch.testing.assert_close(tensor, split[name], rtol=1e-4, atol=1e-5)


def linear_model(num_classes: int, in_channels: int) -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(8 * 8 * in_channels, num_classes))


def test_max_steps_ends_the_run_with_evaluation_and_checkpoint_in_a_folder_that_it_makes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    summary = run(compose_small("train.max_steps=3"))
    (folder,) = (tmp_path / "outputs").iterdir()
    assert json.loads((folder / "summary.json").read_text()) == summary
    assert max(line["step"] for line in metrics(folder)) == 3
    assert "test_accuracy" in summary and (folder / "checkpoints" / "last.pt").exists()


ADAMW = ["optim=adamw", "optim.lr=0.01"]


@pytest.mark.parametrize("overrides", [["train.precision=bf16"], [*ADAMW, "train.channels_last=false"]], ids=str)
def test_training_lowers_the_loss_and_is_better_than_chance(tmp_path, overrides):
    summary = train(tmp_path, "train.epochs=6", *overrides)
    losses = [line["loss"] for line in metrics(tmp_path) if "loss" in line]
    assert losses[-1] < 0.7 * losses[0] and summary["test_accuracy"] > 0.5, "there are ten classes"


@pytest.mark.slow
def test_a_compiled_model_trains_and_its_checkpoint_loads_into_an_uncompiled_one(tmp_path):
    train(tmp_path, "train.compile=true")
    train(tmp_path, f"train.resume={tmp_path}", "train.epochs=3")


def test_a_resumed_run_uses_its_own_learning_rate(tmp_path):
    train(tmp_path, "train.epochs=1", "train.warmup_epochs=0")
    train(tmp_path / "on", "train.epochs=2", "train.warmup_epochs=0", "optim.lr=0.01", f"train.resume={tmp_path}")
    rates = [line["lr"] for line in metrics(tmp_path / "on") if "loss" in line]
    assert 0 < rates[0] < 0.01 / 2


@pytest.mark.parametrize("where", ["a new folder", "the same folder"])
def test_best_is_the_best_checkpoint_of_its_folder_after_a_resume_too(tmp_path, monkeypatch, where):
    # The checkpoint that the run starts from is evaluated first.
    accuracies = iter([0.8, 0.9, 0.5 if where == "a new folder" else 0.9, 0.7, 0.6, 0.6])
    monkeypatch.setattr("train.Trainer.evaluate", lambda trainer, loader, signals: ({"accuracy": next(accuracies)}, 0))
    train(tmp_path)
    folder = tmp_path / "on" if where == "a new folder" else tmp_path
    train(folder, "train.epochs=5", f"train.resume={tmp_path}")
    best = torch.load(folder / "checkpoints" / "best.pt", weights_only=True)
    assert best["step"] == (24 if where == "a new folder" else 16)


def test_a_run_that_has_finished_returns_its_summary_unless_more_is_asked_for(tmp_path, caplog):
    summary = train(tmp_path, "train.epochs=1")
    assert train(tmp_path, "train.epochs=1") == summary
    (tmp_path / "summary.json").unlink()  # as if it had been killed before
    assert train(tmp_path, "train.epochs=1")["test_accuracy"] == summary["test_accuracy"]
    with pytest.raises(ConfigError, match=r"this run has finished after 8 steps: raise train\.epochs"):
        train(tmp_path, "train.epochs=1", f"train.resume={tmp_path}")
    with pytest.raises(ConfigError, match=r"finished run with other settings \(optim.lr is 0.5, was .*\): choose"):
        train(tmp_path, "train.epochs=1", "optim.lr=0.5")
    caplog.set_level("INFO")
    train(tmp_path, "train.epochs=2")
    assert "train.resume with other settings: train.epochs is 2, was 1" in caplog.text


def test_a_run_goes_on_after_its_metrics_were_damaged(tmp_path):
    train(tmp_path, "train.epochs=1")
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b"\xff\x00{")
    train(tmp_path, "train.epochs=2")
    assert [line["epoch"] for line in metrics(tmp_path) if "test_accuracy" in line] == [1, 2]


def test_resume_null_starts_afresh_in_the_same_folder(tmp_path, monkeypatch):
    for _ in range(2):
        train(tmp_path, "train.epochs=1", "train.resume=null", "train.log_interval=4")
        assert [line["step"] for line in metrics(tmp_path) if "loss" in line] == [1, 4, 8]
    (tmp_path / "metrics.jsonl").unlink()
    monkeypatch.setattr("train.Trainer.train_step", lambda trainer, batch: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train(tmp_path, "train.epochs=1", "train.resume=null")
    assert not (tmp_path / "summary.json").exists(), "it would be that of the earlier run"


def test_checkpoints_are_saved_inside_an_epoch_and_the_newest_and_the_best_are_kept(tmp_path, monkeypatch):
    accuracies = iter([0.9, 0.8])
    monkeypatch.setattr("train.Trainer.evaluate", lambda trainer, loader, signals: ({"accuracy": next(accuracies)}, 0))
    train(tmp_path, "train.checkpoint_every=3", "train.keep_checkpoints=3")
    kept = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert kept == {"last.pt", "best.pt", *(f"step-{step:07}.pt" for step in (8, 12, 15, 16))}
    assert weights(tmp_path, "best").keys() == weights(tmp_path, "step-0000008").keys()
    assert (tmp_path / "checkpoints" / "best.pt").resolve().name == "step-0000008.pt"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Path:
    """The folder of a run that nothing interrupts."""
    folder = tmp_path_factory.mktemp("undisturbed")
    train(folder)
    return folder


@pytest.mark.parametrize(
    ("number", "inside", "name"),
    [
        pytest.param(signal.SIGTERM, timing.StepTimer, "batches", id="before the first step"),
        pytest.param(signal.SIGINT, train_module.Trainer, "evaluate", id="in an evaluation"),
        pytest.param(signal.SIGUSR1, torch, "save", id="while saving"),
    ],
)
def test_after_a_signal_a_run_saves_and_is_resumed_to_the_same_weights(
    tmp_path, monkeypatch, undisturbed, number, inside, name
):
    calls, function = count(), getattr(inside, name)

    def interrupted(*arguments):
        if next(calls) == 0:
            os.kill(os.getpid(), number)
        return function(*arguments)

    monkeypatch.setattr(inside, name, interrupted)
    before = signal.getsignal(number)
    with pytest.raises(Stopped, match=f"stopped by {number.name}; saved the checkpoint of step") as stopped:
        train(tmp_path, "train.checkpoint_every=3", "loader=prefetch", "loader.num_workers=1")
    assert stopped.value.exit_code == (130 if number == signal.SIGINT else 75)
    assert signal.getsignal(number) is before
    train(tmp_path)
    assert_equal_weights(undisturbed, tmp_path)


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("model=resnet18", "does not fit this run's ResNet"),
        ("seed=1", "seed=0, but the loader has seed=1"),
        ("train.batch_size=16", "global_batch_size=32, but the loader has global_batch_size=16"),
        ("data.length=128", "dataset_length=256, but the loader has dataset_length=128"),
        ("optim=adamw", "was trained with SGD and this run has AdamW"),
    ],
)
def test_resuming_another_run_is_refused_with_the_difference(tmp_path, undisturbed, override, reason):
    with pytest.raises(ConfigError, match=reason):
        train(tmp_path, override, f"train.resume={undisturbed}")


def test_no_process_or_thread_is_left_when_a_run_ends_or_fails(tmp_path, monkeypatch, nothing_left_behind):
    train(tmp_path / "ends", "loader=prefetch", "loader.num_workers=2", "train.max_steps=2")
    monkeypatch.setattr("train.Trainer.train_step", lambda trainer, batch: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train(tmp_path / "fails", "loader=prefetch", "loader.num_workers=2")
