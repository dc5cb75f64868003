"""Tensors of a batch are written into its slot one after the other, and into memory of the batch's own after that."""

import os
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data._utils.collate import default_collate_fn_map

from loaders.workers.batch_buffer import (
    ALIGNMENT,
    BatchBuffer,
    SharedBatchBuffer,
    is_plain,
    stacks_as_torch_does,
    tensor_at,
)
from loaders.workers.shared_memory import page_aligned

PAGE = page_aligned(1)


def memory(size: int = 4 * ALIGNMENT) -> np.ndarray:
    """A slot's bytes, which no tensor has been written into."""
    return np.full(size, 0xEE, np.uint8)


def lies_at(tensor: torch.Tensor, slot: np.ndarray) -> int:
    return tensor.data_ptr() - slot.ctypes.data


@pytest.fixture
def shared():
    buffers = []

    def make(slot: np.ndarray | None = None) -> SharedBatchBuffer:
        buffers.append(SharedBatchBuffer(slot))
        return buffers[-1]

    yield make
    for buffer in buffers:
        buffer.close()


# Room


def test_tensors_are_placed_one_after_the_other_at_aligned_places():
    slot = memory()
    buffer = BatchBuffer(slot)
    tensors = [buffer.empty((3, 5), torch.uint8), buffer.empty((), torch.float64), buffer.empty((65,), torch.int8)]
    assert [lies_at(tensor, slot) for tensor in tensors] == [0, ALIGNMENT, 2 * ALIGNMENT]
    assert [tuple(tensor.shape) for tensor in tensors] == [(3, 5), (), (65,)]
    assert [tensor.dtype for tensor in tensors] == [torch.uint8, torch.float64, torch.int8]
    assert (buffer.needed, buffer.overflowed) == (4 * ALIGNMENT, False)
    assert [tensor.untyped_storage().nbytes() for tensor in tensors] == [15, 8, 65]


@pytest.mark.parametrize("size", [4 * ALIGNMENT, 3 * ALIGNMENT + 1])
def test_a_slot_may_be_filled_to_its_last_byte(size):
    slot = memory(size)
    buffer = BatchBuffer(slot)
    assert lies_at(buffer.empty((size,), torch.uint8), slot) == 0
    assert not buffer.overflowed


def test_what_finds_no_room_and_all_after_it_overflow():
    slot = memory()
    buffer = BatchBuffer(slot)
    buffer.empty((ALIGNMENT,), torch.uint8)
    large, small = buffer.empty((3 * ALIGNMENT + 1,), torch.uint8), buffer.empty((1,), torch.uint8)
    assert buffer.overflowed
    for tensor in (large, small):
        assert not 0 <= lies_at(tensor, slot) < len(slot)
    assert buffer.needed == 6 * ALIGNMENT  # how large the slot should have been


def test_without_a_slot_everything_overflows():
    buffer = BatchBuffer()
    assert buffer.empty((2,), torch.int32).shape == (2,)
    assert (buffer.needed, buffer.overflowed) == (ALIGNMENT, True)


@pytest.mark.parametrize("shape", [(0,), (3, 0)])
def test_an_empty_tensor_takes_no_room(shape):
    buffer = BatchBuffer()
    tensor = buffer.empty(shape, torch.int32)
    assert (tuple(tensor.shape), tensor.dtype) == (shape, torch.int32)
    assert (buffer.needed, buffer.overflowed) == (0, False)


# Stacking


def test_samples_are_stacked_into_the_slot():
    slot = memory()
    samples = [torch.arange(3) + 10 * row for row in range(2)]
    stacked = BatchBuffer(slot).stack(samples)
    assert lies_at(stacked, slot) == 0
    assert torch.equal(stacked, torch.stack(samples))


@pytest.mark.parametrize(
    "samples",
    [
        [torch.zeros(2), torch.ones(2, dtype=torch.float64)],
        [torch.empty(0), torch.empty(0)],
        [torch.ones(2, requires_grad=True)] * 2,
        [torch.ones(2, requires_grad=True), torch.ones(2)],
    ],
    ids=["mixed dtypes", "empty", "gradients", "a gradient"],
)
def test_unusual_samples_are_stacked_as_torch_does(samples):
    buffer = BatchBuffer(memory())
    stacked, expected = buffer.stack(samples), torch.stack(samples)
    assert stacked.dtype == expected.dtype
    assert torch.equal(stacked, expected)
    assert buffer.needed == 0


class Marked(torch.Tensor):
    """A subclass that changes nothing."""


def test_a_stack_function_of_the_users_is_noticed(monkeypatch):
    assert stacks_as_torch_does() is True
    monkeypatch.setitem(default_collate_fn_map, torch.Tensor, lambda samples, **_: samples)
    assert stacks_as_torch_does() is False


class Intercepting(torch.Tensor):
    """A subclass that is no plain memory."""

    __torch_dispatch__ = classmethod(lambda cls, function, types, args=(), kwargs=None: NotImplemented)


@pytest.fixture
def unusual() -> list[torch.Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch means to drop the last two
        return [
            torch.ones(2).to_sparse(),
            torch.ones(2, requires_grad=True),
            torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
            torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.quint8),
        ]


def test_plain_tensors_are_cpu_memory_of_any_class(unusual):
    assert is_plain(torch.ones(2)) is is_plain(torch.ones(2).as_subclass(Marked)) is True
    for tensor in [*unusual, torch.ones(2, device="meta"), torch.ones(2).as_subclass(Intercepting)]:
        assert is_plain(tensor) is False


# Small tensors


def test_a_small_part_of_a_batch_is_copied_out_of_the_slot():
    slot = memory(16 * ALIGNMENT)
    buffer = BatchBuffer(slot)
    images, labels = buffer.empty((3 * ALIGNMENT,), torch.uint8), buffer.empty((ALIGNMENT,), torch.uint8)
    assert buffer.owned(images) is images
    assert buffer.owned(labels) is labels  # a quarter is not small
    labels.zero_()
    buffer.empty((1,), torch.uint8)
    copy = buffer.owned(labels)
    assert torch.equal(copy, labels)
    assert not 0 <= lies_at(copy, slot) < len(slot)


def test_a_small_tensor_at_the_beginning_of_the_slot_is_copied_too():
    buffer = BatchBuffer(memory(16 * ALIGNMENT))
    labels = buffer.empty((1,), torch.uint8)
    buffer.empty((9 * ALIGNMENT,), torch.uint8)
    assert buffer.owned(labels) is not labels


def test_what_does_not_lie_in_the_slot_is_not_copied():
    slot = memory(4 * ALIGNMENT)
    buffer = BatchBuffer(slot[ALIGNMENT : 3 * ALIGNMENT])
    buffer.empty((2 * ALIGNMENT,), torch.uint8)
    ahead, behind = (tensor_at(slot, place, torch.uint8, (1,)) for place in (ALIGNMENT - 1, 3 * ALIGNMENT))
    sparse = torch.ones(1).to_sparse()
    marked = tensor_at(slot, ALIGNMENT, torch.uint8, (1,)).as_subclass(Marked)
    for item in (ahead, behind, torch.ones(1), sparse, marked, "text", None):
        assert buffer.owned(item) is item
    first = torch.ones(1)
    assert BatchBuffer().owned(first) is first


# Places for another process


def test_a_tensor_in_the_slot_is_referred_to_where_it_is(shared):
    slot = memory()
    buffer = shared(slot)
    buffer.empty((1,), torch.uint8)
    tensor = buffer.empty((2, 3), torch.int16)
    assert buffer.place(tensor) == (ALIGNMENT, torch.int16, (2, 3), (3, 1))
    assert buffer.place(tensor[1, 1:]) == (ALIGNMENT + 8, torch.int16, (2,), (1,))
    assert buffer.needed == 2 * ALIGNMENT


def test_any_other_tensor_is_copied_into_the_slot_once(shared):
    slot = memory()
    buffer = shared(slot)
    tensor = torch.arange(6, dtype=torch.uint8)
    reference = buffer.place(tensor)
    assert reference == (0, torch.uint8, (6,), (1,))
    assert slot[:6].tolist() == [0, 1, 2, 3, 4, 5]
    assert buffer.place(tensor) is reference
    assert buffer.needed == ALIGNMENT


@pytest.mark.parametrize("place", [ALIGNMENT - 1, 3 * ALIGNMENT])
def test_a_tensor_just_outside_the_slot_is_copied_into_it(shared, place):
    whole = memory(4 * ALIGNMENT)
    slot = whole[ALIGNMENT : 3 * ALIGNMENT]
    slot[:] = 0
    assert shared(slot).place(tensor_at(whole, place, torch.uint8, (1,)))[0] == 0
    assert slot[0] == 0xEE


def test_dense_tensors_keep_their_strides_and_others_get_new_ones(shared):
    buffer = shared(memory())
    assert buffer.place(torch.zeros(2, 3, dtype=torch.uint8).t())[2:] == ((3, 2), (1, 3))
    assert buffer.place(torch.zeros(2, 6, dtype=torch.uint8)[:, ::2])[2:] == ((2, 3), (3, 1))
    assert buffer.place(torch.zeros(1, dtype=torch.uint8).expand(4))[2:] == ((4,), (1,))


def test_an_overflow_lies_in_whole_pages_of_shared_memory(shared):
    buffer = shared(memory(ALIGNMENT))
    assert buffer.overflow_fd is None
    first, second, third = torch.ones(PAGE + 1, dtype=torch.uint8), torch.full((8,), 7), torch.ones(3)
    offsets = [buffer.place(tensor)[0] for tensor in (first, second, third)]
    assert offsets == [-1, -1 - 2 * PAGE, -1 - 3 * PAGE]
    inside = buffer.empty((4,), torch.uint8)
    assert buffer.place(inside[2:])[0] == -1 - 4 * PAGE - 2
    assert buffer.overflowed
    assert os.fstat(buffer.overflow_fd).st_size == 5 * PAGE
    alone = shared()
    assert alone.place(alone.empty((4,), torch.uint8)[2:])[0] == -3


def test_closing_closes_the_overflows_descriptor():
    buffer = SharedBatchBuffer()
    buffer.place(torch.ones(3))
    buffer.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(buffer.overflow_fd)


def test_a_cuda_tensor_of_a_worker_is_refused_with_advice(shared):
    with pytest.raises(TypeError, match="a worker made a CUDA tensor: make CPU tensors there"):
        shared(memory()).place(SimpleNamespace(is_cuda=True))


def test_what_is_no_plain_memory_has_to_be_pickled(shared, unusual):
    buffer = shared(memory())
    assert not buffer.is_pickled
    for tensor in unusual:
        buffer.is_pickled = False
        assert buffer.place(tensor) is None
        assert buffer.is_pickled
    buffer.is_pickled = False
    light = [torch.empty(0), torch.ones(2, device="meta"), torch.ones(2, dtype=torch.complex64).conj()]
    light.append(torch.ones(2, dtype=torch.complex64).conj().imag)
    assert [buffer.place(tensor) for tensor in light] == [None] * 4
    assert not buffer.is_pickled
    assert buffer.needed == 0
