"""A batch that another process made arrives as it was, and its tensors are read where they lie."""

import numpy as np
import pytest
import torch

from loaders.workers.batch_buffer import ALIGNMENT, WorkerBuffer
from loaders.workers.serialize import SPARSE_BYTES, Payload, dump, load


class Marked(torch.Tensor):
    """A subclass with attributes."""


def sent(batch, slot: np.ndarray | None = None):
    """The batch as the main process gets it, and its payload."""
    buffer = WorkerBuffer(slot)
    payload, overflow, _ = dump(batch, buffer)
    return load(payload, slot, None if overflow is None else overflow.array()), payload


def sent_bytes(payload: Payload) -> int:
    """How many bytes of tensors were sent."""
    return sum(size for _, size in payload.areas)


@pytest.fixture(params=[0, 2 * ALIGNMENT, 1 << 16], ids=["overflow", "partly", "slot"])
def slot(request) -> np.ndarray | None:
    return np.zeros(request.param, np.uint8) if request.param else None


def test_tensors_that_share_memory_still_share_it(slot):
    memory = torch.arange(100)
    (first, second, other), _ = sent([memory[:60], memory[40:].reshape(3, 20), torch.ones(60)], slot)
    first[50] = -1
    assert second.flatten()[10] == -1
    assert torch.equal(other, torch.ones(60))


def test_of_a_large_storage_only_what_the_batch_uses_is_sent(slot):
    dataset = torch.arange(1 << 20).reshape(1 << 10, 1 << 10)
    rows = [dataset[3], dataset[700], dataset[:, 5]]
    assert dataset.nbytes > SPARSE_BYTES
    received, payload = sent(rows, slot)
    assert all(map(torch.equal, received, rows))
    assert sent_bytes(payload) <= 2 * sum(row.nbytes for row in rows)


def test_a_tensor_that_lies_in_the_slot_is_not_copied():
    buffer = WorkerBuffer(np.zeros(1 << 12, np.uint8))
    buffer.empty((8,), torch.uint8)
    tensor = buffer.empty((100,), torch.int64).fill_(3)
    payload, overflow, _ = dump([tensor, tensor[50:]], buffer)
    assert (payload.areas, overflow) == ([(ALIGNMENT, 800)], None)
    assert buffer.needed == ALIGNMENT + 832
    whole, half = load(payload, buffer.slot, None)
    whole[50] = 9
    assert half[0] == 9


def test_odd_tensors_are_noted():
    for tensor, odd in ((torch.ones(2), False), (torch.eye(2).to_sparse(), True), (torch.empty(0), False)):
        assert dump([tensor], WorkerBuffer())[2] is odd


def test_a_cuda_tensor_of_a_worker_is_refused_with_advice(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    with pytest.raises(TypeError, match="a worker made a CUDA tensor: make CPU tensors there"):
        dump([torch.ones(2)], WorkerBuffer())


def test_large_parts_lie_in_the_slot_and_small_ones_are_copies():
    slot = np.zeros(1 << 16, np.uint8)
    batch = [torch.ones(3 * ALIGNMENT, dtype=torch.uint8), torch.ones(ALIGNMENT, dtype=torch.uint8)]
    (images, labels), _ = sent(batch, slot)
    slot[:] = 5
    assert images.eq(5).all()
    assert labels.eq(5).all()  # a quarter of the batch is not small
    (images, labels, _), _ = sent([*batch, torch.ones(1)], slot)
    slot[:] = 5
    assert images.eq(5).all()
    assert labels.eq(1).all()


def test_a_large_subclass_lies_in_the_slot():
    slot = np.zeros(1 << 16, np.uint8)
    received, payload = sent(torch.ones(4000).as_subclass(Marked), slot)
    slot[:] = 0
    assert not received.as_subclass(torch.Tensor).any()
    assert len(payload.pickled) < 500
