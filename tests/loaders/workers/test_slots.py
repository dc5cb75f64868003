"""Slots are as large as the latest batches need, and are written again only when nobody can read them any more."""

import gc
import os

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from loaders.preload import accelerator
from loaders.workers.shared_memory import page_aligned
from loaders.workers.slots import LATEST, SlotRing, warn_of_pageable_slots

PAGE = page_aligned(1)
SHARED = pytest.mark.parametrize("shared", [False, True], ids=["private", "shared"])


def ring_of(count: int, pages: int = 1, shared: bool = True, **settings) -> SlotRing:
    ring = SlotRing(count, shared, **settings)
    ring.fit(pages * PAGE)
    return ring


def fork() -> None:
    """Forks a child that exits at once."""
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize(
    ("sizes", "capacity"),
    [
        ([0], 0),
        ([0.5], 1),
        ([100, 101], 125),  # grows by a quarter at least
        ([100, 101, 200], 200),
        ([10, 21], 10),  # a single outlier changes nothing
        ([10, 21, 30], 21),  # and a second makes room for the smaller one
        ([10, 20], 20),  # just twice as large is no outlier
        ([10, 21, *[10] * LATEST, 21], 10),  # they are too far apart
        ([100, *[20] * (LATEST - 1)], 100),
        ([100, *[20] * LATEST], 25),  # shrinks after many much smaller batches
        ([100, *[40] * 2 * LATEST], 100),  # which are not those that are a little smaller
        ([100, *[0] * 2 * LATEST], 100),  # nor empty ones
    ],
)
def test_slots_fit_the_latest_batches(sizes, capacity):
    ring = SlotRing(1, False)
    for size in sizes:
        ring.fit(int(size * PAGE))
    assert ring.capacity == capacity * PAGE
    lease = ring.acquire()
    assert (len(lease.array) if lease else 0) == capacity * PAGE


@pytest.mark.parametrize(("made", "now", "used"), [(1, 2, 2), (100, 40, 100), (100, 39, 39)])
def test_a_slot_is_replaced_if_it_is_too_small_or_much_too_large(made, now, used):
    ring, before = ring_of(2, made), open_descriptors()
    kept, other = ring.acquire(), ring.acquire()
    del other
    ring.capacity = now * PAGE
    again = ring.acquire()
    assert len(again.array) == used * PAGE
    assert open_descriptors() == before + 2
    assert ring.acquire() is None, "the replaced slot counts no more"
    del kept
    ring.close()


class Leases(RuleBasedStateMachine):
    """A ring of three slots, whose leases are known by what is written into them."""

    shared = True

    def __init__(self) -> None:
        super().__init__()
        self.ring = ring_of(3, shared=self.shared)
        self.leases: dict[int, tuple] = {}  # (slot, tensor that keeps it leased, whether it was delivered)
        self.retired: set[int] = set()  # numbers of slots that others may read: none of them is leased again
        self.filled = 0

    @rule()
    def acquire(self) -> None:
        lease = self.ring.acquire()
        assert (lease is None) == (len(self.leases) == 3)
        if lease is not None:
            assert lease.slot.number not in {slot.number for slot, _, _ in self.leases.values()} | self.retired
            self.filled = (self.filled + 1) % 251
            lease.array[:] = self.filled
            self.leases[self.filled] = lease.slot, torch.frombuffer(lease.array, dtype=torch.uint8)[5:9], False

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), how=st.sampled_from(["deliver", "drop", "drop", "held by its worker"]))
    def change(self, data, how: str) -> None:
        key = data.draw(st.sampled_from(sorted(self.leases)))
        slot, tensor, _ = self.leases[key]
        if how == "deliver":
            slot.deliver()
            self.leases[key] = slot, tensor, True
        elif how == "drop":
            del self.leases[key]
        else:
            slot.has_readers = True
            self.retired.add(slot.number)

    @rule()
    def fork(self) -> None:
        fork()
        if self.shared:
            self.retired |= {slot.number for slot, _, delivered in self.leases.values() if delivered}

    @invariant()
    def no_lease_is_overwritten(self) -> None:
        assert all(tensor.eq(filled).all() for filled, (_, tensor, _) in self.leases.items())
        assert self.ring.has_spare() == (len(self.leases) < 3)

    def teardown(self) -> None:
        self.leases.clear()
        self.ring.close()
        assert self.ring.acquire() is None


@SHARED
def test_leases_never_overlap_and_who_may_be_read_is_retired(shared, monkeypatch):
    monkeypatch.setattr(Leases, "shared", shared)
    gc.collect()
    before = open_descriptors()
    checks = [HealthCheck.too_slow]
    run_state_machine_as_test(
        Leases, settings=settings(max_examples=10, stateful_step_count=25, deadline=None, suppress_health_check=checks)
    )
    gc.collect()
    assert open_descriptors() == before


def test_only_a_fork_while_a_batch_is_delivered_retires_its_slot():
    """The machine above tells that such slots are retired; this one that no others are."""
    ring = ring_of(1)
    number = ring.acquire().slot.number
    for forks, reused in (("before", True), ("while undelivered", True), ("after", True), ("while delivered", False)):
        lease = ring.acquire()
        assert lease.slot.number == number
        slot = lease.slot
        if forks in ("before", "while undelivered"):
            fork()
        if forks != "while undelivered":
            slot.deliver()
        if forks == "while delivered":
            fork()
        del lease
        if forks == "after":
            fork()
        assert (ring.acquire().slot.number == number) == reused
        assert slot.is_retired != reused
    ring.close()


def is_mapped(address: int) -> bool:
    with open("/proc/self/maps") as maps:
        return any(line.startswith(f"{address:x}-") for line in maps)


class Driver:
    """Page-locks as CUDA does: unless `clear_error` is called, it reports a failure once more, at its next call."""

    def __init__(self) -> None:
        self.locked: dict[int, int] = {}  # by address: bytes
        self.fails = self.would_report = False

    def cudaHostRegister(self, address: int, size: int, flags: int) -> bool:
        if not self.fails:
            self.locked[address] = size
        self.would_report = self.fails
        return self.fails

    def cudaHostUnregister(self, address: int) -> bool:
        assert is_mapped(address), "memory is unlocked before it is unmapped"
        del self.locked[address]
        self.would_report = self.fails
        return self.fails


@pytest.fixture
def driver(monkeypatch) -> Driver:
    driver = Driver()

    def check_error(failed: bool) -> None:
        if failed:
            raise RuntimeError("no room to lock")

    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr(torch.cuda, "check_error", check_error)
    monkeypatch.setattr(accelerator, "clear_error", lambda: setattr(driver, "would_report", False))
    warn_of_pageable_slots.cache_clear()
    return driver


@SHARED
def test_slots_are_page_locked_where_they_are_asked_for_until_their_last_tensor_dies(shared, driver):
    other, ring = ring_of(1, shared=shared), ring_of(2, shared=shared, page_locked=True)
    assert other.acquire() and not driver.locked
    leases = [ring.acquire(), ring.acquire()]
    assert driver.locked == {lease.array.ctypes.data: PAGE for lease in leases}
    assert all(address % PAGE == 0 for address in driver.locked)
    leases.pop()
    assert len(driver.locked) == 2
    fork()  # whose child has nothing to unlock
    ring.close()
    assert [*driver.locked] == [leases[0].array.ctypes.data]
    leases.pop()
    assert driver.locked == {}


def test_a_page_locked_slot_never_grows_and_is_unlocked_when_a_larger_one_has_replaced_it(driver):
    ring = ring_of(1, page_locked=True)
    lease = ring.acquire()
    small = lease.array.ctypes.data
    ring.fit(2 * PAGE)
    assert driver.locked == {small: PAGE}
    del lease
    larger = ring.acquire().array
    assert driver.locked == {larger.ctypes.data: ring.capacity}


@SHARED
def test_rings_that_cannot_be_page_locked_say_so_once_and_serve_all_the_same(shared, driver, caplog):
    driver.fails = True
    for _ in range(2):
        ring = ring_of(2, shared=shared, page_locked=True)
        assert ring.acquire() and ring.acquire()
        assert not driver.would_report
        ring.close()
    assert [record.message for record in caplog.records] == [
        "page-locking a batch failed, so copies to the GPU may be slower: no room to lock"
    ]


def test_a_slot_that_cannot_be_unlocked_makes_no_other_call_fail(driver):
    ring = ring_of(1, page_locked=True)
    ring.acquire()
    driver.fails = True
    ring.close()
    assert not driver.locked and not driver.would_report
