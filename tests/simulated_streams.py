"""The streams and events of the simulated accelerator "sim" (simulated_gpu.py): a stream is a thread with a queue.

An event belongs to the device that was current when it was made; using it on the other device raises.
"""

import atexit
import contextlib
import random
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

DEVICES = 2
torch.utils.rename_privateuse1_backend("sim")

errors: list[str] = []  # what would have been undefined behaviour
_here = threading.local()  # the current device and streams of a thread
all_streams: "weakref.WeakSet[Stream]" = weakref.WeakSet()


class Queue:
    """Runs tasks one after the other in a thread."""

    def __init__(self) -> None:
        self.tasks: deque[tuple[Callable[[], Any], float]] = deque()
        self.changed = threading.Condition()
        self.put = self.done = 0
        self.is_waiting = False  # for another queue
        threading.Thread(target=self._run, daemon=True).start()
        atexit.register(self.settle)  # an interpreter that ends while a thread computes aborts

    @torch.inference_mode()  # so that it may write to whatever a consumer in inference mode has made
    def _run(self) -> None:
        while True:
            with self.changed:
                while not self.tasks:
                    self.changed.wait()
                task, seconds = self.tasks.popleft()
            time.sleep(random.random() * seconds)
            try:
                task()
            except Exception as error:
                errors.append(repr(error))
            del task
            with self.changed:
                self.done += 1
                self.changed.notify_all()

    def add(self, task: Callable[[], Any], seconds: float = 0.0) -> int:
        """Returns the task's number, to wait for."""
        with self.changed:
            self.tasks.append((task, seconds))
            self.put += 1
            self.changed.notify_all()
            return self.put

    def wait(self, number: int) -> None:
        with self.changed:
            while self.done < number:
                self.changed.wait()

    def wait_for(self, other: "Queue", number: int) -> None:
        with self.changed:
            self.is_waiting = True
            self.changed.notify_all()
        other.wait(number)
        self.is_waiting = False

    def settle(self, bound: float = 60) -> None:
        """Waits until it has run all its tasks, or waits for another queue."""
        with self.changed:
            assert self.changed.wait_for(lambda: self.is_waiting or self.done == self.put, bound)


class Event:
    def __init__(self, enable_timing: bool = False, **_: Any) -> None:
        self.device = current_device()
        self.queue: Queue | None = None
        self.number, self.time = 0, 0.0

    def record(self, stream: "Stream | None" = None) -> None:
        stream = stream or current_stream()
        if self.queue is None:
            self.device = stream.device.index
        if self.device != stream.device.index:
            raise RuntimeError("an event is recorded on another device than before")
        self.queue = stream.queue
        self.number = stream.queue.add(lambda: setattr(self, "time", time.perf_counter()))

    def query(self) -> bool:
        return self.queue is None or self.queue.done >= self.number

    def synchronize(self) -> None:
        if self.queue is not None:
            self.queue.wait(self.number)

    def elapsed_time(self, later: "Event") -> float:
        if self.device != later.device:
            raise RuntimeError("the events are of different devices")
        if not (self.query() and later.query()):
            raise RuntimeError("both events must be completed")
        return 1000 * (later.time - self.time)


class Stream:
    def __init__(self, device: Any = None) -> None:
        self.queue = Queue()
        self.device = torch.device("sim", _index(device))
        all_streams.add(self)

    def record_event(self) -> Event:
        event = Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        if (queue := event.queue) is not None:
            number = event.number
            self.queue.add(lambda: self.queue.wait_for(queue, number))

    def wait_stream(self, other: "Stream") -> None:
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        self.queue.wait(self.queue.put)


def _index(device: Any = None) -> int:
    index = None if device is None else device if isinstance(device, int) else torch.device(device).index
    return current_device() if index is None else index


def current_device() -> int:
    return getattr(_here, "device", 0)


_defaults = [Stream(index) for index in range(DEVICES)]


def current_stream(device: Any = None) -> Stream:
    index = _index(device)
    return vars(_here).get(f"stream {index}", _defaults[index])


@contextlib.contextmanager
def stream(new: Stream):
    """Makes a stream and its device current."""
    name, before = f"stream {new.device.index}", current_stream(new.device)
    with device(new.device):
        setattr(_here, name, new)
        try:
            yield
        finally:
            setattr(_here, name, before)


@contextlib.contextmanager
def device(new: Any):
    before, _here.device = current_device(), _index(new)
    try:
        yield
    finally:
        _here.device = before


def synchronize(device: Any = None) -> None:
    for one in list(all_streams):
        one.synchronize()
