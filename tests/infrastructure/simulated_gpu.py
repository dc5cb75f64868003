"""A simulated accelerator, "sim", with two devices: what undefined behaviour on a GPU does, happens here for sure.

- A stream is a thread with a queue (simulated_streams.py); copies and kernels take up to `copy_seconds` and
  `kernel_seconds`.
- A kernel or copy works on raw addresses and keeps nothing alive. A block that is freed goes to the next allocation
  of the same stream at once, as in CUDA's caching allocator, unless `record_stream` was called; its bytes are
  overwritten.
- A copy from page-locked memory reads it when it runs; from other memory, before `to` returns. It is noted in `errors`
  if the memory is not page-locked from the copy's first to its last byte, and from when it is queued until it has run,
  and (`Libc`) if page-locked memory is unmapped or given back to the system.

Tensors are wrapper subclasses on a PrivateUse1 backend, which torch lets Python define (experimental: `IS_POSSIBLE`).
Importing this patches torch, so each test imports it in a process of its own.
"""

import ctypes
import mmap
import os
import sys
import threading
from collections import defaultdict
from types import SimpleNamespace

import torch
from torch.utils import _pytree as pytree
from torch.utils import backend_registration

from tests.infrastructure import simulated_streams
from tests.infrastructure.simulated_streams import DEVICES, current_stream, errors

MADV_REMOVE = 9
PROCESS = os.getpid()
IS_POSSIBLE = hasattr(backend_registration, "_setup_privateuseone_for_python_backend")

copy_seconds = kernel_seconds = 0.0  # the longest random delay before each copy and each kernel
blocking = 0  # copies to the device from memory that is not page-locked
reserved = 0  # bytes that the allocator has taken from the device
pinned = 0  # bytes that were copied into page-locked memory
locked = {}  # page-locked host memory, by its address
refuses = False  # to page-lock memory, as a GPU may
calls_of_children = mmap.mmap(-1, 1)  # whether a forked child has locked or unlocked memory

_lock = threading.RLock()
_free = defaultdict(list)  # by stream and size
_pending = []  # freed, but recorded on other streams


# Memory


class _Block:
    def __init__(self, size, stream):
        self.bytes = torch.empty(size, dtype=torch.uint8)
        self.size = size
        self.stream = stream
        self.users = set()  # other streams, as record_stream was told


class _Owner:
    """Frees its block when the last tensor on it has died."""

    def __init__(self, size, on):
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

    def __del__(self, is_finalizing=sys.is_finalizing):
        if is_finalizing():
            return
        block = self.block
        users = block.users
        block.users = set()
        with _lock:
            if users:
                _pending.append(([user.record_event() for user in users], block))
                return
            memory = block.bytes
            block.stream.queue.add(lambda: memory.fill_(0xEE))  # undefined from here on, in the stream's order
            _free[id(block.stream), block.size].append(block)


class _Locked:
    def __init__(self, address, size, device=None, owner=None):
        self.address = address
        self.size = size
        self.end = address + size
        self.device = device  # None: torch's own memory, which is pinned for all devices
        self.owner = owner  # keeps the memory alive
        locked[address] = self

    def covers(self, address, size):
        return locked.get(self.address) is self and self.address <= address and address + size <= self.end


def lock(array):
    """Page-locks a numpy array's memory for good."""
    _Locked(array.ctypes.data, array.nbytes, owner=array)


def _register(address, size, flags):
    """As cudaHostRegister: for the current device; memory that overlaps locked memory is refused."""
    calls_of_children[0] |= os.getpid() != PROCESS
    if refuses or _overlaps(address, size):
        return 712
    _Locked(address, size, simulated_streams.current_device())
    return 0


def _unregister(address):
    calls_of_children[0] |= os.getpid() != PROCESS
    return 713 if locked.pop(address, None) is None else 0


def _check_error(code):
    if code:
        raise RuntimeError(f"CUDA error {code}")


def _overlaps(address, size):
    end = address + size
    return any(item.address < end and address < item.end for item in list(locked.values()))


def _lock_at(address):
    return next((item for item in list(locked.values()) if item.address <= address < item.end), None)


class Libc:
    """The C library, through which no page-locked memory may be unmapped or given back."""

    def __init__(self, library):
        self._library = library

    def __getattr__(self, name):
        return getattr(self._library, name)

    def madvise(self, address, size, advice):
        if advice == MADV_REMOVE:
            self._check(address, size, "given back")
        return int(self._library.madvise(address, size, advice))

    def munmap(self, address, size):
        self._check(address, size, "unmapped")
        return int(self._library.munmap(address, size))

    def _check(self, address, size, action):
        if os.getpid() == PROCESS and _overlaps(address, size):
            errors.append(f"page-locked memory is {action}")


def is_pinned(tensor, *_):
    """As CUDA, which looks at the first byte only."""
    return tensor.device.type == "cpu" and _lock_at(tensor.data_ptr()) is not None


def pin_memory(tensor, *_):
    """A copy in page-locked memory, which is never reused, as torch's is not while a copy from it is under way.

    Of a tensor in page-locked memory, whoever locked it, the tensor itself: so does torch.
    """
    global pinned
    if is_pinned(tensor):
        return tensor
    copy = tensor.clone()
    pinned += copy.nbytes
    _Locked(copy.data_ptr(), max(copy.nbytes, 1), owner=copy.untyped_storage())
    return copy


# Tensors


class SimTensor(torch.Tensor):
    raw: torch.Tensor  # the device's memory, on the host
    owner: _Owner

    @staticmethod
    def __new__(cls, raw, owner):
        layout = {"strides": raw.stride(), "storage_offset": raw.storage_offset(), "dtype": raw.dtype}
        self = torch.Tensor._make_wrapper_subclass(cls, raw.size(), device=owner.block.stream.device, **layout)
        self.raw = raw
        self.owner = owner
        return self

    def __reduce_ex__(self, protocol):
        return self.detach().cpu().__reduce_ex__(protocol)

    def record_stream(self, stream):  # type: ignore[override]
        if stream is not self.owner.block.stream:
            self.owner.block.users.add(stream)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        aten = torch.ops.aten
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
        positional, keywords = pytree.tree_unflatten(raws, spec)
        if keywords.get("device") is not None:
            keywords = {**keywords, "device": torch.device("cpu")}
        returned = [item.alias_info for item in func._schema.returns]
        if func is aten.detach.default or any(info is not None and not info.is_write for info in returned):
            return pytree.tree_map_only(
                torch.Tensor, lambda view: cls(view, first.owner), func(*positional, **keywords)
            )
        if func._schema.is_mutable:
            where.queue.add(lambda: func(*positional, **keywords), kernel_seconds)
            arguments = enumerate(func._schema.arguments)
            changed = [(at, item.name) for at, item in arguments if item.alias_info and item.alias_info.is_write]
            written = [args[at] if at < len(args) else kwargs[name] for at, name in changed]
            return written[0] if len(written) == 1 else tuple(written)
        on_meta = {**keywords, "device": "meta"} if "device" in keywords else keywords
        metas = pytree.tree_map_only(torch.Tensor, lambda item: item.to("meta"), (positional, on_meta))
        shapes = func(*metas[0], **metas[1])
        made = pytree.tree_map_only(
            torch.Tensor, lambda item: _empty(item.size(), item.stride(), item.dtype, where), shapes
        )
        targets = [item.raw for item in pytree.tree_leaves(made) if isinstance(item, SimTensor)]

        def kernel():
            results = [
                item for item in pytree.tree_leaves(func(*positional, **keywords)) if isinstance(item, torch.Tensor)
            ]
            for target, result in zip(targets, results, strict=True):
                target.copy_(result)

        where.queue.add(kernel, kernel_seconds)
        return made


def _copied(target, source, non_blocking, on):
    global blocking
    raw = target.raw
    size = source.nbytes
    plain = source.contiguous() if source.stride() != raw.stride() else source
    is_plain = plain is source and source.dtype == raw.dtype and torch.ops.aten.is_non_overlapping_and_dense(source)
    lock = _lock_at(source.data_ptr())
    is_for_device = lock is not None and lock.device in (None, on.device.index)
    if size and non_blocking and is_plain and is_for_device:
        address = source.data_ptr()

        def copy():  # refers to no host tensor, as a GPU does not
            if not lock.covers(address, size):
                errors.append("a copy from host memory that is not, or no longer, page-locked")
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


def _empty(size, stride, dtype, on):
    size = tuple(size)
    stride = tuple(stride)
    extent = 0
    if 0 not in size:
        extent = 1 + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
    owner = _Owner(extent * dtype.itemsize, on)
    flat = owner.block.bytes[: extent * dtype.itemsize].view(dtype) if extent else torch.empty(0, dtype=dtype)
    return SimTensor(torch.as_strided(flat, size, stride), owner)


def _install():
    names = ("Stream", "Event", "stream", "device", "current_stream", "current_device", "synchronize")
    module = SimpleNamespace(**{name: getattr(simulated_streams, name) for name in names})
    module.is_available = lambda: True
    module.device_count = lambda: DEVICES
    module._is_in_bad_fork = lambda: False
    module.is_initialized = lambda: True
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    module.cudart = lambda: SimpleNamespace(cudaHostRegister=_register, cudaHostUnregister=_unregister)
    module.check_error = _check_error
    module._lazy_init = lambda: None
    module.manual_seed_all = lambda seed: None
    backend_registration._setup_privateuseone_for_python_backend("sim", module)

    def make(size, stride, dtype, device):
        return _empty(size, stride, dtype or torch.get_default_dtype(), current_stream(device))

    def contiguous(size):
        return torch.empty(tuple(size), device="meta").stride()

    library = torch.library.Library("aten", "IMPL", "PrivateUse1")
    library.impl(
        "empty.memory_format", lambda size, dtype=None, device=None, **_: make(size, contiguous(size), dtype, device)
    )
    library.impl("empty_strided", lambda size, stride, dtype=None, device=None, **_: make(size, stride, dtype, device))
    torch.Tensor.is_pinned = is_pinned  # type: ignore[assignment]
    torch.Tensor.pin_memory = pin_memory  # type: ignore[assignment]
    return library


_library = _install() if IS_POSSIBLE else None
