"""A run that stops anywhere, in any way, and goes on with any loader, ends with the bits of one that did not stop."""

from functools import cache

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from tests.configs import EXTENSIONS, IMAGES, STOP, TWO_PARTS, checkpoint, differences, logged, train, untimed
from tests.training.extensions import Images, Stop
from training.stopping import Stopped


class Centred(nn.Module):
    """A loss with a buffer that follows the outputs, and that checkpoints keep."""

    def __init__(self):
        super().__init__()
        self.register_buffer("centre", torch.zeros(10))

    def forward(self, outputs, labels):
        with torch.no_grad():
            self.centre.lerp_(outputs.mean(0), 0.1)
        return functional.cross_entropy(outputs - self.centre, labels)


CONFIGS = {
    "batch norm": "model=small_cnn model.width=2 data.length=128",
    "ema, accumulate, clip": f"{TWO_PARTS} callbacks.ema.decay=0.9 train.accumulate=3 train.clip_norm=1 "
    "schedule=one_cycle",
    "bf16": "train.precision=bf16 optim=adamw schedule=step schedule.step_size=1",
    "fp16, clip": "train.precision=fp16 train.clip_norm=1",
    "val split, mixup, erase": "data.val_fraction=0.25 augment.mixup=0.2 augment.erase=0.5 train.epochs=3",
    "two optimizers": f"{TWO_PARTS} trainer._target_={EXTENSIONS}.Alternating train.max_steps=13",
    "modules beside the network": f"trainer._target_={EXTENSIONS}.Beside task.metric=loss",
    "states of parts": f"task.loss={{_target_: {__name__}.Centred}} optim._target_={EXTENSIONS}.Signs "
    f"+callbacks.spy._target_={EXTENSIONS}.Spy",
    "batch sampler": f"batch_sampler._target_={EXTENSIONS}.Pairs train.last_batch=keep data.length=32",
    "what callbacks change": f"{TWO_PARTS} schedule=step schedule.step_size=1 train.epochs=3 "
    f"+callbacks.plateau._target_={EXTENSIONS}.Plateau +callbacks.thaws._target_={EXTENSIONS}.Thaws",
    "stream": f"data._target_={EXTENSIONS}.Stream train.steps_per_epoch=9 train.batch_size=16 loader.streams=4 "
    "loader.shuffle_buffer=20",
}
HOW = ["SIGTERM", "SIGINT", "error", "evaluation"]
LOADERS = ["torch 0", "torch 1", "workers 0", "workers 2", "prefetch 1", "threads 2", "resident 0"]


def loader(config, name):
    kind, workers = name.split()
    if config == "stream" or (config == "batch sampler" and kind == "resident"):
        kind = "workers"
    return f"loader={kind} loader.num_workers={workers}"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a run that nothing stops."""

    @cache
    def trained(config):
        folder = tmp_path_factory.mktemp("whole")
        train(folder, CONFIGS[config], STOP, loader(config, "torch 0"))
        return folder

    return trained


def check_resume(folder, undisturbed, config, stops, loaders):
    overrides = f"{CONFIGS[config]} {STOP} train.checkpoint_every=4"
    for stop, name in zip(stops, loaders, strict=False):
        step, how = stop.split()
        Stop.at = int(step)
        Stop.how = how
        try:
            train(folder, overrides, loader(config, name))
        except Stopped:
            assert how.startswith("SIG") and checkpoint(folder)["step"] == int(step), "a signal loses no step"
        except ZeroDivisionError:
            newest = max((int(path.stem[5:]) for path in folder.glob("checkpoints/step-*.pt")), default=0)
            assert newest >= int(step) - 4, "an error loses few steps"
    Stop.at = 0
    train(folder, overrides, loader(config, loaders[len(stops)]))
    resumed = checkpoint(folder)
    whole = checkpoint(undisturbed)
    del resumed["config"], whole["config"]
    assert differences(resumed, whole) == []
    assert untimed(folder) == untimed(undisturbed)
    assert checkpoint(folder, "best")["step"] == checkpoint(undisturbed, "best")["step"]


@pytest.mark.parametrize(
    ("config", "stops", "loaders"),
    [
        ("batch norm", "3 SIGTERM, 5 SIGINT", "workers 2, torch 0, threads 2"),
        ("ema, accumulate, clip", "5 SIGTERM, 13 error", "torch 0, prefetch 1, workers 0"),
        ("bf16", "8 evaluation", "torch 1, workers 0"),
        ("fp16, clip", "7 SIGINT, 16 SIGTERM", "torch 0, torch 0, workers 0"),
        ("val split, mixup, erase", "6 error, 14 SIGTERM", "workers 0, resident 0, workers 0"),
        ("two optimizers", "8 SIGINT, 13 SIGTERM", "torch 0, workers 0, torch 0"),
        ("modules beside the network", "11 SIGTERM", "torch 0, workers 0"),
        ("states of parts", "5 SIGTERM, 10 error", "torch 0, workers 0, torch 0"),
        ("batch sampler", "5 SIGINT", "workers 0, workers 2"),
        ("what callbacks change", "3 SIGINT, 8 SIGTERM, 13 error", "torch 0, workers 0, torch 0, workers 1"),
        ("stream", "5 SIGTERM, 12 error", "workers 2, workers 0, workers 1"),
    ],
)
def test_a_run_that_stops_is_resumed_to_the_same_bits(tmp_path, whole, config, stops, loaders):
    check_resume(tmp_path, whole(config), config, stops.split(", "), loaders.split(", "))


@pytest.mark.slow
@pytest.mark.timeout(1200)
@settings(max_examples=150, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(
    config=st.sampled_from(list(CONFIGS)),
    stops=st.lists(st.tuples(st.integers(1, 16), st.sampled_from(HOW)), max_size=4),
    loaders=st.lists(st.sampled_from(LOADERS), min_size=5, max_size=5),
)
def test_a_run_that_stops_anywhere_is_resumed_to_the_same_bits(tmp_path_factory, whole, config, stops, loaders):
    texts = [f"{step} {how}" for step, how in sorted(stops)]
    check_resume(tmp_path_factory.mktemp("stopped"), whole(config), config, texts, loaders)


def test_max_steps_below_what_was_done_trains_nothing_and_is_named(tmp_path, caplog):
    caplog.set_level("INFO")
    for every in ("step", "epoch"):
        folder = tmp_path / every
        cycle = f"schedule=one_cycle schedule.every={every}"
        train(folder, cycle)
        train(folder, cycle, "train.max_steps=5")
        assert checkpoint(folder)["step"] == 16 and "raise train.max_steps=5" in caplog.text
        assert "raise train.epochs" not in caplog.text


def test_a_run_goes_on_with_another_batch_size_at_the_end_of_an_epoch(tmp_path, error):
    larger = "train.batch_size=64 train.log_interval=1"
    train(tmp_path, "train.epochs=1")
    assert train(tmp_path, larger)["epochs"] == 2
    assert checkpoint(tmp_path)["step"] == 8 + 4
    train(tmp_path / "whole", larger)
    ours, whole = (logged(folder, "lr")[-4:] for folder in (tmp_path, tmp_path / "whole"))
    assert ours == whole, "the schedule is where an epoch begins"
    train(tmp_path / "within", "train.max_steps=3")
    with error("32", "64"):
        train(tmp_path / "within", "train.batch_size=64")


class Files(Images):
    """A folder whose files change between runs."""

    length = 64
    moved = False

    def __init__(self, train, **_):
        super().__init__(train)
        self.labels = [index % 2 for index in range(len(self))]
        if Files.moved:
            self.labels[40:42] = [1, 0]  # which were 0 and 1

    def __len__(self):
        return Files.length


def test_data_that_change_are_refused_within_an_epoch_and_named_at_its_end(tmp_path, monkeypatch, error, caplog):
    caplog.set_level("INFO")
    files = f"{IMAGES} data._target_={__name__}.Files train.batch_size=32 schedule=constant"
    for name, limit in (("within", "train.max_steps=1"), ("end", "train.epochs=1")):
        train(tmp_path / name, files, limit)
    monkeypatch.setattr(Files, "moved", True)
    with error("labels of the training set", "end-of-epoch checkpoint"):
        train(tmp_path / "within", files)
    monkeypatch.setattr(Files, "length", 96)
    with error(r"\b64\b", r"\b96\b"):
        train(tmp_path / "within", files)
    train(tmp_path / "end", files)
    assert "dataset_length is 96, was 64" in caplog.text and checkpoint(tmp_path / "end")["step"] == 2 + 3
    monkeypatch.setattr(Files, "moved", False)
    train(tmp_path / "end", files, "train.epochs=3")
    assert "labels of the training set, or their order, have changed" in caplog.text
