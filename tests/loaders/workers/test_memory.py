"""The memory of slots: no more is held than is needed, and each tensor travels by itself."""

import os
import re
import resource
import sys
from multiprocessing import active_children

import pytest
import torch
from example_datasets import Numbers

from loaders import MachineFull, WorkerLoader
from loaders.workers.slots import SPOILT, Slots


class Bytes(Numbers):
    """Sample i has `size` bytes of value i."""

    def __init__(self, length: int, size: int = 10_000) -> None:
        super().__init__(length)
        self.size = size

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((self.size,), index % 256, dtype=torch.uint8)


def loader_over(dataset, batch_size: int = 4, num_workers: int = 2, **settings) -> WorkerLoader:
    return WorkerLoader(dataset, batch_size, num_workers=num_workers, seed=0, persistent_workers=True, **settings)


def memory_in_use() -> int:
    """Bytes of all memories of loaders that this process has open."""
    links = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    return sum(512 * os.stat(link).st_blocks for link in links if is_memory(link))


def is_memory(link: str) -> bool:
    return os.path.lexists(link) and "memfd:loader" in os.readlink(link)


def mappings(pid: int | str = "self") -> int:
    with open(f"/proc/{pid}/maps") as file:
        return sum("memfd:loader" in line for line in file)


def test_a_batch_that_a_forked_child_can_see_never_changes_and_memory_stays_flat(bound):
    before = mappings()  # of other tests' loaders
    with loader_over(Bytes(64)) as loader:
        held = []
        for _ in range(12):
            iterator = iter(loader)
            batch = next(iterator)
            receiving, sending = os.pipe()
            child = os.fork()
            if child == 0:
                os.read(receiving, 1)
                os._exit(0 if (batch == torch.arange(4)[:, None]).all() else 1)
            del batch
            list(iterator)
            os.write(sending, b"x")
            assert os.waitpid(child, 0)[1] == 0
            os.close(receiving), os.close(sending)
            held.append((memory_in_use(), mappings(), *(mappings(process.pid) for process in active_children())))
    assert max(held)[0] < 4 * 17 * 4 * 11_000
    assert max(maps for _, *every in held for maps in every) <= before + 3


def test_a_fork_gives_no_memory_back_as_another_thread_may_be_about_to_write_there():
    slots = Slots(2 * SPOILT)
    *held, written = [slots.take() for _ in range(SPOILT + 1)]
    for lease in held:
        lease.slot.is_delivered = True
    slot, written.array[:100] = written.slot, 7
    slots.note_use(slot, 100)
    del written
    child = os.fork()
    if child == 0:
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert (slot.lease().array[:100] == 7).all()
    assert slots.take().slot.memory is not slot.memory, "the memory with spoilt slots stays"
    slots.close()


def test_a_fork_marks_every_slot_though_another_thread_goes_on_meanwhile():
    made = [Slots(1) for _ in range(3)]
    leases, kept = [slots.take() for slots in made], made[0].take()
    for lease in leases:
        lease.slot.is_delivered = True

    def another_thread(*_) -> None:  # is called wherever another thread could go on
        made.append(Slots(1))
        made[0].note_use(kept.slot, 1, True)

    traced = sys.gettrace()
    sys.settrace(another_thread)
    if (child := os.fork()) == 0:
        os._exit(0)
    sys.settrace(traced)
    assert os.waitpid(child, 0)[1] == 0
    assert all(lease.slot.is_spoilt for lease in (*leases, kept))
    for slots in made:
        slots.close()


def test_a_worker_that_cannot_map_its_memory_says_so():
    def limit(worker: int) -> None:
        with open("/proc/self/statm") as file:
            size = int(file.read().split()[0]) * resource.getpagesize() + (1 << 28)
        resource.setrlimit(resource.RLIMIT_AS, (size, size))

    with (
        loader_over(Bytes(8), worker_init_fn=limit) as loader,
        pytest.raises(MachineFull, match="mapping the memory for batches in a worker failed: out of memory"),
    ):
        next(loader)


def test_memory_is_left_out_of_core_dumps():
    with loader_over(Bytes(8)) as loader:
        next(loader)
        with open("/proc/self/smaps") as file:
            flags = re.search(r"memfd:loader.*?VmFlags: ([^\n]*)", file.read(), re.DOTALL)
        assert flags is not None and "dd" in flags.group(1).split()


# What travels


def arrived(sample):
    """The sample as it comes from a worker."""
    with WorkerLoader([sample], None, num_workers=1, collate_fn=as_it_is) as loader:
        return next(iter(loader))


def as_it_is(sample):
    return sample


class Marked(torch.Tensor):
    """A subclass with attributes."""


TENSORS = {  # test_like_torch.py has more of them
    "channels-last": torch.rand(2, 3, 8, 8).to(memory_format=torch.channels_last),
    "expanded": torch.rand(3, 1, 4).expand(3, 1000, 4),
    "transposed": torch.rand(4, 5).t(),
    "empty": torch.empty(0, 3),
    "scalar": torch.tensor(3.5),
    "conjugate": torch.rand(6).to(torch.complex64).conj(),
    "grad": torch.rand(3, requires_grad=True),
    "subclass": torch.rand(300).as_subclass(Marked),
}


def test_a_tensor_arrives_with_its_values_type_and_layout():
    came = arrived(TENSORS)
    for name, tensor in TENSORS.items():
        assert torch.equal(came[name].detach(), tensor.detach()), name
        for what in (type, torch.Tensor.stride, lambda one: (one.dtype, one.requires_grad)):
            assert what(came[name]) == what(tensor), name


def test_of_a_large_storage_only_the_tensors_own_elements_travel():
    dataset = torch.rand(1000, 1000)
    with loader_over(dataset, 2, collate_fn=as_it_is) as loader:
        came = next(loader)
        assert loader.stats()["workers"]["bytes"] == 2 * 4000
    assert torch.equal(torch.stack(came), dataset[:2])
