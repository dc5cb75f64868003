"""Slots are as large as the latest batches need, and are written again only when nobody can read them any more."""

import os
import sys

import pytest
import torch

from loaders.workers import slots
from loaders.workers.shared_memory import page_aligned
from loaders.workers.slots import LATEST, Lease, SlotRing

PAGE = page_aligned(1)


@pytest.fixture(params=[False, True], ids=["private", "shared"])
def shared(request) -> bool:
    return request.param


@pytest.fixture
def ring(shared):
    ring = SlotRing(3, shared)
    yield ring
    ring.close()


def free(lease) -> None:
    """Ends a lease that nothing else holds."""
    lease.array = None


def fork() -> None:
    """Forks a child that exits at once."""
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def is_mapped(address: int) -> bool:
    with open("/proc/self/maps") as maps:
        return any(line.startswith(f"{address:x}-") for line in maps)


# Sizes


def test_there_is_no_slot_before_a_size_is_known(ring):
    assert ring.acquire() is None
    ring.fit(0)
    assert (ring.capacity, ring.acquire()) == (0, None)


def test_a_slot_holds_whole_pages(ring):
    ring.fit(PAGE + 1)
    assert ring.capacity == 2 * PAGE
    assert len(ring.acquire().array) == 2 * PAGE


def test_slots_grow_by_a_quarter_at_least(ring):
    ring.fit(100 * PAGE)
    ring.fit(100 * PAGE)
    assert ring.capacity == 100 * PAGE
    ring.fit(101 * PAGE)
    assert ring.capacity == 125 * PAGE
    ring.fit(200 * PAGE)
    assert ring.capacity == 200 * PAGE


def test_one_batch_twice_as_large_as_slots_changes_nothing_and_a_second_does(ring):
    ring.fit(10 * PAGE)
    ring.fit(21 * PAGE)
    assert ring.capacity == 10 * PAGE
    ring.fit(30 * PAGE)
    assert ring.capacity == 21 * PAGE  # room for the second largest


def test_a_batch_just_twice_as_large_is_no_outlier(ring):
    ring.fit(10 * PAGE)
    ring.fit(20 * PAGE)
    assert ring.capacity == 20 * PAGE


def test_outliers_that_are_far_apart_stay_alone(ring):
    ring.fit(10 * PAGE)
    ring.fit(21 * PAGE)
    for _ in range(LATEST):
        ring.fit(10 * PAGE)
    ring.fit(21 * PAGE)
    assert ring.capacity == 10 * PAGE


def test_slots_shrink_after_many_much_smaller_batches(ring):
    ring.fit(100 * PAGE)
    for _ in range(LATEST - 1):
        ring.fit(20 * PAGE)
        assert ring.capacity == 100 * PAGE
    ring.fit(20 * PAGE)
    assert ring.capacity == 25 * PAGE


def test_slots_do_not_shrink_for_batches_that_are_little_smaller(ring):
    ring.fit(100 * PAGE)
    for _ in range(2 * LATEST):
        ring.fit(40 * PAGE)  # a quarter more, and twice that, is a slot as it is
    assert ring.capacity == 100 * PAGE


def test_empty_batches_do_not_shrink_slots(ring):
    ring.fit(100 * PAGE)
    for _ in range(2 * LATEST):
        ring.fit(0)
    assert ring.capacity == 100 * PAGE


# Leases


def test_at_most_count_slots_are_made(ring):
    ring.fit(1)
    leases = [ring.acquire() for _ in range(3)]
    assert all(leases)
    assert (ring.has_free(), ring.has_spare(), ring.acquire()) == (False, False, None)
    free(leases.pop())
    assert (ring.has_free(), ring.has_spare()) == (True, True)
    assert ring.acquire() is not None


def test_a_slot_is_spare_before_it_is_made(ring):
    ring.fit(1)
    lease = ring.acquire()
    assert lease is not None
    assert (ring.has_free(), ring.has_spare()) == (False, True)


def test_the_first_slot_that_is_free_is_used(ring):
    ring.fit(1)
    leases = [ring.acquire() for _ in range(3)]
    for value, lease in enumerate(leases):
        lease.array[0] = value
    for lease in (leases[2], leases[1]):
        free(lease)
    assert [ring.acquire().array[0] for _ in range(2)] == [1, 1]  # each is free again at once
    kept = [ring.acquire() for _ in range(2)]
    assert [lease.array[0] for lease in kept] == [1, 2]


def test_a_slot_is_leased_while_any_tensor_on_it_lives(ring):
    ring.fit(1)
    lease = ring.acquire()
    tensor = torch.frombuffer(lease.array, dtype=torch.int16, count=4)
    part = tensor[1:2]
    del tensor
    free(lease)
    assert not ring.has_free()
    del part
    assert ring.has_free()


def test_slots_do_not_overlap(ring):
    ring.fit(PAGE)
    leases = [ring.acquire() for _ in range(3)]
    for value, lease in enumerate(leases):
        lease.array[:] = value
    for value, lease in enumerate(leases):
        assert (lease.array == value).all()


def test_a_slot_that_is_too_small_now_is_replaced(ring):
    ring.fit(PAGE)
    lease = ring.acquire()
    free(lease)
    ring.fit(2 * PAGE)
    assert len(ring.acquire().array) == 2 * PAGE


def test_a_slot_that_is_a_little_larger_is_still_used_and_a_much_larger_one_is_not(ring):
    for now, used in ((40, 100), (39, 39)):
        ring.fit(100 * PAGE)
        ring.capacity = 100 * PAGE
        free(ring.acquire())
        ring.capacity = now * PAGE
        lease = ring.acquire()
        assert len(lease.array) == used * PAGE
        free(lease)


def test_replaced_slots_count_no_more(ring):
    for size in range(1, 9):
        ring.capacity = size * PAGE
        free(ring.acquire())
    leases = [ring.acquire() for _ in range(3)]
    assert all(leases)
    assert ring.acquire() is None


# Retired slots


@pytest.fixture
def lease():
    """A lease of the one slot of a ring in shared memory."""
    ring = SlotRing(1, True)
    ring.fit(PAGE)
    lease = ring.acquire()
    lease.ring = ring
    yield lease
    ring.close()


def is_reused(lease: Lease) -> bool:
    """Ends the lease, and returns whether the slot is leased again, or another in its place."""
    free(lease)
    again = lease.ring.acquire()
    assert (again.slot is lease.slot) != lease.slot.is_retired
    assert (again.slot.number == lease.slot.number) != lease.slot.is_retired
    return again.slot is lease.slot


@pytest.mark.parametrize("is_delivered", [True, False])
def test_a_slot_without_readers_is_used_again(lease, is_delivered):
    if is_delivered:
        lease.slot.deliver()
    assert is_reused(lease)


def test_a_slot_that_its_worker_holds_is_retired(lease):
    lease.slot.has_readers = True
    before = open_descriptors()
    assert not is_reused(lease)
    assert open_descriptors() == before, "its descriptor was closed and the other's opened"


def test_a_slot_is_retired_if_a_process_was_forked_while_its_batch_was_delivered(lease):
    lease.slot.deliver()
    fork()
    assert not is_reused(lease)


def test_a_slot_whose_lease_ends_during_a_fork_is_retired(lease, monkeypatch):
    lease.slot.deliver()
    monkeypatch.setattr(slots.Forks, "count", slots.Forks.count + 1)  # as a function that runs before the fork sees it
    assert not is_reused(lease)


def test_a_fork_before_the_delivery_or_after_the_lease_retires_no_slot(lease):
    fork()
    lease.slot.deliver()
    slot = lease.slot
    free(lease)
    fork()
    assert lease.ring.acquire().slot is slot


def test_a_fork_retires_no_slot_in_private_memory():
    ring = SlotRing(1, False)
    ring.fit(PAGE)
    lease = ring.acquire()
    lease.ring = ring
    lease.slot.deliver()
    fork()
    assert is_reused(lease)


def test_a_discarded_slots_memory_is_closed():
    ring = SlotRing(1, True)
    before = open_descriptors()
    for size in (1, 100, 1, 100):  # neither fits the other
        ring.capacity = size * PAGE
        lease = ring.acquire()
        assert open_descriptors() == before + 1
        free(lease)
    ring.close()
    assert open_descriptors() == before


def test_an_exception_of_a_signal_handler_costs_no_slot(ring):
    """Struck at each moment of `acquire` at which a handler may run."""
    ring.fit(PAGE)
    kept, moment = ring.acquire(), 0
    while moment >= 0:
        moment, countdown = moment + 1, moment + 1

        def strike(frame, event, _):
            nonlocal countdown
            countdown -= event in ("call", "c_return")
            if countdown == 0:
                sys.setprofile(None)
                raise KeyboardInterrupt

        lease, ring.capacity = None, PAGE * (1 + moment % 2)  # the slots before have to be replaced
        try:
            sys.setprofile(strike)
            lease = ring.acquire()
            sys.setprofile(None)
            moment = -1 if countdown > 0 else moment
        except KeyboardInterrupt:
            pass
    assert moment == -1
    others = [ring.acquire(), ring.acquire()] if lease is None else [lease, ring.acquire()]
    assert all(others)
    assert ring.acquire() is None
    del kept


# Page-locked memory


class Cudart:
    """Stands in for the CUDA runtime: holds what is page-locked, {address: bytes}."""

    def __init__(self) -> None:
        self.locked: dict[int, int] = {}
        self.refuses = False
        self.tried = 0

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.tried += 1
        if self.refuses:
            return 1
        assert flags == 0
        self.locked[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.locked[address]
        return 0


@pytest.fixture
def cudart(monkeypatch) -> Cudart:
    cudart = Cudart()

    def check(code: int) -> None:
        if code:
            raise RuntimeError("no room to lock")

    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch.cuda, "check_error", check)
    return cudart


def test_slots_are_page_locked_from_the_first_lease_until_they_are_discarded(shared, cudart):
    ring = SlotRing(2, shared, page_locked=True)
    ring.fit(PAGE)
    leases = [ring.acquire(), ring.acquire()]
    assert cudart.locked == {lease.array.ctypes.data: PAGE for lease in leases}
    free(leases.pop())
    assert len(cudart.locked) == 2
    ring.close()
    assert [*cudart.locked] == [leases[0].array.ctypes.data]
    free(leases.pop())
    assert cudart.locked == {}


def test_page_locked_slots_lie_in_pages_of_their_own(cudart):
    ring = SlotRing(2, False, page_locked=True)
    ring.fit(PAGE)
    leases = [ring.acquire(), ring.acquire()]
    assert [lease.array.ctypes.data % PAGE for lease in leases] == [0, 0]
    assert len(cudart.locked) == 2


def test_a_ring_that_cannot_be_page_locked_says_so_once_and_serves_all_the_same(shared, cudart, caplog, monkeypatch):
    kernels = []
    monkeypatch.setattr(torch, "zeros", lambda *_, device: kernels.append(device))
    slots._warn_once.cache_clear()
    cudart.refuses = True
    ring = SlotRing(2, shared, page_locked=True)
    ring.fit(PAGE)
    assert ring.acquire() is not None
    lease = ring.acquire()
    assert lease is not None
    assert cudart.tried == 1
    assert kernels == ["cuda"]  # one that may fail with CUDA's error
    assert [record.message for record in caplog.records] == [
        "page_lock failed for a batch, so copies to the GPU may be slower: no room to lock"
    ]
    ring.close()


def test_memory_that_cannot_be_unlocked_is_said_once(cudart, caplog, monkeypatch):
    monkeypatch.setattr(torch, "zeros", lambda *_, device: None)
    slots._warn_once.cache_clear()
    ring = SlotRing(2, True, page_locked=True)
    ring.fit(PAGE)
    leases = [ring.acquire(), ring.acquire()]
    monkeypatch.setattr(cudart, "cudaHostUnregister", lambda address: 1)
    ring.close()
    del leases
    assert [record.message for record in caplog.records] == [
        "page_unlock failed for a batch, so copies to the GPU may be slower: no room to lock"
    ]


def test_other_rings_are_not_page_locked(ring, cudart):
    ring.fit(PAGE)
    assert ring.acquire() is not None
    assert cudart.tried == 0


# Close


def test_a_closed_ring_gives_no_slot_and_closing_again_does_nothing(ring):
    ring.fit(1)
    free(ring.acquire())
    ring.close()
    assert ring.acquire() is None
    ring.close()


def test_what_is_leased_outlives_the_ring_and_is_freed_then():
    before = open_descriptors()
    ring = SlotRing(2, True)
    ring.fit(PAGE)
    kept, other = ring.acquire(), ring.acquire()
    kept.array[:] = 3
    free(other)
    ring.close()
    assert open_descriptors() == before
    assert (kept.array == 3).all()
    address = kept.array.ctypes.data
    assert is_mapped(address)
    free(kept)
    assert not is_mapped(address)
