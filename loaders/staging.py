"""A batch's way to the device: copied and transformed on a side stream, handed over to the consumer's by an event.

Why there are no races:
- One side stream for a stage's life, so all its copies and transforms are ordered among themselves.
- A batch's device memory belongs to the side stream; `record_stream` tells the allocator that the consumer's stream
  reads it too, so that a later copy is not given the memory before that reading is done.
- A host batch is held until its copy's event has completed: only then may the loader rewrite its memory.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from loaders.batch import move, tensors
from loaders.randomness import Random

Transform = Callable[[Any, Random], Any]


class Stage:
    """Prepares batches on `device`: on a stream of its own where `side_stream` is true and the device is a GPU.

    One thread at a time prepares; another may hand over. Raises RuntimeError for a device that is not there.
    """

    def __init__(self, device: torch.device | str, transform: Transform | None, side_stream: bool) -> None:
        self.device = present(device)
        self.transform = transform
        self._stream = torch.cuda.Stream(self.device) if side_stream and self.device.type == "cuda" else None
        self._copies: deque[tuple[torch.cuda.Event, Any]] = deque()
        self.busy_seconds = 0.0  # of the host, in prepare

    def begin(self) -> None:
        """Orders the side stream after what the calling thread has queued, on memory that may be handed out again."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))

    @contextmanager
    def on_stream(self) -> Iterator[None]:
        """Makes the side stream the calling thread's own."""
        if self._stream is None:
            yield
            return
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            yield

    def prepare(self, batch: Any, random: Random) -> tuple[Any, torch.cuda.Event | None]:
        """The batch on the device, transformed, and the event of its completion (None without a side stream)."""
        began = time.perf_counter()
        prepared = move(batch, self._to_device)
        if self.device.type == "cuda":
            stream = self._stream or torch.cuda.current_stream(self.device)
            self._copies.append((stream.record_event(), batch))
            self.release_copied()
        if self.transform is not None:
            prepared = self.transform(prepared, random)
        self.busy_seconds += time.perf_counter() - began
        return prepared, None if self._stream is None else self._stream.record_event()

    def hand_over(self, batch: Any, ready: torch.cuda.Event | None) -> Any:
        """Lets the calling thread's stream use the batch once it is ready; the host does not wait."""
        if ready is not None:
            consumer = torch.cuda.current_stream(self.device)
            consumer.wait_event(ready)
            for tensor in tensors(batch):
                _record_stream(tensor, consumer)
        return batch

    def release_copied(self, wait: bool = False) -> None:
        """Lets go of the host batches whose copies are done; with `wait`, of all."""
        while self._copies and (wait or self._copies[0][0].query()):
            event, _ = self._copies.popleft()
            event.synchronize()

    def _to_device(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            try:
                return leaf.to(self.device, non_blocking=True)
            except TypeError:  # not every class's `.to` knows the keyword
                return leaf.to(self.device)
        on_host = leaf.device.type == "cpu" and leaf.layout == torch.strided
        if self._stream is not None and on_host and not leaf.is_pinned():
            leaf = leaf.pin_memory()  # from pageable memory the copy would be synchronous
        return leaf.to(self.device, non_blocking=True)


def present(device: torch.device | str) -> torch.device:
    """The device, of a GPU with its number. Raises RuntimeError for one that is not there."""
    device = torch.device(device)
    if device.type != "cuda":
        return device
    if not torch.cuda.is_available():
        raise RuntimeError(f"device={str(device)!r}, but torch finds no CUDA device here: use device='cpu'")
    if device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    if device.index >= torch.cuda.device_count():
        raise RuntimeError(f"device={str(device)!r}, but torch finds {torch.cuda.device_count()} CUDA devices here")
    return device


def _record_stream(tensor: torch.Tensor, stream: torch.cuda.Stream) -> None:
    """`record_stream` for a tensor of any layout, by the strided tensors that it consists of."""
    if hasattr(tensor, "__tensor_flatten__"):
        parts = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    elif tensor.layout == torch.sparse_coo:
        parts = [tensor._indices(), tensor._values()]
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        parts = [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        parts = [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    else:
        if tensor.is_cuda:
            tensor.record_stream(stream)
        return
    for part in parts:
        _record_stream(part, stream)
