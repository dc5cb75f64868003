"""What callbacks, optimizers and collate functions of a fork may do in a run without changing what it trains."""

from typing import Any, ClassVar

import pytest
import torch
from torch.utils.data import default_collate

from data.synthetic import Synthetic
from tests.configs import (
    EXTENSIONS,
    STOP,
    TWO_PARTS,
    checkpoint,
    differences,
    differing_weights,
    steps,
    train,
    untimed,
)
from training.stopping import Stopped

CONSTANT = "schedule=constant"  # another schedule depends on train.max_steps
STREAM = (
    f"data._target_={EXTENSIONS}.Stream train.steps_per_epoch=8 train.batch_size=16 loader.streams=2 loader=workers"
)


@pytest.mark.parametrize("settings", ["loader=prefetch loader.num_workers=1", STREAM])
def test_a_callback_that_looks_at_batches_does_not_move_the_run_nor_its_resume(tmp_path, settings):
    looks = f"{CONSTANT} {settings} +callbacks.looks._target_={EXTENSIONS}.Looks"
    train(tmp_path / "whole", CONSTANT, settings)
    train(tmp_path / "looks", looks, "train.max_steps=6")
    train(tmp_path / "looks", looks)
    ours, whole = (checkpoint(tmp_path / name) for name in ("looks", "whole"))
    assert differences(ours["model"], whole["model"]) == differences(ours["loader"], whole["loader"]) == []
    losses = [[line["loss"] for line in steps(tmp_path / name) if line["step"] > 6] for name in ("looks", "whole")]
    assert losses[0] == losses[1]


class Reads:
    """Reads a batch of the loader that training reads."""

    def __init__(self, at):
        self.at = at

    def on_start(self, run):
        if self.at == 0:
            next(iter(run.train_loader))

    def on_step(self, run):
        if run.trainer.step == self.at:
            next(run.train_loader)

    def on_log(self, run, values):
        if self.at == "log":
            next(run.train_loader)

    def on_epoch_end(self, run):
        if self.at == "epoch":
            next(run.train_loader)


@pytest.mark.parametrize("at", [0, 1, 3, "log", "epoch"])
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


def test_a_resume_trains_what_was_unfrozen(tmp_path):
    thaws = f"{CONSTANT} {TWO_PARTS} +callbacks.thaws._target_={EXTENSIONS}.Thaws"
    train(tmp_path / "whole", thaws)
    for limit in ("10", "16"):
        train(tmp_path / "parts", thaws, f"train.max_steps={limit}")
    assert differing_weights(tmp_path / "parts", tmp_path / "whole") == []


@pytest.mark.parametrize(
    "schedule", ["constant", "constant schedule.every=step", "step schedule.step_size=1", "cosine"]
)
def test_a_learning_rate_that_a_callback_has_set_is_that_of_a_resume(tmp_path, schedule):
    plateau = (
        f"+callbacks.plateau._target_={EXTENSIONS}.Plateau schedule={schedule} train.epochs=4 train.log_interval=1"
    )
    train(tmp_path / "whole", plateau)
    for limit in (8, 13, 17):  # at the end of an epoch, and within one
        with pytest.raises(Stopped):
            train(tmp_path / "parts", plateau, STOP, f"+callbacks.stop.at={limit} +callbacks.stop.how=SIGTERM")
    train(tmp_path / "parts", plateau)
    ours, whole = (untimed(tmp_path / name) for name in ("parts", "whole"))
    assert ours == whole
    assert differences(checkpoint(tmp_path / "parts")["model"], checkpoint(tmp_path / "whole")["model"]) == []


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


def test_each_step_of_a_run_and_of_its_resume_draws_its_own_random_numbers(tmp_path):
    draws = f"{CONSTANT} +callbacks.draws._target_={__name__}.Draws"
    for limit in (3, 5):
        train(tmp_path / "resumed", draws, f"train.max_steps={limit}")
    train(tmp_path / "whole", draws, "train.max_steps=5")
    assert Draws.numbers[:5] == Draws.numbers[5:] and len({*Draws.numbers}) == 5


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


def lbfgs(params, **_):
    return torch.optim.LBFGS(params)


def muon(params, **_):
    return torch.optim.Muon(params)


@pytest.mark.parametrize("name", ["lbfgs", "muon"])
def test_an_optimizer_that_takes_no_groups_is_a_sentence_that_names_the_method_to_override(tmp_path, error, name):
    with error(name, "configure_optimizers"):
        train(tmp_path, f"optim._target_={__name__}.{name}")


def leave_out(samples):
    """A collate function that leaves out samples, and so whole batches."""
    kept = [sample for sample in samples if sample["label"] < 3]
    return default_collate(kept) if kept else {name: value[None][:0] for name, value in samples[0].items()}


@pytest.mark.parametrize("more", ["callbacks.ema.decay=0.9 train.accumulate=2", "train.precision=fp16"])
def test_steps_without_a_sample_are_left_out(tmp_path, caplog, more):
    collate = f"data.collate={{_target_: {__name__}.leave_out}}"
    train(tmp_path, collate, "train.batch_size=4 train.epochs=1 data.length=64", more)
    assert checkpoint(tmp_path)["step"] == 16 and "batch without samples" in caplog.text
    assert all(weight.isfinite().all() for weight in checkpoint(tmp_path)["model"].values())
    assert None not in [line.get("loss", 0) for line in steps(tmp_path)]
