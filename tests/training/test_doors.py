"""The doors of a run, used as a fork uses them: one small run each."""

import json

import pytest
import torch
from torch import nn

from tests.configs import DOORS, LINEAR, checkpoint, metrics, steps, train
from tests.training.doors import Centred, Signs, Spy, Stop
from training.stopping import Stopped

SPY = [f"+callbacks.spy._target_={DOORS}.Spy", "+callbacks.spy.every=2"]
STOP = f"+callbacks.stop._target_={DOORS}.Stop"
HERE = __name__


@pytest.fixture
def stop():
    """Lets the run stop after a step."""

    def at(step: int, how: str) -> None:
        Stop.at, Stop.how = step, how

    yield at
    Stop.at = 0


# Callbacks


def test_a_callback_is_called_at_each_point_and_adds_to_the_log_and_the_summary(tmp_path):
    summary = train(tmp_path, *SPY, "train.log_interval=4")
    epoch = ["step"] * 3 + ["log 4"] + ["step"] * 4 + ["log 8", "log 8", "evaluation", "epoch end"]
    assert Spy.calls[: 3 + len(epoch)] == ["start", "step", "log 1", *epoch]
    assert Spy.calls[-1] == "end" and summary["counted_steps"] == 16
    assert json.loads((tmp_path / "summary.json").read_text())["counted_steps"] == 16
    assert [line.get("twice") for line in steps(tmp_path)][1:3] == [6.0, 14.0], "the mean since the line before"
    assert sum("epochs_done" in line for line in metrics(tmp_path)) >= 1


@pytest.mark.parametrize("how", ["SIGTERM", "error"])
def test_a_callback_learns_that_a_run_was_interrupted_and_goes_on_with_its_state(tmp_path, stop, how):
    stop(5, how)
    with pytest.raises((Stopped, ZeroDivisionError)):
        train(tmp_path, *SPY, STOP, "train.checkpoint_every=2")
    assert Spy.calls[-1] == "interrupted"
    assert train(tmp_path, *SPY, STOP, "train.checkpoint_every=2")["counted_steps"] == 16
    assert Spy.calls[:2] == ["start", "loaded 5" if how == "SIGTERM" else "loaded 4"]


def test_a_state_that_cannot_be_read_again_is_named_at_the_first_save(tmp_path, error):
    with error(r"callbacks\.mine", r"numpy|float64"):
        train(tmp_path, f"+callbacks.mine._target_={DOORS}.NumpyState", "train.checkpoint_every=1")
    assert [line["step"] for line in metrics(tmp_path)] in ([], [1]), "not at the run's end"


def test_a_callback_without_any_of_the_methods_is_refused(tmp_path, error):
    with error(r"callbacks\.mine", "on_step"):
        train(tmp_path, "+callbacks.mine._target_=torch.nn.ReLU")


def test_a_run_ends_early_when_its_score_does_not_improve(tmp_path):
    stuck = ["optim.lr=0", "callbacks.best.early_stop=2", "train.epochs=9", "task.metric=loss"]
    summary = train(tmp_path, LINEAR, *stuck)
    assert summary["epochs"] == 3, "an equal score is no better one"
    assert checkpoint(tmp_path)["step"] == 8 * 3
    again = train(tmp_path, LINEAR, *stuck, "train.log_interval=2")
    assert again["epochs"] == 3, "a run that stopped early is not continued by a resume"


def test_a_score_that_is_no_number_is_never_the_best(tmp_path):
    nan = [f"task.metrics={{mine: {{_target_: {HERE}.Listed, values: [nan, 0.5, nan]}}}}", "task.metric=mine"]
    nan += ["task.higher_is_better=true"]
    train(tmp_path, LINEAR, *nan, "train.epochs=3")
    assert checkpoint(tmp_path, "best")["step"] == 16
    assert [line["test_mine"] for line in metrics(tmp_path) if "test_mine" in line] == [None, 0.5, None]


class Listed:
    """A metric whose values are given."""

    def __init__(self, values: list[object]) -> None:
        self.values, self.samples = iter(float(value) for value in values), 0

    def reset(self) -> None:
        self.samples = 0

    def update(self, outputs: torch.Tensor, labels: torch.Tensor) -> None:
        self.samples += len(labels)

    def compute(self) -> float:
        return next(self.values) if self.samples == 64 else 0.0  # else it is the check before the first step


# The trainer


def test_a_training_step_of_a_fork_trains_and_what_it_logs_is_in_the_line(tmp_path):
    plain = [LINEAR, "optim.momentum=0", "optim.nesterov=false", "optim.weight_decay=0", "train.epochs=1"]
    train(tmp_path / "own", *plain, f"trainer._target_={DOORS}.Doubled", "optim.lr=0.1")
    train(tmp_path / "usual", *plain, "optim.lr=0.2")
    own, usual = (steps(tmp_path / name) for name in ("own", "usual"))
    for mine, other in zip(own, usual, strict=True):
        assert mine["loss"] == pytest.approx(2 * other["loss"], rel=1e-4), "twice the gradient, half the rate"
        assert mine["rows"] == 32 and "evaluated" not in mine
    assert [line["evaluated"] for line in metrics(tmp_path / "own") if "evaluated" in line] == [32.0]


def test_a_step_with_two_optimizers_trains_both_networks(tmp_path):
    two = [f"model._target_={DOORS}.TwoParts", f"trainer._target_={DOORS}.Alternating"]
    train(tmp_path, *two, "train.log_interval=1", "train.precision=fp16")
    lines = steps(tmp_path)
    assert all({"first", "second"} <= line.keys() for line in lines)
    assert all(lines[-1][name] < lines[0][name] for name in ("first", "second"))
    saved = checkpoint(tmp_path)
    assert len(saved["optimizers"]) == 2 and saved["scaler"]["scale"] > 0


def test_modules_beside_the_network_are_saved_and_a_loss_keeps_its_buffers(tmp_path):
    train(tmp_path, LINEAR, f"trainer._target_={DOORS}.Beside", "task.metric=loss", "train.max_steps=2")
    saved = json.dumps(list(flat_keys(checkpoint(tmp_path))))
    assert all(name in saved for name in ("head.0.weight", "slow.weight"))
    train(tmp_path / "loss", LINEAR, f"task.loss={{_target_: {DOORS}.Centred}}", "train.max_steps=2")
    assert "centre" in json.dumps(list(flat_keys(checkpoint(tmp_path / "loss")))) and Centred().centre.sum() == 0


def flat_keys(state: object, prefix: str = "") -> list[str]:
    if not isinstance(state, dict):
        return [prefix.lstrip(".")]
    return [key for name, value in state.items() for key in flat_keys(value, f"{prefix}.{name}")]


def test_an_optimizer_of_a_fork_keeps_numbers_in_its_groups_over_a_resume_and_takes_a_new_rate(tmp_path):
    settings = [LINEAR, f"optim._target_={DOORS}.Signs", "schedule=constant", "optim.lr=0.01"]
    train(tmp_path, *settings, "train.max_steps=5")
    assert Signs([nn.Parameter(torch.zeros(1))], 0.1).param_groups[0]["taken"] == 0
    train(tmp_path, *settings, "train.max_steps=7", "optim.lr=0.001")
    (optimizer,) = checkpoint(tmp_path)["optimizers"]
    assert {group["taken"] for group in optimizer["param_groups"]} == {7}
    assert steps(tmp_path)[-1]["lr"] == pytest.approx(0.001)


# Schedules


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        (["schedule=constant"], [0.25] * 16),
        (["schedule=step", "schedule.step_size=1", "schedule.gamma=0.5"], [0.25] * 8 + [0.125] * 8),
        ([f"schedule._target_={DOORS}.halving"], [0.25] * 8 + [0.125] * 8),
        (["schedule._target_=torch.optim.lr_scheduler.CosineAnnealingLR"], None),
        (["schedule=one_cycle"], None),
    ],
)
def test_the_learning_rate_follows_its_schedule_also_after_a_resume(tmp_path, stop, schedule, rates):
    stop(7, "SIGTERM")
    with pytest.raises(Stopped):
        train(tmp_path, LINEAR, "train.log_interval=1", STOP, *schedule)
    train(tmp_path, LINEAR, "train.log_interval=1", STOP, *schedule)
    found = [line["lr"] for line in steps(tmp_path)]
    if rates is None:
        assert max(found) == pytest.approx(0.25, rel=0.05) and found[-1] < 0.01
    else:  # a line may have the rate of the step or of the next one
        assert found == pytest.approx(rates) or found[:-1] == pytest.approx(rates[1:])


# Metrics of an epoch


def test_a_metric_of_an_epoch_may_return_several_numbers_and_choose_the_best_checkpoint(tmp_path, caplog):
    several = [f"task.metrics={{m: {{_target_: {DOORS}.Several}}}}", "task.metric=m_worst"]
    summary = train(tmp_path, LINEAR, *several, "train.epochs=3")
    assert 0 <= summary["test_m_worst"] <= 1 and summary["test_m_map"] == 0.5
    assert not {"test_m_classes", "test_m_name"} & summary.keys()
    warnings = [text for text in caplog.messages if "classes" in text and "name" in text]
    assert len(warnings) == 1, "one warning names what is left out, not one in each epoch"
    scores = [line["test_m_worst"] for line in metrics(tmp_path) if "test_m_worst" in line]
    assert checkpoint(tmp_path, "best")["step"] == 8 * (1 + max(range(3), key=lambda i: (scores[i], i)))


def test_torchmetrics_are_metrics_of_an_epoch(tmp_path):
    pytest.importorskip("torchmetrics")
    about = "_target_: torchmetrics.F1Score, task: multiclass, num_classes: 10, average: macro"
    both = f"both: {{_target_: {HERE}.collection}}"
    summary = train(tmp_path, LINEAR, f"task.metrics={{f1: {{{about}}}, {both}}}", "task.metric=f1")
    assert 0 < summary["test_f1"] <= 1 + 1e-6
    assert summary["test_both_MulticlassAccuracy"] == pytest.approx(summary["test_accuracy"])


def collection():
    from torchmetrics import MetricCollection
    from torchmetrics.classification import MulticlassAccuracy

    return MetricCollection([MulticlassAccuracy(10, average="micro")])


# Samplers


@pytest.mark.parametrize("loader", ["prefetch", "torch", "resident"])
def test_a_sampler_decides_which_samples_train(tmp_path, loader):
    sampler = [f"sampler._target_={DOORS}.only_threes", f"trainer._target_={DOORS}.Counting", f"loader={loader}"]
    summary = train(tmp_path, *sampler, "train.last_batch=keep", "train.epochs=3")
    seen = checkpoint(tmp_path)["others"]["seen"]["running_mean"].tolist()
    assert seen == [0, 0, 0, 3 * 64, *[0] * 6] and summary["epochs"] == 3


def test_a_batch_sampler_makes_the_batches(tmp_path):
    pairs = [f"batch_sampler._target_={DOORS}.Pairs", "train.last_batch=keep", "data.length=20", "train.epochs=1"]
    train(tmp_path, *pairs, f"trainer._target_={DOORS}.Counting", "loader=prefetch")
    assert checkpoint(tmp_path)["step"] == 10, "ten pairs"
    assert sum(checkpoint(tmp_path)["others"]["seen"]["running_mean"].tolist()) == 20
