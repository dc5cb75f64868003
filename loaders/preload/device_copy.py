"""Copies a batch to the device and transforms it there, on a side stream; an event says when it is ready.

Devices without streams (a CPU, MPS) get the batch in the calling thread, by copies that block.

Why there are no races:
- A copier has one side stream for its whole life, so all its copies and transforms run in order.
- A batch's device memory belongs to the side stream. `record_stream` tells the allocator that the consumer's stream
  reads it too, so that no later copy gets the memory before the consumer has read it.
- A host batch is held until its copy and its transform are done, which an event tells: only then may the loader
  rewrite its memory. So are its tensors, as an object that moves itself drops them. What stays on the host is copied
  out of a page-locked slot, because the consumer may copy it to the device.

What a consumer has to know:
- The stream that waits for a batch is the one that is current where `next()` is called. Do not call it while a CUDA
  graph is captured: replays would not wait. Copy the batch into the graph's input tensor, then replay.
- While a preloader's thread runs, capture with capture_error_mode="thread_local", as torch.compile does: in the
  default mode, calls made by that thread, such as querying an event, make the capture fail.
- However far the host is ahead of the device, the device holds at most depth + 4 batches, and those that you keep: a
  batch is copied only when the step that used the batch depth + 2 before it is done.
- autocast, no_grad, inference_mode and the default device are set per thread: in a preloader's thread, the transform
  does not see the training loop's settings, and has to name its dtypes itself.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from ..nested import leaves, move, tensors
from ..randomness import Random
from ..timeline import COPY_STREAM, PRELOADER, TRAINING, Moment, Timeline
from .accelerator import Accelerator, checked_device
from .transfer import strided_parts, transfer, unlocked

FIGURES = ("batches", "queued", "wait_seconds", "loader_wait_seconds", "copy_seconds", "transform_seconds")

Transform = Callable[[Any, Random], Any]


class DeviceCopier:
    """Prepares batches on `device`: if that has streams and `depth` is not 0, on a separate stream.

    One thread at a time may call `prepare`; another may call `open`, `hand_over` and `used` meanwhile. Raises
    RuntimeError for a device that does not exist.
    """

    def __init__(self, device: torch.device | str, transform: Transform | None, depth: int) -> None:
        self.device, self.transform, self._depth = checked_device(device), transform, depth
        self._accelerator = Accelerator(self.device)
        self._stream = self._accelerator.new_stream() if depth and self._accelerator.has_streams else None
        self._copies: deque[tuple[Any, Any]] = deque()  # events, and the host batches that are held until then
        # The consumer appends an event after its use of each batch, and before a batch is copied the thread waits for
        # events until fewer than depth + 2 batches may be in use.
        self._used: deque[Any] = deque()
        self._ahead = 0  # batches whose use was not waited for
        self._is_in_use = False  # the newest batch that was handed over
        self.figures: dict[str, Any] = dict.fromkeys(FIGURES, 0)  # see Preloader.stats
        self.timeline: Timeline | None = None
        self._lane = PRELOADER if depth else TRAINING

    def __reduce__(self) -> Any:
        """Makes a copy begin afresh, with a stream of its own."""
        return DeviceCopier, (self.device, self.transform, self._depth)

    def open(self, loader: Any) -> Any:
        """Returns iter(loader), called with the device current. The loader is told that its batches will be held.

        The side stream waits for the work that the calling thread has queued, in iter(loader) too: it may read memory
        to be reused. The batches of an epoch that was left early count as used now.
        """
        kind = type(loader)
        owner: Any = next((one for one in kind.__mro__ if "holds_batches_until_copied" in vars(one)), object)
        # A subclass with its own `__iter__` may copy the batches to the device itself, and drop them.
        holds = owner is not object and (kind.__iter__, kind._get_iterator) == (owner.__iter__, owner._get_iterator)
        with self._accelerator.current():
            if holds:
                loader.holds_batches_until_copied = self._accelerator.has_streams  # elsewhere copies block
            try:
                batches = iter(loader)
            finally:
                if holds:  # only this iterator's batches are held: others may use the loader, too
                    loader.holds_batches_until_copied = False
        if self._stream is not None:
            self._stream.wait_stream(self._accelerator.current_stream())
            self._used = deque([self._accelerator.current_stream().record_event()] * self._ahead)
            self._is_in_use = False
        return batches

    def used(self) -> None:
        """Notes that the consumer, in whose thread this is called, has queued all its work on its newest batch."""
        if self._is_in_use:
            self._used.append(self._accelerator.current_stream().record_event())
            self._is_in_use = False

    def on_stream(self) -> AbstractContextManager[Any]:
        """Makes `device` and the side stream current in the calling thread."""
        return self._accelerator.using(self._stream)

    def prepare(self, batch: Any, random: Random, batch_id: tuple[int, int] | None = None) -> tuple[Any, Any]:
        """Returns the transformed batch on the device, and the event of its completion (None without a side stream).

        `batch_id`, its epoch and number, is for the timeline. Raises ValueError for a batch on several devices.
        """
        while self._used and self._ahead >= self._depth + 2:
            self._used.popleft().synchronize()
            self._ahead -= 1
        done = None
        # An object's `.to`, or the transform, may put other tensors into the batch.
        held = batch, list(tensors(batch)) if self._accelerator.has_streams else None
        try:
            with self._timed("copy", batch_id):
                prepared = self._moved(batch)
            if self.transform is not None:
                with self._timed("transform", batch_id):
                    prepared = self.transform(prepared, random)
            if self._accelerator.has_streams:
                prepared = unlocked(prepared)
            self._ahead += 1
        finally:  # after an error too, what was queued before it reads the host batch; so may the transform
            if self._accelerator.has_streams:
                done = (self._stream or self._accelerator.current_stream()).record_event()
                self._copies.append((done, held))
                self.release_copied()
        return prepared, None if self._stream is None else done

    def count_wait(self, began: float, batch_id: tuple[int, int]) -> None:
        """Counts the time since `began` (time.perf_counter), which the host spent in the loader's next()."""
        now = time.perf_counter()
        self.figures["loader_wait_seconds"] += now - began
        if self.timeline is not None and self._lane == PRELOADER:
            self.timeline.add(self._lane, "wait", began, now, batch_id)

    def hand_over(self, batch: Any, ready: Any) -> Any:
        """Makes the calling thread's stream wait until the batch is ready; the host does not wait."""
        if ready is not None:
            consumer = self._accelerator.current_stream()
            consumer.wait_event(ready)
            read = [part for part in strided_parts(batch) if part.device == self.device]
            for tensor in {part.untyped_storage()._cdata: part for part in read}.values():
                tensor.record_stream(consumer)
            self._is_in_use = True
        return batch

    def release_copied(self, wait: bool = False) -> None:
        """Drops the host batches whose copies are done; with `wait`, waits for all copies."""
        while self._copies and (wait or self._copies[0][0].query()):
            event, _ = self._copies.popleft()
            event.synchronize()

    @contextmanager
    def _timed(self, activity: str, batch_id: tuple[int, int] | None) -> Iterator[None]:
        began = self._now()
        yield
        ended = self._now()
        self.figures[f"{activity}_seconds"] += ended.host - began.host
        if self.timeline is not None:
            self.timeline.add_between(self._lane, COPY_STREAM, activity, began, ended, batch_id)

    def _now(self) -> Moment:
        """Returns the present moment, with an event on the side stream if a timeline needs one."""
        needs_event = self._stream is not None and self.timeline is not None and self.timeline.is_open
        return Moment(time.perf_counter(), self._accelerator.timed_event(self._stream) if needs_event else None)

    def _moved(self, batch: Any) -> Any:
        """Returns the batch on the device, or queues its copy there."""
        devices = {leaf.device for leaf in leaves(batch) if isinstance(leaf, torch.Tensor)}
        if len(devices) > 1:
            where = " and ".join(sorted(map(str, devices)))
            raise ValueError(
                f"a batch has tensors on {where}: have the loader give all of them on one device, preferably the CPU"
            )
        if self._accelerator.has_streams:
            return transfer(batch, self.device, self._to_device)
        return move(batch, self._to_device)

    def _to_device(self, leaf: Any) -> Any:
        try:
            moved = leaf.to(self.device, non_blocking=self._accelerator.has_streams)
        except TypeError:  # not every class's `.to` knows the keyword
            moved = leaf.to(self.device)
        return leaf if moved is None else moved  # some objects move themselves, and return nothing
