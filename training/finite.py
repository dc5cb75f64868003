"""Finds the first step whose loss or gradients are not finite. The host never waits for the device to know it.

Invariant: `_first` on the device is the number of that step, or 0. `read` returns the last copy of it that is done,
and starts the next one: the host learns of the step some steps later.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from loaders import Accelerator


class FirstNotFinite:
    def __init__(self, device: torch.device) -> None:
        self._accelerator = Accelerator(device)
        self._first = torch.zeros((), dtype=torch.int64, device=device)
        self._copy = torch.zeros((), dtype=torch.int64)
        if self._accelerator.has_streams:
            self._copy = self._copy.pin_memory()
        self._copied: Any = None  # the event after the copy

    def add(self, step: int, value: Tensor) -> None:
        """Checks a number of the step: its loss, or the norm of its gradients."""
        value = value.detach()
        if value.device.type != "cpu":
            is_new = ~value.isfinite() & (self._first == 0)
            self._first = torch.where(is_new, step, self._first)
        elif not math.isfinite(value) and not self._first:
            self._first.fill_(step)

    def read(self, waits: bool = False) -> int:
        """The number of the first such step; 0 if there was none. waits: also looks at the latest steps."""
        if waits or self._first.device.type == "cpu":
            return int(self._first)
        is_copied = self._copied is None or self._copied.query()
        if not self._accelerator.has_streams or not is_copied:
            return 0
        step = int(self._copy)
        self._copy.copy_(self._first, non_blocking=True)  # for a later call
        self._copied = self._accelerator.timed_event()
        return step
