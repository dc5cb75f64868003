"""A simulated accelerator, "sim", with two devices: what undefined behaviour on a GPU does, happens here for sure.

- A stream is a thread with a queue of closures; copies and kernels take up to `copy_seconds` and `kernel_seconds`.
- A kernel or copy works on raw addresses and keeps nothing alive. A block that is freed goes to the next allocation
  of the same stream at once, as in CUDA's caching allocator, unless `record_stream` was called; its bytes are
  overwritten.
- A copy from page-locked memory reads it when it runs; from other memory, before `to` returns. Memory that is no
  longer page-locked when the copy runs is noted in `errors`.
- An event belongs to the device that was current when it was made; using it on the other device raises.

Tensors are wrapper subclasses on a PrivateUse1 backend, which torch lets Python define (experimental: `IS_POSSIBLE`).
Importing this patches torch, so each test imports it in a process of its own.
"""

import atexit
import contextlib
import ctypes
import random
import sys
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils import backend_registration

IS_POSSIBLE = hasattr(backend_registration, "_setup_privateuseone_for_python_backend")
DEVICES = 2
torch.utils.rename_privateuse1_backend("sim")

copy_seconds = kernel_seconds = 0.0  # the longest random delay before each copy and each kernel
errors: list[str] = []  # what would have been undefined behaviour
blocking = 0  # copies to the device from memory that is not page-locked
reserved = 0  # bytes that the allocator has taken from the device
locked: dict[int, tuple[int, Any]] = {}  # page-locked host memory: address -> bytes, and what keeps them alive

_here = threading.local()  # the current device and streams of a thread
_lock = threading.RLock()
_streams: "weakref.WeakSet[Stream]" = weakref.WeakSet()
_free: dict[tuple[int, int], list["_Block"]] = defaultdict(list)  # by stream and size
_pending: list[tuple[list["Event"], "_Block"]] = []  # freed, but recorded on other streams


class _Queue:
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

    def wait_for(self, other: "_Queue", number: int) -> None:
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
        self.queue: _Queue | None = None
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
        self.queue = _Queue()
        self.device = torch.device("sim", _index(device))
        _streams.add(self)

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
    for one in list(_streams):
        one.synchronize()


# Memory


class _Block:
    def __init__(self, size: int, stream: Stream) -> None:
        self.bytes, self.size, self.stream = torch.empty(size, dtype=torch.uint8), size, stream
        self.users: set[Stream] = set()  # other streams, as record_stream was told


class _Owner:
    """Frees its block when the last tensor on it has died."""

    def __init__(self, size: int, on: Stream) -> None:
        global reserved
        size = -(-max(size, 1) // 512) * 512
        with _lock:
            for item in list(_pending):
                if all(event.query() for event in item[0]):
                    _pending.remove(item)
                    _free[id(item[1].stream), item[1].size].append(item[1])
            free = _free[id(on), size]
            if not free:
                reserved += size
            self.block = free.pop() if free else _Block(size, on)

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if is_finalizing():
            return
        block = self.block
        users, block.users = block.users, set()
        with _lock:
            if users:
                _pending.append(([user.record_event() for user in users], block))
                return
            memory = block.bytes
            block.stream.queue.add(lambda: memory.fill_(0xEE))  # undefined from here on, in the stream's order
            _free[id(block.stream), block.size].append(block)


def lock(array: Any) -> None:
    """Page-locks a numpy array's memory for good, as cudaHostRegister does."""
    locked[array.ctypes.data] = array.nbytes, array


def _is_locked(address: int, size: int) -> bool:
    return any(start <= address and address + size <= start + length for start, (length, _) in locked.copy().items())


def is_pinned(tensor: torch.Tensor, *_: Any) -> bool:
    return tensor.device.type == "cpu" and _is_locked(tensor.data_ptr(), tensor.nbytes)


def pin_memory(tensor: torch.Tensor, *_: Any) -> torch.Tensor:
    """A copy in page-locked memory, which is never reused, as torch's is not while a copy from it is under way.

    Of a tensor in page-locked memory, whoever locked it, the tensor itself: so does torch.
    """
    if is_pinned(tensor):
        return tensor
    pinned = tensor.clone()
    locked[pinned.data_ptr()] = max(pinned.nbytes, 1), pinned.untyped_storage()
    return pinned


# Tensors

# Those that occur often: they are found faster here than by their schemas.
VIEWS = {getattr(torch.ops.aten, name).default for name in ("as_strided", "detach", "view")}
VIEWS |= {torch.ops.aten.slice.Tensor, torch.ops.aten.view.dtype}


class SimTensor(torch.Tensor):
    raw: torch.Tensor  # the device's memory, on the host
    owner: _Owner

    @staticmethod
    def __new__(cls, raw: torch.Tensor, owner: _Owner) -> "SimTensor":
        layout = {"strides": raw.stride(), "storage_offset": raw.storage_offset(), "dtype": raw.dtype}
        self = torch.Tensor._make_wrapper_subclass(cls, raw.size(), device=owner.block.stream.device, **layout)
        self.raw, self.owner = raw, owner
        return self

    def __repr__(self) -> str:  # type: ignore[override]
        return f"SimTensor({tuple(self.shape)}, {self.dtype}, {self.device})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.detach().cpu().__reduce_ex__(protocol)

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def record_stream(self, stream: Stream) -> None:  # type: ignore[override]
        if stream is not self.owner.block.stream:
            self.owner.block.users.add(stream)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs, aten = kwargs or {}, torch.ops.aten
        if func in VIEWS:
            return cls(func(args[0].raw, *args[1:], **kwargs), args[0].owner)
        if torch.is_inference_mode_enabled() and func._can_decompose():  # elsewhere autograd has done it
            return func.decompose(*args, **kwargs)
        flat, spec = pytree.tree_flatten((args, kwargs))
        first = next((item for item in flat if isinstance(item, SimTensor)), None)
        where = current_stream(first.device if first is not None else None)
        if func is aten._to_copy.default and torch.device(kwargs.get("device") or "sim").type == "cpu":
            where.synchronize()
            return args[0].raw.to(kwargs.get("dtype") or args[0].dtype, copy=True)
        if func is aten.copy_.default and not all(isinstance(item, SimTensor) for item in args[:2]):
            return _copied(args[0], args[1], len(args) > 2 and args[2], where)
        raws = [item.raw if isinstance(item, SimTensor) else item for item in flat]
        if func in (aten._local_scalar_dense.default, aten.equal.default):
            where.synchronize()
            return func(*pytree.tree_unflatten(raws, spec)[0])
        given, named = pytree.tree_unflatten(raws, spec)
        if named.get("device") is not None:
            named = {**named, "device": torch.device("cpu")}
        returned = [item.alias_info for item in func._schema.returns]
        if func is aten.detach.default or any(info is not None and not info.is_write for info in returned):
            return pytree.tree_map_only(torch.Tensor, lambda view: cls(view, first.owner), func(*given, **named))
        if func._schema.is_mutable:
            where.queue.add(lambda: func(*given, **named), kernel_seconds)
            arguments = [(number, item) for number, item in enumerate(func._schema.arguments)]
            written = [
                args[number] if number < len(args) else kwargs[item.name]
                for number, item in arguments
                if item.alias_info is not None and item.alias_info.is_write
            ]
            return written[0] if len(written) == 1 else tuple(written)
        on_meta = {**named, "device": "meta"} if "device" in named else named
        metas = pytree.tree_map_only(torch.Tensor, lambda item: item.to("meta"), (given, on_meta))
        try:
            shapes = func(*metas[0], **metas[1])
        except NotImplementedError:  # the shape depends on the data, for which the host waits
            where.synchronize()
            shapes = func(*given, **named)
        made = pytree.tree_map_only(
            torch.Tensor, lambda item: _empty(item.size(), item.stride(), item.dtype, where), shapes
        )
        targets = [item.raw for item in pytree.tree_leaves(made) if isinstance(item, SimTensor)]

        def kernel() -> None:
            results = [item for item in pytree.tree_leaves(func(*given, **named)) if isinstance(item, torch.Tensor)]
            for target, result in zip(targets, results, strict=True):
                target.copy_(result)

        where.queue.add(kernel, kernel_seconds)
        return made


def _copied(target: torch.Tensor, source: torch.Tensor, non_blocking: bool, on: Stream) -> torch.Tensor:
    global blocking
    if not isinstance(target, SimTensor):  # to the host
        on.synchronize()
        return target.copy_(source.raw)  # type: ignore[attr-defined]
    raw, size = target.raw, source.nbytes
    plain = source.contiguous() if source.stride() != raw.stride() else source
    is_plain = plain is source and source.dtype == raw.dtype and torch.ops.aten.is_non_overlapping_and_dense(source)
    if size and non_blocking and is_plain and is_pinned(source):
        address = source.data_ptr()

        def copy() -> None:  # refers to no host tensor, as a GPU does not
            if not _is_locked(address, size):
                errors.append("a copy from host memory that is no longer page-locked")
            else:
                ctypes.memmove(raw.data_ptr(), address, size)

        on.queue.add(copy, copy_seconds)
    elif size <= 65536:  # staged by the driver
        blocking += size > 0
        staged = plain.clone()
        on.queue.add(lambda: raw.copy_(staged), copy_seconds)
    else:
        blocking += 1
        on.queue.wait(on.queue.add(lambda: raw.copy_(plain), copy_seconds))
    return target


def _empty(size: Any, stride: Any, dtype: torch.dtype, on: Stream) -> SimTensor:
    size, stride = tuple(size), tuple(stride)
    extent = 0 if 0 in size else 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    owner = _Owner(extent * dtype.itemsize, on)
    flat = owner.block.bytes[: extent * dtype.itemsize].view(dtype) if extent else torch.empty(0, dtype=dtype)
    return SimTensor(torch.as_strided(flat, size, stride), owner)


def _install() -> Any:
    names = ("Stream", "Event", "stream", "device", "current_stream", "current_device", "synchronize")
    module = SimpleNamespace(**{name: globals()[name] for name in names})
    module.is_available, module.device_count = lambda: True, lambda: DEVICES
    module._is_in_bad_fork, module.is_initialized = lambda: False, lambda: True
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    module._lazy_init, module.manual_seed_all = lambda: None, lambda seed: None
    backend_registration._setup_privateuseone_for_python_backend("sim", module)

    def make(size: Any, stride: Any, dtype: torch.dtype | None, device: Any) -> SimTensor:
        return _empty(size, stride, dtype or torch.get_default_dtype(), current_stream(device))

    def contiguous(size: Any) -> Any:
        return torch.empty(tuple(size), device="meta").stride()

    library = torch.library.Library("aten", "IMPL", "PrivateUse1")
    library.impl(
        "empty.memory_format", lambda size, dtype=None, device=None, **_: make(size, contiguous(size), dtype, device)
    )
    library.impl("empty_strided", lambda size, stride, dtype=None, device=None, **_: make(size, stride, dtype, device))
    torch.Tensor.is_pinned, torch.Tensor.pin_memory = is_pinned, pin_memory  # type: ignore[assignment]
    return library


_library = _install() if IS_POSSIBLE else None
