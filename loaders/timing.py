"""Measures how long each step waited for its batch and how long it computed.

A step lasts from the request for its batch to `end_step`, or to the request for the next one. It waits until its batch
is ready: loaded, copied and transformed, as far as no thread did that ahead. On the CPU both are read from the host's
clock. On CUDA they are events on the step's stream, so that waiting is the time that the device
stood idle between the end of one step and the arrival of the next batch; they are read at log points only, and nothing
synchronises in between. The time between epochs belongs to no step.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .nested import rows
from .preload.accelerator import Accelerator
from .timeline import GPU, TRAINING, Moment, Timeline

WINDOWS = 20  # parts of a run whose speeds show how much the speed varied


@dataclass(frozen=True)
class Window:
    """Totals over some steps."""

    steps: int
    images: int
    seconds: float
    wait_seconds: float
    worst_wait_fraction: float | None = None  # of several processes: data_wait_fraction of the one that waited most

    @classmethod
    def of_processes(cls, windows: Sequence[Window]) -> Window:
        """Returns the totals of several processes over the same steps: images are summed, times averaged."""
        if len(windows) == 1:
            return windows[0]
        seconds, waits = np.mean([(window.seconds, window.wait_seconds) for window in windows], axis=0).tolist()
        worst = max(window.data_wait_fraction for window in windows)
        return cls(windows[0].steps, sum(window.images for window in windows), seconds, waits, worst)

    @property
    def images_per_second(self) -> float:
        return self.images / self.seconds if self.seconds else 0.0

    @property
    def data_wait_fraction(self) -> float:
        return self.wait_seconds / self.seconds if self.seconds else 0.0

    def __str__(self) -> str:
        step_ms = 1000 * self.seconds / max(self.steps, 1)
        wait_ms = 1000 * self.wait_seconds / max(self.steps, 1)
        share = f"{100 * self.data_wait_fraction:.0f} %"
        if self.worst_wait_fraction is not None:
            share += f", worst process {100 * self.worst_wait_fraction:.0f} %"
        rate = f"{self.images_per_second:,.0f} images/s"
        return f"{rate}, step {step_ms:.1f} ms, of which waiting {wait_ms:.1f} ms ({share})"


class StepTimer:
    """Times the steps of a run; the first `warmup_steps` are left out, but a window of only those has its last step.

    Usage: `for batch in timer.batches(loader): step(batch)`, and `timer.window()` at log points. `timeline` records
    the `timeline_steps` steps that come after the warm-up.
    """

    def __init__(
        self, device: torch.device, warmup_steps: int, timeline: Timeline | None = None, timeline_steps: int = 0
    ) -> None:
        self._accelerator = Accelerator(device)
        self._warmup_steps = warmup_steps
        self._timeline, self._timeline_steps = timeline, timeline_steps
        self._steps = 0  # that have ended, in all epochs, the warm-up included
        self._step: tuple[Moment, Moment, int] | None = None  # the current one: asked, ready, images
        self._pending: list[tuple[Moment, Moment, int, Moment]] = []  # not read yet: asked, ready, images, ended
        self._read = array("d")  # of the others: seconds, those of waiting, images
        self._window_start = self._epoch_start = 0
        self.first_batch_seconds: float | None = None
        self.epoch_first_batch_seconds = 0.0

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Yields the batches of the loader's next epoch, and times its steps.

        `epoch_first_batch_seconds` is then the time to the epoch's first batch, which includes starting workers;
        `first_batch_seconds` is that of the run's first epoch.
        """
        self._epoch_start, asked = self._steps, self._mark()
        for batch in loader:
            ready = self._mark()
            self._step = (asked, ready, rows(batch))
            if self._steps == self._epoch_start:
                self.epoch_first_batch_seconds = ready.host - asked.host
                self.first_batch_seconds = self.first_batch_seconds or self.epoch_first_batch_seconds
            try:
                yield batch
            finally:  # if the loop breaks off, its last step counts too
                del batch
                asked = self.end_step()

    def window(self) -> Window:
        """Ends the current step, and returns the steps since the last call.

        So writing to the log afterwards belongs to no step. On CUDA this waits for the device, as do all methods below
        that return figures.
        """
        self.end_step()
        start, self._window_start = self._window_start, self._steps
        return _total(self._steady(start))

    def epoch(self) -> Window:
        """Returns the steps since `batches` was called."""
        return _total(self._steady(self._epoch_start))

    def run(self) -> Window:
        """Returns all steps but the warm-up."""
        return _total(self._steady(0))

    def whole(self) -> Window:
        """Returns all steps, the warm-up included."""
        return _total(self._from(0))

    def summary(self, total: Window) -> dict[str, Any]:
        """Returns a run's figures, as summary.json has them; `step_ms_p50` and `step_ms_p95` include waiting.

        `total` is what `run` returned, or the totals of several processes.
        """
        p50, p95 = self.step_ms(50, 95)
        return {
            "images_per_second": total.images_per_second,
            "images_per_second_quartiles": self.quartiles(total.images_per_second),
            "data_wait_fraction": total.data_wait_fraction,
            "first_batch_seconds": self.first_batch_seconds,
            "step_ms_p50": p50,
            "step_ms_p95": p95,
        }

    def step_ms(self, *percentiles: float, part: str = "step") -> list[float]:
        """Returns percentiles of the steps' milliseconds: of a whole "step", its "waiting" or its "computing"."""
        steps = self._steady(0) if self._steps else np.zeros((1, 3))
        seconds, waits = steps[:, 0], steps[:, 1]
        durations = {"step": seconds, "waiting": waits, "computing": seconds - waits}[part]
        return [1000 * float(value) for value in np.percentile(durations, percentiles)]

    def quartiles(self, images_per_second: float) -> list[float]:
        """Returns the quartiles of the speeds of the run's parts, scaled to a mean of `images_per_second`."""
        steps = self._steady(0)
        if not len(steps):
            return [0.0, 0.0, 0.0]
        speeds = [_total(part).images_per_second for part in np.array_split(steps, min(WINDOWS, len(steps)))]
        mean = _total(steps).images_per_second or 1.0
        return [images_per_second / mean * float(speed) for speed in np.percentile(speeds, (25, 50, 75))]

    def _steady(self, start: int) -> np.ndarray:
        """Returns the steps from number `start` on, without the warm-up; the last step if all are warm-up."""
        return self._from(max(start, min(self._warmup_steps, self._steps - 1)))

    def _from(self, start: int) -> np.ndarray:
        """Returns the steps from number `start` on: their seconds, those of waiting, and images, float64 (steps, 3).

        On CUDA it waits for the last of them.
        """
        if self._pending and self._accelerator.has_streams:
            self._pending[-1][3].event.synchronize()
        for asked, ready, images, ended in self._pending:
            self._read.extend((asked.until(ended), asked.until(ready), images))
        self._pending.clear()
        return np.asarray(self._read[3 * start :]).reshape(-1, 3)

    def end_step(self) -> Any:
        """Ends the current step, if one is running, and returns the present moment."""
        now, step, self._step = self._mark(), self._step, None
        if step is not None:
            self._pending.append((*step, now))
            self._steps += 1
            if (timeline := self._timeline) is not None:
                for activity, start, end in (("wait", *step[:2]), ("compute", step[1], now)):
                    timeline.add_between(TRAINING, GPU, activity, start, end, timeline.delivered)
                if self._steps == self._warmup_steps:
                    timeline.begin()
                if self._steps == self._warmup_steps + self._timeline_steps:
                    timeline.close()
        return now

    def _mark(self) -> Moment:
        return Moment(time.perf_counter(), self._accelerator.timed_event() if self._accelerator.has_streams else None)


def _total(steps: np.ndarray) -> Window:
    seconds, waits, images = steps.sum(axis=0).tolist()
    return Window(len(steps), int(images), seconds, waits)
