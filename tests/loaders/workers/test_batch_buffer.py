"""Tensors of a batch are written into its slot one after the other, and into new memory if they do not fit."""

import warnings

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate
from torch.utils.data._utils.collate import collate_tensor_fn, default_collate_fn_map

from loaders.workers.batch_buffer import (
    ALIGNMENT,
    BatchBuffer,
    ThreadBuffer,
    WorkerBuffer,
    is_plain,
    stacks_as_torch_does,
)


def memory(size: int = 4 * ALIGNMENT) -> np.ndarray:
    """A slot's bytes, which no tensor has been written into."""
    return np.full(size, 0xEE, np.uint8)


def lies_at(tensor: torch.Tensor, slot: np.ndarray) -> int:
    return tensor.data_ptr() - slot.ctypes.data


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


def test_a_slot_may_be_filled_to_its_last_byte():
    slot = memory()
    buffer = BatchBuffer(slot)
    assert lies_at(buffer.empty((len(slot),), torch.uint8), slot) == 0
    assert not buffer.overflowed


def test_what_finds_no_room_overflows():
    slot = memory()
    buffer = BatchBuffer(slot)
    buffer.empty((ALIGNMENT,), torch.uint8)
    large, small = buffer.empty((3 * ALIGNMENT + 1,), torch.uint8), buffer.empty((1,), torch.uint8)
    assert buffer.overflowed
    assert not 0 <= lies_at(large, slot) < len(slot)
    assert lies_at(small, slot) == ALIGNMENT
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


def test_a_threads_small_tensors_get_memory_of_their_own():
    slot = memory(16 * ALIGNMENT)
    buffer = ThreadBuffer(slot)
    labels, images = buffer.empty((4 * ALIGNMENT - 1,), torch.uint8), buffer.empty((4 * ALIGNMENT,), torch.uint8)
    assert not 0 <= lies_at(labels, slot) < len(slot)
    assert lies_at(images, slot) == 0
    assert (buffer.needed, buffer.overflowed) == (8 * ALIGNMENT, False)


# Collating


def wrapped(samples: list) -> dict:
    """A user's own collate_fn, which calls torch's."""
    return {"image": default_collate(samples)}


@pytest.mark.parametrize(
    ("kind", "collate_fn", "is_placed"),
    [
        (BatchBuffer, default_collate, False),
        (ThreadBuffer, default_collate, True),
        (ThreadBuffer, wrapped, False),  # its map is all threads'
        (WorkerBuffer, default_collate, True),
        (WorkerBuffer, wrapped, True),
        (WorkerBuffer, torch.stack, False),
    ],
)
def test_torchs_collating_stacks_into_the_buffer(kind, collate_fn, is_placed):
    buffer, samples = kind(memory()), [torch.arange(4), torch.arange(4, 8)]
    batch = buffer.collate(collate_fn, samples)
    stacked = batch["image"] if isinstance(batch, dict) else batch
    assert stacked.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert (lies_at(stacked, buffer.slot) == 0) == (buffer.needed > 0) == is_placed
    assert default_collate_fn_map[torch.Tensor] is collate_tensor_fn


def test_another_thread_of_a_worker_collates_into_memory_of_its_own(in_thread, bound):
    buffer = WorkerBuffer(memory())
    sample = torch.arange(3)
    batch = buffer.collate(lambda samples: in_thread(default_collate, samples).result(bound), [sample])
    assert batch.tolist() == [[0, 1, 2]]
    assert buffer.needed == 0


@pytest.mark.parametrize("kind", [ThreadBuffer, WorkerBuffer])
def test_a_users_own_stack_function_is_used(kind, monkeypatch):
    monkeypatch.setitem(default_collate_fn_map, torch.Tensor, lambda samples, **_: samples)
    sample = torch.ones(2)
    assert stacks_as_torch_does() is False
    assert kind(memory()).collate(default_collate, [sample]) == [sample]
