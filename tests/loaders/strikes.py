"""Raises an exception at any moment at which a signal handler might: when a function begins, and when a call returns.

Python runs signal handlers between two instructions; these moments are those before and after each call, a send to a
worker among them. Only code of loaders/, and what it calls, is struck, and only in the thread that calls `struck`.
"""

import _weakrefset
import logging
import os
import signal
import sys
import threading
from contextlib import contextmanager
from multiprocessing import heap, process
from pathlib import Path

from torch.utils.data import sampler

import loaders

PACKAGE = str(Path(loaders.__file__).parent)
# A generator of torch's samplers has ended after an exception, as under torch's own loader; multiprocessing loses its
# own count of memory or of children, threading its locks, and logging would keep the lock that it takes before a fork:
# then every other thread that logs or forks waits for ever.
FRAGILE = {
    sampler.__file__,
    heap.__file__,
    process.__file__,
    threading.__file__,
    _weakrefset.__file__,
    logging.__file__,
}


class Interrupted(BaseException):
    """What a program's own signal handler raises."""


def is_moment(frame):
    """Whether a handler may run here, in code of loaders/ or called from there, and the loader can go on after it."""
    if signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ()):
        return False
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(PACKAGE):
            return True
        if file in FRAGILE:
            return False
        frame = frame.f_back
    return False


@contextmanager
def at_moments(do):
    """Calls `do` at each moment."""
    this = os.getpid()

    def profile(frame, event, _):
        if os.getpid() != this:
            sys.setprofile(None)  # a worker that was started meanwhile
        elif event in ("call", "c_return") and is_moment(frame):
            do()

    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)


def moments_of(call):
    """How many moments a call has."""
    moments = []
    with at_moments(lambda: moments.append(None)):
        call()
    return len(moments)


@contextmanager
def struck(moment, kind=Interrupted):
    """Has a signal handler raise `kind` at the given moment, counted from 1, if it comes."""
    left = moment

    def handle(*_):
        raise kind

    def strike():
        nonlocal left
        left -= 1
        if left == 0:
            sys.setprofile(None)
            signal.raise_signal(signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        with at_moments(strike):
            yield
    finally:
        signal.signal(signal.SIGUSR1, before)
