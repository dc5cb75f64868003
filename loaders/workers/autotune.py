"""num_workers="auto": chooses how many of a pool's workers get tasks, from how fast the consumer gets its batches.

A search doubles the number while the consumer waits and is served faster for it, and halves the interval between a
number that is too small and one that is too large. Of numbers that it cannot tell apart it keeps the smallest. What
counts is the consumer's own throughput: workers that take cores from the training step show there, not in its waiting.
Workers that compute are never more than the cores; workers that mostly wait, for a disk perhaps, use little of a core,
so there may be more of them.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

log = logging.getLogger(__name__)

WAITS = 0.02  # share of its time that the consumer may wait before more workers are tried
GAIN, LOSS = 0.03, 0.02  # what more workers have to gain, and what fewer may cost, as shares of the throughput
WINDOW_SECONDS, WINDOW_ROUNDS = 0.2, 2  # a window lasts so long, and each worker has read so many batches in it
TRIAL, LONGEST_TRIAL = 3, 9  # windows of a trial: the median of the first if it is clear, else of more
LINEAR = 0.9  # if the throughput a worker is still this share of that with fewer, fewer need not be tried
LOOK_SECONDS = 2.0  # of a look at the settled throughput, with as many windows as a trial
CHANGED, WAITS_MORE = 0.25, 0.05  # a change of the throughput, or of the share of waiting, that calls for a new search
PATIENCE, MOST_PATIENCE = 4, 64  # looks in a row that have to show it; doubled after each search that changed nothing
MOSTLY = 0.75  # share of its time that the consumer may wait before the number is quadrupled instead of doubled
MOST_WAITING = 32  # as many workers are tried if they mostly wait, where there are fewer cores
AGAIN = 4  # a consumer that still waits is tried with more workers after `patience` times so many looks


class Window(NamedTuple):
    """Some batches as their consumer got them."""

    batches: int
    seconds: float
    waited: float  # seconds of them

    @property
    def rate(self) -> float:
        """Batches per second."""
        return self.batches / self.seconds

    @property
    def waits(self) -> float:
        """Share of the time that the consumer waited."""
        return self.waited / self.seconds


class Search:
    """Finds the number of workers that serves the consumer best: `workers` is to be used next.

    The largest is `cores`, or `most` if they wait so much that they all fit on the cores.
    """

    def __init__(self, cores: int, most: int) -> None:
        self.cores, self.most, self.workers = cores, most, 1
        self.limit = cores  # the largest number for workers that compute as much as these did
        self._found, self._patience = 0, PATIENCE  # the number that the last search found
        self._begin()

    def note(self, window: Window, load: float) -> None:
        """Takes a window that was measured with `workers` workers, and decides on `workers` anew.

        `load` is the share of a core that a worker used while it read.
        """
        self._windows.append(window)
        self.limit = max(self.cores, min(self.most, int(self.cores / max(load, 0.01))))
        if self.is_settled:
            self._look()
        else:
            self._judge()

    def _begin(self) -> None:
        self.is_settled, self._is_shrinking, self._is_linear = False, False, False
        self._number, self._best = self.workers, Window(0, 1.0, 0.0)  # the best number so far, and how it did
        self._too_few, self._too_many = 0, self.most + 1  # numbers that did worse, or no better
        self._windows: list[Window] = []

    def _judge(self) -> None:
        """Ends the trial if its result is clear."""
        windows = self._windows
        if len(windows) < TRIAL:
            return
        middle = _middle(windows)
        needed = self._best.rate * (1 - LOSS if self._is_shrinking else 1 + GAIN)
        spread = max(window.rate for window in windows) - min(window.rate for window in windows)
        if self._best.batches and abs(middle.rate - needed) < spread / 4 and len(windows) < LONGEST_TRIAL:
            return
        self._windows = []
        is_good = middle.rate >= needed
        if is_good and self._is_shrinking:
            self._number, self._too_many = self.workers, self._number
            self._best = max(self._best, middle, key=lambda window: window.rate)
        elif is_good:
            if self._best.batches:
                self._too_few = self._number
                self._is_linear = middle.rate / self.workers >= LINEAR * self._best.rate / self._number
            self._number, self._best = self.workers, middle
        elif self._is_shrinking:
            self._too_few = self.workers
        else:
            self._too_many = self.workers
        self._choose()

    def _choose(self) -> None:
        """Chooses the next number to try, or settles."""
        number, too_many = self._number, min(self._too_many, self.limit + 1)
        if not self._is_shrinking and self._best.waits > WAITS and too_many - number > 1:
            larger = (4 if self._best.waits > MOSTLY else 2) * number
            self.workers = min(larger, self.limit) if self._too_many > self.most else (number + too_many) // 2
        elif number - self._too_few > 1 and not self._is_linear:
            self._is_shrinking = True
            self.workers = (self._too_few + number) // 2
        else:
            self._patience = min(2 * self._patience, MOST_PATIENCE) if number == self._found else PATIENCE
            self.workers = self._found = number
            self.is_settled, self._usual = True, Window(0, 1.0, 0.0)
            self._looks = self._odd_looks = 0

    def _look(self) -> None:
        """Begins another search when the figures have changed for long, or now and then while the consumer waits."""
        if len(self._windows) < TRIAL or sum(window.seconds for window in self._windows) < LOOK_SECONDS:
            return
        now, usual = _middle(self._windows), self._usual
        self._windows = []
        if not usual.batches:
            self._usual = now
            # The trial saw no waiting, so no larger number was tried: there were batches loaded ahead, perhaps.
            if now.waits > WAITS and self.workers < min(self._too_many, self.limit + 1) - 1:
                self._begin()
            return
        has_changed = not 1 - CHANGED < now.rate / usual.rate < 1 / (1 - CHANGED)
        is_odd = has_changed or abs(now.waits - usual.waits) > WAITS_MORE
        self._odd_looks = self._odd_looks + 1 if is_odd else 0
        self._looks += 1
        could_gain = usual.waits > WAITS and self.workers * (1 + 2 * GAIN) < self.limit
        if self._odd_looks >= self._patience or (could_gain and self._looks >= AGAIN * self._patience):
            self._begin()


class Tuner:
    """Measures windows for a search. Batches begun with another number of workers, or ahead, do not count."""

    def __init__(self, cores: int) -> None:
        self.most = max(cores, MOST_WAITING)
        self._search = Search(cores, self.most)
        self.new_workers: set[int] = set()  # that have answered no task since they were added
        self.changes = 0  # of the number of workers
        self._settled = 0  # the number that the log was told last
        self._clock = 0.0  # when the last batch was delivered
        self._skipped = 0  # batches still to be left out
        self._begin_window()

    @property
    def workers(self) -> int:
        """How many workers should get tasks now."""
        return self._search.workers

    def delivered(self, now: float, waited: float, ready: int, in_flight: int, is_first: bool, load: float) -> None:
        """A batch was delivered at `now`, after its consumer had waited for `waited` seconds.

        `ready`: further batches that could have been delivered. `in_flight`: these, and those not ready.
        `is_first`: of an epoch, so what the consumer did since the last batch was perhaps an evaluation.
        `load`: the share of a core that a worker has used while it read.
        """
        began, seconds, self._clock = self._clock, now - self._clock, now
        if self.new_workers or not began:  # the first steps are slow, and batches wait for them
            self._skipped = in_flight
        elif is_first:
            self._skipped = max(self._skipped, ready)
        elif self._skipped:
            self._skipped -= 1
        else:
            self._batches += 1
            self._seconds += seconds
            self._waited += waited
            # Workers may answer in step, so only whole rounds can be compared.
            rounds, part = divmod(self._batches, self.workers)
            if not part and rounds >= WINDOW_ROUNDS and self._seconds >= WINDOW_SECONDS:
                self._end_window(in_flight, load)

    def _begin_window(self) -> None:
        self._batches, self._seconds, self._waited = 0, 0.0, 0.0

    def _end_window(self, in_flight: int, load: float) -> None:
        window, before = Window(self._batches, self._seconds, self._waited), self.workers
        self._begin_window()
        self._search.note(window, load)
        if self.workers != before:
            self.new_workers = set(range(before, self.workers))
            self._skipped = in_flight
            self.changes += 1
            figures = f"{window.rate:,.1f} batches/s, waiting {100 * window.waits:.0f} % of the time"
            log.debug("num_workers=auto: %s with workers: %d; next: %d", figures, before, self.workers)
        if self._search.is_settled and self.workers != self._settled:
            self._settled = self.workers
            log.info("num_workers=auto uses %d of at most %d workers", self.workers, self._search.limit)


class FixedNumber:
    """In place of a Tuner: the number of workers stays."""

    def __init__(self, workers: int) -> None:
        self.workers, self.changes = workers, 0
        self.new_workers: set[int] = set()

    def delivered(self, now: float, waited: float, ready: int, in_flight: int, is_first: bool, load: float) -> None:
        """Measures nothing."""


def _middle(windows: list[Window]) -> Window:
    """Returns the window with the median rate: a pause in one of them, for a checkpoint perhaps, does not matter."""
    return sorted(windows, key=lambda window: window.rate)[len(windows) // 2]
