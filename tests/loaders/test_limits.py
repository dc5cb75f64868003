"""What a loader holds of the machine: memory, mappings and descriptors stay small, and come back when it is closed."""

import gc
import multiprocessing
import os
import re
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from example_datasets import Numbers

from loaders import WorkerLoader

MB = 1 << 20
SHARED = re.compile(r"^(/memfd:|/dev/shm/|.*\(deleted\)$)")


class Sized:
    """Sample i is `sizes[i]` bytes of value i modulo 251."""

    def __init__(self, sizes: Iterable[int]) -> None:
        self.sizes = list(sizes)

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((self.sizes[index],), index % 251, dtype=torch.uint8)


def is_whole(batch: torch.Tensor, number: int, dataset: Sized) -> bool:
    return batch.shape == (1, dataset.sizes[number]) and bool((batch == number % 251).all())


def family() -> list[int]:
    return [os.getpid(), *(process.pid for process in multiprocessing.active_children())]


def mappings(pid: int) -> list[tuple[tuple[int, int], str, int]]:
    """A process's mappings of shared files that have no name any more: (device and inode, addresses, bytes)."""
    found = []
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        addresses, _, _, device, inode, *path = line.split(maxsplit=5)
        if path and SHARED.match(path[0]):
            major, minor = (int(part, 16) for part in device.split(":"))
            start, end = (int(part, 16) for part in addresses.split("-"))
            found.append(((os.makedev(major, minor), int(inode)), addresses, end - start))
    return found


def descriptors(pid: int) -> list[tuple[tuple[int, int], str]]:
    """A process's descriptors of such files: (device and inode, path in /proc)."""
    found = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            if SHARED.match(os.readlink(link)):
                status = os.stat(link)
                found.append(((status.st_dev, status.st_ino), str(link)))
        except FileNotFoundError:  # closed meanwhile
            continue
    return found


def shared_files(pids: Iterable[int]) -> dict[tuple[int, int], int]:
    """The bytes allocated to each nameless file that any of these processes has open or mapped."""
    allocated: dict[tuple[int, int], int] = {}
    for pid in pids:
        for file, addresses, size in mappings(pid):
            try:
                allocated[file] = 512 * os.stat(f"/proc/{pid}/map_files/{addresses}").st_blocks
            except PermissionError:  # only root may look: the worst case, unless a descriptor tells below
                allocated[file] = size
    for pid in pids:
        allocated |= {file: 512 * os.stat(path).st_blocks for file, path in descriptors(pid)}
    return allocated


def held() -> int:
    """The bytes of shared memory that this process and its workers keep from the system."""
    gc.collect()
    return sum(shared_files(family()).values())


@pytest.mark.parametrize("seed", [0, None])
def test_the_memory_of_a_closed_loader_goes_back_though_a_later_loaders_workers_live(seed):
    before, dataset = held(), Sized([4 * MB] * 8)
    first = WorkerLoader(dataset, 1, num_workers=2, seed=seed, persistent_workers=True)
    assert all(is_whole(batch, number, dataset) for number, batch in enumerate(first))
    assert held() - before > 4 * MB
    with WorkerLoader(Numbers(8), 4, num_workers=2, seed=seed, persistent_workers=True) as later:
        assert len(list(later)) == 2
        first.close()
        assert held() - before < 2 * MB


def test_a_batch_that_is_kept_outlives_its_loader_and_then_goes_back_with_the_processes_forked_meanwhile():
    before, dataset = held(), Sized([4 * MB] * 8)
    first = WorkerLoader(dataset, 1, num_workers=2, seed=0, persistent_workers=True)
    kept = next(iter(first))
    with WorkerLoader(Numbers(8), 4, num_workers=2, seed=0, persistent_workers=True) as later:
        assert len(list(later)) == 2
        first.close()
        assert is_whole(kept, 0, dataset)
        del kept
        assert held() - before < 6 * MB  # the later workers map that batch alone: their dataset might read it
    assert held() - before < 2 * MB


@pytest.mark.parametrize("seed", [0, None])
def test_one_large_batch_does_not_make_all_slots_large(seed):
    sizes = [MB // 4] * 60
    sizes[20] = 20 * MB
    before, dataset = held(), Sized(sizes)
    with WorkerLoader(dataset, 1, num_workers=2, seed=seed, persistent_workers=True) as loader:
        assert all(is_whole(batch, number, dataset) for number, batch in enumerate(loader))
        assert held() - before < 30 * MB


@pytest.mark.parametrize("seed", [0, None])
def test_batches_that_grow_slowly_cost_neither_descriptors_nor_mappings(seed, descriptors_left):
    descriptors_left(64)
    dataset = Sized(range(4096, 4096 * 200, 4096))
    with WorkerLoader(dataset, 1, num_workers=2, seed=seed, persistent_workers=True) as loader:
        assert all(is_whole(batch, number, dataset) for number, batch in enumerate(loader))
        assert loader.stats()["workers"]["deaths"] == 0
        for pid in family():
            assert len(mappings(pid)) < 64


class Held:
    """A sample of the first batch comes only after the other worker has answered the second and begun its next."""

    def __init__(self) -> None:
        self.answered = multiprocessing.Event()

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 12:  # in the fourth batch, the other worker's second
            self.answered.set()
        if index == 0:
            assert self.answered.wait(30)
        return torch.full((1000,), index)


@pytest.mark.parametrize("seed", [0, None])
def test_breaking_off_an_epoch_leaves_no_descriptor_open(seed):
    def use() -> None:
        loader = WorkerLoader(Held(), 4, num_workers=2, seed=seed)
        for batch in loader:
            assert batch[0, 0] == 0
            break

    use()
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        use()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before
