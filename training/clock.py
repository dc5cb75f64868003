"""Clock: how many seconds each phase of a run takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

FILE_MAKING = "making the dataset's files, once"  # the phase of what later runs save


class Clock:
    """Measures the phases of a run; every moment counts for exactly one.

    Inside `with clock.phase("evaluation")` that is "evaluation", else "set-up", and after `begin_training` "the rest".
    seconds: of each phase until the last change of phase.
    watchers: functions that get the name, start and end (seconds of time.perf_counter) of each phase that ends.
    """

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(("set-up", "start-up", "training", "evaluation", "checkpoint", "the rest"), 0.0)
        self.watchers: list[Callable[[str, float, float], None]] = []
        self._phase, self._start = "set-up", time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Counts the time in the block for the phase `name`, and not for the phase around it."""
        outer = self._switch_to(name)
        try:
            yield
        finally:
            self._switch_to(outer)

    def begin_training(self) -> None:
        """Ends the set-up: from now on, time outside of all phases counts as the rest."""
        self._switch_to("the rest")

    def recount(self, seconds: float, phase: str, to: str) -> None:
        """Counts `seconds` of a phase for another one."""
        if seconds:
            self.seconds[to] = self.seconds.get(to, 0.0) + seconds
            self.seconds[phase] -= seconds

    def phases(self, first_batch_seconds: float | None = None) -> dict[str, float]:
        """The seconds of each phase until now. The wait for the first batch counts as start-up, not as training."""
        self._switch_to(self._phase)  # adds the time until now
        first, phases = first_batch_seconds or 0.0, dict(self.seconds)
        return phases | {"start-up": phases["start-up"] + first, "training": max(0.0, phases["training"] - first)}

    def _switch_to(self, name: str) -> str:
        """Ends the current phase and starts another. Returns the name of the one that ended."""
        before, now = self._phase, time.perf_counter()
        self.seconds[before] += now - self._start
        for watch in self.watchers:
            watch(before, self._start, now)
        self._phase, self._start = name, now
        return before
