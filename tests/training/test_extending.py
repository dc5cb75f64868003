"""The extension points of a run, used as a fork uses them: one small run each."""

import json
import math
import re
import threading
from collections import deque
from contextlib import nullcontext
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from torch.optim.lr_scheduler import CyclicLR, LambdaLR
from torch.utils.data import WeightedRandomSampler

from data.errors import DataError
from tests.configs import (
    CONF,
    EXTENSIONS,
    IMAGES,
    SMALL,
    TWO_PARTS,
    checkpoint,
    differences,
    differing_weights,
    logged,
    separate,
    steps,
    stop,
    summary_of,
    train,
    untimed,
)
from tests.training.extensions import Images, Linear, Spy, Stream, Worst, lying
from training.results import SUMMARY_KEYS
from training.stopping import Stopped
from training.trained_weights import MOST, weights_in
from training.trainer import Trainer

LATE = f"{IMAGES} data._target_={EXTENSIONS}.Faulty +data.fault='one unreadable'"
SPY = f"+callbacks.spy._target_={EXTENSIONS}.Spy"


# Callbacks


def test_a_callback_is_called_at_each_point_and_adds_to_the_log_and_the_summary(tmp_path):
    summary = train(tmp_path, SPY, "train.log_interval=4")
    epoch = ["step"] * 3 + ["log 4"] + ["step"] * 4 + ["log 8", "log 8", "evaluation", "epoch end", "log 8"]
    assert Spy.calls[: 3 + len(epoch)] == ["start", "step", "log 1", *epoch]
    assert Spy.calls[-3:] == ["epoch end", "log 16", "end"] and summary["counted_steps"] == 16
    assert summary_of(tmp_path)["counted_steps"] == 16
    assert [line.get("twice") for line in steps(tmp_path)][1:3] == [6.0, 13.0], "the mean since the line before"
    assert logged(tmp_path, "epochs_done") == [1, 2], "each in a line of its own, also the last"


def test_a_callback_learns_that_a_run_was_interrupted_and_goes_on_with_its_state(tmp_path):
    with pytest.raises(Stopped):
        train(tmp_path, SPY, *stop(5))
    assert Spy.calls[-1] == "interrupted"
    assert train(tmp_path, SPY)["counted_steps"] == 16
    assert Spy.calls[:2] == ["start", "loaded 5"]


class Phases:
    def on_start(self, run):
        self.names = []
        run.clock.watchers.append(lambda name, start, end: self.names.append(name))

    def on_end(self, run, summary):
        summary["checkpoint_phases"] = self.names.count("checkpoint")


def test_the_phase_checkpoint_has_the_checkpoints_within_an_epoch_too(tmp_path):
    summary = train(tmp_path, f"+callbacks.phases._target_={__name__}.Phases train.checkpoint_every=3")
    assert summary["checkpoint_phases"] == 5 + 2, "steps 3 to 15, and the end of each epoch"


class MixesFirst:
    """Switches mixup off after the first epoch."""

    def __init__(self):
        MixesFirst.mixed = []

    def on_start(self, run):
        run.data.augment.transform.mixup = 0.2 if run.progress.epoch < 1 else 0

    on_epoch_end = on_start

    def on_step(self, run):
        shares = run.batch["label"]
        self.mixed.append(bool(((shares > 0) & (shares < 1)).any()))


def test_a_callback_switches_mixup_off(tmp_path):
    train(tmp_path, "augment.mixup=0.2", f"+callbacks.mixes._target_={__name__}.MixesFirst")
    assert MixesFirst.mixed[:8] == [True] * 8 and not any(MixesFirst.mixed[-4:])


class RangeTest:
    """Tries a few steps at a rate at which they diverge, and restores everything."""

    def on_start(self, run):
        trainer = run.trainer
        parts = [trainer.model, *trainer.optimizers]
        before = [deepcopy(part.state_dict()) for part in parts]
        trainer.optimizers[0].param_groups[0]["lr"] = 1e9
        for batch in run.batches_to_look_at(3):
            trainer.train_step(batch)
        for part, state in zip(parts, before, strict=True):
            part.load_state_dict(state)


class Saliency:
    """A callback that leaves gradients at the weights."""

    def on_epoch_end(self, run):
        sum(weight.square().sum() for weight in run.trainer.model.parameters()).backward()


class StepSaliency:
    def on_step(self, run):
        sum(weight.square().sum() for weight in run.trainer.model.parameters()).backward()


class Attacked(Trainer):
    """Its evaluation computes gradients, as that of an attack on the images does."""

    def evaluation_step(self, batch):
        with torch.enable_grad():
            sum(weight.square().sum() for weight in self.model.parameters()).backward()
        return super().evaluation_step(batch)


@pytest.mark.parametrize(
    "leaves",
    [
        f"+callbacks.s._target_={__name__}.Saliency",
        f"+callbacks.s._target_={__name__}.StepSaliency",
        f"trainer._target_={__name__}.Attacked",
    ],
)
def test_gradients_of_an_evaluation_or_a_callback_do_not_go_into_the_next_step(tmp_path, leaves):
    train(tmp_path / "plain", "train.epochs=2")
    train(tmp_path / "left", "train.epochs=2", leaves)
    assert differing_weights(tmp_path / "plain", tmp_path / "left") == []


class Grid(nn.Linear):
    """Has a buffer whose elements share memory."""

    def __init__(self, num_classes, **_):
        super().__init__(3 * 8 * 8, num_classes)
        self.register_buffer("grid", torch.arange(3.0).expand(4, 3), persistent=False)

    def forward(self, image):
        return super().forward(image.flatten(1)) + self.grid.sum()


def test_a_buffer_whose_elements_share_memory_is_trained_with(tmp_path):
    train(tmp_path, f"model._target_={__name__}.Grid", "train.epochs=1")


def test_steps_that_a_callback_tries_before_training_leave_no_trace_also_in_a_resume(tmp_path):
    for name, *settings in (["plain"], ["tried", f"+callbacks.range_test._target_={__name__}.RangeTest"]):
        with pytest.raises(Stopped):
            train(tmp_path / name, *stop(5), "train.log_interval=8", *settings)
        train(tmp_path / name, "train.log_interval=8", *settings)
    assert untimed(tmp_path / "tried") == untimed(tmp_path / "plain")
    assert differing_weights(tmp_path / "tried", tmp_path / "plain") == []


class Fails:
    def __init__(self, where):
        self.where = where

    def on_start(self, run):
        if self.where == "start":
            raise ZeroDivisionError("start")

    def on_end(self, run, summary):
        if summary is not None:
            assert summary_of(run.folder)["epochs"] == 2, "it is written already"
            summary["score"] = "mine"
            summary["added"] = {"figure": np.float32(0.5), "folder": run.folder, "nan": np.float32("nan")}
        raise ZeroDivisionError("end")


def with_a_callback_that_fails(where):
    first, last = (f"+callbacks.{name}._target_={EXTENSIONS}.Spy" for name in ("first", "last"))
    return f"{first} +callbacks.fails={{_target_: {__name__}.Fails, where: {where}}} {last}"


def test_an_error_in_a_callback_ends_once_each_that_was_started(tmp_path):
    with pytest.raises(ZeroDivisionError, match="start"):
        train(tmp_path, with_a_callback_that_fails("start"))
    assert Spy.calls[-2:] == ["start", "interrupted"] and not {"end", "interrupted"} & {*Spy.calls[:-2]}


def test_nothing_after_training_fails_a_finished_run(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("PATH", "")  # without git
    summary = train(tmp_path, with_a_callback_that_fails("end"))
    assert summary_of(tmp_path) == summary
    assert summary["added"] == {"figure": 0.5, "folder": str(tmp_path), "nan": None}
    assert summary["score"] == "test_accuracy" and "has set score" in caplog.text
    assert summary["git_commit"] is None and summary["versions"]["torch"]
    assert Spy.calls.count("end") == 2 and "on_end of callbacks.fails" in caplog.text and "git" in caplog.text


class PathState(Spy):
    """From step 3 on it has a state that weights_only refuses."""

    def state_dict(self):
        return {"steps": self.steps if self.steps < 3 else Path("steps.txt")}


def test_a_state_that_cannot_be_read_again_is_named_when_it_is_saved(tmp_path, error):
    with error(r"callbacks\.mine\.steps: .*PosixPath.*: return tensors"):
        train(tmp_path, f"+callbacks.mine._target_={__name__}.PathState train.checkpoint_every=1")
    assert checkpoint(tmp_path)["step"] == 2, "the one before is kept"
    assert not (tmp_path / "checkpoints" / "step-0000003.pt").exists()


def test_a_run_ends_early_when_its_score_does_not_improve(tmp_path, caplog, error):
    caplog.set_level("INFO")
    stuck = "optim.lr=0 callbacks.best.early_stop=2 train.epochs=9 task.metric=loss train.keep_checkpoints=9"
    first = train(tmp_path, stuck)
    assert first["epochs"] == 3, "an equal score is no better one"
    assert checkpoint(tmp_path)["step"] == 8 * 3
    assert "callbacks.best (early_stop=2) stopped the run after epoch 3 of 9" in caplog.text
    assert train(tmp_path, stuck) == json.loads((tmp_path / "summary.json").read_text()), "it has finished"
    assert first["images_per_second"] and "as a callback ended it: to continue it, use" in caplog.text
    with error("finished run with other settings .*optim.lr is 0.1, was 0"):
        train(tmp_path, stuck, "optim.lr=0.1")
    assert train(tmp_path, stuck, "callbacks.best.early_stop=3")["epochs"] == 4
    second = tmp_path / "checkpoints" / "step-0000016.pt"
    assert train(tmp_path / "new", stuck, f"train.resume={second}")["epochs"] == 3, (
        "the count goes on in another folder"
    )
    assert checkpoint(tmp_path / "new", "best")["step"] == 8 * 3, "which has a best checkpoint of its own"


class Told(Images):
    """The label is the epoch."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __getitem__(self, index):
        return super().__getitem__(index)[0], self.epoch


class Reshuffled(Images):
    """Draws from a global generator when an epoch begins."""

    def __init__(self, **options):
        super().__init__(**options)
        self.order = np.arange(len(self))

    def set_epoch(self, epoch):
        self.order = np.random.permutation(len(self))

    def __getitem__(self, index):
        return super().__getitem__(int(self.order[index]))


@pytest.mark.parametrize("after", [1, 6])
def test_what_a_dataset_draws_when_it_is_told_the_epoch_is_the_same_after_a_resume(tmp_path, after):
    drawn = f"{IMAGES} data._target_={__name__}.Reshuffled train.epochs=3"
    train(tmp_path / "whole", drawn)
    with pytest.raises(Stopped):
        train(tmp_path / "resumed", drawn, *stop(after))
    train(tmp_path / "resumed", drawn)
    assert not differing_weights(tmp_path / "whole", tmp_path / "resumed")


class LogsLabels:
    def on_step(self, run):
        run.log(told=run.batch["label"].float().mean())


@pytest.mark.parametrize("loader", ["workers loader.num_workers=2", "threads"])
def test_a_dataset_is_told_the_epoch_also_in_workers_below_a_split_and_after_a_resume(tmp_path, loader):
    of_dataset = f"{IMAGES} data._target_={__name__}.Told data.val_fraction=0.25 +callbacks.mine._target_={__name__}"
    for epochs in (1, 2):
        train(tmp_path, f"{of_dataset}.LogsLabels loader={loader} train.log_interval=1 train.epochs={epochs}")
    told = logged(tmp_path, "told")
    assert sorted({*told}) == [0, 1] and told == sorted(told)


@pytest.mark.parametrize("change", ["data.val_fraction=0", "task.metric=loss"])
def test_the_best_score_of_other_samples_or_of_another_metric_is_not_compared_with(tmp_path, caplog, change):
    train(tmp_path, "data.val_fraction=0.25 callbacks.best.early_stop=1 train.epochs=1")
    state = checkpoint(tmp_path)
    state["callbacks"]["best"]["score"] = 2.0
    torch.save(state, tmp_path / "checkpoints" / "last.pt")
    summary = train(tmp_path, "data.val_fraction=0.25 callbacks.best.early_stop=1 train.epochs=2", change)
    assert summary["epochs"] == 2 and "best.pt is chosen anew" in caplog.text
    assert checkpoint(tmp_path)["callbacks"]["best"]["score"] <= 1


# The trainer


def test_a_training_step_of_a_fork_trains_and_what_it_logs_is_in_the_line(tmp_path):
    plain = "optim.momentum=0 optim.nesterov=false optim.weight_decay=0 train.epochs=1"
    train(tmp_path / "own", plain, f"trainer._target_={EXTENSIONS}.Doubled optim.lr=0.1")
    train(tmp_path / "usual", plain, "optim.lr=0.2")
    own, usual = (steps(tmp_path / name) for name in ("own", "usual"))
    for mine, other in zip(own, usual, strict=True):
        assert mine["loss"] == pytest.approx(2 * other["loss"], rel=1e-4), "twice the gradient, half the rate"
        assert mine["rows"] == 32 and "evaluated" not in mine
        assert 0 <= mine["accuracy"] <= 1, "the scores are computed from the outputs that it returns"
    assert logged(tmp_path / "own", "evaluated") == [32.0]


class Ported(Trainer):
    """Has methods that only another library calls, and one that it calls itself."""

    def validation_step(self, batch, batch_idx):
        pass

    def on_train_epoch_end(self):
        pass

    def on_difference(self):
        pass

    def backward(self, loss):
        self.on_difference()
        super().backward(loss)


class TwoSources(Trainer):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.unlabelled = iter([1, 2, 3])


class LossAlone(Trainer):
    def training_step(self, batch):
        return super().training_step(batch)[0]


def test_a_training_step_that_returns_the_loss_alone_has_no_scores_which_is_said_once(tmp_path, caplog):
    train(tmp_path, f"trainer._target_={__name__}.LossAlone")
    assert all("accuracy" not in line and "loss" in line for line in steps(tmp_path))
    assert caplog.text.count("LossAlone.training_step") == 1


class Nested(Trainer):
    """Enters the mixed precision in which train_step calls it already, and has its own evaluation."""

    def training_step(self, batch):
        with self.autocast:
            return super().training_step(batch)

    def evaluation_step(self, batch):
        inputs, labels = self.inputs_and_labels(batch)
        return {"accuracy": self.model(*inputs).argmax(1) == labels}


def test_mixed_precision_ends_with_the_step_also_if_a_training_step_enters_it_again(tmp_path, caplog):
    metric = "task.metrics={zero: {_target_: tests.training.test_scores.Listed, values: []}} task.metric=accuracy"
    train(tmp_path, f"trainer._target_={__name__}.Nested train.precision=bf16 train.epochs=1", metric)
    assert not torch.is_autocast_enabled("cpu")
    assert "Nested.evaluation_step does not call self.metrics.update(outputs, labels)" in caplog.text


class Broken(Trainer):
    def backward(self, loss):
        super().backward(loss.double().sum().expand(2))


def test_from_the_command_line_to_the_gradients_are_six_frames_of_ours(command):
    shown = command(
        *SMALL, f"trainer._target_={__name__}.Broken", "hydra.run.dir=out", ends_with=1, has_traceback=True
    )
    last = shown.rpartition("Traceback")[2]
    ours = [line for line in last.splitlines() if re.search(rf'File "{CONF.parent}/(train\.py|training/)', line)]
    assert len(ours) == 6 and "in backward" in ours[-1], last


@pytest.mark.parametrize("name", ["step", "lr", "accuracy", "test_loss"])
def test_what_is_logged_may_not_have_the_name_of_another_key_of_metrics(tmp_path, error, name):
    with error(f"'{name}'"):
        train(tmp_path, f"+callbacks.logs={{_target_: {__name__}.Logs, name: {name}}}")


class Logs:
    def __init__(self, name, value=1.0):
        self.named = {name: value}

    def on_step(self, run):
        run.log(**self.named)


@pytest.mark.parametrize("value", ["text", "null", "[[1.0], [1.0, 2.0]]"])
def test_a_logged_value_that_is_no_number_is_named(tmp_path, error, value):
    with error("mine is .*: .*numbers or tensors"):
        train(tmp_path, f"+callbacks.logs={{_target_: {__name__}.Logs, name: mine, value: {value}}}")


@pytest.mark.filterwarnings("error::UserWarning")
def test_a_train_step_of_a_fork_need_not_step_each_time_though_fp16_scales_the_loss(tmp_path):
    train(tmp_path, f"trainer._target_={EXTENSIONS}.EveryOther train.precision=fp16")
    assert steps(tmp_path)[-1]["step"] == 16


def test_a_run_that_goes_on_with_another_schedule_keeps_no_momentum_of_the_earlier_one(tmp_path):
    train(tmp_path, "schedule=one_cycle train.max_steps=9")
    train(tmp_path, "schedule=constant train.max_steps=10")
    assert checkpoint(tmp_path)["optimizers"][0]["param_groups"][0]["momentum"] == 0.9


TAKEN = {  # by a subclass, for something else
    "settings": {"a": []},
    "evaluate": lambda outputs, labels: {},
    "log": lambda text: None,
    "loss_of": lambda outputs, labels: 0,
    "training_step": lambda batch, batch_idx: 0,
}


class Takes(Trainer):
    """Has an attribute of its own by a name of ours: from its constructor, or from configure_optimizers."""

    def __init__(self, *arguments, name, when):
        if when == "first":
            setattr(self, name, TAKEN[name])
        super().__init__(*arguments)
        self.name = name
        if when == "early":
            setattr(self, name, TAKEN[name])

    def configure_optimizers(self):
        setattr(self, self.name, TAKEN[self.name])
        return super().configure_optimizers()


@pytest.mark.parametrize("when", ["first", "early", "late"])
@pytest.mark.parametrize("name", TAKEN)
def test_an_attribute_that_training_uses_for_something_else_is_refused_by_its_name(tmp_path, error, name, when):
    with error(rf"Takes\b.*\b{name}\b.*(choose another name|rename)"):
        train(tmp_path, f"trainer._target_={__name__}.Takes +trainer.name={name} +trainer.when={when}")


class Overflowing(Trainer):
    """No gradient is finite, though each loss is."""

    def training_step(self, batch):
        loss, outputs = super().training_step(batch)
        loss.register_hook(lambda gradient: gradient * math.inf)
        return loss, outputs


class LeavesEval:
    def on_epoch_end(self, run):
        run.trainer.model.eval()


class Misnamed:
    def on_step(self, run):
        pass

    def on_epoch_begin(self, run):
        raise AssertionError

    def state_dict(self):
        return {}


class LeavesOut(Trainer):
    def configure_optimizers(self):
        return torch.optim.SGD([self.model[-1].bias], 0.1)


class OfTrained(Trainer):
    def configure_optimizers(self):
        return torch.optim.SGD([weight for weight in self.model.parameters() if weight.requires_grad], 0.1)


class Thaws:
    def on_epoch_end(self, run):
        run.trainer.model.requires_grad_(True)


class Loose(Trainer):
    """Its temperature is trained, but is in no module."""

    def configure_optimizers(self):
        self.temperature = nn.Parameter(torch.ones(()))
        return torch.optim.SGD([*self.model.parameters(), self.temperature], 0.1)


def test_an_optimizers_weights_that_no_checkpoint_would_have_are_refused(tmp_path, error):
    with error("1 weights that are in no module", "Loose"):
        train(tmp_path, f"trainer._target_={__name__}.Loose")


class NoneValidates(Images):
    def __init__(self, train, **options):
        super().__init__(train, **options)
        self.is_val = np.zeros(len(self), bool)


class OtherLabels(Images):
    def __init__(self, train, **options):
        super().__init__(train, **options)
        self.labels = [self[index][1] ^ train for index in range(len(self))]


class OwnPath(Images):
    def path(self, name):
        return f"images/{name}"


class SplitsItself(Images):
    def __init__(self, train, val_fraction=0.2, **options):
        super().__init__(train, **options)


class FromLightning(nn.Linear):
    """A network that also has the methods with which another library trains it."""

    def __init__(self, num_classes, dtype="float32", **_):
        super().__init__(8 * 8 * 3, num_classes, dtype=getattr(torch, dtype))

    def forward(self, images):
        return super().forward(images.flatten(1).to(self.weight.dtype))

    def training_step(self, batch, batch_idx):
        raise NotImplementedError


NETWORK = f"model._target_={__name__}.FromLightning"
FROZEN = f"{TWO_PARTS} trainer._target_={__name__}.OfTrained train.freeze=first"


class Forgetful(nn.Module):
    """`fault`: "a layer" that forward does not use, or dropout that is "always" on."""

    def __init__(self, num_classes, fault, **_):
        super().__init__()
        self.fault = fault
        self.last = nn.Linear(8 * 8 * 3, num_classes)
        self.other = nn.Linear(2, 2) if fault == "layer" else None

    def forward(self, images):
        return nn.functional.dropout(self.last(images.flatten(1)), training=self.training or self.fault == "dropout")


def test_weights_in_float16_are_refused(tmp_path, error):
    with error("model.weight is trained in float16", "train.precision=fp16"):
        train(tmp_path, NETWORK, "+model.dtype=float16")


class Careless:
    """Does once what changes nothing, or too much."""

    has_changed = False

    def on_start(self, run):
        torch.set_grad_enabled(False)

    def on_log(self, run, values):
        if not self.has_changed:
            values["perplexity"] = 1.0

    def on_evaluation(self, run, scores):
        if not self.has_changed:
            self.has_changed = True
            torch.set_grad_enabled(False)


class Sets:
    """Sets an attribute that nothing reads."""

    def __init__(self, owner):
        self.owner = owner

    def on_epoch_end(self, run):
        owner = getattr(run, self.owner, run)
        owner.accumulate = 2


@pytest.mark.parametrize("owner", ["run", "trainer"])
def test_an_attribute_that_nothing_would_read_is_refused_where_it_is_set(tmp_path, owner):
    with pytest.raises((AttributeError, DataError), match="accumulate"):
        train(tmp_path, f"+callbacks.mine={{_target_: {__name__}.Sets, owner: {owner}}}")


class Replaces:
    """Replaces an object that the loaders have."""

    def __init__(self, name):
        self.name = name

    def on_epoch_end(self, run):
        setattr(run.data, self.name, getattr(run.data, self.name))


@pytest.mark.parametrize("name", ["train", "test", "collate", "augment", "transform"])
def test_an_object_that_the_loaders_have_is_refused_where_it_is_replaced(tmp_path, error, name):
    with error(rf"run\.data\.{name} cannot be replaced"):
        train(tmp_path, f"+callbacks.mine={{_target_: {__name__}.Replaces, name: {name}}}")


class Returns:
    def on_step(self, run):
        return -1

    def on_end(self, run, summary):
        return [7] * 1000


class ForgetsToStep(Trainer):
    def train_step(self, batch):
        self.backward(self.loss_of(batch))


class Lookahead(torch.optim.Optimizer):
    """Steps another optimizer. As some do, it does not call the constructor of torch's class."""

    def __init__(self, inner):
        self.inner = inner
        self.defaults = inner.defaults
        self.state = inner.state
        self.param_groups = inner.param_groups

    def step(self, closure=None):
        self.inner.step(closure)

    def state_dict(self):
        return self.inner.state_dict()


class StepsUnseen(Trainer):
    def configure_optimizers(self):
        return Lookahead(torch.optim.SGD(self.model.parameters(), 0.1))

    def train_step(self, batch):
        self.backward(self.loss_of(batch))
        self.optimizers[0].step()


class TwoSteps(torch.optim.Optimizer):
    """Has an optimizer inside, and methods of its own in place of `step`, as optimizers for sharpness have."""

    def __init__(self, weights):
        super().__init__(weights, {"lr": 0.1})
        self.inner = torch.optim.SGD(self.param_groups, 0.1, momentum=0.9)

    def second_step(self):
        self.inner.step()


class StepsTwice(StepsUnseen):
    def configure_optimizers(self):
        return TwoSteps(self.model.parameters())

    def train_step(self, batch):
        self.backward(self.loss_of(batch))
        self.optimizers[0].second_step()


@pytest.mark.parametrize(("trainer", "is_saved"), [(StepsUnseen, True), (StepsTwice, False)])
def test_an_optimizer_around_another_one_trains_and_is_warned_of_only_if_its_state_would_be_lost(
    tmp_path, caplog, trainer, is_saved
):
    train(tmp_path, f"trainer._target_={__name__}.{trainer.__name__} train.epochs=1 schedule=constant")
    assert "no optimizer has stepped" not in caplog.text
    assert ("the state of SGD in `inner` of TwoSteps" in caplog.text) != is_saved


CARELESS = f"+callbacks.mine._target_={__name__}.Careless train.log_interval=100"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (CARELESS, "on_start of callbacks.mine has switched gradients off"),
        (CARELESS, "on_evaluation of callbacks.mine has switched gradients off"),
        (
            f"model._target_={__name__}.Forgetful +model.fault=layer",
            "2 trainable weights have no gradient in the first",
        ),
        (
            f"model._target_={__name__}.Forgetful +model.fault=dropout",
            "loss: other values when the same test samples are evaluated again: one of Forgetful and Classification",
        ),
        (NETWORK, "FromLightning has training_step, which training does not call"),
        (f"trainer._target_={__name__}.Ported", "Ported has on_train_epoch_end, validation_step, which training does"),
        (f"trainer._target_={__name__}.TwoSources", "trainer.unlabelled is an iterator (list_iterator), whose place"),
        (f"{NETWORK} +model.dtype=bfloat16 callbacks.ema.decay=0.9", "there are weights of torch.bfloat16"),
        (f"data._target_={__name__}.SplitsItself", "a parameter val_fraction"),
        (f"trainer._target_={__name__}.Overflowing train.precision=fp16", "skipped all of the last 12 steps"),
        (f"+callbacks.mine._target_={__name__}.LeavesEval", "left Sequential in evaluation mode"),
        (f"+callbacks.mine._target_={__name__}.Misnamed", "nothing calls on_epoch_begin"),
        (f"+callbacks.mine._target_={__name__}.Misnamed", "has only one of state_dict and load_state_dict"),
        (f"trainer._target_={__name__}.LeavesOut", "no optimizer has model.2.weight (1 weights)"),
        (f"{FROZEN} train.unfreeze_after=2", "no optimizer has model.first.1.weight, model.first.1.bias (2 weights)"),
        (f"{FROZEN} +callbacks.mine._target_={__name__}.Thaws", "no optimizer has model.first.1.weight"),
        (f"+callbacks.mine._target_={__name__}.Returns", "on_step of callbacks.mine returned -1, which nothing reads"),
        (f"+callbacks.mine._target_={__name__}.Returns", "on_end of callbacks.mine returned [7"),
        (f"trainer._target_={__name__}.ForgetsToStep", "no optimizer has stepped in an epoch"),
        (f"{IMAGES} data._target_={__name__}.NoneValidates", "no sample of the training set validates"),
        (f"{IMAGES} data.test_length=64", "Images has as many test samples as training samples, and the first"),
        (f"{IMAGES} data._target_={__name__}.OtherLabels", "`labels` of OtherLabels begins with"),
        (f"{IMAGES} data._target_={__name__}.OwnPath data.val_fraction=0.25", "OwnPath.path is not used"),
        (f"{IMAGES} data._target_={__name__}.OwnPath data.val_fraction=0.25", "OwnPath are known by their positions"),
    ],
)
def test_what_has_no_effect_or_another_one_than_meant_is_said_once(tmp_path, caplog, overrides, words):
    caplog.set_level("INFO")
    train(tmp_path, overrides, "train.epochs=4")
    assert caplog.text.count(words) == 1


# Networks that are frozen in part


class Following(nn.Module):
    """Its first part is trained or frozen; its norm is never trained, but follows, as MoCo's key network does."""

    def __init__(self, num_classes, in_channels, **_):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(in_channels, 4, 3), nn.BatchNorm2d(4))
        self.norm = nn.BatchNorm2d(4).requires_grad_(False)
        self.last = nn.Linear(36 * 4, num_classes)

    def forward(self, images):
        return self.last(self.norm(self.first(images)).flatten(1))


def test_what_train_freeze_names_keeps_its_weights_and_statistics_and_another_norm_its_weights_alone(tmp_path):
    for count in (1, 5):
        following = f"model._target_={__name__}.Following train.freeze=first train.max_steps={count}"
        train(tmp_path / str(count), following)
    one, more = (checkpoint(tmp_path / count)["model"] for count in "15")
    statistics = [f".norm.{name}" for name in ("num_batches_tracked", "running_mean", "running_var")]
    assert differences(one, more) == [".last.bias", ".last.weight", *statistics]


class Keeps:
    """A callback whose state has a number of numpy, and something else."""

    def __init__(self, kind):
        self.kind = kind

    def on_step(self, run):
        pass

    def state_dict(self):
        return {
            "best": np.float64(0.5),
            "seen": [np.int64(3)],
            "other": threading.Lock() if self.kind == "lock" else 1,
        }

    def load_state_dict(self, state):
        assert state == {"best": 0.5, "seen": [3], "other": 1}


def test_a_state_of_a_callback_may_have_numbers_of_numpy_and_what_no_checkpoint_can_have_is_said_before_training(
    tmp_path, error
):
    keeps = f"+callbacks.keeps._target_={__name__}.Keeps +callbacks.keeps.kind="
    train(tmp_path, f"{keeps}number train.max_steps=2")
    train(tmp_path, f"{keeps}number train.max_steps=3")
    with error("no checkpoint can have callbacks.keeps.other: <class '_thread.lock'>"):
        train(tmp_path / "lock", f"{keeps}lock")
    assert not (tmp_path / "lock" / "metrics.jsonl").exists()


class Remembers(Linear):
    """Its memory grows with each batch."""

    def add(self, kind, **_):
        start = None if kind == "filled" else torch.zeros(0, 10)
        self.register_buffer("memory", start, persistent=kind != "unsaved")

    def forward(self, images):
        outputs = super().forward(images)
        if self.training:
            self.memory = torch.cat([outputs.detach(), *([] if self.memory is None else [self.memory])])
        return outputs


def test_a_buffer_whose_size_changes_is_refused_unless_a_resume_can_load_it(tmp_path, error):
    remembers = f"model._target_={__name__}.Remembers +model.kind="
    with error(r"Remembers changes the size of the buffer memory .* from \(0, 10\) to \(\d+, 10\)"):
        train(tmp_path, f"{remembers}saved")
    for kind in ("filled", "unsaved"):
        for steps_in_all in (2, 3):
            train(tmp_path / kind, f"{remembers}{kind} train.max_steps={steps_in_all}")
    assert checkpoint(tmp_path / "filled")["model"]["memory"].shape == (3 * 32, 10)


def scripted(num_classes, in_channels, **_):
    return torch.jit.script(nn.Sequential(nn.Flatten(), nn.Linear(8 * 8 * in_channels, num_classes), nn.Dropout(0.1)))


@pytest.mark.filterwarnings("ignore")  # torch.jit is deprecated
def test_a_network_of_torchscript_trains(tmp_path):
    train(tmp_path, f"model._target_={__name__}.scripted train.max_steps=2 callbacks.ema.decay=0.9")


def lazy_norms(num_classes, **_):
    affine = nn.Sequential(nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d(), nn.Flatten(), nn.LazyLinear(num_classes))
    return nn.Sequential(nn.LazyBatchNorm2d(affine=False), affine)


def test_lazy_norms_are_shaped_with_their_buffers(tmp_path):
    train(tmp_path, f"model._target_={__name__}.lazy_norms train.max_steps=1")
    assert checkpoint(tmp_path)["model"]["0.running_mean"].shape == (3,)


class SetByFirstBatch(Linear):
    """Sets a weight by the first batch, once, which it notes in a private attribute."""

    def add(self, **_):
        self.shift = nn.Parameter(torch.zeros(()))
        self._is_set = False

    def forward(self, images):
        if not self._is_set:
            self.shift.data.fill_(5.0)
            self._is_set = True
        return super().forward(images) + self.shift


def test_a_weight_that_the_first_batch_sets_is_set_by_the_first_batch_of_training(tmp_path):
    train(tmp_path, f"model._target_={__name__}.SetByFirstBatch train.max_steps=1")
    assert checkpoint(tmp_path)["model"]["shift"] == pytest.approx(5, abs=1)


class NoisyNetwork(Linear):
    def add(self, **_):
        self.generator = np.random.default_rng()


class SavedNetwork(NoisyNetwork):
    def get_extra_state(self):
        return str(self.generator.bit_generator.state)

    def set_extra_state(self, state):
        pass


class NoisyTrainer(Trainer):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.generator = np.random.default_rng()


class NoisyMetric(Worst):
    def __init__(self):
        super().__init__()
        self.draws = [np.random.default_rng()]


class NoisyCallback:
    def __init__(self):
        self.generator = np.random.default_rng()

    def on_step(self, run):
        pass


class SavedCallback(NoisyCallback):
    def state_dict(self):
        return {"generator": str(self.generator.bit_generator.state)}


GENERATOR = np.random.default_rng()


class Hides(Linear):
    """Its generator is in no attribute of a module."""

    def add(self, place, **_):
        generator = np.random.default_rng()
        if place == "container":
            self.generators = {"first": [generator]}
        if place == "closure":
            self.noise = lambda: generator.random()
        if place == "hook":
            self.register_forward_pre_hook(lambda module, images: (images[0] + generator.random(),))
        if place == "code":
            self.noise = lambda: GENERATOR.random()


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ("model._target_", {"NoisyNetwork": "model.generator", "SavedNetwork": None}),
        *(
            (f"+model.place={place} model._target_", {"Hides": "model"})
            for place in ("container", "closure", "hook", "code")
        ),
        ("trainer._target_", {"NoisyTrainer": "trainer.generator"}),
        ("+callbacks.noisy._target_", {"NoisyCallback": "callbacks.noisy.generator", "SavedCallback": None}),
        ("+task.metrics.mine._target_", {"NoisyMetric": "task.metrics.mine"}),
    ],
)
def test_a_generator_that_no_checkpoint_has_is_named(tmp_path, caplog, setting, named):
    for kind, name in named.items():
        caplog.clear()
        train(tmp_path / kind, f"{setting}={__name__}.{kind} train.max_steps=1")
        said = [text for text in caplog.messages if "random generator" in text]
        assert len(said) == (name is not None) and all(text.startswith(f"{name} ") for text in said)


# Schedules


@pytest.mark.parametrize(
    ("schedule", "middle", "last"),
    [
        ("schedule=step schedule.step_size=1 schedule.gamma=0.5", (0.25, 0.125), 0.125),
        ("schedule._target_=torch.optim.lr_scheduler.CosineAnnealingLR", (0.125, 0.1006), 0),
        ("schedule=one_cycle", (0.1728, 0.139), 0),
    ],
)
def test_the_learning_rate_follows_its_schedule(tmp_path, schedule, middle, last):
    train(tmp_path, "train.log_interval=1", schedule)
    rates = logged(tmp_path, "lr")
    assert (max(rates), rates[-1]) == pytest.approx((0.25, last), rel=0.05, abs=0.005)
    assert rates[7:9] == pytest.approx(middle, rel=0.01)


def poly(optimizer, power, total):
    return LambdaLR(optimizer, lambda step: (1 - step / total if total else math.nan) ** power)


@pytest.mark.parametrize(("total", "ends"), [(16, None), (15, None), (8, 10), (0, 1)])
@pytest.mark.parametrize("power", [1.0, 0.9])
def test_a_rate_that_is_no_number_from_0_ends_the_run_before_the_step_that_would_have_it(
    tmp_path, error, total, ends, power
):
    schedule = f"schedule._target_={__name__}.poly +schedule.power={power} +schedule.total={total} data.length=128"
    with error(f"the schedule gives the learning rate .* for step {ends} of 16") if ends else nullcontext():
        train(tmp_path, schedule, "train.epochs=4")
    assert ends == 1 or all(isinstance(rate, float) for rate in logged(tmp_path, "lr")[:-1])


def two_rates(optimizer, kind):
    if kind == "cyclic":
        return CyclicLR(optimizer, [0.1], [0.2])
    return LambdaLR(optimizer, [lambda step: 1.0])


@pytest.mark.parametrize(
    "schedule",
    [
        "schedule=one_cycle +schedule.max_lr=[0.1]",
        *(f"schedule._target_={__name__}.two_rates +schedule.kind={kind}" for kind in ("cyclic", "lambda")),
    ],
)
def test_a_schedule_with_a_value_for_one_group_of_weights_is_told_of_the_others(tmp_path, error, schedule):
    with error("^schedule: .* the optimizer has 2 groups of weights"):
        train(tmp_path, schedule)


class WithOwnMethods(Linear):
    """A network with a training loop of its own, whose methods have names of torch's."""

    def compile(self, optimizer, loss):
        raise AssertionError("it is for another program")


class Trains(WithOwnMethods):
    def train(self, loader, epochs):
        raise AssertionError("it is for another program")


class Evaluates(WithOwnMethods):
    def eval(self, images):
        raise AssertionError("it is for another program")


def test_methods_of_a_network_that_are_something_else_than_torchs_are_refused_or_not_called(
    tmp_path, error, monkeypatch
):
    for kind in ("Trains", "Evaluates"):
        with error(rf"model: {kind}\.\w+ is called with .*rename"):
            train(tmp_path / kind, f"model._target_={__name__}.{kind}")
    compiled = []
    monkeypatch.setattr(nn.Module, "compile", lambda network, mode: compiled.append(type(network)))
    train(tmp_path, f"model._target_={__name__}.WithOwnMethods train.compile=true train.max_steps=1")
    assert compiled == [WithOwnMethods]


class InDoubles(Linear):
    def __init__(self, num_classes, in_channels, **_):
        torch.set_default_dtype(torch.float64)
        super().__init__(num_classes, in_channels)


def test_the_default_dtype_that_a_network_sets_is_not_that_of_the_next_run(tmp_path, error):
    with error("image: float32"):
        train(tmp_path, f"model._target_={__name__}.InDoubles")
    assert torch.get_default_dtype() == torch.float32


class Unseen(Linear):
    """Has layers where torch does not see them."""

    def add(self, place, **_):
        layer = nn.Linear(2, 2)
        frozen = nn.Linear(2, 2).requires_grad_(False)
        cycle = [deque()]
        cycle[0] += [cycle, {"itself": cycle}, layer]
        places = {
            "list": [layer],
            "dict": {"a": layer},
            "parameter": (layer.weight,),
            "frozen": [frozen],
            "cycle": cycle,
        }
        self.hidden = places.get(place, SimpleNamespace(scales={"a": layer.weight}))
        if place == "list":
            self.module = nn.Sequential(nn.ReLU())
            self.module.inner = self.__dict__.pop("hidden")


class Scaled:
    """A loss, and a score, with a weight that torch does not see."""

    def __init__(self):
        self.scale = nn.Parameter(torch.ones(()))

    def __call__(self, outputs, labels):
        return nn.functional.cross_entropy(outputs * self.scale, labels, reduction="none")


class HasScaled(Trainer):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.scaled = Scaled()


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        (f"task.loss={{_target_: {__name__}.Scaled}}", "task.own_loss"),
        (f"task.scores={{scaled: {{_target_: {__name__}.Scaled}}}}", "task.extra_scores"),
        (f"trainer._target_={__name__}.HasScaled", "trainer.scaled"),
    ],
)
def test_weights_in_an_object_that_torch_does_not_see_are_warned_of(tmp_path, caplog, setting, named):
    train(tmp_path, setting, "train.max_steps=1")
    assert [text.split()[0] for text in caplog.messages if "torch does not see them" in text] == [named]


@pytest.mark.parametrize("place", ["list", "dict", "parameter", "object", "frozen", "cycle"])
def test_layers_in_a_container_that_torch_does_not_see_are_warned_of(tmp_path, caplog, place):
    train(tmp_path, f"model._target_={__name__}.Unseen +model.place={place} train.max_steps=1")
    name = {"list": "model.module.inner", "frozen": None}.get(place, "model.hidden")
    said = [text for text in caplog.messages if "torch does not see them" in text]
    assert [text.split()[0] for text in said] == [name] * (name is not None)


def test_of_what_an_attribute_leads_to_the_nearest_objects_are_looked_into():
    def behind(value, depth):
        for _ in range(depth):
            value = [{"ids": list(range(2000))}, value]
        return value

    weight = nn.Parameter(torch.ones(()))
    for depth, found in ((1000, [weight]), (MOST, [])):
        assert list(weights_in(behind(weight, depth))) == found


class Loads:
    """Sets weights when a run begins, and the batch size of the loader when an epoch ends, if `sets`."""

    def __init__(self, sets=False):
        self.sets = sets

    def on_start(self, run):
        if not self.sets:
            nn.init.zeros_(run.trainer.model.weight)

    def on_epoch_end(self, run):
        if self.sets:
            run.train_loader.batch_size = 4


def test_what_a_callback_sets_in_vain_or_over_a_checkpoint_is_said(tmp_path, caplog, error):
    loads = f"+callbacks.loads._target_={__name__}.Loads model._target_={EXTENSIONS}.Linear"
    train(tmp_path, loads, "train.max_steps=3")
    assert "changed weights" not in caplog.text
    train(tmp_path, loads)
    assert "on_start of a callback has changed weights that the checkpoint had" in caplog.text
    with error("a callback has set batch_size of run.train_loader"):
        train(tmp_path / "sets", loads, "+callbacks.loads.sets=true")


def hardest(outputs, labels):
    return nn.functional.cross_entropy(outputs, labels, reduction="none").topk(8).values.mean()


def test_a_loss_that_needs_more_samples_than_are_tried_first_is_tried_with_more(tmp_path):
    train(tmp_path, f"task.loss={{_target_: {__name__}.hardest, _partial_: true}} train.epochs=1")
    assert checkpoint(tmp_path)["step"] == 8


class EvaluatesToo:
    """Evaluates a batch of its own by the trainer, with other labels."""

    def on_epoch_end(self, run):
        for batch in run.batches_to_look_at(1):
            run.trainer.evaluation_step({**batch, "label": (batch["label"] + 1) % 10})


def test_what_a_callback_evaluates_is_in_no_metric_of_the_run(tmp_path):
    worst = f"task.metrics={{worst: {{_target_: {EXTENSIONS}.Worst}}}} optim.lr=0.01"
    train(tmp_path / "plain", worst)
    train(tmp_path / "more", worst, f"+callbacks.more._target_={__name__}.EvaluatesToo")
    plain, more = (logged(tmp_path / name, "test_worst") for name in ("plain", "more"))
    assert plain == more and len(more) == 2


def test_a_value_that_is_added_to_a_written_line_is_named(tmp_path, caplog):
    train(tmp_path, CARELESS, "train.epochs=1")
    assert "has set perplexity in a line that is written already: call run.log" in caplog.text


class Scores:
    def __init__(self, **names):
        self.names = names

    def on_evaluation(self, run, scores):
        scores |= self.names


@pytest.mark.parametrize("name", [*SUMMARY_KEYS, "test_accuracy", "mine"])
def test_a_score_of_on_evaluation_has_a_name_that_the_summary_has_not(tmp_path, error, name):
    adds = f"+callbacks.adds={{_target_: {__name__}.Scores, {name}: 0.5}} data.val_fraction=0.25 train.epochs=1"
    with nullcontext() if name == "mine" else error(f"{name!r}, a score of on_evaluation"):
        summary = train(tmp_path, adds, "callbacks/standard=[]")
        evaluated = {f"{split}_{score}" for split in ("val", "test") for score in ("loss", "accuracy")}
        assert summary.keys() - evaluated == {*SUMMARY_KEYS, "mine"} - {"best_score"}  # which callbacks.best adds


class Recalibrates:
    """Changes a weight in the method `at` of the last epoch."""

    def __init__(self, at):
        setattr(self, at, self.change)

    def change(self, run, *_):
        if run.progress.step == run.progress.last_step:
            next(run.trainer.model.parameters()).data.mul_(2)


@pytest.mark.parametrize(
    ("at", "is_saved"), [("on_step", True), ("on_evaluation", False), ("on_epoch_end", False), ("on_end", False)]
)
def test_weights_that_are_changed_after_the_last_checkpoint_are_warned_of(tmp_path, caplog, at, is_saved):
    train(tmp_path, f"+callbacks.late={{_target_: {__name__}.Recalibrates, at: {at}}} callbacks.ema.decay=0.9")
    assert ("after the last checkpoint was saved" in caplog.text) == (not is_saved)


class AtTheEnd:
    """Does `what` in its last method."""

    def __init__(self, what):
        self.what = what

    def on_end(self, run, summary):
        if self.what == "an average":
            run.trainer.ema_model = deepcopy(run.trainer.model)
        elif self.what == "a file":
            torch.save({}, run.folder / "checkpoints" / "best.pt")
        else:
            prune.random_unstructured(run.trainer.model[2], "weight", 0.5)


@pytest.mark.parametrize("what", ["an average", "a file", "pruned weights"])
def test_what_on_end_changes_is_warned_of_and_the_run_has_ended_well(tmp_path, caplog, what):
    late = f"+callbacks.late={{_target_: {__name__}.AtTheEnd, what: {what}}} callbacks/standard=[best] train.epochs=1"
    assert train(tmp_path, late)["verdict"]
    assert ("something else has written into" if what == "a file" else "after the last checkpoint") in caplog.text


@pytest.mark.parametrize("step", ["1", None, [3]])
def test_a_folder_with_the_metrics_of_another_program_is_refused(tmp_path, error, step):
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": step, "score": 1}))
    with error(r"metrics\.jsonl is of another program"):
        train(tmp_path)


# Samplers


def only_threes(dataset):
    """Draws samples of class 3 alone."""
    return WeightedRandomSampler([float(dataset[i]["label"] == 3) for i in range(len(dataset))], 64)


def of_labels(labels):
    return WeightedRandomSampler([1.0] * len(labels), len(labels))


def threes(outputs, labels):
    return (labels == 3).float()


@pytest.mark.parametrize("loader", ["prefetch", "torch", "resident"])
def test_a_sampler_decides_which_samples_train(tmp_path, loader):
    sampler = f"sampler._target_={__name__}.only_threes task.scores={{threes: {{_target_: {__name__}.threes}}}}"
    train(tmp_path, sampler, f"train.last_batch=keep train.epochs=3 loader={loader}")
    assert checkpoint(tmp_path)["step"] == 3 * 64 / 32
    assert {*logged(tmp_path, "threes")} == {1.0}


def test_a_sampler_of_torch_gets_the_dataset_under_the_name_that_it_has_there(tmp_path):
    train(tmp_path, "sampler._target_=torch.utils.data.SequentialSampler", "train.max_steps=1")
    assert checkpoint(tmp_path)["step"] == 1


def test_a_sampler_of_labels_that_the_dataset_has_not_is_told_of_them(tmp_path, error):
    with error("the dataset has no `labels`: add an array"):
        train(tmp_path, IMAGES, f"sampler._target_={__name__}.of_labels")


def test_a_batch_sampler_makes_the_batches(tmp_path):
    pairs = f"batch_sampler._target_={EXTENSIONS}.Pairs train.last_batch=keep data.length=20 train.epochs=1"
    train(tmp_path, pairs, "loader=prefetch")
    assert checkpoint(tmp_path)["step"] == 10


@pytest.mark.parametrize(
    ("gives", "says", "loader", "schedule"), [(64, 128, "workers", "one_cycle"), (128, 64, "torch", "cosine")]
)
def test_an_epoch_is_an_epoch_whatever_its_sampler_says(tmp_path, caplog, gives, says, loader, schedule):
    summary = train(tmp_path, lying(gives, says), f"train.epochs=3 loader={loader} schedule={schedule}")
    assert summary["epochs"] == 3 and checkpoint(tmp_path)["step"] == 3 * gives // 32
    assert logged(tmp_path, "epoch", "test_loss") == [1, 2, 3]
    warnings = [text for text in caplog.messages if "by its loader's length" in text]
    assert len(warnings) == 1 and f"{gives // 32} steps" in warnings[0] and f"{says // 32}" in warnings[0]


# Datasets


@pytest.mark.parametrize(("metric", "best"), [("accuracy", max), ("loss", min)])
def test_a_validation_split_chooses_the_best_checkpoint_and_the_test_set_is_evaluated_once(tmp_path, metric, best):
    summary = train(tmp_path, IMAGES, f"data.val_fraction=0.25 task.metric={metric}")
    assert logged(tmp_path, "step", "val_accuracy") == [3, 6]
    assert logged(tmp_path, "step", "test_accuracy") == [6]
    assert summary["score"] == f"val_{metric}" and {"test_accuracy", "val_loss"} <= summary.keys()
    assert summary["best_score"] == best(logged(tmp_path, f"val_{metric}"))


def test_an_evaluation_may_be_of_some_steps_only_and_a_stream_has_epochs_of_as_many_steps_as_it_is_told(tmp_path):
    stream = f"data._target_={EXTENSIONS}.Stream train.steps_per_epoch=9 train.batch_size=16 loader=workers"
    train(
        tmp_path, stream, f"loader.streams=4 train.eval_steps=1 task.scores={{seen: {{_target_: {__name__}.samples}}}}"
    )
    assert logged(tmp_path, "step", "test_accuracy") == [9, 18], "203 samples are a pass of 16 steps"
    assert logged(tmp_path, "epoch", "test_accuracy") == [1, 2]
    assert logged(tmp_path, "test_seen") == [13.0] * 2, "the first batch, of the first of four streams"


class Passes(Stream):
    """Its samples depend on the pass over them."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        for image, label in super().__iter__():
            yield image, (label + self.epoch) % 10


def test_a_stream_that_counts_its_passes_keeps_its_workers(tmp_path, caplog):
    caplog.set_level("INFO")
    stream = f"data._target_={__name__}.Passes data.length=32 train.steps_per_epoch=4 train.batch_size=16"
    train(tmp_path, stream, "loader=workers loader.num_workers=1 loader.streams=2 train.epochs=3")
    assert "epoch 3:" in caplog.text
    assert "restart" not in caplog.text and "dropped" not in caplog.text


def samples(outputs, labels):
    return torch.full((len(labels),), float(len(labels)))


def test_the_device_keeps_a_dataset_of_tuples(tmp_path):
    assert train(tmp_path, IMAGES, "loader=resident augment.erase=0.5")["test_accuracy"] == 1.0


@pytest.mark.parametrize("loader", ["torch", "workers", "threads"])
def test_a_later_sample_that_cannot_be_read_ends_the_run_in_its_own_words(tmp_path, error, loader, caplog):
    late = f"{LATE} loader={loader}"
    with error(r"37\.png is missing"):
        train(tmp_path, late)
    if loader == "workers":
        caplog.clear()
        skips = train(tmp_path / "skips", late, "loader.on_error=skip")
        # Two sets in two epochs, and read-ahead.
        assert skips["skipped_samples"] >= 4 and skips["retried_samples"] == 0
        assert caplog.text.count("37.png") == 2, "each file of the two sets is warned of once"
        assert checkpoint(tmp_path / "skips")["step"] == 8


def test_a_workers_error_is_shown_as_its_last_sentence_and_the_log_file_has_all_of_it(command, tmp_path):
    shown = command(
        *SMALL, *separate(LATE), "loader=workers", "loader.num_workers=1", "hydra.run.dir=out", ends_with=1
    )
    assert "37.png is missing" in shown and len(shown.splitlines()) < 12, shown
    log = (tmp_path / "out" / "train.log").read_text()
    assert "Traceback" in log and "__getitem__" in log
