"""Page-locked host memory: a device copies from it at the speed of the link, without a core and without another copy.

Only a Preloader gets batches in it: it holds each batch until the device has copied it. Nobody would know when a copy
that another consumer queues is done, so the memory could be written again during that copy.

Invariant: whatever may be page-locked is in `_locks`. Memory is noted there before it is locked, and forgotten after
it is unlocked, so that no exception in between (Ctrl-C) hides a lock; unlocking twice does no harm. A forked child
unlocks nothing: locks belong to the process that made them. Locks survive forks: slots are shared memory
(MAP_SHARED), which a fork neither moves nor copies on write, so workers write to the locked pages.
"""

import logging
import os
import weakref
from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch

from .accelerator import Accelerator
from .background import reraise_of_signal
from .machine import SHARE, available_memory
from .nested import strided_parts

log = logging.getLogger(__name__)


class _Lock(NamedTuple):
    size: int  # bytes
    accelerator: Accelerator  # it is locked for this device
    owner: int  # the process that has to unlock it; 0: torch unlocks it


_locks: dict[int, _Lock] = {}  # locks by the address of the memory
_has_failed = False  # locking has failed: nothing more is locked


@cache
def limit() -> int:
    """Returns how many bytes this process may lock."""
    return (available_memory() or 0) // SHARE


def has_room(size: int) -> bool:
    locked = sum(lock.size for lock in list(_locks.values()))
    return not _has_failed and locked + size <= limit()


def lock_for(accelerator: Accelerator | None, address: int, size: int) -> bool:
    """Page-locks memory for the device of a Preloader, if there is room; unlocks it for any other consumer (None).

    Returns whether it is locked. Nothing may be copying from the memory.
    """
    global _has_failed
    lock = _locks.get(address)
    if lock is not None:
        if accelerator is not None and lock.accelerator.device == accelerator.device and lock.size >= size:
            return True
        unlock(address)
    if accelerator is None or not has_room(size):
        return False
    _locks[address] = _Lock(size, accelerator, os.getpid())
    try:
        accelerator.page_lock(address, size)
    except RuntimeError as error:
        reraise_of_signal(error)
        _has_failed = True
        log.warning("page-locking a batch failed, so each is copied once more on its way to the device: %s", error)
        unlock(address)  # the driver may report an error of an earlier call, and have locked the memory
        return False
    return True


def unlock(start: int, size: int = 1) -> None:
    """Unlocks what was locked from an address in this range on, before it is given back to the system or unmapped."""
    for address, lock in list(_locks.items()):
        if not start <= address < start + size:
            continue
        if lock.owner == os.getpid():
            with suppress(RuntimeError):  # after an exception it may not be locked
                lock.accelerator.page_unlock(address)
        _locks.pop(address, None)


def pinned(size: int, accelerator: Accelerator) -> np.ndarray | None:
    """Returns uninitialised memory that torch has pinned for the device, uint8 (size,); None if there is no room."""
    if not has_room(size):
        return None
    with accelerator.current():
        memory: np.ndarray = torch.empty(size, dtype=torch.uint8, device="cpu").pin_memory().numpy()
    address = memory.ctypes.data
    _locks[address] = _Lock(size, accelerator, 0)
    weakref.finalize(memory, _locks.pop, address, None).atexit = False
    return memory


def copy_out(batch: Any) -> None:
    """Copies every host tensor of the batch that lies in memory of this module into other memory."""
    if not _locks:
        return
    for tensor in strided_parts(batch):
        if tensor.is_cpu and tensor.layout == torch.strided and _is_locked(tensor.data_ptr()):
            tensor.data = tensor.clone()


def _is_locked(address: int) -> bool:
    return any(start <= address < start + lock.size for start, lock in list(_locks.items()))
