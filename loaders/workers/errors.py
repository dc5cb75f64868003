"""Errors on their way from a worker process to the program, as torch sends them: with the traceback as text."""

from __future__ import annotations

import pickle
import signal

from torch._utils import ExceptionWrapper


def pickled_error(where: str) -> bytes:
    """Returns the exception that is being handled, with its traceback, as a pickle for `raised_again`."""
    wrapper = ExceptionWrapper(where=where)
    try:
        return pickle.dumps(wrapper)
    except Exception:  # the class cannot be pickled
        wrapper.exc_type = RuntimeError
        return pickle.dumps(wrapper)


def raised_again(pickled: bytes) -> BaseException:  # type: ignore[return]  # reraise() never returns
    """Returns an exception of the same class, with the worker's traceback as its text."""
    wrapper: ExceptionWrapper = pickle.loads(pickled)
    # Else an exception from a signal handler would be taken for the worker's, which would be lost.
    blocks_signals = hasattr(signal, "pthread_sigmask")  # not on Windows
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals()) if blocks_signals else None
    try:
        wrapper.reraise()
    except BaseException as error:
        return error.with_traceback(None)  # whose frames refer to the error, and to the caller
    finally:
        if mask is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
