"""Measures how long each step waited for its batch and how long it computed, and says what to do about it.

A step lasts from the request for its batch to the request for the next one. On the CPU both are read from the host's
clock. On CUDA they are events on the step's stream, so that waiting is the time that the device stood idle between
the end of one step and the arrival of the next batch; they are read at log points only, and nothing synchronises
in between. The time between epochs belongs to no step.
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


@dataclass(frozen=True)
class Window:
    """Totals over some steps."""

    steps: int
    images: int
    seconds: float
    wait_seconds: float
    worst_wait_fraction: float | None = None  # of several processes, the share of the one that waited most

    @classmethod
    def of_processes(cls, windows: Sequence[Window]) -> Window:
        """The same steps in several processes: their images are added up, their times averaged."""
        if len(windows) == 1:
            return windows[0]
        seconds, waits = (
            sum(getattr(w, name) for w in windows) / len(windows) for name in ("seconds", "wait_seconds")
        )
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
    """Times the steps of a run; the first `warmup_steps` count in no window unless there are no others.

    Usage: `for batch in timer.batches(loader): step(batch)`, and `timer.window()` at log points.
    """

    def __init__(self, device: torch.device, warmup_steps: int) -> None:
        self._on_cuda = device.type == "cuda"
        self._warmup_steps = warmup_steps
        self._step: tuple[Any, Any, int] | None = None  # asked, ready, images
        self._pending: list[tuple[Any, Any, Any, int]] = []  # asked, ready, ended, images
        self._wait, self._total, self._images = array("d"), array("d"), array("q")
        self._window_start = self._epoch_start = 0
        self.first_batch_seconds: float | None = None
        self.epoch_first_batch_seconds = 0.0

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """The loader's next epoch. Its first batch's time, starting workers included, is kept apart as well."""
        self._resolve()
        self._epoch_start = len(self._total)
        began, asked = time.perf_counter(), self._mark()
        first = True
        for batch in loader:
            self._step = (asked, self._mark(), rows(batch))
            if first:
                first, self.epoch_first_batch_seconds = False, time.perf_counter() - began
                self.first_batch_seconds = self.first_batch_seconds or self.epoch_first_batch_seconds
            try:
                yield batch
            finally:  # the last step of a loop that breaks off counts like any other
                del batch
                asked = self._end_step()

    def window(self) -> Window:
        """The steps since the last call, the present one included, which ends here: what is logged next is not timed.

        On CUDA this waits for the device, as the two below do.
        """
        self._end_step()
        self._resolve()
        start, self._window_start = self._window_start, len(self._total)
        return self._sum(start)

    def epoch(self) -> Window:
        """The steps since `batches` was called."""
        self._resolve()
        return self._sum(self._epoch_start)

    def run(self) -> Window:
        """All steps."""
        self._resolve()
        return self._sum(0)

    def summary(self, total: Window) -> dict[str, float | None]:
        """The run's figures as summary.json has them; a step's milliseconds are percentiles, waiting included.

        `total` is what `run` returned, or the totals of several processes.
        """
        p50, p95 = self.step_ms(50, 95)
        return {
            "images_per_second": total.images_per_second,
            "data_wait_fraction": total.data_wait_fraction,
            "first_batch_seconds": self.first_batch_seconds,
            "step_ms_p50": p50,
            "step_ms_p95": p95,
        }

    def step_ms(self, *percentiles: float) -> list[float]:
        """Percentiles of a step's duration in milliseconds, waiting included."""
        self._resolve()
        durations = np.asarray(self._total[self._steady(0) :] or [0.0])
        return [1000 * float(value) for value in np.percentile(durations, percentiles)]

    def _steady(self, start: int) -> int:
        """`start`, or the first later step that is no warm-up; at least the last step is left."""
        return max(start, min(self._warmup_steps, len(self._total) - 1))

    def _sum(self, start: int) -> Window:
        start = self._steady(start)
        steps = len(self._total) - start
        return Window(steps, sum(self._images[start:]), sum(self._total[start:]), sum(self._wait[start:]))

    def _end_step(self) -> Any:
        """Ends the step, unless `window` did, and returns now, when the next batch is asked for."""
        now = self._mark()
        if self._step is not None:
            asked, ready, images = self._step
            self._pending.append((asked, ready, now, images))
            self._step = None
        return now

    def _mark(self) -> Any:
        if self._on_cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            return event
        return time.perf_counter()

    def _resolve(self) -> None:
        if self._on_cuda and self._pending:
            self._pending[-1][2].synchronize()
        for asked, ready, ended, images in self._pending:
            self._wait.append(self._seconds(asked, ready))
            self._total.append(self._seconds(asked, ended))
            self._images.append(images)
        self._pending.clear()

    def _seconds(self, start: Any, end: Any) -> float:
        return float(start.elapsed_time(end) / 1000 if self._on_cuda else end - start)


def verdict(data_wait_fraction: float, config: Any, cores: int) -> str:
    """A sentence that says what the bottleneck was and what to try; `config` is the LoaderConfig of the run."""
    share = f"waiting for data took {100 * data_wait_fraction:.0f} % of training"
    if config.name == "cached":
        return f"loader=cached: this is what training costs with free data; {share}: compare its images/s with others'"
    if data_wait_fraction < 0.05:
        return f"compute-bound: {share}, a faster loader cannot help here"
    if config.name == "torch":
        advice = "try loader=prefetch, which loads and copies while the step computes"
    elif config.name == "resident":
        advice = "make augmentation and transform cheaper, or try loader=prefetch, which works while the step computes"
    elif config.num_workers != "auto" and config.num_workers < cores:
        advice = f"raise loader.num_workers (it is {config.num_workers}, and this machine has {cores} cores)"
    else:
        advice = "make a sample cheaper to read, or sweep loader.num_workers and loader.prefetch_factor"
    return f"{'data-bound' if data_wait_fraction > 0.2 else 'nearly compute-bound'}: {share}: {advice}"
