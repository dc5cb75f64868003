"""Keeps the whole dataset on the device, and gathers and augments each batch there, by whole-batch operations.

No sample is read, collated or copied while training, so no loader is faster if the data fit. Only a batch's indices
and random numbers are copied, and the host does not wait for that. The idea is from airbench's CifarLoader (Keller
Jordan).
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from .arguments import LoaderConfigError
from .epoch_loader import EpochLoader, TaskSource
from .machine import available_memory
from .nested import leaves, move, tensors
from .preload.accelerator import Accelerator, checked_device
from .preload.transfer import strided_parts
from .randomness import Random, preserved_globals
from .workers.batch_buffer import BatchBuffer
from .workers.reader import Reader, Reading, offers, spec_of
from .workers.shared_memory import MachineFull
from .workers.tasks import Task

log = logging.getLogger(__name__)

Augment = Callable[[Any, Random], Any]

READ_AT_ONCE = 64  # samples that are read together where a batch sampler decides what a batch is


class ResidentLoader(EpochLoader):
    """Batches on `device` of a map-style dataset that is loaded there once, when the first epoch begins.

    A dataset may offer
    - `arrays()` -> {"image": uint8 (N, ...), "label": int64 (N,)}: all samples as arrays, one row per sample;
    - `augment_batch(batch, random)`: turns rows of those arrays, gathered on the device (B, ...), into samples.
      `random` is a `loaders.Random` with a stream per row, keyed as for `read_batch`, or None for no augmentation.

    Any other dataset is read once, by `read_batch` or `__getitem__`, and keeps the random numbers drawn then.

    augment: True calls the dataset's `augment_batch`; a callable (batch, random) -> batch is called instead of it,
        with the gathered rows; False or None: no augmentation.
    The other arguments mean what they mean in WorkerLoader.

    Raises MachineFull if the dataset needs more memory than is free, RuntimeError for a device that does not exist,
    LoaderConfigError for samples that do not have the same fields. `iter()` raises the dataset's own errors.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        shuffle: bool = False,
        seed: int = 0,
        device: torch.device | str = "cpu",
        augment: Augment | bool | None = True,
        drop_last: bool = False,
        rank: int = 0,
        world_size: int = 1,
        pad: bool = True,
        last_batch: str | None = None,
        sampler: Any = None,
        batch_sampler: Any = None,
    ) -> None:
        order = batch_size, shuffle, seed, drop_last, rank, world_size, pad, last_batch, sampler, batch_sampler
        super().__init__(dataset, *order)
        if not self._epochs.tasks.has_sampler:
            self._epochs.tasks.form = np.asarray
        if not (augment is None or isinstance(augment, bool) or callable(augment)):
            raise ValueError(f"augment={augment!r}: give a function (batch, random) -> batch, True or False")
        self.device = checked_device(device)
        self._accelerator = Accelerator(self.device)
        own = getattr(dataset, "augment_batch", None) if offers(dataset, "arrays") else None
        self._augment: Augment | None = own if augment is True else augment or None
        if not augment and own is not None:
            self._augment = lambda batch, _: own(batch, None)
        self._samples: Any = None  # all samples on the device, as one batch

    def stats(self) -> dict[str, Any]:
        """Returns {"resident": {"bytes": size of the dataset on the device}}."""
        return {"resident": {"bytes": sum(tensor.nbytes for tensor in tensors(self._samples))}}

    def close(self) -> None:
        """Frees the dataset on the device; delivered batches stay valid. May be called repeatedly, in any state."""
        super().close()
        self._samples = None

    def _prepare(self) -> None:
        if self._samples is None and len(self.dataset):
            self._samples = self._from_arrays() if offers(self.dataset, "arrays") else self._read_once()

    def _open(self, epoch: int, first: int) -> TaskSource:
        return TaskSource(self._batch, self._epochs.tasks.epoch(epoch, first))

    def _batch(self, task: Task) -> Any:
        indices = np.asarray(task.indices)
        if indices.dtype.kind not in "iu":
            raise TypeError(f"loader=resident gathers rows by integers, and the sampler gave {task.indices!r}")
        wanted = torch.from_numpy(indices)
        if self._accelerator.has_streams:
            wanted = wanted.pin_memory()  # from pageable memory the copy would be synchronous
            for part in strided_parts(self._samples):  # which may be freed while this gather is under way
                if part.device == self.device:
                    part.record_stream(self._accelerator.current_stream())
        wanted = wanted.to(self.device, non_blocking=self._accelerator.has_streams)
        batch = move(self._samples, lambda rows: rows.index_select(0, wanted))
        if self._augment is not None:
            batch = self._augment(batch, Random(self.seed, *task.random_key(), indices))
        return batch

    def _from_arrays(self) -> dict[str, torch.Tensor]:
        kind, length = type(self.dataset).__name__, len(self.dataset)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # about read-only arrays: nothing here writes to them
            fields = {name: _as_tensor(array) for name, array in self.dataset.arrays().items()}
        for name, field in fields.items():
            if field.shape[:1] != (length,):
                raise LoaderConfigError(
                    f"{kind}.arrays() has {name!r} of shape {tuple(field.shape)}, and {kind} has {length:,} samples: "
                    "give one row per sample"
                )
        # Arrays that are already on the device are used as they are, and need no more memory.
        self._check_room(sum(field.nbytes for field in fields.values() if field.device != self.device))
        return {name: field.to(self.device) for name, field in fields.items()}

    def _read_once(self) -> Any:
        """Reads all samples, in the dataset's order, a batch at a time."""
        length, step = len(self.dataset), self.batch_size or READ_AT_ONCE
        reader = Reader(self.dataset, default_collate, True, self.seed, spec_of(self.dataset), skips=False)
        whole, layout = None, ""
        # The first sample is read alone, to learn how much memory all of them need.
        for start, stop in pairwise([0, *range(1, length, step), length]):
            task = Task(list(range(start, stop)), 0, 0, np.arange(start, stop, dtype=np.int64).tobytes())
            with preserved_globals():  # the model's own draws must not change with the loader
                reader.read(task, BatchBuffer(), reading := Reading())
                part = reading.batch
            if whole is None:
                whole, layout = self._make_room(part), _layout(part)
                warn_of_reading_once(type(self.dataset).__name__)
            if _layout(part) != layout:
                raise LoaderConfigError(
                    f"samples {start} to {stop - 1} are {_layout(part)} where sample 0 is {layout}: "
                    "loader=resident needs samples of the same fields, shapes and dtypes"
                )
            for ours, theirs in zip(leaves(whole), leaves(part), strict=True):
                ours[start:stop] = theirs
        return whole

    def _make_room(self, first: Any) -> Any:
        """Returns a batch like `first`, which has one sample, but with an unwritten row for every sample."""
        other = next(_others(first), None)
        if other is not None:
            raise LoaderConfigError(
                f"loader=resident keeps only tensors, and a sample of {type(self.dataset).__name__} also has a "
                f"{type(other).__name__} ({other!r}): leave it out of the samples, or use loader=prefetch"
            )
        self._check_room(len(self.dataset) * sum(tensor.nbytes for tensor in tensors(first)))
        shape = (len(self.dataset),)
        return move(first, lambda rows: torch.empty(shape + rows.shape[1:], dtype=rows.dtype, device=self.device))

    def _check_room(self, needed: int) -> None:
        free = free_bytes(self.device)
        if free is not None and needed > free:
            raise MachineFull(
                f"loader=resident needs {_size(needed)} on {self.device} for {len(self.dataset):,} samples, and "
                f"{_size(free)} are free: use loader=prefetch"
            )


def free_bytes(device: torch.device) -> int | None:
    """Returns the bytes of memory that this process may still use on `device`; None if the system does not tell."""
    return available_memory() if device.type == "cpu" else Accelerator(device).free_bytes()


@cache
def warn_of_reading_once(kind: str) -> None:
    log.warning("%s has no arrays(): it is read once, so its random augmentation is the same in every epoch", kind)


def _as_tensor(array: Any) -> torch.Tensor:
    return array if isinstance(array, torch.Tensor) else torch.from_numpy(np.asarray(array))


def _layout(batch: Any) -> str:
    """Returns the structure of a sample, with each tensor's dtype and shape."""
    return repr(move(batch, lambda rows: f"{rows.dtype} {tuple(rows.shape[1:])}"))


def _others(batch: Any) -> Iterator[Any]:
    """Yields each value in the batch that is not a tensor."""
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if isinstance(batch, Sequence) and not isinstance(batch, (str, bytes)):
        for value in batch:
            yield from _others(value)
    elif not isinstance(batch, torch.Tensor):
        yield batch


def _size(count: int) -> str:
    return f"{count / 1e9:,.1f} GB" if count >= 1e9 else f"{count / 1e6:,.1f} MB"
