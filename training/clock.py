"""Clock: how many seconds each phase of a run takes."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Clock:
    """Measures the phases of a run. Every moment counts for exactly one of them.

    seconds: the time of each phase, until the last change of phase.
    watchers: functions that get the name, start and end (seconds of time.perf_counter) of each phase that ends.
    """

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(("start-up", "training", "evaluation", "checkpoint", "the rest"), 0.0)
        self.watchers: list[Callable[[str, float, float], None]] = []
        self._phase = "start-up"
        self._start = time.perf_counter()

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
        previous = self._phase
        now = time.perf_counter()
        self.seconds[previous] += now - self._start
        for watch in self.watchers:
            watch(previous, self._start, now)
        self._phase = name
        self._start = now
        return previous
