"""What a device can do: the names that differ between CUDA, ROCm, XPU, MPS and other backends stand here alone.

torch has a module for each type of device (torch.cuda, torch.xpu, ...), and most of them have the same names. A device
whose module lacks one of STREAM_NAMES, as MPS does, gets neither a side stream nor events: nothing then says when a
copy is done, so copies block.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

STREAM_NAMES = ("Stream", "Event", "stream", "current_stream", "device", "synchronize")


class Accelerator:
    """A device, and the streams, events and memory that torch offers for it. All calls name this device."""

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self._module: Any = module_of(self.device)
        self.has_streams = all(hasattr(self._module, name) for name in STREAM_NAMES)

    def new_stream(self) -> Any:
        return self._module.Stream(self.device)

    def current_stream(self) -> Any:
        return self._module.current_stream(self.device)

    def timed_event(self, stream: Any = None) -> Any:
        """Returns an event with a time, recorded on `stream`, or on the stream that is current in this thread."""
        event = self._module.Event(enable_timing=True)
        event.record(stream or self.current_stream())
        return event

    def current(self) -> AbstractContextManager[Any]:
        """Makes the device current in the calling thread: memory is page-locked for the current device."""
        return self._module.device(self.device) if self.has_streams else nullcontext()

    @contextmanager
    def using(self, stream: Any) -> Iterator[None]:
        """Makes the device and the stream (None: no change) current in the calling thread."""
        with self.current(), nullcontext() if stream is None else self._module.stream(stream):
            yield

    def synchronize(self) -> None:
        """Waits for all work on the device."""
        if self.has_streams:
            self._module.synchronize(self.device)
        elif self._module is not None:
            self._module.synchronize()

    def free_bytes(self) -> int | None:
        """Returns how much memory this process may still use on the device; None if torch does not tell."""
        module = self._module
        if not hasattr(module, "mem_get_info"):
            return None
        unused = module.memory_reserved(self.device) - module.memory_allocated(self.device)  # in torch's allocator
        return int(module.mem_get_info(self.device)[0] + unused)


def module_of(device: torch.device) -> Any:
    """Returns torch's module for the device's type, such as torch.cuda; None for a CPU and where torch has none."""
    if device.type == "cpu":
        return None
    try:
        return torch.get_device_module(device)
    except RuntimeError:
        return None


def checked_device(device: torch.device | str) -> torch.device:
    """Returns the device, with a number if its type has some. Raises RuntimeError if it does not exist."""
    try:
        device = torch.device(device)
    except RuntimeError as error:
        raise RuntimeError(f"device={device!r} is unknown to torch: use 'cpu', 'cuda', 'cuda:1', ...") from error
    module, kind = module_of(device), device.type.upper()
    if not hasattr(module, "is_available"):
        return device
    if not module.is_available():
        raise RuntimeError(f"device={str(device)!r}, but torch finds no {kind} device here: use device='cpu'")
    number: int | None = device.index  # torch declares that it is never None
    if number is None:
        return torch.device(device.type, module.current_device()) if hasattr(module, "current_device") else device
    if number >= (count := module.device_count()):
        raise RuntimeError(
            f"device={str(device)!r}, but torch finds {count} {kind} devices here: use a number below {count}"
        )
    return device


def can_pin_memory() -> bool:
    """Returns whether host memory can be pinned for this machine's accelerator, as torch's DataLoader decides it."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return accelerator is not None and accelerator.type != "mps"


def can_page_lock() -> bool:
    """Returns whether this process can page-lock memory of its own: with CUDA and ROCm."""
    return torch.cuda.is_available()


def page_lock(address: int, size: int) -> None:
    """Page-locks memory. Raises RuntimeError with the reason if that fails."""
    torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(address, size, 0))
    _page_locked[address] = address + size


def page_unlock(address: int) -> None:
    """Ends `page_lock`, before the memory is unmapped. Raises RuntimeError with the reason if that fails."""
    del _page_locked[address]
    torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(address))


def page_locked_until(address: int) -> int | None:
    """Returns the end of the memory around this address that `page_lock` has locked; None if it has not."""
    for start, end in list(_page_locked.items()):
        if start <= address < end:
            return end
    return None


_page_locked: dict[int, int] = {}  # from which address to which


def clear_error() -> None:
    """Makes a call that may fail, because CUDA reports a failure again at its next call."""
    torch.zeros(1, device="cuda")
