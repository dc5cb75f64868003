"""Measurements after a run, on a stand-in for its trainer; whole runs are in test_train.py."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from training.callbacks.report.trial import MOST_BATCHES, NEVER, Trials


@pytest.fixture
def trials():
    """Trials of up to 0.05 seconds on a kept batch; `steps` has the batches that were trained."""
    signals, steps = SimpleNamespace(received=0), []
    alone = SimpleNamespace(world_size=1, agree=lambda *numbers: numbers, gather=lambda value: [value])
    trainer = SimpleNamespace(step=7, device=torch.device("cpu"), processes=alone)
    trainer.train_step = lambda batch: steps.append(batch) or setattr(trainer, "step", trainer.step + 1)
    made = Trials(trainer, signals, 0.05, lambda _: nullcontext(([1, 2, 3], 4)))
    made.keep_batch([{"image": torch.zeros(2, 3)}])
    made.signals, made.steps, made.trainer = signals, steps, trainer
    return made


def test_steps_of_a_measurement_do_not_count_as_the_runs(trials):
    for seconds in (trials.free(0.001), trials.change(("loader=prefetch",), 0.001)):
        assert 0 < seconds.low <= seconds.middle <= seconds.high < 60
    assert isinstance(trials.steps[0], dict) and 3 in trials.steps
    assert trials.trainer.step == 7


@pytest.fixture
def clock(trials, monkeypatch):
    """A clock on which each step takes as many seconds as `clock.steps` says next, and else the last number."""
    state = SimpleNamespace(now=0.0, steps=[0.001])
    train_step = trials.trainer.train_step

    def timed(batch):
        state.now += state.steps.pop(0) if len(state.steps) > 1 else state.steps[0]
        train_step(batch)

    trials.trainer.train_step = timed
    monkeypatch.setattr("training.callbacks.report.trial.time.perf_counter", lambda: state.now)
    return state


def test_a_measurement_has_five_repetitions_of_equal_length_after_the_warm_up(trials, clock):
    clock.steps = [0.004] * (3 + 5 + 3) + [0.004, 0.004, 0.006, 0.008, 0.005, 0.005, 0.003, 0.005, 0.005, 0.006]
    assert [round(seconds, 6) for seconds in trials.free(1e-6)] == [0.004, 0.005, 0.007]
    assert len(trials.steps) == 3 + 5 + 3 + 5 * 2


def test_free_data_are_measured_with_one_thread_and_the_number_of_threads_is_put_back(trials, clock, monkeypatch):
    numbers = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setattr(torch, "set_num_threads", numbers.append)
    step = trials.trainer.train_step
    trials.trainer.train_step = lambda batch: step(numbers[-1])
    assert trials.free(60.0, threads=1).middle == pytest.approx(0.001), "it may be faster than the run by any factor"
    assert set(trials.steps) == {1} and numbers[-1] == 4


def test_steps_that_turn_out_slower_than_those_of_the_run_do_not_hold_it_up(trials, clock):
    clock.steps = [0.3]
    assert trials.free(0.001) is None and trials.change(("loader=prefetch",), 0.001) is None
    assert clock.now < 4 * 0.3 + 0.5 + 2 * 0.3, "ten times the seconds of a measurement, but for the last step"


def test_one_batch_is_kept_and_the_sizes_of_a_few_are_told(trials):
    batches = [{"image": torch.zeros(4, size), "label": torch.zeros(4)} for size in (5, 2, 9, *[3] * 20)]
    taken = iter(batches)
    fresh = Trials(trials.trainer, trials.signals, 60.0, None)
    assert fresh.keep_batch(taken) == (4 * 3, 4 * 10)
    assert len(list(taken)) == len(batches) - MOST_BATCHES
    fresh.free(1e-9)
    assert trials.steps[0] is batches[0]


def test_no_batch_is_loaded_for_measurements_that_will_not_be_made(trials):
    without = Trials(trials.trainer, trials.signals, 0.0, None)
    assert without.keep_batch(pytest.fail(name) for name in ["a batch was loaded"]) == (1, 1)
    assert without.free(0.001) is None and not trials.steps


def test_a_dataset_that_fails_after_the_run_leaves_it_its_report(trials):
    assert trials.keep_batch(1 / 0 for _ in range(3)) == (1, 1)


def test_a_signal_ends_a_measurement_and_nothing_is_proposed(trials):
    def signalled(batch):
        trials.signals.received = 15

    trials.trainer.train_step = signalled
    assert trials.change(("loader=prefetch",), 0.001) == NEVER
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
