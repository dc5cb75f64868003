"""Pickles a batch without its tensors, which lie in shared memory: the pickle has a reference to each of them.

So a batch of any structure is sent in a few hundred bytes. Only unusual tensors (sparse, nested, quantized, with
gradients) are sent inside the pickle.
"""

from __future__ import annotations

import io
import math
import pickle
from typing import Any

import numpy as np
import torch

from .batch_buffer import SMALL, Reference, SharedBatchBuffer, is_plain


def dump(batch: Any, buffer: SharedBatchBuffer) -> bytes:
    """Pickles a batch; the tensors that lie in `buffer`, or are copied there, are replaced by references."""
    file = io.BytesIO()
    _BatchPickler(file, buffer).dump(batch)
    return file.getvalue()


def load(pickled: bytes, slot: np.ndarray | None, overflow: np.ndarray | None, batch_bytes: int) -> Any:
    """Unpickles a batch whose tensors take `batch_bytes`, in `slot` and `overflow`, both uint8 (size,).

    Its tensors share that memory, except those that are a small part of the batch: they are cloned, see SMALL.
    """
    return _BatchUnpickler(io.BytesIO(pickled), slot, overflow, batch_bytes).load()


class _BatchPickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, buffer: SharedBatchBuffer) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._buffer = buffer

    def persistent_id(self, item: Any) -> Reference | None:
        return self._buffer.place(item) if type(item) is torch.Tensor else None

    def reducer_override(self, item: Any) -> Any:
        """Sends a tensor of a subclass, such as torchvision's tv_tensors, as a plain tensor and its attributes."""
        is_special = type(item) is torch.Tensor or isinstance(item, torch.nn.Parameter)
        if isinstance(item, torch.Tensor) and not is_special and is_plain(item):
            return _as_subclass, (type(item), item.as_subclass(torch.Tensor), item.__dict__)
        return NotImplemented


class _BatchUnpickler(pickle.Unpickler):
    def __init__(
        self, file: io.BytesIO, slot: np.ndarray | None, overflow: np.ndarray | None, batch_bytes: int
    ) -> None:
        super().__init__(file)
        self._slot, self._overflow, self._batch_bytes = slot, overflow, batch_bytes
        self._tensors: dict[Reference, torch.Tensor] = {}

    def persistent_load(self, reference: Reference) -> torch.Tensor:
        if reference not in self._tensors:
            self._tensors[reference] = self._tensor(*reference)
        return self._tensors[reference]

    def _tensor(
        self, offset: int, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...]
    ) -> torch.Tensor:
        memory, offset = (self._slot, offset) if offset >= 0 else (self._overflow, -1 - offset)
        flat = torch.frombuffer(memory, dtype=dtype, count=math.prod(shape), offset=offset)
        if flat.nbytes < SMALL * self._batch_bytes:
            flat = flat.clone()
        return torch.as_strided(flat, shape, stride)


def _as_subclass(kind: type, tensor: torch.Tensor, attributes: dict[str, Any]) -> torch.Tensor:
    item: torch.Tensor = tensor.as_subclass(kind)
    item.__dict__.update(attributes)
    return item
