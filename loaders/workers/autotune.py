"""num_workers="auto": chooses how many of a pool's workers get tasks, by the consumer's throughput.

A search starts with a worker per core, which is fast at once in most runs, and often best. While the consumer waits
and its throughput grows, it uses more: twice as many as should be enough. Then it bisects, for the smallest number
with that throughput. It compares the throughput, not the waiting: a worker that takes a core from the training step
makes the step slower, though the consumer waits less. Workers that compute are never more than the cores. Workers that
mostly wait, for a disk for example, use little of a core, so there may be more.
"""

from __future__ import annotations

import logging
import math
from typing import NamedTuple

log = logging.getLogger(__name__)

# Shares are of the consumer's time, or of its throughput.
WAITS = 0.02  # more workers are tried if the consumer waits more than this share
# More workers have to raise the throughput by GAIN, and so do fewer if the consumer waits longer, by the share WAITS.
# Other fewer ones may lower it by LOSS.
GAIN, LOSS = 0.03, 0.02
LINEAR = 0.9  # if the throughput per worker is at least this share of what it was with fewer, fewer are not tried
MOSTLY = 0.75  # if the consumer waits more than this share, more workers are tried sooner, and fewer are not tried
MOST_WAITING = 32  # so many workers may be tried on fewer cores, if they mostly wait
WINDOW_SECONDS, WINDOW_ROUNDS = 0.2, 2  # a window lasts at least so long, and for so many batches per worker
TRIAL, LONGEST_TRIAL = 3, 9  # windows of a trial, whose median counts; more are taken until the result is clear
# A settled search looks at the consumer every LOOK_SECONDS. It begins again when `patience` looks in a row differ from
# its best trial by a CHANGED throughput or WAITS_MORE. A search that found the same number doubles the patience.
LOOK_SECONDS, CHANGED, WAITS_MORE = 2.0, 0.25, 0.05
PATIENCE, MOST_PATIENCE = 4, 64


class Window(NamedTuple):
    """How fast the consumer got some batches."""

    batches: int
    seconds: float
    waited: float  # of these seconds, how many the consumer waited

    @property
    def rate(self) -> float:
        """Batches per second."""
        return self.batches / self.seconds

    @property
    def waits(self) -> float:
        """The share of the time that the consumer waited."""
        return self.waited / self.seconds


class Search:
    """Finds the number of workers with the highest throughput. `workers` is the number to use until the next `note`.

    At most it is `cores`; if workers use only a part of a core, as many as fit on the cores, up to `most`.
    """

    def __init__(self, cores: int, most: int) -> None:
        self.cores, self.most, self.workers = cores, most, cores
        self.limit = cores  # the largest number, given how much of a core a worker uses
        self._patience, self._found = PATIENCE, 0  # the number that the last search found
        self._begin()

    def note(self, window: Window, load: float) -> None:
        """Takes a window that was measured with the current `workers`, and may change `workers`.

        `load` is the share of a core that a worker used while it read.
        """
        self._windows.append(window)
        self.limit = max(self.cores, min(self.most, int(self.cores / max(load, 0.01))))
        if not self.is_settled:
            self._judge()
        elif len(self._windows) >= TRIAL:
            self._look()

    def _begin(self) -> None:
        self.is_settled = False
        self._number, self._best = 0, Window(0, 1.0, 1.0)  # the best number so far, and its window
        self._too_few, self._may_grow = 0, True  # a smaller number that did worse; whether a larger one may do better
        self._windows: list[Window] = []

    def _judge(self) -> None:
        """Ends the trial if its result is clear, and chooses the next number to try."""
        number, best, middle = self.workers, self._best, _middle(self._windows)
        has_to_gain = number > self._number or middle.waits > best.waits + WAITS
        needed = best.rate * (1 + GAIN if has_to_gain else 1 - LOSS)
        spread = max(window.rate for window in self._windows) - min(window.rate for window in self._windows)
        margin = abs(middle.rate - needed) if best.batches else GAIN * middle.rate
        is_clear = margin >= spread / 4 or len(self._windows) == LONGEST_TRIAL
        is_far_too_few = middle.waits > MOSTLY and middle.rate >= needed and self._number < number < self.limit
        if not is_far_too_few and (len(self._windows) < TRIAL or not is_clear):
            return
        self._windows = []
        if number > self._number and middle.rate >= needed:
            is_linear = best.batches and middle.rate / number >= LINEAR * best.rate / self._number
            self._too_few = number - 1 if is_linear else self._number
            self._number, self._best = number, middle
        elif middle.rate >= needed:  # fewer are as good, so more are no better
            self._number, self._may_grow = number, False
            self._best = max(best, middle, key=lambda window: window.rate)
        elif number > self._number:
            self._may_grow = False
        else:
            self._too_few = number
        self._choose()

    def _choose(self) -> None:
        """Chooses the next number to try, or settles."""
        number, waits = self._number, self._best.waits
        if waits > WAITS and self._may_grow and number < self.limit:
            self.workers = min(self.limit, math.ceil(2 * number / max(1 - waits, 0.01)))
        elif number - self._too_few > 1 and not (waits > MOSTLY and number == self.limit):
            self.workers = (self._too_few + number) // 2
        else:
            self._patience = min(2 * self._patience, MOST_PATIENCE) if number == self._found else PATIENCE
            self.workers = self._found = number
            self.is_settled, self._odd_looks = True, 0

    def _look(self) -> None:
        """Begins another search if the figures have changed for some time."""
        if sum(window.seconds for window in self._windows) < LOOK_SECONDS:
            return
        now, usual = _middle(self._windows), self._best
        self._windows = []
        has_changed = not 1 - CHANGED < now.rate / usual.rate < 1 / (1 - CHANGED)
        self._odd_looks = self._odd_looks + 1 if has_changed or abs(now.waits - usual.waits) > WAITS_MORE else 0
        if self._odd_looks >= self._patience:
            self._begin()


class Tuner:
    """Measures windows for a search. It leaves out batches that were begun with another number of workers."""

    def __init__(self, cores: int) -> None:
        self.most = max(cores, MOST_WAITING)
        self._search = Search(cores, self.most)
        self.new_workers = set(range(cores))  # that have answered no task since they were added
        self.changes = 0  # of the number of workers
        self._settled = 0  # the number that the log was told last
        self._clock = 0.0  # when the last batch was delivered
        self._to_skip = 0  # how many of the next batches are left out
        self._begin_window()

    @property
    def workers(self) -> int:
        """How many workers should get tasks now."""
        return self._search.workers

    def delivered(self, now: float, waited: float, ready: int, in_flight: int, is_first: bool, load: float) -> None:
        """A batch was delivered at `now`, after its consumer had waited for `waited` seconds.

        `ready`: further batches that could have been delivered. `in_flight`: these, and those not ready.
        `is_first`: of an epoch: the time since the last batch may have been an evaluation's.
        `load`: the share of a core that a worker has used while it read.
        """
        began, seconds, self._clock = self._clock, now - self._clock, now
        if self.new_workers or not began:  # the first steps are slow, and meanwhile batches are loaded ahead
            self._to_skip = in_flight
        elif is_first:
            self._to_skip = max(self._to_skip, ready)
        elif self._to_skip:
            self._to_skip -= 1
        else:
            self._batches += 1
            self._seconds += seconds
            self._waited += waited
            # Workers may all answer at the same moment, so only whole rounds of them can be compared.
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
            self._to_skip = in_flight
            self.changes += 1
            figures = f"{window.rate:,.1f} batches/s, waiting {100 * window.waits:.0f} % of the time"
            log.debug("num_workers=auto: %s with %d workers; next: %d workers", figures, before, self.workers)
        if self._search.is_settled and self.workers != self._settled:
            self._settled = self.workers
            log.info("num_workers=auto uses %d of at most %d workers", self.workers, self._search.limit)


class FixedNumber:
    """Replaces a Tuner where the number of workers is fixed."""

    def __init__(self, workers: int) -> None:
        self.workers, self.changes = workers, 0
        self.new_workers: set[int] = set()

    def delivered(self, now: float, waited: float, ready: int, in_flight: int, is_first: bool, load: float) -> None:
        """Measures nothing."""


def _middle(windows: list[Window]) -> Window:
    """Returns the window with the median rate, so that a pause in one of them (a checkpoint) does not matter."""
    return sorted(windows, key=lambda window: window.rate)[len(windows) // 2]
