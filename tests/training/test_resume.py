"""A run that stops anywhere, in any way, and goes on with any loader, ends with the bits of one that did not stop.

A run is a sequence of starts. Each ends by a signal, an error, a kill or a full disk. Between them the loader and
other settings change, callbacks look at batches, the run moves to another folder, and evaluate.py reads it.
"""

import importlib
import os
import shutil
import signal
import sys
import traceback
from contextlib import ExitStack, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional
from torch.optim import SGD

from data.errors import DataError
from loaders import MachineFull
from tests.configs import (
    DARKENED,
    EXTENSIONS,
    FAST,
    IMAGES,
    MIXTURE,
    STOP,
    TWO_PARTS,
    checkpoint,
    composed,
    differences,
    logged,
    metrics,
    train,
    untimed,
)
from tests.infrastructure.forks import ROOT
from tests.training.conftest import full_disk
from tests.training.extensions import Images, Linear, Signs, Stop
from training.assemble import assemble
from training.config import checked
from training.module_state import ModuleState
from training.optimizer import settings_of_groups
from training.stopping import Stopped
from training.trainer import Trainer


class Centred(nn.Module):
    """A loss with a buffer that follows the outputs, and that checkpoints keep."""

    def __init__(self):
        super().__init__()
        self.register_buffer("centre", torch.zeros(10))

    def forward(self, outputs, labels):
        with torch.no_grad():
            self.centre.lerp_(outputs.mean(0), 0.1)
        return functional.cross_entropy(outputs - self.centre, labels)


class Annealed:
    """A loss that is no module, and counts its calls."""

    def __init__(self):
        self.calls = 0
        self.centre = torch.zeros(10)

    def __call__(self, outputs, labels):
        self.calls += 1
        self.centre = torch.lerp(self.centre, outputs.detach().mean(0), 0.1)
        return functional.cross_entropy(outputs - self.centre, labels) + outputs.square().mean() / self.calls


class Ranged(Linear):
    """Has a range that is infinite at first, and a scale that state_dict leaves out."""

    def add(self, **_):
        self.register_buffer("high", torch.tensor(-torch.inf))
        self.register_buffer("scale", torch.ones(1), persistent=False)

    def forward(self, images):
        if self.training:
            self.high = torch.maximum(0.9 * self.high, images.max())
        return self.scale * super().forward(images.clamp(max=self.high.clamp(min=1)))


class Counted(Annealed):
    """A score that counts its calls, too."""

    def __call__(self, outputs, labels):
        self.calls += 1
        return torch.full((len(outputs),), float(self.calls))


class CountedInside(nn.Module):
    """A score that is a module, and counts its calls in a buffer of a part, and in an attribute."""

    def __init__(self):
        super().__init__()
        self.part = nn.Module()
        self.part.register_buffer("calls", torch.zeros(()))
        self.seen = 0

    def forward(self, outputs, labels):
        self.part.calls += 1
        self.seen += 1
        return (self.part.calls + 1000 * self.seen).expand(len(outputs))


class LargestLoss(nn.Module):
    """A metric that is a module, whose reset() keeps what it knows of earlier evaluations."""

    def __init__(self):
        super().__init__()
        self.register_buffer("largest", torch.zeros(()))

    def reset(self):
        pass

    def update(self, outputs, labels):
        self.largest.copy_(torch.maximum(self.largest, functional.cross_entropy(outputs, labels)))

    def compute(self):
        return self.largest


class FreezesAgain:
    """After each epoch but the last: before train.unfreeze_after, which undoes it, and after it."""

    def on_epoch_end(self, run):
        run.trainer.model.features[0].requires_grad_(False)


class Scales:
    def on_epoch_end(self, run):
        run.trainer.model.scale = run.trainer.model.scale / 2


class Begins:
    """Makes its changes when a run begins, and not when it is resumed; `often` makes one at each start."""

    def __init__(self, often=None):
        self.often = often

    def on_start(self, run):
        network = run.trainer.model
        if run.progress.step == 0:
            network.scale = torch.tensor([0.5])
            run.data.task.own_loss.calls = 2
            next(network.parameters()).requires_grad_(False)
        if self.often is not None:
            network.scale = torch.tensor([self.often])


class Slow(Signs):
    """Keeps a number and a tensor in attributes."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.steps = 0
        self.total = torch.zeros(())

    def step(self, closure=None):
        self.steps += 1
        self.total = self.total + self.steps
        for group in self.param_groups:
            group["lr"] *= 1 / self.steps + 1 / float(self.total)
        super().step(closure)


class Remembers(Trainer):
    """Has numbers and a tensor in attributes, one of them from its first step on."""

    baseline = 0.0

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.centre = torch.zeros(())

    def training_step(self, batch):
        loss, outputs = super().training_step(batch)
        self.baseline = 0.9 * self.baseline + 0.1 * loss.item()
        self.centre = torch.lerp(self.centre, outputs.detach().mean(), 0.1)
        if self.progress.step == 2:
            self.third_loss = loss.item()
        return loss * (1 + self.baseline + getattr(self, "third_loss", 0)) + (
            outputs - self.centre
        ).square().mean(), outputs


class Follows(Trainer):
    """Makes its average before any batch."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.ema_model = deepcopy(self.model)

    def train_step(self, batch):
        super().train_step(batch)
        self.ema_model.scale = self.model.scale


class RateOfTensor(Trainer):
    def configure_optimizers(self):
        return SGD(self.model.parameters(), lr=torch.tensor(0.1))


class Cools:
    def on_epoch_end(self, run):
        run.trainer.optimizers[0].param_groups[0]["lr"].mul_(0.3)


PLATEAU = f"+callbacks.plateau._target_={EXTENSIONS}.Plateau train.epochs=4 train.log_interval=1"
CONFIGS = {
    "six steps": "data.length=96 data.test_length=16 train.log_interval=2 train.clip_norm=1",
    "batch norm": "model=small_cnn model.width=2 data.length=128",
    "layers that are unfrozen": "model=small_cnn model.width=2 data.length=128 train.epochs=3 train.freeze=backbone "
    "train.unfreeze_after=1 optim.layer_decay=0.5",
    "layers that a callback freezes again": "model=small_cnn model.width=2 data.length=128 train.epochs=3 "
    f"train.freeze=backbone train.unfreeze_after=1 +callbacks.freezes._target_={__name__}.FreezesAgain",
    "ema, accumulate, clip": f"{TWO_PARTS} callbacks.ema.decay=0.9 train.accumulate=3 train.clip_norm=1 "
    "schedule=one_cycle",
    "bf16": "train.precision=bf16 optim=adamw schedule=step schedule.step_size=1",
    "fp16, clip": "train.precision=fp16 train.clip_norm=1",
    "a fold": "data.folds=3 data.fold=1",
    "val split, mixup, erase": "data.val_fraction=0.25 augment.mixup=0.2 augment.erase=0.5 train.epochs=3",
    "a transform of batches": DARKENED,
    "two optimizers": f"{TWO_PARTS} trainer._target_={EXTENSIONS}.Alternating train.max_steps=13",
    "modules beside the network": f"trainer._target_={EXTENSIONS}.Beside task.metric=loss",
    "states of parts": f"task.loss={{_target_: {__name__}.Centred}} optim._target_={EXTENSIONS}.Signs "
    f"+callbacks.spy._target_={EXTENSIONS}.Spy +callbacks.averages._target_={EXTENSIONS}.Averages",
    "what no state_dict has": f"model._target_={__name__}.Ranged task.loss={{_target_: {__name__}.Annealed}} "
    f"task.scores={{own_loss: {{_target_: {__name__}.Counted}}, inside: {{_target_: {__name__}.CountedInside}}}} "
    f"task.metrics={{largest: {{_target_: {__name__}.LargestLoss}}}} "
    f"callbacks.ema.decay=0.9 +callbacks.scales._target_={__name__}.Scales train.epochs=3",
    "what on_start changes once": f"model._target_={__name__}.Ranged task.loss={{_target_: {__name__}.Annealed}} "
    f"+callbacks.begins._target_={__name__}.Begins callbacks.ema.decay=0.9 train.epochs=3",
    "a buffer that the first batch fills": f"model._target_={EXTENSIONS}.FirstBatch callbacks.ema.decay=0.9",
    "a buffer that is filled in an average, too": f"model._target_={EXTENSIONS}.FirstBatch "
    f"trainer._target_={__name__}.Follows",
    "what a trainer remembers": f"trainer._target_={__name__}.Remembers",
    "what an optimizer keeps in attributes": f"optim._target_={__name__}.Slow",
    "mixture": MIXTURE,
    "batch sampler": f"batch_sampler._target_={EXTENSIONS}.Pairs train.last_batch=keep data.length=32",
    "what callbacks change": f"{TWO_PARTS} schedule=step schedule.step_size=1 train.epochs=3 "
    f"+callbacks.plateau._target_={EXTENSIONS}.Plateau +callbacks.thaws._target_={EXTENSIONS}.Thaws",
    "numbers and modes that a callback changes": f"{TWO_PARTS} train.epochs=4 "
    f"+callbacks.alters._target_={EXTENSIONS}.Alters",
    "a rate that a callback sets": f"{PLATEAU} schedule=constant",
    "a rate that a callback sets, each step": f"{PLATEAU} schedule=constant schedule.every=step",
    "a rate that a callback sets, cosine": f"{PLATEAU} schedule=cosine",
    "a rate that a callback changes in place": f"trainer._target_={__name__}.RateOfTensor schedule=constant "
    f"+callbacks.cools._target_={__name__}.Cools train.epochs=3",
    "a set that grows": f"data._target_={EXTENSIONS}.Curriculum data.length=48 train.batch_size=16 train.epochs=3",
    "stream": f"data._target_={EXTENSIONS}.Stream train.steps_per_epoch=9 train.batch_size=16 loader.streams=4 "
    "loader.shuffle_buffer=20",
}
CHANGES = [
    *("", "torch 1", "workers 0", "workers 2", "prefetch 1", "threads 2", "resident 0"),
    "train.checkpoint_every=1",
    "train.keep_checkpoints=1 train.checkpoint_every=2",
    f"+callbacks.looks._target_={EXTENSIONS}.Looks",
]


@dataclass
class Start:
    """A start of the run: how it ends, after how many steps, with which change, and in which folder it goes on.

    how: "KILL A FILE" is a SIGKILL before change number `at` of the run's files, such as a rename.
    change: a loader and its workers, or settings.
    """

    how: str
    at: int
    change: str = ""
    moves: bool = False
    evaluates: bool = False  # afterwards


def settings_of(config, change):
    name, _, workers = change.partition(" ")
    overrides = [CONFIGS[config], STOP, "train.checkpoint_every=4"]
    if not workers.isdigit():
        name, workers, overrides = "torch", "0", [*overrides, change]
    if config == "stream" or (config == "batch sampler" and name == "resident"):
        name = "workers"
    return [*overrides, f"loader={name} loader.num_workers={workers}"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a run that nothing stops."""

    @cache
    def trained(config):
        folder = tmp_path_factory.mktemp("whole")
        train(folder, CONFIGS[config], STOP, settings_of(config, "")[-1])
        return folder

    return trained


def kill_at_change(folder, number):
    """Kills this process before change `number` of the files in the folder."""

    def look(event, arguments):
        nonlocal number
        is_change = event in ("os.rename", "os.remove", "os.symlink", "os.link", "os.mkdir")
        is_change |= event == "open" and bool(set(str(arguments[1])) & set("wax"))
        if is_change and any(str(argument).startswith(str(folder)) for argument in arguments):
            number -= 1
            if number == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(look)


def train_and_be_killed(start, folder, *settings):
    """Trains in a forked child. If it is not killed, it finishes the run."""
    child = os.fork()
    if child:
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert status in (0, -signal.SIGKILL), f"the killed run has failed, see its traceback: {start}"
        return
    try:
        if start.how == "KILL A FILE":
            Stop.at = 0
            kill_at_change(folder, start.at)
        train(folder, *settings)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def check_evaluation(folder):
    """Evaluates the best checkpoint, with the scores that the run had then, if it evaluated it."""
    if not (newest(folder) and (ROOT / "extras" / "finished").exists()):
        return
    result = importlib.import_module("extras.finished.evaluate").main([str(folder)])
    for line in metrics(folder) if (folder / "metrics.jsonl").exists() else []:  # it may be killed before
        if line["step"] == result["step"] and "test_loss" in line:
            assert abs(line["test_loss"] - result["loss"]) < 1e-5


def newest(folder):
    """The step of the newest checkpoint, 0 if there is none."""
    return max((int(path.stem[5:]) for path in folder.glob("checkpoints/step-*.pt")), default=0)


def allowed(folder, change, before):
    """The change, unless the run in the folder has finished: then it has to be what it was."""
    return before if (folder / "summary.json").exists() else change


def check_sequence(root, undisturbed, config, starts, last=""):
    """last: the change with which the run is finished."""
    folder = root / "0"
    earlier = []
    change = ""
    lags = False  # whether last.pt may be older than the newest checkpoint, as a kill came between the two
    for number, start in enumerate(starts):
        saved = newest(folder)
        if start.moves and saved:
            earlier = [f"train.resume={folder}"]
            folder = root / str(number + 1)
            lags = False
        Stop.at, Stop.how = (0, "") if start.how == "full disk" else (start.at, start.how)
        change = allowed(folder, start.change, change)
        overrides = settings_of(config, change)
        try:
            with full_disk() if start.how == "full disk" else nullcontext():
                if "KILL" in start.how:
                    train_and_be_killed(start, folder, *overrides, *earlier)
                else:
                    train(folder, *overrides, *earlier)
        except Stopped:
            assert newest(folder) == start.at, "a signal loses no step"
        except ZeroDivisionError:  # like a kill, it saves nothing
            assert newest(folder) >= start.at - 4 or folder.name != "0", "an error loses few steps"
        except DataError as error:
            assert "could not be written" in str(error) and newest(folder) in (0, saved)
        except MachineFull:  # a worker needs room, too
            assert start.how == "full disk"
        Stop.at = 0
        Stop.how = ""
        lags = start.how == "KILL A FILE" or (lags and newest(folder) == saved)
        has_last = (folder / "checkpoints" / "last.pt").is_symlink()
        step = checkpoint(folder)["step"] if has_last else 0
        assert step == newest(folder) or (step < newest(folder) and lags)
        if start.evaluates:
            check_evaluation(folder)
    train(folder, *settings_of(config, allowed(folder, last, change)), *earlier)
    ours = checkpoint(folder)
    whole = checkpoint(undisturbed)
    del ours["config"], whole["config"]
    if earlier:  # another folder has its own best checkpoint
        del ours["callbacks"]["best"], whole["callbacks"]["best"]
    assert differences(ours, whole) == []
    lines = untimed(folder)
    assert lines == untimed(undisturbed)[-len(lines) :] and (earlier or lines[0]["step"] == 1)
    assert earlier or checkpoint(folder, "best")["step"] == checkpoint(undisturbed, "best")["step"]


LOOKS = CHANGES[-1]


@pytest.mark.parametrize(
    ("config", "stops", "changes"),
    [
        ("batch norm", "3 SIGTERM, 5 SIGINT", "workers 2, torch 0, threads 2"),
        ("layers that are unfrozen", "3 SIGTERM, 4 SIGTERM, 9 error", "torch 0, workers 0, torch 0, workers 1"),
        ("layers that are unfrozen", "4 evaluation, 6 SIGINT, 8 SIGTERM", ", , , "),
        ("layers that a callback freezes again", "3 SIGTERM, 4 evaluation, 6 SIGTERM, 10 SIGTERM", ", , , , "),
        ("ema, accumulate, clip", "5 SIGTERM, 13 error", "torch 0, prefetch 1, workers 0"),
        ("bf16", "8 evaluation", "torch 1, workers 0"),
        ("fp16, clip", "7 SIGINT, 16 SIGTERM", "torch 0, torch 0, workers 0"),
        ("val split, mixup, erase", "6 error, 14 SIGTERM", "workers 0, resident 0, workers 0"),
        ("six steps", "6 SIGTERM, 20 error", ", , torch 1"),  # it has finished after the second start
        ("a transform of batches", "5 SIGTERM", "prefetch 1, prefetch 1"),
        ("two optimizers", "8 SIGINT, 13 SIGTERM", "torch 0, workers 0, torch 0"),
        ("modules beside the network", "11 SIGTERM", "torch 0, workers 0"),
        ("states of parts", "5 SIGTERM, 10 error", "torch 0, workers 0, torch 0"),
        ("what no state_dict has", "5 SIGTERM, 8 evaluation, 13 error", ", workers 0, , "),
        ("what on_start changes once", "2 SIGTERM, 5 SIGTERM, 8 evaluation", ", workers 0, , "),
        ("a buffer that the first batch fills", "3 SIGTERM, 13 error", ", workers 0, "),
        ("a buffer that is filled in an average, too", "3 SIGTERM", ", "),
        ("what a trainer remembers", "2 SIGTERM, 5 SIGTERM, 9 error", ", workers 0, , "),
        ("what an optimizer keeps in attributes", "2 SIGTERM, 9 error", ", workers 0, "),
        ("mixture", "2 SIGTERM", "torch 0, workers 1"),
        ("batch sampler", "5 SIGINT", "workers 0, workers 2"),
        ("what callbacks change", "3 SIGINT, 8 SIGTERM, 13 error", "torch 0, workers 0, torch 0, workers 1"),
        ("numbers and modes that a callback changes", "8 SIGTERM, 13 error, 21 SIGTERM", ", workers 0, , "),
        ("a rate that a callback sets", "8 SIGTERM, 13 SIGTERM, 17 SIGTERM", ", , , "),
        ("a rate that a callback sets, each step", "8 SIGTERM, 13 SIGTERM", ", , "),
        ("a rate that a callback sets, cosine", "8 SIGTERM, 13 SIGTERM", ", , "),
        ("a rate that a callback changes in place", "8 SIGTERM, 13 SIGTERM", ", , "),
        ("a set that grows", "1 SIGTERM, 3 SIGTERM, 5 error, 12 SIGTERM", "torch 0, workers 1, workers 0, torch 0, "),
        ("stream", "5 SIGTERM, 12 error", "workers 2, workers 0, workers 1"),
        ("stream", "6 SIGTERM", f"{LOOKS}, {LOOKS}"),
    ],
)
def test_a_run_that_stops_is_resumed_to_the_same_bits(tmp_path, whole, config, stops, changes):
    *changes, last = changes.split(", ")
    starts = []
    for stop, change in zip(stops.split(", "), changes, strict=True):
        step, how = stop.split()
        starts.append(Start(how, int(step), change))
    check_sequence(tmp_path, whole(config), config, starts, last)


@pytest.mark.parametrize(
    "starts",
    [
        [Start("SIGTERM", 2, LOOKS), Start("error", 5, "workers 1", moves=True)],
        [Start("full disk", 1, CHANGES[-3]), Start("evaluation", 3, CHANGES[-2])],
        [Start("KILL A FILE", 9, CHANGES[-3], evaluates=True), Start("SIGKILL", 4, "workers 1", True, True)],
    ],
)
def test_a_run_that_is_killed_moved_and_looked_at_ends_with_the_same_bits(tmp_path, whole, starts):
    check_sequence(tmp_path, whole("six steps"), "six steps", starts)


HOW = st.sampled_from(["SIGTERM", "SIGINT", "SIGKILL", "error", "evaluation"])
ENDS = st.tuples(HOW, st.integers(1, 16)) | st.tuples(st.just("KILL A FILE"), st.integers(1, 30))
ENDS |= st.just(("full disk", 0))
CHANGE = st.sampled_from(CHANGES)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(max_examples=250, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(
    config=st.sampled_from(list(CONFIGS)) | st.just("six steps"),
    starts=st.lists(st.tuples(ENDS, CHANGE, st.booleans(), st.booleans()), max_size=4),
    last=CHANGE,
)
def test_a_run_that_ends_anywhere_is_resumed_to_the_same_bits(tmp_path_factory, whole, config, starts, last):
    starts = [Start(*ends, *rest) for ends, *rest in starts]
    check_sequence(tmp_path_factory.mktemp("stopped"), whole(config), config, starts, last)


def test_max_steps_below_what_was_done_trains_nothing_and_is_named(tmp_path, caplog):
    caplog.set_level("INFO")
    for every in ("step", "epoch"):
        folder = tmp_path / every
        cycle = f"schedule=one_cycle schedule.every={every}"
        train(folder, cycle)
        train(folder, cycle, "train.max_steps=5")
        assert checkpoint(folder)["step"] == 16 and "raise train.max_steps=5" in caplog.text
        assert "raise train.epochs" not in caplog.text


def test_a_finished_run_whose_checkpoints_were_removed_is_not_overwritten(tmp_path, error):
    train(tmp_path, "train.max_steps=1")
    shutil.rmtree(tmp_path / "checkpoints")
    with error("has the summary.json of a finished run.*train.resume=null"):
        train(tmp_path, "train.max_steps=1")
    assert (tmp_path / "summary.json").exists()
    train(tmp_path, "train.max_steps=1", "train.resume=null")


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


def test_a_weight_of_the_loss_and_a_precision_that_were_changed_are_taken(tmp_path):
    loss = "task.loss={{_target_: torch.nn.CrossEntropyLoss, weight: {}}}"
    settings = "optim.lr=0 schedule=constant"
    train(tmp_path / "a", settings, loss.format([1] * 10), "train.max_steps=4")
    fp16 = train(tmp_path / "a", settings, loss.format([1] * 10), "train.max_steps=5 train.precision=fp16")
    assert fp16["test_loss"] == fp16["test_loss"], "it is no NaN"
    later = train(tmp_path / "a", settings, loss.format([9, *[1] * 9]), "train.max_steps=6")
    new = train(tmp_path / "b", settings, loss.format([9, *[1] * 9]), "train.max_steps=6")
    assert later["test_loss"] == pytest.approx(new["test_loss"], rel=1e-5)


def test_a_resume_compares_the_rates_of_groups_as_often_after_many_steps_as_after_few(tmp_path, monkeypatch):
    compared = []

    def count(*arguments):
        compared.append(arguments)
        return settings_of_groups(*arguments)

    def compared_after(steps):
        folder = tmp_path / str(steps)
        train(folder, f"train.epochs=3 train.max_steps={steps}")
        compared.clear()
        train(folder, f"train.epochs=3 train.max_steps={steps + 1}")
        return len(compared)

    monkeypatch.setattr("training.optimizer.settings_of_groups", count)
    assert compared_after(20) == compared_after(2) > 0


def test_a_setting_that_callbacks_had_changed_and_that_no_module_has_any_more_is_named(tmp_path, caplog):
    with ExitStack() as cleanup:
        trainer = assemble(checked(composed(*FAST)), tmp_path, cleanup).trainer
        of_torch = {"optimizers.0._need_device_dtype_check_for_fused": False}  # in checkpoints of earlier versions
        saved = {"model.drop.p": 0.1, "model.norm.requires_grad": True, "ema_model.scale": 1}
        ModuleState(trainer).restore(saved | of_torch)
    assert [text.split()[0] for text in caplog.messages if "not restored" in text] == ["model.drop.p"]


def test_what_on_start_sets_in_a_resume_wins_over_what_it_had_set_before(tmp_path):
    settings = f"model._target_={__name__}.Ranged task.loss={{_target_: {__name__}.Annealed}} train.epochs=4 {STOP}"
    begins = f"{settings} +callbacks.begins._target_={__name__}.Begins"
    for epochs, callback, scale in ((1, "", 0.5), (2, "+callbacks.begins.often=3.0", 3.0), (3, "", 3.0), (4, "", 3.0)):
        train(tmp_path, f"{begins} {callback} train.max_steps={4 * epochs}")
        assert checkpoint(tmp_path)["altered"]["model.scale"] == scale


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
