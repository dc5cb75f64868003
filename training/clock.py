"""Clock: how many seconds each phase of a run takes."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Clock:
    """Measures the phases of a run; every moment counts for exactly one: docs/extending.md says which there are.

    seconds: of each phase, until the last change of phase.
    watchers: functions that get the name, start and end (seconds of time.perf_counter) of each phase that ends.
    """

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(("start-up", "training", "evaluation", "checkpoint", "the rest"), 0.0)
        self.watchers: list[Callable[[str, float, float], None]] = []
        self._phase, self._start = "start-up", time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Counts the time in the block for the phase `name`, and not for the phase around it."""
        outer = self.switch_to(name)
        try:
            yield
        finally:
            self.switch_to(outer)

    def switch_to(self, name: str) -> str:
        """Ends the current phase and begins another. Returns the name of the one that ended."""
        before, now = self._phase, time.perf_counter()
        self.seconds[before] += now - self._start
        for watch in self.watchers:
            watch(before, self._start, now)
        self._phase, self._start = name, now
        return before
