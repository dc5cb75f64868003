"""A simulated accelerator, "sim", with two devices: what undefined behaviour on a GPU does, happens here for sure.

- A stream is a thread with a queue (simulated_streams.py); copies and kernels take up to `copy_seconds` and
  `kernel_seconds`.
- A kernel or copy works on raw addresses and keeps nothing alive. A block that is freed goes to the next allocation
  of the same stream at once, as in CUDA's caching allocator, unless `record_stream` was called; its bytes are
  overwritten.
- A copy from page-locked memory reads it when it runs; from other memory, before `to` returns. Memory that is no
  longer page-locked when the copy runs is noted in `errors`.

Tensors are wrapper subclasses on a PrivateUse1 backend, which torch lets Python define (experimental: `IS_POSSIBLE`).
Importing this patches torch, so each test imports it in a process of its own.
"""

import ctypes
import sys
import threading
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils import backend_registration

from tests import simulated_streams
from tests.simulated_streams import DEVICES, Event, Stream, current_stream, errors

IS_POSSIBLE = hasattr(backend_registration, "_setup_privateuseone_for_python_backend")

copy_seconds = kernel_seconds = 0.0  # the longest random delay before each copy and each kernel
blocking = 0  # copies to the device from memory that is not page-locked
reserved = 0  # bytes that the allocator has taken from the device
locked: dict[int, tuple[int, Any]] = {}  # page-locked host memory: address -> bytes, and what keeps them alive

_lock = threading.RLock()
_free: dict[tuple[int, int], list["_Block"]] = defaultdict(list)  # by stream and size
_pending: list[tuple[list["Event"], "_Block"]] = []  # freed, but recorded on other streams


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


class SimTensor(torch.Tensor):
    raw: torch.Tensor  # the device's memory, on the host
    owner: _Owner

    @staticmethod
    def __new__(cls, raw: torch.Tensor, owner: _Owner) -> "SimTensor":
        layout = {"strides": raw.stride(), "storage_offset": raw.storage_offset(), "dtype": raw.dtype}
        self = torch.Tensor._make_wrapper_subclass(cls, raw.size(), device=owner.block.stream.device, **layout)
        self.raw, self.owner = raw, owner
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.detach().cpu().__reduce_ex__(protocol)

    def record_stream(self, stream: Stream) -> None:  # type: ignore[override]
        if stream is not self.owner.block.stream:
            self.owner.block.users.add(stream)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs, aten = kwargs or {}, torch.ops.aten
        flat, spec = pytree.tree_flatten((args, kwargs))
        first = next((item for item in flat if isinstance(item, SimTensor)), None)
        where = current_stream(first.device if first is not None else None)
        if func is aten._to_copy.default and torch.device(kwargs.get("device") or "sim").type == "cpu":
            where.synchronize()
            return args[0].raw.to(kwargs.get("dtype") or args[0].dtype, copy=True)
        if func is aten.copy_.default and not isinstance(args[1], SimTensor):
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
            arguments = enumerate(func._schema.arguments)
            changed = [(at, item.name) for at, item in arguments if item.alias_info and item.alias_info.is_write]
            written = [args[at] if at < len(args) else kwargs[name] for at, name in changed]
            return written[0] if len(written) == 1 else tuple(written)
        on_meta = {**named, "device": "meta"} if "device" in named else named
        metas = pytree.tree_map_only(torch.Tensor, lambda item: item.to("meta"), (given, on_meta))
        shapes = func(*metas[0], **metas[1])
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
        on.queue.add(lambda: raw.copy_(plain), copy_seconds).result()
    return target


def _empty(size: Any, stride: Any, dtype: torch.dtype, on: Stream) -> SimTensor:
    size, stride = tuple(size), tuple(stride)
    extent = 0 if 0 in size else 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    owner = _Owner(extent * dtype.itemsize, on)
    flat = owner.block.bytes[: extent * dtype.itemsize].view(dtype) if extent else torch.empty(0, dtype=dtype)
    return SimTensor(torch.as_strided(flat, size, stride), owner)


def _install() -> Any:
    names = ("Stream", "Event", "stream", "device", "current_stream", "current_device", "synchronize")
    module = SimpleNamespace(**{name: getattr(simulated_streams, name) for name in names})
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
