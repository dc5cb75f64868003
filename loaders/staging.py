"""A batch's way to the device: copied and transformed on a side stream, handed over to the consumer's by an event.

Why there are no races:
- One side stream for a stage's life, so all its copies and transforms are ordered among themselves.
- A batch's device memory belongs to the side stream; `record_stream` tells the allocator that the consumer's stream
  reads it too, so that a later copy is not given the memory before that reading is done.
- A host batch is held until its copy's event has completed: only then may the loader rewrite its memory.

What a consumer has to know:
- The stream that waits for a batch is the one that is current where `next()` is called: do not call it inside the
  capture of a CUDA graph, whose replays would not wait. Copy the batch into the graph's own input, then replay.
- While a preloader's thread runs, capture with capture_error_mode="thread_local", as torch.compile does: in the
  default mode the thread's own calls, such as asking an event, make the capture fail.
- Memory of a batch that was dropped is used again when the consumer's stream has come past it: a host that is steps
  ahead of the device keeps as many batches more there.
- autocast, inference_mode and the default device belong to a thread: with a preloader's thread the transform does not
  see those of the training loop, and has to name its dtypes itself.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from loaders.batch import is_dense, leaves, move, tensors
from loaders.randomness import Random
from loaders.slots import ALIGNMENT

Transform = Callable[[Any, Random], Any]

# Leaves are copied together where they fill this share of the bytes between the first and the last, and then one that
# is smaller than this part of them all gets memory of its own: who keeps a batch's labels shall not keep its images.
FILLED, SMALL = 3 / 4, 1 / 4


class Stage:
    """Prepares batches on `device`: on a stream of its own where `side_stream` is true and the device is a GPU.

    One thread at a time prepares; another may hand over. Raises RuntimeError for a device that is not there.
    """

    def __init__(self, device: torch.device | str, transform: Transform | None, side_stream: bool) -> None:
        self.device = present_device(device)
        self.transform = transform
        self._stream = torch.cuda.Stream(self.device) if side_stream and self.device.type == "cuda" else None
        self._copies: deque[tuple[torch.cuda.Event, Any]] = deque()
        self.busy_seconds = 0.0  # of the host, in prepare

    def begin(self) -> None:
        """Orders the side stream after what the calling thread has queued, on memory that may be handed out again."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))

    def on_device(self) -> AbstractContextManager[Any]:
        """Makes the device the calling thread's own: memory that is page-locked there, is by it."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    @contextmanager
    def on_stream(self) -> Iterator[None]:
        """Makes the device and the side stream the calling thread's own."""
        with self.on_device(), torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
            yield

    def prepare(self, batch: Any, random: Random) -> tuple[Any, torch.cuda.Event | None]:
        """The batch on the device, transformed, and the event of its completion (None without a side stream).

        Raises ValueError for a batch that lies on several devices.
        """
        began = time.perf_counter()
        try:
            prepared = self._moved(batch)
        finally:  # what was queued before an error reads the host batch too
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

    def _moved(self, batch: Any) -> Any:
        found = [leaf for leaf in leaves(batch) if isinstance(leaf, torch.Tensor)]
        if len(devices := {leaf.device for leaf in found}) > 1:
            where = " and ".join(sorted(map(str, devices)))
            raise ValueError(
                f"a batch has tensors on {where}: have the loader give all of them on one device, best the CPU"
            )
        copied = copied_together(found, self._to_device) if self.device.type != "cpu" else {}
        return move(batch, lambda leaf: copied[id(leaf)] if id(leaf) in copied else self._to_device(leaf))

    def _to_device(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            try:
                return leaf.to(self.device, non_blocking=True)
            except TypeError:  # not every class's `.to` knows the keyword
                return leaf.to(self.device)
        on_host = leaf.device.type == "cpu" and leaf.layout == torch.strided
        if self._stream is not None and on_host and not leaf.is_pinned():  # which asks the driver, for 1 us or so
            leaf = leaf.pin_memory()  # from pageable memory the copy would be synchronous
        return leaf.to(self.device, non_blocking=True)


def copied_together(
    leaves: Iterable[torch.Tensor], copy: Callable[[torch.Tensor], torch.Tensor]
) -> dict[int, torch.Tensor]:
    """The copies, by `id`, of leaves that one call of `copy` can take together; of none where that would not do.

    It does for dense CPU tensors that lie side by side in one storage, as those of a slot do. `copy` is given the
    bytes that they span, uint8 (n,), and its result is viewed with their dtypes, shapes and strides. Their places in
    it are as much aligned as those in the storage.
    """
    plain = {id(leaf): leaf for leaf in leaves if _is_plain(leaf)}
    if len(plain) < 2 or len({leaf.untyped_storage().data_ptr() for leaf in plain.values()}) > 1:
        return {}
    places = {key: leaf.storage_offset() * leaf.itemsize for key, leaf in plain.items()}
    start = end = min(places.values()) // ALIGNMENT * ALIGNMENT
    for key in sorted(places, key=places.__getitem__):
        if places[key] < end:  # they overlap: apart, a change to one would not change the other
            return {}
        end = places[key] + plain[key].nbytes
    if sum(leaf.nbytes for leaf in plain.values()) < FILLED * (end - start):
        return {}
    storage = next(iter(plain.values())).untyped_storage()
    whole = copy(torch.empty(0, dtype=torch.uint8).set_(storage, start, (end - start,), (1,)))
    copies = {}
    for key, leaf in plain.items():
        own = whole[places[key] - start :][: leaf.nbytes]
        own = own.clone() if leaf.nbytes < SMALL * len(whole) else own
        copies[key] = torch.as_strided(own.view(leaf.dtype), leaf.size(), leaf.stride())
    return copies


def _is_plain(leaf: torch.Tensor) -> bool:
    """Whether its bytes, with dtype, shape and strides, are all there is to it."""
    if type(leaf) is not torch.Tensor or leaf.device.type != "cpu" or leaf.layout != torch.strided:
        return False
    more = leaf.is_nested or leaf.is_quantized or leaf.requires_grad or leaf.is_conj() or leaf.is_neg()
    return not more and leaf.numel() > 0 and is_dense(leaf)


def present_device(device: torch.device | str) -> torch.device:
    """The device, with its number if it is a GPU. Raises RuntimeError, in words, for one that is not there."""
    try:
        device = torch.device(device)
    except RuntimeError as error:
        raise RuntimeError(f"device={device!r} is none that torch knows: use 'cpu', 'cuda', 'cuda:1', ...") from error
    if device.type != "cuda":
        return device
    if not torch.cuda.is_available():
        raise RuntimeError(f"device={str(device)!r}, but torch finds no CUDA device here: use device='cpu'")
    if device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    if device.index >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise RuntimeError(
            f"device={str(device)!r}, but torch finds {count} CUDA devices here: use a number below {count}"
        )
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
