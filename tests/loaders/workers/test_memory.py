"""The memory of slots: no more is held than is needed, and each tensor travels by itself."""

import os
import re
import resource
import sys

import pytest
import torch
from example_datasets import Images

from loaders import MachineFull, WorkerLoader
from loaders.workers.slots import MOST_SPOILT, TIDIED_EVERY, Slots


def loader_over(dataset, batch_size=4, **settings):
    return WorkerLoader(dataset, batch_size, num_workers=2, seed=0, persistent_workers=True, **settings)


def fork():
    """Forks a child, which ends at once."""
    if (child := os.fork()) == 0:
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def test_a_fork_gives_no_memory_back_as_another_thread_may_be_about_to_write_there():
    slots = Slots(2 * MOST_SPOILT)
    *held, written = [slots.take() for _ in range(MOST_SPOILT + 1)]
    for lease in held:
        slots.deliver(lease.slot)
    slot = written.slot
    written.array[:100] = 7
    slots.note_use(slot, 100)
    del written
    fork()
    assert (slot.lease().array[:100] == 7).all()
    leases = (slots.take() for _ in range(TIDIED_EVERY))
    assert any(lease.slot.memory is not slot.memory for lease in leases), "the memory with spoilt slots stays"
    slots.close()


def test_a_fork_marks_every_slot_though_another_thread_goes_on_meanwhile():
    made = [Slots(1) for _ in range(3)]
    leases = [slots.take() for slots in made]
    kept = made[0].take()
    for slots, lease in zip(made, leases, strict=True):
        slots.deliver(lease.slot)

    def another_thread(*_):  # is called wherever another thread could go on
        made.append(Slots(1))
        made[0].note_use(kept.slot, 1, True)

    traced = sys.gettrace()
    sys.settrace(another_thread)
    fork()
    sys.settrace(traced)
    assert all(lease.slot.is_spoilt for lease in (*leases, kept))
    for slots in made:
        slots.close()


def test_a_worker_that_cannot_map_its_memory_says_so():
    def limit(worker):
        with open("/proc/self/statm") as file:
            size = int(file.read().split()[0]) * resource.getpagesize() + (1 << 28)
        resource.setrlimit(resource.RLIMIT_AS, (size, size))

    with (
        loader_over(Images(8), worker_init_fn=limit) as loader,
        pytest.raises(MachineFull, match="out of memory"),
    ):
        next(loader)


def test_memory_is_left_out_of_core_dumps():
    with loader_over(Images(8)) as loader:
        next(loader)
        with open("/proc/self/smaps") as file:
            flags = re.search(r"memfd:loader.*?VmFlags: ([^\n]*)", file.read(), re.DOTALL)
        assert flags is not None and "dd" in flags.group(1).split()


def test_of_a_large_storage_only_the_tensors_own_elements_travel():  # test_like_torch.py: and how
    dataset = torch.rand(1000, 1000)
    with loader_over(dataset, 2, collate_fn=list) as loader:
        came = next(loader)
        assert loader.stats()["workers"]["bytes"] == 2 * 4000
    assert torch.equal(torch.stack(came), dataset[:2])
