"""What train.py promises of every run. tests/training tests its parts, resumes and extension points."""

import os
import signal
import time

import pytest
import torch

from data.synthetic import Synthetic
from tests.configs import (
    SMALL,
    checkpoint,
    composed,
    differences,
    differing_weights,
    logged,
    steps,
    summary_of,
    train,
)
from tests.data.reading import refused
from train import train_model
from training.stopping import Stopped

PROMISED = (
    *("loader", "num_workers", "batch_size", "device", "images_per_second", "data_wait_fraction", "step_ms_p50"),
    *("first_batch_seconds", "step_ms_p95", "test_accuracy", "epochs", "verdict", "git_commit", "versions"),
)
SHORT = "loader.num_workers=1 train.max_steps=2 data.test_length=8"


def test_a_run_writes_its_metrics_summary_and_checkpoints(tmp_path):
    summary = train(tmp_path)
    assert summary_of(tmp_path) == summary
    assert set(PROMISED) <= summary.keys()
    assert summary["loader"] == "torch" and summary["batch_size"] == 32 and summary["epochs"] == 2
    assert summary["images_per_second"] > 0 and 0 <= summary["data_wait_fraction"] <= 1
    for line in steps(tmp_path):
        assert line.keys() == {"step", "epoch", "loss", "lr", "images_per_second", "data_wait_fraction", "accuracy"}
    assert logged(tmp_path, "step", "test_accuracy") == [8, 16]
    assert logged(tmp_path, "epoch", "test_accuracy") == [1, 2]
    # the first step, each interval, and the last step of an epoch
    assert logged(tmp_path, "step", "lr") == [1, 3, 6, 8, 9, 12, 15, 16]
    assert logged(tmp_path, "epoch", "lr") == [1] * 4 + [2] * 4
    names = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert names == {"step-0000008.pt", "step-0000016.pt", "last.pt", "best.pt"}


def test_the_same_seed_gives_bit_equal_weights_whatever_the_loader_and_another_seed_others(tmp_path):
    for name, loader, seed in (("one", "torch", 0), ("two", "prefetch", 0), ("other", "torch", 1)):
        train(tmp_path / name, f"loader={loader} seed={seed}", SHORT)
    assert not differing_weights(tmp_path / "one", tmp_path / "two")
    assert differing_weights(tmp_path / "one", tmp_path / "other")


def test_a_batch_in_parts_or_in_fp16_gives_the_clipped_gradient_of_the_whole_batch(tmp_path):
    def weights(*settings):
        train(tmp_path / str(settings), "train.epochs=1 train.clip_norm=1.0", *settings)
        return checkpoint(tmp_path / str(settings))["model"]

    whole = weights()
    assert differences(weights("train.clip_norm=1e9"), whole)
    torch.testing.assert_close(weights("train.accumulate=3"), whole, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(weights("train.precision=fp16"), whole, rtol=1e-4, atol=1e-2)


def test_max_steps_ends_the_run_with_evaluation_and_checkpoint_in_a_folder_that_it_makes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    summary = train_model(composed(*SMALL, "train.max_steps=3"))
    (folder,) = (tmp_path / "outputs").iterdir()
    assert summary_of(folder) == summary
    assert max(logged(folder, "step")) == checkpoint(folder)["step"] == 3
    assert "test_accuracy" in summary


@pytest.mark.slow
def test_a_compiled_model_trains_and_its_checkpoint_loads_into_an_uncompiled_one(tmp_path):
    train(tmp_path, "train.compile=true")
    assert train(tmp_path, "train.epochs=3")["epochs"] == 3


def test_a_finished_run_returns_its_summary_unless_more_is_asked_for_or_its_files_are_damaged(tmp_path, caplog):
    caplog.set_level("INFO")
    once = "train.epochs=1"
    summary = train(tmp_path, once)
    assert train(tmp_path, once) == summary == train(tmp_path, "train.max_steps=5")
    assert "this run has finished: to continue it, use train.resume=" in caplog.text
    (tmp_path / "summary.json").write_text("")
    with refused(rf"{tmp_path}/summary\.json is damaged"):
        train(tmp_path, once)
    (tmp_path / "summary.json").unlink()  # as if it had been killed before
    caplog.clear()
    again = train(tmp_path, once)
    assert "no step is left to train: to continue it" in caplog.text and "has finished" not in caplog.text
    assert again["test_accuracy"] == summary["test_accuracy"]
    assert again["images_per_second"] is None and again["verdict"] == "not measured: no step was timed"
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1')
    train(tmp_path, "train.epochs=2")
    assert "changed settings: train.epochs is 2, was 1" in caplog.text
    assert logged(tmp_path, "epoch", "test_accuracy") == [1, 2]


def test_resume_null_starts_afresh_in_the_same_folder(tmp_path):
    for _ in range(2):
        train(tmp_path, "train.epochs=1 train.resume=null train.log_interval=4")
        assert logged(tmp_path, "step", "lr") == [1, 4, 8]


class Silent(Synthetic):
    """A store that does not answer any more, from a sample of the fourth batch on; then the run is stopped."""

    read = 0

    def __getitem__(self, index):
        Silent.read += 1
        if Silent.read == 122:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
        return super().__getitem__(index)


def test_a_signal_while_no_batch_comes_ends_the_run_with_a_checkpoint_of_the_last_step(tmp_path):
    with pytest.raises(Stopped, match="saved the checkpoint of step 3"):
        train(tmp_path, f"data._target_={__name__}.Silent loader=workers")
    assert checkpoint(tmp_path)["step"] == 3


def test_no_process_or_thread_is_left_when_a_run_ends_or_fails(tmp_path, monkeypatch, nothing_left_behind):
    train(tmp_path / "ends", "loader=prefetch loader.num_workers=2 train.max_steps=2")
    monkeypatch.setattr("training.trainer.Trainer.train_step", lambda trainer, batch: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train(tmp_path / "fails", "loader=prefetch loader.num_workers=2")
