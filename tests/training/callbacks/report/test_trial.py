"""Measurements after a run, on a stand-in for its trainer; whole runs are in test_train.py."""

import math
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from training.callbacks.report.trial import Trials


@pytest.fixture
def trials():
    """Trials of up to 0.05 seconds, whose changed loader has endless batches; `steps` are those that were trained."""
    signals, steps = SimpleNamespace(received=0), []
    alone = SimpleNamespace(world_size=1, agree=lambda *numbers: numbers)
    trainer = SimpleNamespace(step=7, device=torch.device("cpu"), first_batch={"image": 0}, processes=alone)
    trainer.train_step = lambda batch: steps.append(batch) or setattr(trainer, "step", trainer.step + 1)
    made = Trials(trainer, signals, 0.05, lambda _: nullcontext(([1, 2, 3], 4)))
    made.signals, made.steps, made.trainer = signals, steps, trainer
    return made


def test_steps_of_a_measurement_do_not_count_as_the_runs(trials):
    assert 0 < trials.free(0.001) < 60
    assert 0 < trials.change(("loader=prefetch",), 0.001) < 60
    assert {"image": 0} in trials.steps and 3 in trials.steps
    assert trials.trainer.step == 7


def test_a_signal_ends_a_measurement_and_nothing_is_proposed(trials):
    def signalled(batch):
        trials.signals.received = 15

    trials.trainer.train_step = signalled
    assert trials.change(("loader=prefetch",), 0.001) == math.inf
    trials.signals.received = 0
    assert trials.free(0.001) is None


def test_an_error_of_the_model_leaves_the_run_its_report(trials):
    trials.trainer.train_step = lambda batch: 1 / 0
    assert trials.free(0.001) is None
    trials.trainer.processes.world_size = 2
    with pytest.raises(ZeroDivisionError):  # the other process would wait for this one
        trials.free(0.001)


def test_what_would_take_too_long_is_not_measured(trials):
    assert trials.change(("loader=prefetch",), 60.0) is None
    assert trials.free(60.0) is None
