"""What callbacks, optimizers and collate functions of a fork may do in a run without changing what it trains."""

import random
from collections import UserDict
from collections.abc import Callable
from copy import deepcopy
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from torch.optim import SGD
from torch.utils.data import default_collate

from data.synthetic import Synthetic
from tests.configs import (
    EXTENSIONS,
    IMAGES,
    TWO_PARTS,
    checkpoint,
    differences,
    logged,
    steps,
    train,
)
from tests.training.extensions import Images

CONSTANT = "schedule=constant"  # another schedule depends on train.max_steps


class Reads:
    """Reads a batch of the loader that training reads, in the method `at`."""

    def __init__(self, at):
        setattr(self, at, self.read)

    def read(self, run, *_):
        next(run.train_loader)


@pytest.mark.parametrize("at", ["on_start", "on_step", "on_log", "on_epoch_end"])
def test_a_callback_that_reads_the_training_loader_is_told_how_to_look_at_batches(tmp_path, error, at):
    with error("batches_to_look_at"):
        train(tmp_path, f"+callbacks.reads={{_target_: {__name__}.Reads, at: {at}}}")


class Levelled(Synthetic):
    level = 1

    def __getitem__(self, index):
        return {**super().__getitem__(index), "level": self.level}


class Raises:
    """Raises the level of the dataset after each epoch, and keeps the levels that were trained."""

    seen: ClassVar[list[int]] = []

    def on_step(self, run):
        Raises.seen += run.batch["level"].unique().tolist()

    def on_epoch_end(self, run):
        run.data.train.level += 1


def test_workers_get_the_attributes_of_a_dataset_that_a_callback_has_changed(tmp_path):
    Raises.seen.clear()
    raises = f"data._target_={__name__}.Levelled +callbacks.raises._target_={__name__}.Raises"
    train(tmp_path, raises, "loader=workers loader.num_workers=1 train.epochs=3 data.length=64")
    assert Raises.seen == [1, 1, 2, 2, 3, 3]


ADDED: dict[str, Callable[[Any], Any]] = {
    "a module": lambda run: setattr(run.trainer.model, "more", nn.Linear(2, 2)),
    "another weight": lambda run: setattr(run.trainer.model.first[1], "bias", nn.Parameter(torch.zeros(10))),
    "a mask of pruning": lambda run: prune.identity(run.trainer.model.first[1], "weight"),
    "a module of the trainer": lambda run: setattr(run.trainer, "teacher", deepcopy(run.trainer.model)),
    "a group": lambda run: run.trainer.optimizers[0].add_param_group({"params": [nn.Parameter(torch.zeros(1))]}),
    "an optimizer": lambda run: setattr(run.trainer, "optimizers", [SGD(run.trainer.model.parameters())]),
}


class Adds:
    """Adds or replaces something when the run starts, or after the first epoch."""

    def __init__(self, what, at):
        setattr(self, at, ADDED[what])


@pytest.mark.parametrize("at", ["on_start", "on_epoch_end"])
@pytest.mark.parametrize("what", ADDED)
def test_a_callback_may_not_add_or_replace_what_a_resume_could_not_load(tmp_path, error, what, at):
    with error("renamed or replaced", "configure_optimizers"):
        train(tmp_path, TWO_PARTS, f"+callbacks.adds={{_target_: {__name__}.Adds, what: {what}, at: {at}}}")


def test_a_learning_rate_of_the_command_line_replaces_that_of_a_callback(tmp_path):
    plateau = f"+callbacks.plateau._target_={EXTENSIONS}.Plateau schedule=constant train.log_interval=1"
    train(tmp_path, plateau, "train.epochs=2")
    train(tmp_path, plateau, "train.epochs=3 optim.lr=0.5")
    assert steps(tmp_path)[-1]["lr"] == 0.25, "it is halved by the evaluation with which the resume begins"


class Draws:
    """Draws a random number in each step, as dropout does."""

    numbers: ClassVar[list[float]] = []

    def on_step(self, run):
        Draws.numbers.append(torch.rand(()).item())


def test_each_step_draws_its_own_random_numbers(tmp_path):
    train(tmp_path, f"+callbacks.draws._target_={__name__}.Draws", "train.max_steps=5")
    assert len({*Draws.numbers}) == 5


class Averaging(torch.optim.SGD):
    """Moves a weight in eval(), as schedule-free optimizers do, so that one sees which are evaluated and saved."""

    newest: ClassVar[Any] = None

    def __init__(self, params, lr, **options):
        super().__init__(params, lr=lr)
        self.trains = False
        Averaging.newest = self

    @torch.no_grad()
    def turn(self, trains):
        if self.trains != trains:
            self.param_groups[0]["params"][0].mul_(0.5 if trains else 2.0)  # exactly undone
        self.trains = trains

    def train(self):
        self.turn(True)

    def eval(self):
        self.turn(False)

    def step(self, closure=None):
        assert self.trains
        return super().step(closure)


class Evaluated:
    def on_evaluation(self, run, scores):
        assert not Averaging.newest.trains
        self.weights = {name: value.clone() for name, value in run.trainer.model.state_dict().items()}

    def on_end(self, run, summary):
        torch.save(self.weights, run.folder / "evaluated.pt")


def test_an_optimizer_with_train_and_eval_is_evaluated_and_saved_in_its_eval_mode(tmp_path):
    ours = f"{CONSTANT} optim._target_={__name__}.Averaging +callbacks.look._target_={__name__}.Evaluated"
    train(tmp_path / "whole", ours, "train.checkpoint_every=5")
    evaluated = torch.load(tmp_path / "whole" / "evaluated.pt")
    assert differences(checkpoint(tmp_path / "whole")["model"], evaluated) == []
    for limit in ("3", "16"):
        train(tmp_path / "resumed", ours, f"train.max_steps={limit}")
    assert differences(checkpoint(tmp_path / "resumed")["model"], evaluated) == []


def leave_out(samples):
    """A collate function that leaves out samples, and so whole batches."""
    kept = [sample for sample in samples if sample["label"] < leave_out.below]
    return default_collate(kept) if kept else {name: value[None][:0] for name, value in samples[0].items()}


leave_out.below = 3


class LeaveOutAll:
    def on_start(self, run):
        leave_out.below = 0


@pytest.mark.parametrize("more", ["callbacks.ema.decay=0.9 train.accumulate=2", "train.precision=fp16"])
def test_steps_without_a_sample_are_left_out(tmp_path, caplog, more):
    collate = f"data.collate={{_target_: {__name__}.leave_out}}"
    train(tmp_path, collate, "train.batch_size=4 train.epochs=1 data.length=64", more)
    assert checkpoint(tmp_path)["step"] == 16 and "batch without samples" in caplog.text
    assert all(weight.isfinite().all() for weight in checkpoint(tmp_path)["model"].values())
    assert None not in [line.get("loss", 0) for line in steps(tmp_path)]


def test_an_epoch_without_a_sample_is_not_taken_for_a_step_that_forgets_its_optimizer(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(leave_out, "below", 3)
    empty = f"data.collate={{_target_: {__name__}.leave_out}} +callbacks.empty._target_={__name__}.LeaveOutAll"
    train(tmp_path, empty, "data.length=64 train.epochs=1 callbacks/standard=[]")
    assert "step 2 has a batch without samples" in caplog.text and "no optimizer has stepped" not in caplog.text


def noisy(samples):
    batch = default_collate(samples)
    return {**batch, "image": torch.randint_like(batch["image"], 256)}


def with_missing(samples):
    return {**default_collate(samples), "weight": torch.full((len(samples),), torch.nan)}


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("collate", ["noisy", "with_missing"])
def test_a_collate_function_that_draws_is_warned_of(tmp_path, caplog, collate, workers):
    collates = f"data.collate={{_target_: {__name__}.{collate}}}"
    train(tmp_path, collates, f"loader.num_workers={workers} train.epochs=1 data.length=64")
    assert ("data.collate gives other batches" in caplog.text) == (collate == "noisy")


class Tokenized(UserDict):
    """What tokenizers return: a mapping that has a method `to`, which moves it as a whole."""

    def to(self, device):
        return Tokenized({name: value.to(device) for name, value in self.items()})


class Tokens(Images):
    def __getitem__(self, index):
        image, label = super().__getitem__(index)
        return Tokenized(image=image, label=torch.tensor(label))


def tokenized(samples):
    return Tokenized(default_collate([dict(sample) for sample in samples]))


@pytest.mark.parametrize("collate", ["", f"data.collate={{_target_: {__name__}.tokenized}}"])
def test_samples_and_batches_may_be_mappings_that_move_as_a_whole(tmp_path, collate):
    train(tmp_path, f"{IMAGES} data._target_={__name__}.Tokens train.epochs=1 train.accumulate=2", collate)
    assert checkpoint(tmp_path)["step"] == 4


class Drawing(Images):
    """Its samples have a number that is drawn `how`."""

    def __init__(self, how, **options):
        super().__init__(**options)
        self.how = how
        self.seen = 0
        self.generator = np.random.default_rng()
        self.of_worker = None

    def __getitem__(self, index):
        self.seen += 1
        if self.how == "from_a_generator_that_each_worker_makes" and self.of_worker is None:
            self.of_worker = np.random.default_rng()
        draws = {
            "by_a_counter": lambda: self.seen,
            "from_a_new_generator": lambda: np.random.default_rng().random(),
            "from_a_child_of_a_generator": lambda: self.generator.spawn(1)[0].random(),
            "from_a_generator_that_each_worker_makes": lambda: self.of_worker.random(),
            "from_the_global_generators": lambda: random.random() + np.random.rand() + torch.rand(()).item(),
            "from_a_generator_that_it_holds": lambda: self.generator.random(),
            "never": lambda: 0.0,
        }
        image, label = super().__getitem__(index)
        return {"image": image, "label": label, "drawn": draws[self.how]()}


SEEDED = (
    "from_the_global_generators",
    "from_a_generator_that_it_holds",
    "from_a_generator_that_each_worker_makes",  # the batch that makes it is read again
    "never",
)
UNSEEDED = ("by_a_counter", "from_a_new_generator", "from_a_child_of_a_generator")


@pytest.mark.parametrize("how", [*SEEDED, *UNSEEDED])
def test_a_dataset_that_gives_other_samples_from_the_same_random_numbers_is_named_once(tmp_path, caplog, how):
    train(tmp_path, f"{IMAGES} data._target_={__name__}.Drawing +data.how={how} train.epochs=1")
    assert caplog.text.count("Drawing gives other samples") == (how in UNSEEDED)
    assert caplog.text.count("Drawing gives other test samples") == (how in SEEDED and how != "never")


class Overwrites:
    def on_evaluation(self, run, scores):
        scores |= {"test_accuracy": 2.0, "test_own": 3.0}


def test_a_score_that_a_callback_overwrites_stays_what_it_was_and_one_that_it_adds_is_in_the_summary(tmp_path, caplog):
    summary = train(tmp_path, f"+callbacks.overwrites._target_={__name__}.Overwrites")
    assert summary["test_accuracy"] == logged(tmp_path, "test_accuracy")[-1] < 2 and summary["test_own"] == 3
    assert not any(name.startswith("trainer.") for name in checkpoint(tmp_path)["altered"])
    assert "on_evaluation of callbacks.overwrites has set test_accuracy" in caplog.text
