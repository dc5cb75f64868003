"""The streams and events of the simulated accelerator "sim" (simulated_gpu.py): a stream is a thread with a queue.

An event belongs to the device that was current when it was made; using it on the other device raises.
"""

import contextlib
import random
import threading
import time
import weakref
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

import torch

DEVICES = 2
torch.utils.rename_privateuse1_backend("sim")

errors = []  # what would have been undefined behaviour
_here = threading.local()  # the current device and streams of a thread
all_streams = weakref.WeakSet()


class Queue:
    """Runs tasks one after the other in a thread. An interpreter that exits runs them all."""

    def __init__(self):
        self._thread = ThreadPoolExecutor(1)
        self._lock = threading.Lock()
        self._blocked = Future()  # done while it waits for another queue
        self.last = self.add(lambda: None)

    def add(self, task, seconds=0.0):
        """Returns what is done when the task has run."""
        with self._lock:
            self.last = self._thread.submit(_run, task, random.random() * seconds)
            return self.last

    def wait_for(self, other):
        self._blocked.set_result(None)
        other.result()
        self._blocked = Future()

    def settle(self, bound=60):
        """Waits until it has run all its tasks, or waits for another queue."""
        assert wait([self.last, self._blocked], bound, FIRST_COMPLETED).done


@torch.inference_mode()  # so that it may write to whatever a consumer in inference mode has made
def _run(task, seconds):
    time.sleep(seconds)
    try:
        task()
    except Exception as error:
        errors.append(repr(error))


class Event:
    def __init__(self, enable_timing=False, **_):
        self.device = current_device()
        self.time = 0.0
        self.recorded = None

    def record(self, stream=None):
        stream = stream or current_stream()
        if self.recorded is None:
            self.device = stream.device.index
        if self.device != stream.device.index:
            raise RuntimeError("an event is recorded on another device than before")
        self.recorded = stream.queue.add(lambda: setattr(self, "time", time.perf_counter()))

    def query(self):
        return self.recorded is None or self.recorded.done()

    def synchronize(self):
        if self.recorded is not None:
            self.recorded.result()

    def elapsed_time(self, later):
        if self.device != later.device:
            raise RuntimeError("the events are of different devices")
        if not (self.query() and later.query()):
            raise RuntimeError("both events must be completed")
        return 1000 * (later.time - self.time)


class Stream:
    def __init__(self, device=None):
        self.queue = Queue()
        self.device = torch.device("sim", _index(device))
        all_streams.add(self)

    def record_event(self):
        event = Event()
        event.record(self)
        return event

    def wait_event(self, event):
        if (recorded := event.recorded) is not None:
            self.queue.add(lambda: self.queue.wait_for(recorded))

    def wait_stream(self, other):
        self.wait_event(other.record_event())

    def synchronize(self):
        self.queue.last.result()


def _index(device=None):
    index = None if device is None else device if isinstance(device, int) else torch.device(device).index
    return current_device() if index is None else index


def current_device():
    return getattr(_here, "device", 0)


_defaults = [Stream(index) for index in range(DEVICES)]


def current_stream(device=None):
    index = _index(device)
    return vars(_here).get(f"stream {index}", _defaults[index])


@contextlib.contextmanager
def stream(new):
    """Makes a stream and its device current."""
    name = f"stream {new.device.index}"
    before = current_stream(new.device)
    with device(new.device):
        setattr(_here, name, new)
        try:
            yield
        finally:
            setattr(_here, name, before)


@contextlib.contextmanager
def device(new):
    before = current_device()
    _here.device = _index(new)
    try:
        yield
    finally:
        _here.device = before


def synchronize(device=None):
    for existing in list(all_streams):
        existing.synchronize()
