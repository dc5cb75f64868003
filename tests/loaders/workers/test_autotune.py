"""The tuner with a simulated pool and consumer, of which the best number of workers is known."""

import random
from collections.abc import Callable

import pytest

from loaders.workers.autotune import MOST_WAITING, Search, Tuner, Window

Model = Callable[[int], tuple[float, float]]  # workers -> batches/s, and the share of the time that the consumer waits


class Simulation:
    """A consumer that is served as `model` says; its clock is simulated, and each batch takes its time times noise."""

    def __init__(self, model: Model, most: int, noise: float = 0.0, load: float = 1.0) -> None:
        self.model, self.most, self.noise, self.load = model, most, noise, load
        self.tuner = Tuner(most)
        self.now, self.batches = 0.0, 0
        self.used: list[int] = []  # the number of workers, by batch
        self._random = random.Random(0)

    def run(self, seconds: float, epoch: int = 10**9, pause: float = 0.0) -> float:
        """Delivers for so long; returns batches/s, pauses between epochs left out."""
        end, before, paused = self.now + seconds, self.batches, 0.0
        while self.now < end:
            workers = self.tuner.workers
            rate, waits = self.model(workers)
            is_first, ready = self.batches % epoch == 0, 0
            if is_first and self.batches and pause:
                self.now, paused, ready = self.now + pause, paused + pause, 4 * workers - 1
            took = (1 + self.noise * self._random.uniform(-1, 1)) / rate
            if self.batches % epoch < 4 * workers and pause:  # loaded in the pause
                took, waits = took * (1 - waits), 0.0
            self.now += took
            self.tuner.delivered(self.now, took * waits, ready, 4 * workers, is_first, self.load)
            assert self.tuner.new_workers == set(range(workers, self.tuner.workers)) or not self.used
            self.tuner.new_workers.clear()
            self.batches += 1
            self.used.append(workers)
        return (self.batches - before) / (seconds - paused)

    @property
    def best(self) -> float:
        return max(self.model(workers)[0] for workers in range(1, self.most + 1))


def bounded(loading: float, step: float) -> Model:
    """Each worker loads so many batches/s, on a core of its own, and the step trains so many."""

    def model(workers: int) -> tuple[float, float]:
        rate = min(workers * loading, step)
        return rate, 1 - rate / step

    return model


def sharing(loading: float, step: float, cost: float) -> Model:
    """Each worker more slows the step down by this share: they take its cores."""

    def model(workers: int) -> tuple[float, float]:
        slowed = step * (1 - cost * (workers - 1))
        rate = min(workers * loading, slowed)
        return rate, 0.1 + 0.9 * (1 - rate / slowed)

    return model


CASES = {
    "bound by the loader, to all cores": (bounded(10, 10**4), 64, 64),
    "bound by the loader, of 12 cores": (bounded(10, 10**4), 12, 12),
    "bound by the loader, of 2 cores": (bounded(100, 10**4), 2, 2),
    "bound by the step": (bounded(100, 50), 16, 1),
    "balanced at 5": (bounded(10, 50), 16, 5),
    "balanced at 11": (bounded(10, 105), 16, 11),
    "2 cores that the step needs": (sharing(90, 100, 0.15), 2, 1),
    "8 cores that the step needs": (sharing(20, 100, 0.06), 8, 4),
}


@pytest.mark.parametrize(("model", "most", "best"), CASES.values(), ids=CASES)
@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_the_best_number_is_found_and_kept(model, most, best, noise):
    simulation = Simulation(model, most, noise)
    simulation.run(20)
    changes = simulation.tuner.changes
    assert simulation.run(200) >= 0.95 * simulation.best
    if not noise:
        assert 0.95 * best <= simulation.used[-1] <= best
        assert simulation.tuner.changes - changes <= 30  # a look at more workers, while it waits


def test_it_is_found_within_some_hundred_batches_or_a_few_seconds():
    simulation = Simulation(bounded(50, 390), 16)
    simulation.run(10)
    assert list(dict.fromkeys(simulation.used)) == [16, 8, 4, 6, 7]
    assert set(simulation.used[-1000:]) == {8}


def test_workers_that_wait_may_be_more_than_the_cores():
    simulation = Simulation(bounded(3, 80), 2, load=0.02)
    simulation.run(60)
    assert simulation.used[-1] == 27
    simulation = Simulation(bounded(3, 80), 2, load=0.4)  # five workers fill both cores
    simulation.run(60)
    assert simulation.used[-1] == 5
    simulation = Simulation(bounded(1, 80), 2, load=0.0)
    simulation.run(60)
    assert simulation.used[-1] == MOST_WAITING


def test_noise_does_not_make_it_change_its_mind_for_ever():
    simulation = Simulation(bounded(10, 45), 8, noise=0.9)
    simulation.run(600)
    changes = simulation.tuner.changes
    assert simulation.run(3600) >= 0.95 * simulation.best
    assert simulation.tuner.changes - changes < 60


def test_when_the_figures_change_clearly_it_searches_again():
    simulation = Simulation(bounded(10, 12), 16)
    simulation.run(60)
    assert simulation.used[-1] == 2
    simulation.model = bounded(10, 75)  # a faster step
    simulation.run(60)
    assert simulation.used[-1] == 8
    simulation.model = bounded(10, 12)
    simulation.run(60)
    assert simulation.used[-1] == 2


def test_short_epochs_with_pauses_between_them_do_not_confuse_it():
    simulation = Simulation(bounded(10, 45), 4)
    simulation.run(120, epoch=20, pause=1.0)
    assert simulation.used[-1] == 4
    simulation = Simulation(bounded(50, 45), 4)
    simulation.run(120, epoch=20, pause=1.0)
    assert simulation.used[-1] == 1


def test_nothing_is_concluded_before_new_workers_have_answered():
    simulation = Simulation(bounded(10, 45), 1, load=0.1)
    simulation.run(2)
    tuner = simulation.tuner
    assert tuner.workers == 10
    tuner.new_workers = {9}
    for _ in range(1000):  # as slow as before: the last worker is still starting
        simulation.now += 0.1
        tuner.delivered(simulation.now, 0.08, 0, 40, False, 0.1)
        assert tuner.workers == 10
    tuner.new_workers.clear()
    simulation.run(30)
    assert simulation.used[-1] == 5


def test_a_long_pause_in_the_step_does_not_count():
    simulation = Simulation(bounded(10, 45), 8)
    simulation.run(2)
    simulation.now += 30  # a checkpoint
    simulation.run(30)
    assert simulation.used[-1] == 5


def after(search: Search, *rates: int, waits: float = 0.5, windows: int = 3, load: float = 1.0) -> int:
    """Serves so many batches a second for some windows of a second each. Returns what is tried or used then."""
    for rate in rates:
        for _ in range(windows):
            search.note(Window(rate, 1.0, waits), load)
    return search.workers


def test_more_workers_are_tried_if_the_consumer_waits_and_their_cores_do_not():
    assert after(Search(4, 32), 100, waits=0.015, load=0.1) == 2
    assert after(Search(4, 32), 100, waits=0.025, load=0.1) == 9
    assert after(Search(4, 32), 100, waits=0.025, load=1.0) == 2
    search = Search(4, 32)
    assert after(search, 100, waits=0.8, load=0.1, windows=1) == 32  # one window shows that these are far too few
    assert after(search, 102, waits=0.8, load=0.1) == 2  # more have to gain 3 %


@pytest.mark.parametrize(("rate", "waits"), [(74, 0.0), (134, 0.0), (100, 0.06)])
def test_figures_that_stay_changed_for_four_looks_begin_another_search(rate, waits):
    search = Search(1, 1)
    after(search, 100, 100, waits=0.0)  # it settles, and looks for the first time
    after(search, *[rate] * 3, waits=waits)
    after(search, 100, waits=0.0)  # a look as usual: it counts anew
    after(search, *[rate] * 3, waits=waits)
    assert search.is_settled
    after(search, rate, waits=waits)
    assert not search.is_settled
