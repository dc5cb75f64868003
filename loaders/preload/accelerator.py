"""What a device can do: the names that differ between CUDA, ROCm, XPU, MPS and other backends stand here alone.

torch has a module for each type of device (torch.cuda, torch.xpu, ...), and most of them have the same names. A device
whose module lacks one of STREAM_NAMES, as MPS does, gets neither a side stream nor events: nothing then says when a
copy is done, so copies block.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

STREAM_NAMES = ("Stream", "Event", "stream", "current_stream", "device", "synchronize")


class Accelerator:
    """A device, and the streams, events and memory that torch offers for it. All calls name this device."""

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self._module: Any = module_of(self.device)
        self.has_streams = all(hasattr(self._module, name) for name in STREAM_NAMES)

    def __reduce__(self) -> Any:
        return Accelerator, (self.device,)  # a module cannot be pickled or copied

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

    def using(self, stream: Any) -> AbstractContextManager[Any]:
        """Makes the stream and its device (None: no change) current in the calling thread."""
        return nullcontext() if stream is None else self._module.stream(stream)

    def synchronize(self) -> None:
        """Waits for all work on the device."""
        if self.has_streams:
            self._module.synchronize(self.device)
        elif self._module is not None:
            self._module.synchronize()

    def empty_cache(self) -> None:
        """Gives memory that torch keeps for later back to the device."""
        if hasattr(self._module, "empty_cache"):
            self._module.empty_cache()

    def count(self) -> int:
        """Returns how many devices of this type there are."""
        return int(self._module.device_count())

    def peak_bytes(self) -> int | None:
        """Returns how much memory tensors have taken at most; None if torch does not tell."""
        module = self._module
        return int(module.max_memory_allocated(self.device)) if hasattr(module, "max_memory_allocated") else None

    def has_bf16(self) -> bool:
        """Returns whether the device itself computes in bfloat16, as far as torch tells."""
        module = self._module
        return hasattr(module, "is_bf16_supported") and bool(module.is_bf16_supported(including_emulation=False))

    def seed(self, number: int) -> None:
        """Seeds torch's generator of the device, if it has one."""
        if hasattr(self._module, "manual_seed"):
            with self.current():
                self._module.manual_seed(number)

    def make_current(self) -> None:
        """Makes the device current for good, if it has a number."""
        if self.device.index is not None and hasattr(self._module, "set_device"):
            self._module.set_device(self.device)

    def fallbacks(self) -> list[str]:
        """Returns what torch lacks for this device, and what is done instead: a part of a sentence each."""
        if self._module is None:
            return []
        found = [] if self.has_streams else ["no streams: copies block, and the host's clock times the steps"]
        if not hasattr(self._module, "max_memory_allocated"):
            found.append("no memory figures: the report leaves them out")
        if not self.has_bf16():
            found.append("no bfloat16: precision=auto means float32")
        return found

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


def chosen_device(device: torch.device | str) -> torch.device:
    """Returns the device that a setting names: "auto" is torch's accelerator here, or the CPU if it finds none.

    Raises RuntimeError if it does not exist. Nothing is initialised, so that the process may still be forked.
    """
    if device == "auto":
        return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
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
    if number is not None and number >= (count := module.device_count()):
        raise RuntimeError(
            f"device={str(device)!r}, but torch finds {count} {kind} devices here: use a number below {count}"
        )
    return device


def checked_device(device: torch.device | str) -> torch.device:
    """Returns the chosen device, with the number of the current one if it has none and its type has some."""
    device = chosen_device(device)
    module = module_of(device)
    if device == torch.device(device.type) and hasattr(module, "current_device"):
        return torch.device(device.type, module.current_device())
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
    _page_locked.pop(address, None)
    torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(address))


def page_locked_until(address: int) -> int | None:
    """Returns the end of the memory around this address that `page_lock` has locked; None if it has not."""
    # A copy: the garbage collector may run here, and unlock the memory of a loader that was not closed.
    return next((end for start, end in _page_locked.copy().items() if start <= address < end), None)


_page_locked: dict[int, int] = {}  # from which address to which


def clear_error() -> None:
    """Makes a call that may fail, because CUDA reports a failure again at its next call."""
    torch.zeros(1, device="cuda")
