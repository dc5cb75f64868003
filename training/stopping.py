"""Signals that stop a run early: train.py finishes the step, saves a checkpoint and exits.

Ctrl-C, SIGTERM (kill, spot machines, torchrun), SIGUSR1 (Slurm) and SIGUSR2 (submitit) only set a flag, which train.py
reads after each step. So a signal cannot interrupt a step, the loader or a save. A second signal, more than a second
later, ends the program at once.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
TEMPORARY_FAILURE = 75  # exit code after all signals but Ctrl-C; in sysexits.h it means "try again"
ONE_EVENT = 1.0  # seconds within which signals count as one: torchrun sends a Ctrl-C a second time


class Stopped(BaseException):
    """A signal stopped the run, after a checkpoint was saved. Not an Exception, so that it ends a sweep too."""

    def __init__(self, sentence: str, signal_number: int) -> None:
        super().__init__(sentence, signal_number)
        self.exit_code = 130 if signal_number == signal.SIGINT else TEMPORARY_FAILURE

    def __str__(self) -> str:
        return str(self.args[0])


class StopSignals:
    """In its `with` block, the first signal sets `received` to its number; a later signal has its usual effect."""

    def __init__(self) -> None:
        self.received = 0
        self._received_at = 0.0
        self._handlers: dict[int, Any] = {}  # the earlier handlers, by signal

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():  # Python allows handlers only there
            for number in SIGNALS:
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self._handlers[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Restores the earlier handlers. After a stop, calls the signal's: that of submitit submits the job again."""
        self._restore()
        handler = self._handlers.get(self.received)
        if isinstance(error, Stopped) and callable(handler) and handler is not signal.default_int_handler:
            handler(self.received, None)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self.received:
            self.received, self._received_at = number, now
            said = f"{signal.Signals(number).name}: stops after the next step, with a checkpoint; once more: at once\n"
            os.write(2, said.encode())  # unlike print, a signal handler may call it at any time
        elif now - self._received_at > ONE_EVENT:
            self._restore()
            os.kill(os.getpid(), number)

    def _restore(self) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
