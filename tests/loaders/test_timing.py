"""StepTimer: how long each step waited for its batch and how long it computed."""

import weakref

import pytest
import torch

from loaders import CoreSeconds, Preloader, StepTimer, Window, WorkerLoader

CPU = torch.device("cpu")


@pytest.fixture
def timer(clock):
    """Counts every step."""
    return StepTimer(CPU, warmup_steps=0)


def loader(clock, *waits):
    for wait in waits:
        clock.now += wait
        yield torch.zeros(8, 3)


def run(timer, clock, *waits, step=3.0):
    for _ in timer.batches(loader(clock, *waits)):
        clock.now += step


@pytest.mark.parametrize(
    ("warmup_steps", "epochs", "window", "run_window"),
    [
        (1, [[100.0, 1.0], [1.0, 1.0]], Window(2, 16, 8.0, 2.0), Window(3, 24, 12.0, 3.0)),  # only in the first epoch
        (10, [[100.0, 2.0]], Window(1, 8, 5.0, 2.0), Window(1, 8, 5.0, 2.0)),  # a run that is all warm-up
        (0, [[1.0, 1.0], [2.0]], Window(1, 8, 5.0, 2.0), Window(3, 24, 13.0, 4.0)),
        (0, [[]], Window(0, 0, 0.0, 0.0), Window(0, 0, 0.0, 0.0)),
    ],
)
def test_a_steps_seconds_include_waiting_but_no_warm_up_and_nothing_between_epochs(
    clock, warmup_steps, epochs, window, run_window
):
    timer = StepTimer(CPU, warmup_steps)
    for waits in epochs:
        clock.now += 500.0
        run(timer, clock, *waits)
    assert timer.epoch() == window
    assert timer.run() == run_window
    rates = timer.run().images_per_second, timer.run().data_wait_fraction
    seconds = run_window.seconds or 1.0
    assert rates == pytest.approx((run_window.images / seconds, run_window.wait_seconds / seconds))
    assert timer.first_batch_seconds == (epochs[0][0] if epochs[0] else None)


def test_a_window_counts_the_steps_since_the_window_before(clock, timer):
    windows = []
    for number, _ in enumerate(timer.batches(loader(clock, 1.0, 2.0, 3.0, 4.0))):
        clock.now += 3.0
        if number % 2:
            windows.append(timer.window())
            clock.now += 50.0  # writing it down is no part of a step
    assert windows == [Window(2, 16, 9.0, 3.0), Window(2, 16, 13.0, 7.0)]
    assert timer.run() == Window(4, 32, 22.0, 10.0)
    assert timer.window() == Window(0, 0, 0.0, 0.0)


@pytest.mark.parametrize("warmup_steps", [0, 1])
def test_the_summary_has_the_runs_rate_its_first_batch_and_its_percentiles(clock, warmup_steps):
    timer = StepTimer(CPU, warmup_steps)
    waits = [2.0 * number for number in range(101)]
    assert timer.summary(timer.run())["first_batch_seconds"] is None
    run(timer, clock, *waits, step=1.0)
    first = warmup_steps  # the first wait is the shortest
    seconds = sum(waits) + 101 - first
    assert timer.summary(timer.run()) == {
        "images_per_second": pytest.approx(8 * (101 - first) / seconds),
        "images_per_second_quartiles": timer.quartiles(timer.run().images_per_second),
        "data_wait_fraction": pytest.approx(sum(waits) / seconds),
        "first_batch_seconds": 0.0,
        "step_ms_p50": pytest.approx(1000 * (101 + first)),
        "step_ms_p95": pytest.approx(1000 * (1 + 190 + 0.1 * first)),
    }


def test_a_batch_is_not_kept_alive_while_the_next_one_is_made():
    alive = []
    kept = []

    def watched():
        for _ in range(3):
            kept.append([batch() for batch in alive if batch() is not None])
            batch = torch.zeros(1)
            alive.append(weakref.ref(batch))
            yield batch
            del batch

    for batch in StepTimer(CPU, 0).batches(watched()):
        del batch
    assert kept == [[], [], []]


def test_what_follows_an_ended_step_belongs_to_no_step(clock, timer):
    for _ in timer.batches(loader(clock, 1.0, 1.0)):
        clock.now += 3.0
        timer.end_step()
        clock.now += 100.0  # a checkpoint
    assert timer.run() == timer.whole() == Window(2, 16, 8.0, 2.0)


@pytest.mark.parametrize("is_preloaded", [False, True])
def test_the_evidence_has_what_the_workers_of_the_loader_did(is_preloaded):
    timer = StepTimer(CPU, 0)
    with WorkerLoader(torch.arange(8), 2, num_workers=1, seed=0) as workers:
        loader = Preloader(workers, CPU) if is_preloaded else workers
        for _ in timer.batches(loader):
            pass
        assert timer.evidence(loader).stats.workers.read_batches == 4
        assert (timer.evidence(loader).stats.preloader is not None) == is_preloaded


def test_cores_are_counted_in_the_timed_steps_alone(clock, monkeypatch):
    monkeypatch.setattr("loaders.timing.core_seconds", lambda: CoreSeconds(clock.now, 0.0, clock.now, 0.0))
    timer = StepTimer(CPU, warmup_steps=2)
    for _ in range(2):
        run(timer, clock, 1.0, 1.0, 1.0, 1.0)
        clock.now += 100.0  # an evaluation
    assert timer.cores == CoreSeconds(20.0, 0.0, 20.0, 0.0)  # the first epoch's last two steps, then three
    timer.window()
    assert timer.evidence([]).cores is timer.cores


@pytest.mark.cuda
@pytest.mark.parametrize("late", [False, True])
def test_on_the_device_a_batch_that_comes_late_is_waiting_and_a_slow_step_is_not(late):
    def sleep(batch, _=None):
        torch.cuda._sleep(20_000_000)
        return batch

    timer = StepTimer(torch.device("cuda"), warmup_steps=1)
    for batch in timer.batches(Preloader([torch.zeros(8)] * 10, "cuda", 2, sleep if late else None)):
        batch += 1 if late else sleep(batch)  # though the host runs ahead
    window = timer.run()
    assert (window.steps, window.images) == (9, 72)
    assert (window.data_wait_fraction > 0.5) == late


def test_the_windows_of_several_processes_are_one_window_with_the_worst_share():
    windows = [Window(4, 40, 10.0, 1.0), Window(4, 36, 20.0, 6.0)]
    total = Window.of_processes(windows)
    assert total == Window(4, 76, 15.0, 3.5, worst_wait_fraction=0.3)
    assert str(total).endswith("(23 %, worst process 30 %)")
    assert Window.of_processes(windows[:1]) == windows[0]
