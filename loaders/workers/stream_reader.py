"""Reads the streams of an iterable dataset; a worker may host several.

Invariant: with a seed, what a stream gives from a place on is a function of that place alone. Each stream has its own
copy of the dataset and its own WorkerInfo, and before each sample the global generators are seeded from (seed, epoch,
stream, number in the stream). Without a seed, a worker is a stream, as in torch: it iterates over the dataset that it
has, with its own generators.
"""

from __future__ import annotations

import hashlib
import io
import pickle
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from types import GeneratorType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data._utils import worker as torch_worker

from ..randomness import Random, fold, seed_globals
from .batch_buffer import BatchBuffer
from .pool import SET_UP
from .reader import Mark, Reading
from .streams import Place, Progress, StreamError, StreamTask, drops_its_buffer

KEYS = 256  # keys of samples that are computed together


@dataclass
class StreamReader:
    """Reads tasks from streams. Workers get it by fork or as a pickle; one thread uses it."""

    dataset: Any
    collate_fn: Callable[[Any], Any]
    drop_last: bool
    seed: int | None
    skips: bool  # samples that raise are left out
    streams: int
    shuffle_buffer: int
    repeats: bool  # a stream that ends begins its next epoch
    init_fn: Callable[[int], None] | None  # with a seed
    pickled: bytes  # with a seed: the dataset, of which each stream makes its copy, and init_fn if it is its method
    iterator: Any = None  # over the dataset, if iter(loader) has to make it as torch's does: no seed and no workers
    spec: None = None
    open: dict[int, _Stream] = field(default_factory=dict)

    def read(
        self, task: StreamTask, buffer: BatchBuffer, reading: Reading, mark: Mark = lambda _: None, seeds: bool = True
    ) -> None:
        """Reads the stream's next batch; there is none if it has ended. Arguments and errors are those of Reader.

        If an exception from a signal handler interrupts it, the next call begins where this one did.
        """
        if not seeds:
            raise RuntimeError(
                "a stream with a seed cannot be read in a thread, as get_worker_info() and the random generators are "
                "global: use num_workers=1 or more, or a Preloader with depth=0 (loader.preload_depth=0)"
            )
        before, reading.progress = torch_worker._worker_info, Progress(task.stream, is_over=True)  # if it cannot open
        try:
            self._read(task, buffer, reading, mark)
        finally:
            torch_worker._worker_info = before

    def _read(self, task: StreamTask, buffer: BatchBuffer, reading: Reading, mark: Mark) -> None:
        place = task.start
        stream = self.open.get(task.stream) if place is None else self.open.pop(task.stream, None)
        if stream is not None and stream.task is task and self.seed is not None:
            place = stream.before  # it was interrupted
        if place is not None:
            stream = self.open[task.stream] = _Stream(self, task.stream, place, mark)
        if stream is None:  # it could not be opened for the task before, which had the error
            reading.progress = Progress(task.stream, is_over=True, is_empty=True)
            return
        is_new, stream.before, stream.task = stream.is_new, stream.place, task
        try:
            samples = stream.read(task.rows or 1, mark, reading.skipped)
        except Exception:
            reading.progress = stream.advance()
            raise
        progress = reading.progress = stream.advance(is_empty=stream.ended and not samples)
        if progress.is_empty:
            return
        if not samples:
            reasons = "; ".join(f"sample {sample}: {reason}" for sample, reason in reading.skipped[:3])
            raise RuntimeError(f"on_error='skip' has left out every sample of a batch ({reasons})")
        if is_new:
            with suppress(Exception):  # samples that cannot be pickled are not compared
                file = io.BytesIO()
                _ValuePickler(file).dump(samples[:4])
                reading.progress = progress._replace(digest=hashlib.sha256(file.getvalue()).digest())
        began = time.perf_counter()
        reading.batch = buffer.collate(self.collate_fn, samples if task.rows else samples[0])
        reading.collate_seconds = time.perf_counter() - began

    def close(self) -> None:
        """Drops the iterators over the dataset: generators run their `finally` now, though streams are in cycles."""
        self.iterator = None
        self.open.clear()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "open": {}, "dataset": None if self.pickled else self.dataset}


def stream_reader(loader: Any) -> StreamReader:
    """Returns the reader of a WorkerLoader's streams. Raises StreamError if a seed is given and pickling fails."""
    added, dataset = loader._added, loader.dataset
    init_fn, drop_last = loader.worker_init_fn, loader.drop_last
    how = added.on_error == "skip", added.streams, added.shuffle_buffer, added.steps_per_epoch is not None
    try:
        own = init_fn if getattr(init_fn, "__self__", None) is dataset else None
        pickled = b"" if added.seed is None else pickle.dumps((dataset, own), pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        raise StreamError(
            f"{type(dataset).__name__} cannot be pickled, and each stream reads a copy of it that is made so: leave "
            f"open files, generators and lambdas out of its attributes ({error})"
        ) from error
    iterator = iter(dataset) if added.seed is None and not loader.num_workers else None
    return StreamReader(dataset, loader.collate_fn, drop_last, added.seed, *how, init_fn, pickled, iterator)


class _Stream:
    """An open stream. Samples go through a block: the shuffle buffer, which is read, shuffled and used up in turn."""

    def __init__(self, reader: StreamReader, number: int, place: Place, mark: Mark) -> None:
        self._reader, self._number = reader, number
        self.before = self.place = place  # before and after the newest task
        self.task: StreamTask | None = None
        self._dropped: tuple[int, float] | None = None
        self._dataset, self._info = reader.dataset, torch_worker._worker_info
        self._begin(place, mark)
        self.is_new = reader.seed is not None and not self._drawn  # no sample was delivered

    def _begin(self, place: Place, mark: Mark) -> None:
        """Makes an iterator over the dataset that is at `place`."""
        reader, seed = self._reader, self._reader.seed
        self._epoch, self._drawn, self.ended = place.epoch, 0, place.ended
        self._is_exhausted = place.ended  # the dataset; it may have filled a block before
        self._block: list[Any] = []  # samples, or failures in their place
        self._taken = 0  # out of the block
        self._start: tuple[int, Any] = 0, None  # samples before the block, and the dataset's state there
        if place.ended:
            self._drawn = place.samples + place.taken
            return
        if seed is None:
            self._iterator = iter(self._dataset) if reader.iterator is None else reader.iterator
            return
        began, state, key = time.perf_counter(), place.state or {}, int(fold(seed, self._epoch, self._number))
        self._dataset, own_init_fn = pickle.loads(reader.pickled)
        torch_worker._worker_info = self._info = torch_worker.WorkerInfo(
            id=self._number, num_workers=reader.streams, seed=key >> 1, dataset=self._dataset
        )
        seed_globals(key)
        if (init_fn := own_init_fn or reader.init_fn) is not None:
            init_fn(self._number)
        if callable(getattr(self._dataset, "set_epoch", None)):
            self._dataset.set_epoch(self._epoch)
        if "dataset" in state:  # in the order of torchdata's StatefulDataLoader
            self._dataset.load_state_dict(state["dataset"])
        self._iterator = iter(self._dataset)
        if "iterator" in state:
            self._iterator.load_state_dict(state["iterator"])
        if state:
            self._drawn = place.samples
        self._keys = _keys(seed, self._epoch, self._number, self._drawn)
        to_drop = place.samples - self._drawn + place.taken
        for at in range(to_drop):
            mark(SET_UP - 1 - at)  # another number each time, so that `timeout` limits each sample
            if self._drawn == place.samples:
                self._start = place.samples, place.state
            try:
                self._draw() if self._drawn < place.samples else self._next()
            except StopIteration:
                raise StreamError(
                    f"stream {self._number} has ended after {self._drawn} samples, before the place to resume: "
                    "its dataset has fewer samples now, or other ones each time that it is read"
                ) from None
        if not place.taken:
            self._start = place.samples, place.state
        if to_drop:
            self._dropped = to_drop, time.perf_counter() - began

    def read(self, count: int, mark: Mark, skipped: list[tuple[Any, str]]) -> list[Any]:
        """Returns the next `count` samples, or fewer at the stream's end."""
        torch_worker._worker_info, samples = self._info, list[Any]()
        take = self._next if self._reader.shuffle_buffer > 1 else self._draw
        least = count if self._reader.drop_last else 1
        if self.ended:
            self._repeat(mark, least)
        while not self.ended and (row := len(samples) + len(skipped)) < count:
            mark(row)
            try:
                sample = take()
            except StopIteration:
                self.ended = True
                if self._reader.drop_last:
                    del samples[:], skipped[:]
                if not samples and not skipped:
                    self._repeat(mark, least)
                continue
            if not isinstance(sample, _Failure):
                samples.append(sample)
            # A generator has ended with its error: skipping that sample would lose all others.
            elif self._reader.skips and not isinstance(self._iterator, GeneratorType):
                skipped.append((f"{sample.number} of stream {self._number}", repr(sample.error)))
            else:
                raise sample.error
        if self._reader.shuffle_buffer > 1:  # for collate_fn: the samples may all have been drawn by an earlier task
            seed_globals(int(fold(self._reader.seed or 0, self._epoch, self._number, self._start[0], self._taken)))
        return samples

    def _repeat(self, mark: Mark, least: int) -> None:
        """Begins the stream's next epoch, if it should, and if this one had at least `least` samples."""
        if self._reader.repeats and self._drawn >= least:
            self._begin(Place(self._epoch + 1), mark)

    def advance(self, is_empty: bool = False) -> Progress:
        """Ends a task: the stream's place is now after it."""
        if self._taken == len(self._block):
            self._block, self._taken, self._start = [], 0, (self._drawn, self._own_state())
        samples, state = self._start
        self.place = Place(self._epoch, samples, self._taken, self.ended, state)
        dropped, self._dropped, self.is_new = self._dropped, None, False
        is_over = is_empty or (self.ended and not self._reader.repeats)
        return Progress(self._number, self.place, is_over, is_empty, dropped)

    def _next(self) -> Any:
        """Returns the next sample of the block, or its failure. Raises StopIteration at the end."""
        if self._taken == len(self._block):
            self._fill()
        sample, self._block[self._taken] = self._block[self._taken], None
        self._taken += 1
        return sample

    def _fill(self) -> None:
        """Reads a block, and shuffles it. Raises StopIteration at the end."""
        if self._is_exhausted:  # some iterators begin anew if they are asked again
            raise StopIteration
        first = self._drawn
        if first != self._start[0]:
            self._start = first, self._own_state()
        block = [self._draw()]
        with suppress(StopIteration):
            while len(block) < self._reader.shuffle_buffer:
                block.append(self._draw())
        rows = np.argsort(Random(self._reader.seed or 0, self._epoch, self._number, first).uniform(len(block)))
        self._block, self._taken = [block[row] for row in rows.tolist()], 0

    def _draw(self) -> Any:
        """Returns the dataset's next sample, or its failure. Raises StopIteration at the end."""
        if self._reader.seed is not None:
            seed_globals(next(self._keys))
        number = self._drawn
        try:
            sample = next(self._iterator)
        except StopIteration:
            self._is_exhausted = True
            raise
        except Exception as error:
            sample = _Failure(number, error)
        self._drawn = number + 1
        return sample

    def _own_state(self) -> dict[str, Any] | None:
        """Returns the states of the dataset and its iterator, if resuming from them is exact: none at the end."""
        if self._reader.seed is None or self._is_exhausted or drops_its_buffer(self._dataset):
            return None
        parts = {"iterator": self._iterator}
        if self._iterator is not self._dataset:
            parts["dataset"] = self._dataset
        methods = ("state_dict", "load_state_dict")
        stateful = [name for name, part in parts.items() if all(hasattr(part, method) for method in methods)]
        return {name: parts[name].state_dict() for name in stateful} or None


class _Failure(NamedTuple):
    """An error in the place of sample `number`."""

    number: int
    error: Exception


class _ValuePickler(pickle.Pickler):
    """Pickles a tensor's own elements: torch would pickle its whole storage, which may be the dataset."""

    def reducer_override(self, item: Any) -> Any:
        return (bytes, (item.numpy().tobytes(),)) if isinstance(item, torch.Tensor) else NotImplemented


def _keys(seed: int, epoch: int, stream: int, first: int) -> Iterator[int]:
    """Yields the keys of a stream's samples, from number `first` on."""
    while True:
        yield from fold(seed, epoch, stream, np.arange(first, first + KEYS)).tolist()
        first += KEYS
