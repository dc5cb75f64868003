"""Tensors of a batch are written into its slot one after the other, and into new memory if they do not fit."""

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate
from torch.utils.data._utils.collate import collate_tensor_fn, default_collate_fn_map

from loaders.workers.batch_buffer import ALIGNMENT, BatchBuffer, WorkerBuffer, is_plain

KINDS = pytest.mark.parametrize("kind", [BatchBuffer, WorkerBuffer])


def memory(size: int = 4 * ALIGNMENT) -> np.ndarray:
    """A slot's bytes, which no tensor has been written into."""
    return np.full(size, 0xEE, np.uint8)


def place(tensor: torch.Tensor, buffer: BatchBuffer) -> int | None:
    """Where the tensor lies in the slot; None if it lies elsewhere."""
    offset = tensor.data_ptr() - buffer.slot.ctypes.data
    return offset if 0 <= offset < len(buffer.slot) else None


@pytest.mark.parametrize(
    ("slot", "sizes", "places", "needed"),
    [
        (4, [15, 8, 65], [0, 64, 128], 256),
        (4, [256], [0], 256),  # a slot may be filled to its last byte
        (4, [64, 193, 1], [0, None, 64], 384),  # what finds no room lies elsewhere
        (0, [2], [None], 64),
        (0, [0], [None], 0),  # an empty tensor takes no room
    ],
)
def test_tensors_are_placed_one_after_the_other_at_aligned_places(slot, sizes, places, needed):
    buffer = WorkerBuffer(memory(slot * ALIGNMENT))
    tensors = [buffer.empty((size,), torch.uint8) for size in sizes]
    assert [place(tensor, buffer) for tensor in tensors] == places
    assert (buffer.needed, buffer.overflowed) == (needed, needed > slot * ALIGNMENT)
    assert [tensor.untyped_storage().nbytes() for tensor in tensors] == sizes
    scalar = buffer.empty((), torch.float64)
    assert (scalar.shape, scalar.dtype) == ((), torch.float64)


def test_small_tensors_that_nobody_copies_later_get_memory_of_their_own():
    buffer = BatchBuffer(memory(16 * ALIGNMENT))
    labels, images = (buffer.empty((size,), torch.uint8) for size in (4 * ALIGNMENT - 1, 4 * ALIGNMENT))
    assert (place(labels, buffer), place(images, buffer)) == (None, 0)
    assert (buffer.needed, buffer.overflowed) == (8 * ALIGNMENT, False)


@KINDS
@pytest.mark.parametrize(
    ("samples", "is_placed"),
    [
        ([torch.arange(4), torch.arange(4, 8)], True),
        ([torch.zeros(2), torch.ones(2, dtype=torch.float64)], False),
        ([torch.empty(0), torch.empty(0)], False),
        ([torch.ones(2, requires_grad=True), torch.ones(2)], False),
        ([torch.ones(2, 2, 2, 2).to(memory_format=torch.channels_last)] * 2, False),
    ],
    ids=["plain", "mixed dtypes", "empty", "a gradient", "channels last"],
)
def test_default_collate_stacks_into_the_slot_what_torch_would_stack_alike(kind, samples, is_placed):
    buffer, expected = kind(memory()), torch.stack(samples)
    stacked = buffer.collate(default_collate, samples)
    assert (stacked.dtype, stacked.stride()) == (expected.dtype, expected.stride())
    assert torch.equal(stacked, expected)
    assert (buffer.needed > 0) == is_placed
    assert default_collate_fn_map[torch.Tensor] is collate_tensor_fn


class Marked(torch.Tensor):
    """A subclass that changes nothing."""


class Intercepting(torch.Tensor):
    """A subclass that is no plain memory."""

    __torch_dispatch__ = classmethod(lambda cls, function, types, args=(), kwargs=None: NotImplemented)


@pytest.mark.filterwarnings("ignore")  # torch means to drop some of these
def test_plain_tensors_are_cpu_memory_of_any_class():
    one = torch.ones(2)
    assert is_plain(one) and is_plain(one.as_subclass(Marked))
    nested, quantized = (
        torch.nested.nested_tensor([one, torch.ones(3)]),
        torch.quantize_per_tensor(one, 1.0, 0, torch.quint8),
    )
    odd = [one.to_sparse(), torch.ones(2, requires_grad=True), nested, quantized, torch.ones(2, device="meta")]
    assert not any(map(is_plain, [*odd, one.as_subclass(Intercepting), one.to(torch.complex64).conj()]))


def test_a_collate_fn_may_replace_how_default_collate_stacks():
    def mine(samples, *, collate_fn_map=None) -> str:
        return "stacked"

    def collate_fn(samples: list) -> str:
        default_collate_fn_map[torch.Tensor] = mine
        return default_collate(samples)

    try:
        for _ in range(2):
            assert WorkerBuffer(memory()).collate(collate_fn, [torch.ones(2)]) == "stacked"
        assert default_collate_fn_map[torch.Tensor] is mine
    finally:
        default_collate_fn_map[torch.Tensor] = collate_tensor_fn
