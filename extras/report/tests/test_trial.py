"""Measurements after a run, on a stand-in for its trainer; whole runs are in test_report.py."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from tests.configs import composed
from training.callbacks.report.trial import NEVER, WORKER_TIMEOUT, Trials, changed_config
from training.config import checked


@pytest.fixture
def run():
    """A run whose trainer keeps the batches that it trains in `steps`; a changed loader of it gives 1, 2, 3."""
    signals, steps = SimpleNamespace(received=0), []
    alone = SimpleNamespace(world_size=1, agree=lambda *numbers: numbers, gather=lambda value: [value])
    trainer = SimpleNamespace(step=7, device=torch.device("cpu"), processes=alone, model=torch.nn.ReLU(), others={})
    trainer.logged = None
    trainer.train_step = lambda batch: steps.append(batch) or setattr(trainer, "step", trainer.step + 1)
    config = checked(composed("loader=workers", "loader.num_workers=1", "loader.prefetch_factor=4"))
    run = SimpleNamespace(trainer=trainer, signals=signals, config=config, steps=steps)
    run.train_loader = SimpleNamespace(stats=lambda: {})
    run.make_train_loader = lambda loader: nullcontext([1, 2, 3])
    return run


@pytest.fixture
def trials(run):
    """Trials of up to 0.05 seconds on a kept batch."""
    made = Trials(run, 0.05)
    made.keep_batch([{"image": torch.zeros(2, 3)}])
    return made


CHANGE = ("loader.num_workers=1",)


def test_steps_of_a_measurement_do_not_count_as_the_runs(run, trials):
    for seconds in (trials.free(0.001), trials.change(CHANGE, 0.001)):
        assert 0 < seconds.low <= seconds.middle <= seconds.high < 60
    assert isinstance(run.steps[0], dict) and 3 in run.steps
    assert run.trainer.step == 7


@pytest.fixture
def clock(run, monkeypatch):
    """A clock on which each step takes as many seconds as `clock.steps` says next, and else the last number."""
    state = SimpleNamespace(now=0.0, steps=[0.001])
    train_step = run.trainer.train_step

    def timed(batch):
        state.now += state.steps.pop(0) if len(state.steps) > 1 else state.steps[0]
        train_step(batch)

    run.trainer.train_step = timed
    monkeypatch.setattr("training.callbacks.report.trial.time.perf_counter", lambda: state.now)
    return state


def test_a_measurement_has_five_repetitions_of_equal_length_after_the_warm_up(run, trials, clock):
    clock.steps = [0.004] * (3 + 5 + 3) + [0.004, 0.004, 0.006, 0.008, 0.005, 0.005, 0.003, 0.005, 0.005, 0.006]
    assert [round(seconds, 6) for seconds in trials.free(1e-6)] == [0.004, 0.005, 0.007]
    assert len(run.steps) == 3 + 5 + 3 + 5 * 2


def test_one_thread_is_tried_and_the_number_of_threads_is_put_back(run, trials, monkeypatch):
    numbers = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setattr(torch, "set_num_threads", numbers.append)
    step = run.trainer.train_step
    run.trainer.train_step = lambda batch: step(numbers[-1])
    assert trials.change(("train.num_threads=1",), 0.001) != NEVER
    assert set(run.steps) == {1} and numbers[-1] == 4


def test_what_takes_too_long_is_not_measured_or_soon_given_up(trials, clock):
    assert trials.change(CHANGE, 60.0) is None and trials.free(60.0) is None and clock.now == 0
    clock.steps = [0.3]
    assert trials.free(0.001) is None and trials.change(CHANGE, 0.001) is None
    assert clock.now < 4 * 0.3 + 0.5 + 2 * 0.3, "ten times the seconds of a measurement, but for the last step"


def test_one_batch_is_kept_and_its_size_is_told(run):
    batches = [{"image": torch.zeros(4, size), "label": torch.zeros(4)} for size in (5, 2)]
    taken, fresh = iter(batches), Trials(run, 60.0)
    assert fresh.keep_batch(taken) == 4 * 6
    assert len(list(taken)) == 1
    fresh.free(1e-9)
    assert run.steps[0] is batches[0]


def test_no_batch_is_loaded_for_measurements_that_will_not_be_made(run):
    without = Trials(run, 0.0)
    assert without.keep_batch(pytest.fail(name) for name in ["a batch was loaded"]) == 0
    assert without.free(0.001) is None and not run.steps


def test_a_signal_ends_a_measurement_and_nothing_is_proposed(run, trials):
    run.trainer.train_step = lambda batch: setattr(run.signals, "received", 15)
    assert trials.change(CHANGE, 0.001) == NEVER
    run.signals.received = 0
    assert trials.free(0.001) is None


def test_an_error_leaves_the_run_its_report_unless_other_processes_wait(run, trials):
    assert Trials(run, 0.05).keep_batch(1 / 0 for _ in range(3)) == 0
    run.trainer.train_step = lambda batch: 1 / 0
    assert trials.free(0.001) is None and trials.change(CHANGE, 0.001) == NEVER
    run.trainer.processes.world_size = 2
    with pytest.raises(ZeroDivisionError):
        trials.free(0.001)


def test_a_changed_loader_is_that_of_its_preset_with_the_runs_workers():
    config = checked(composed("loader=torch", "loader.num_workers=3", "loader.timeout=9")).loader
    changed = changed_config(config, ["loader=prefetch", "loader.prefetch_factor=5"])
    assert (changed.name, changed.num_workers, changed.prefetch_factor, changed.preload_depth) == ("prefetch", 3, 5, 2)
    assert changed_config(config, ["loader=resident"]).num_workers == 0
    assert changed_config(config, ["loader.num_workers=8"]).timeout == WORKER_TIMEOUT
