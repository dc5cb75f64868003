"""Preloader over WorkerLoader on a GPU: no batch is torn, mixed up or early, whatever streams and allocator do.

A batch's content is a function of its number in the epoch. It is compared on the device, on a stream that lags behind
while slots and device memory are used again and again; the mismatches are counted there, and read once at the end.
"""

import itertools

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from loaders import Accelerator, Preloader, WorkerLoader

pytestmark = pytest.mark.cuda

BATCHES = 64  # in an epoch
ROWS = 32  # in a batch
SIZE = 49_152  # bytes of a row
BEHIND = 200_000  # cycles, some 0.1 ms, that the consumer's stream is kept busy at each batch


class Pattern:
    """Sample i is SIZE bytes that are like those of no other batch, and i."""

    bytes = (np.arange(SIZE + 251) % 251).astype(np.uint8)

    def __len__(self):
        return BATCHES * ROWS

    def sample_spec(self):
        return {"image": ((SIZE,), torch.uint8), "label": ((), torch.int64)}

    def __getitem__(self, index):
        start = 31 * index % 251
        return {"image": torch.from_numpy(self.bytes[start : start + SIZE]), "label": index}

    def read_batch(self, indices, out, random):
        images = out["image"].numpy()
        for row, start in enumerate((31 * indices % 251).tolist()):
            images[row] = self.bytes[start : start + SIZE]
        out["label"].copy_(torch.from_numpy(indices))


def images_of(labels):
    """uint8 (B, SIZE), by another way than Pattern's."""
    return ((31 * labels[:, None] + torch.arange(SIZE, device=labels.device)) % 251).to(torch.uint8)


def inverted(batch, random):
    """Gives the image new memory, and takes and overwrites some more on its stream."""
    torch.empty(int(1 + random.uniform(1)[0] * (1 << 22)), dtype=torch.uint8, device="cuda").fill_(255)
    return {**batch, "image": ~batch["image"]}


def mismatches(batch, number):
    """How many elements of an inverted batch are not as they should be: int64 (), on the device."""
    labels = torch.arange(number * ROWS, (number + 1) * ROWS, device=batch["label"].device)
    return (batch["label"] != labels).sum() + (~batch["image"] != images_of(labels)).sum()


def make(depth, method="multiprocessing", **settings):
    settings |= {"num_workers": 2, "worker_method": method, "persistent_workers": True}
    return Preloader(WorkerLoader(Pattern(), ROWS, seed=0, **settings), "cuda", depth, inverted)


def count_mismatches(loader, batches):
    """Goes through `batches` batches, epoch after epoch; the last one is broken off."""
    wrong = torch.zeros((), dtype=torch.int64, device=loader.device)
    while batches:
        for number, batch in enumerate(itertools.islice(loader, batches)):
            torch.cuda._sleep(BEHIND)
            wrong += mismatches(batch, number)
            torch.empty((1 << 20) + number, dtype=torch.uint8, device=loader.device).fill_(255)
            batches -= 1
    return wrong


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("batches", [250, pytest.param(2500, marks=pytest.mark.slow)])
def test_every_batch_is_whole_and_in_its_place(method, depth, batches):
    with make(depth, method, pin_memory=depth == 3) as loader:
        assert count_mismatches(loader, batches).item() == 0


def test_a_preloader_gets_page_locked_batches_and_nobody_else(method):
    with WorkerLoader(Pattern(), ROWS, seed=0, num_workers=2, worker_method=method) as loader:
        iterator = iter(loader)
        iterator.engine.locks_for = Accelerator("cuda")
        for _ in range(BATCHES // 2):
            locked = next(iterator)
        assert locked["image"].is_pinned()
        copy = locked["image"].cuda(non_blocking=True)
        assert torch.equal(copy, images_of(torch.arange(BATCHES // 2 * ROWS)[-ROWS:].cuda()))
        assert not any(batch["image"].is_pinned() for batch in loader)


@pytest.fixture
def sync_is_an_error():
    """Whoever synchronises the host with a stream, in whichever thread, gets a RuntimeError; events may be waited for.

    The mode is the process's: so it is also a check of the preloader's thread, whose errors come out of next().
    """
    yield lambda: torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode("default")


def test_neither_consumer_nor_thread_synchronises_with_the_device(sync_is_an_error, depth):
    with make(depth) as loader:
        count_mismatches(loader, BATCHES).item()  # from now on all memory is there
        sync_is_an_error()
        wrong = count_mismatches(loader, BATCHES)
        with pytest.raises(RuntimeError, match="synchroniz"):
            wrong.item()
        torch.cuda.set_sync_debug_mode("default")
        assert wrong.item() == 0


def test_a_users_own_non_blocking_copy_is_whole_though_the_batch_is_dropped_at_once(seed):
    with WorkerLoader(Pattern(), ROWS, num_workers=2, seed=seed, pin_memory=True) as loader:
        copies = []
        for batch in loader:
            torch.cuda._sleep(20 * BEHIND)  # so the copy is still to come when the batch is dropped
            copies.append(batch["image"].cuda(non_blocking=True))
            del batch
        for number, copy in enumerate(copies):
            assert torch.equal(copy, images_of(torch.arange(number * ROWS, (number + 1) * ROWS, device="cuda")))


def test_tensors_of_odd_layouts_arrive_whole():
    values = torch.arange(1.0, 7.0).reshape(2, 3)
    batch = [values.to(torch.complex64), values.to_sparse(), values.to_sparse_csr(), values.to_sparse_csc()]
    jagged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    packed = pack_sequence([torch.ones(3), torch.ones(1)])
    ((*arrived, nest, pack),) = Preloader([[*batch, jagged, packed]], "cuda", 2)
    for there, here in zip(arrived, batch, strict=True):
        assert (there.is_cuda, there.dtype, there.layout) == (True, here.dtype, here.layout)
        assert torch.equal(there.to_dense().cpu(), here.to_dense())
    assert torch.equal(nest.values().cpu(), jagged.values())
    assert torch.equal(pack.data.cpu(), packed.data)
