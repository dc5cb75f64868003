"""The dispatcher over a pool that does what a test says: no worker, no waiting.

A state machine has answers, deaths, full workers, full machines and interrupts come in any order, and knows which
batches have to come out; the cases after it are about what one sequence of events has to do exactly.
"""

import gc
import weakref
from collections import deque
from copy import copy
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from loaders.base import Delivery
from loaders.timeline import Work
from loaders.workers import dispatcher as module
from loaders.workers.dispatcher import Dispatcher
from loaders.workers.pool import NO_ROW, WHOLE_BATCH, Death, EngineError, Result, WorkerFailure
from loaders.workers.reader import Reading
from loaders.workers.shared_memory import MachineFull
from loaders.workers.slots import SlotRing
from loaders.workers.tasks import Task

BATCH_BYTES = 64


class ScriptedPool:
    """Holds tasks until a test has one answered or a worker die; who waits for nothing gets the oldest answer."""

    writes_to_slots = False

    def __init__(self, num_workers: int) -> None:
        self.num_workers = num_workers
        self.processes: list = ["a process"]
        self.submitted: list[tuple[int, Task]] = []  # (worker, task), in order
        self.full: set[int] = set()  # workers that take no task now
        self.error: Exception | None = None  # what the next call of `submit` raises
        self.wait_error: BaseException | None = None  # what the next call of `wait` raises
        self.calls: list[str] = []
        self.unanswered: dict[int, tuple[int, Task]] = {}
        self.leases: dict[int, weakref.ref] = {}  # of arrays, by batch
        self.script: list = []  # what the next calls of `wait` do
        self.events: deque = deque()

    def begin(self) -> None:
        self.calls.append("begin")

    def submit(self, worker: int, number: int, task: Task, lease, sent: list) -> bool:
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        if worker in self.full:
            return False
        sent.append(True)
        self.submitted.append((worker, task))
        self.unanswered[number] = worker, task
        if lease is not None:
            self.leases[task.number] = weakref.ref(lease.array)
        return True

    def wait(self) -> None:
        if self.wait_error is not None:
            error, self.wait_error = self.wait_error, None
            raise error
        if self.script:
            self.script.pop(0)()
            return
        self.full.clear()
        if self.unanswered:
            self._answer(next(iter(self.unanswered)))

    def open(self, result: Result, lease) -> Reading | BaseException:
        return result.payload(lease) if callable(result.payload) else result.payload

    def close(self) -> None:
        self.calls.append("close")

    def answer(self, batch: int, **fields) -> None:
        (number,) = [number for number, (_, task) in self.unanswered.items() if task.number == batch]
        self._answer(number, **fields)

    def _answer(self, number: int, **fields) -> None:
        _, task = self.unanswered.pop(number)
        self.events.append(Result(number, **{"payload": Reading(task.number), "needed": BATCH_BYTES, **fields}))

    def die(self, worker: int, row: int = WHOLE_BATCH) -> None:
        self.unanswered = {n: given for n, given in self.unanswered.items() if given[0] != worker}
        self.events.append(Death(worker, f"Worker {worker} was killed.", row))

    def answers(self, *batches: int, **fields) -> None:
        """Has the next `wait` report these batches."""
        self.script.append(lambda: [self.answer(batch, **fields) for batch in batches])

    def dies(self, worker: int, row: int = WHOLE_BATCH) -> None:
        self.script.append(lambda: self.die(worker, row))

    @property
    def workers(self) -> list[tuple[int, int]]:
        """(worker, batch) of all that was submitted."""
        return [(worker, task.number) for worker, task in self.submitted]

    @property
    def batches(self) -> list[int]:
        return [task.number for _, task in self.submitted]


def tasks(*numbers: int, epoch: int | None = None):
    """A task for each batch number; batch n has the samples 10n, 10n + 1 and 10n + 2."""
    return iter([Task([10 * number + row for row in range(3)], epoch, number) for number in numbers])


def started(pool: ScriptedPool, given, ring: SlotRing | None = None, depth: int = 3, **settings) -> Dispatcher:
    how = {"round_robin": False, "in_order": True, "max_restarts": 2, "skips": False, **settings}
    dispatcher = Dispatcher(pool, ring or SlotRing(0, False), lambda workers: depth, **how)
    dispatcher.begin(given)
    return dispatcher


def take(dispatcher: Dispatcher, epoch: int | None = None) -> Delivery | None:
    """The next delivery, taken as an epoch's iterator takes it."""
    delivery = dispatcher.next(epoch)
    if delivery is None:
        return None
    delivery.is_taken = True
    taken, delivery.batch, delivery.error = copy(delivery), None, None
    return taken


def rest(dispatcher: Dispatcher, epoch: int | None = None) -> list:
    """What is left of the epoch: batches, or errors."""
    found = []
    while (delivery := take(dispatcher, epoch)) is not None:
        found.append(delivery.batch if delivery.error is None else delivery.error)
    return found


@pytest.fixture
def pool() -> ScriptedPool:
    return ScriptedPool(2)


def ring_of(count: int) -> SlotRing:
    ring = SlotRing(count, False)
    ring.fit(BATCH_BYTES)
    return ring


class Dispatching(RuleBasedStateMachine):
    """Knows which batches are still to come, and which of them cost too many workers."""

    @initialize(
        workers=st.integers(1, 3),
        depth=st.integers(0, 4),
        round_robin=st.booleans(),
        in_order=st.booleans(),
        max_restarts=st.integers(0, 2),
        slots=st.integers(0, 5),
    )
    def build(self, workers, depth, round_robin, in_order, max_restarts, slots) -> None:
        self.pool, self.depth, self.round_robin, self.in_order = ScriptedPool(workers), depth, round_robin, in_order
        self.max_restarts, self.first, self.used = max_restarts, 0, 0
        self.left: list[int] = []  # batches to come
        self.deaths: dict[int, int] = {}  # in a row, by batch
        how = {"round_robin": round_robin, "in_order": in_order, "max_restarts": max_restarts}
        self.dispatcher = started(self.pool, tasks(), ring_of(slots), depth, **how)

    @rule(count=st.integers(0, 7))
    def begin(self, count: int) -> None:
        self.first, self.used = self.used, self.used + count
        self.left = list(range(self.first, self.used))
        try:
            self.dispatcher.begin(tasks(*self.left))
        except MachineFull:
            self.begin(count)

    @rule(count=st.integers(1, 4))
    def take(self, count: int) -> None:
        for _ in range(count):
            try:
                delivery = self.dispatcher.next()
            except (MachineFull, EngineError, KeyboardInterrupt):
                continue
            assert self.dispatcher.next() is delivery, "the same one, until it is taken"
            if delivery is None:
                assert self.left == []
                return
            delivery = take(self.dispatcher)
            assert delivery.number == self.left[0] if self.in_order else delivery.number in self.left
            self.left.remove(delivery.number)
            failed = self.deaths.get(delivery.number, 0) > self.max_restarts
            assert isinstance(delivery.error, WorkerFailure) if failed else delivery.batch == delivery.number

    @precondition(lambda self: self.pool.unanswered)
    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        self.pool.answer(data.draw(st.sampled_from([task.number for _, task in self.pool.unanswered.values()])))

    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        worker = data.draw(st.integers(0, self.pool.num_workers - 1))
        charged = next((task.number for of, task in self.pool.unanswered.values() if of == worker), None)
        self.deaths[charged] = self.deaths.get(charged, 0) + 1
        self.pool.die(worker)

    @rule(worker=st.integers(0, 2))
    def be_full(self, worker: int) -> None:
        self.pool.full.add(worker)

    @rule(error=st.sampled_from([EngineError, KeyboardInterrupt]))
    def fail_to_wait(self, error: type[BaseException]) -> None:
        self.pool.wait_error = error()

    @rule()
    def fail_to_submit(self) -> None:
        self.pool.error = MachineFull("full")

    @invariant()
    def no_more_than_the_depth_is_with_workers_and_each_task_where_it_belongs(self) -> None:
        given = [task.number for _, task in self.pool.unanswered.values()]
        assert len(given) == len(set(given)), "no batch is read twice at once"
        assert len(set(given) & set(self.left)) <= max(self.depth, 1)
        if self.round_robin:
            assert all((batch - self.first) % self.pool.num_workers == of for of, batch in self.wanted())

    def wanted(self) -> list[tuple[int, int]]:
        return [(of, task.number) for of, task in self.pool.unanswered.values() if task.number >= self.first]

    def teardown(self) -> None:
        if not hasattr(self, "dispatcher"):
            return
        self.pool.error = self.pool.wait_error = None
        while self.left:
            self.take(1)
        assert self.dispatcher.next() is None
        self.dispatcher.close()
        if any(lease() is not None for lease in self.pool.leases.values()):
            gc.collect()  # an exception may hold a lease in a reference cycle
        assert all(lease() is None for lease in self.pool.leases.values())


def test_every_batch_comes_once_and_in_its_place_whatever_happens_to_workers():
    checks = list(HealthCheck)
    run_state_machine_as_test(
        Dispatching,
        settings=settings(
            max_examples=100,
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=checks,
            phases=[Phase.generate],
        ),
    )


# Depth and choice of workers


def test_a_task_goes_to_the_worker_with_the_fewest_tasks_and_retried_ones_count_once(pool):
    dispatcher = started(pool, tasks(*range(6)), depth=4)
    pool.answers(1, 3, 0)
    rest(dispatcher)
    # Worker 1 has answered both of its tasks when batch 0 is delivered, and worker 0 one of two.
    assert pool.workers[:5] == [(0, 0), (1, 1), (0, 2), (1, 3), (1, 4)]
    pool = ScriptedPool(2)
    dispatcher = started(pool, tasks(*range(6)), depth=4)
    pool.answers(0)
    pool.dies(0)
    pool.answers(1)
    assert rest(dispatcher) == [0, 1, 2, 3, 4, 5]
    assert pool.workers == [(0, 0), (1, 1), (0, 2), (1, 3), (0, 4), (0, 2), (0, 4), (1, 5)]
    assert dispatcher.stats.deaths == 1


def test_the_next_epoch_is_loaded_ahead_and_continues(pool):
    def onwards():
        yield from tasks(0, 1, epoch=0)
        yield from tasks(0, 1, epoch=1)

    dispatcher = started(pool, onwards())
    assert [dispatcher.continues_with(0, number) for number in (1, 0)] == [False, True]
    assert rest(dispatcher, 0) == [0, 1]
    assert [dispatcher.continues_with(*place) for place in ((1, 1), (2, 0), (1, 0))] == [False, False, True]
    assert rest(dispatcher, 1) == [0, 1]
    assert not dispatcher.continues_with(2, 0)  # nothing is left


def test_a_dispatcher_that_nobody_holds_closes_its_pool(pool):
    dispatcher = started(pool, tasks(0))
    del dispatcher
    assert pool.calls == ["begin", "close"]


# Deaths


def test_a_crash_counts_only_against_the_first_task_of_the_worker_that_has_no_result(pool, caplog):
    dispatcher = started(pool, tasks(0, 1, 2, 3), depth=4, max_restarts=1)
    pool.answers(1)
    pool.dies(1)
    pool.dies(0)
    assert rest(dispatcher) == [0, 1, 2, 3]
    assert {task.number: task.singly for _, task in pool.submitted[4:]} == {0: True, 2: False, 3: True}
    assert [record.message for record in caplog.records] == [
        "Worker 1 was killed. Restarting it; batches to retry: 1",
        "Worker 0 was killed. Restarting it; batches to retry: 2",
    ]


@pytest.mark.parametrize(
    ("row", "where"),
    [
        (1, "while reading sample 1; on_error='skip' leaves such samples out"),
        (0, "while reading sample 0; on_error='skip' leaves such samples out"),
        (WHOLE_BATCH, r"while reading \[0, 1, 2\]"),
        (NO_ROW, "before reading a sample, perhaps in worker_init_fn"),
    ],
)
@pytest.mark.parametrize(("max_restarts", "count"), [(0, "A worker"), (2, "3 workers in a row")])
def test_too_many_deaths_are_an_error_that_names_the_sample(pool, row, where, max_restarts, count):
    dispatcher = started(pool, tasks(0, 1), depth=1, max_restarts=max_restarts)
    for _ in range(max_restarts + 1):
        pool.dies(0, row)
    error = take(dispatcher)
    assert error.number == 0
    with pytest.raises(WorkerFailure, match=rf"^Worker 0 was killed\. {count} died on this batch, {where}$"):
        raise error.error
    assert rest(dispatcher) == [1]
    assert [task.singly for _, task in pool.submitted] == [False] * max_restarts + [max_restarts > 0, False]


@pytest.mark.parametrize("row", [WHOLE_BATCH, NO_ROW])
def test_with_skips_a_batch_fails_if_no_sample_is_to_blame(pool, row):
    dispatcher = started(pool, tasks(0), depth=1, max_restarts=0, skips=True)
    pool.dies(0, row)
    if row == WHOLE_BATCH:
        pool.dies(0, row)  # sample by sample too
    (error,) = rest(dispatcher)
    assert isinstance(error, WorkerFailure)
    assert dispatcher.stats.skipped_samples == 0


# Errors


def test_a_full_machine_while_a_batch_is_opened_is_that_batchs_error_as_what_was_read_or_opened_is(pool):
    def full(lease):
        raise MachineFull("full")

    read, opened = ValueError("read"), ValueError("opened")
    pool.answers(0, error=read)
    pool.answers(1, payload=opened)
    pool.answers(2, payload=full)
    dispatcher = started(pool, tasks(0, 1, 2, 3))
    *errors, machine, last = rest(dispatcher)
    assert (errors, type(machine), last) == ([read, opened], MachineFull, 3)
    assert dispatcher.stats.batches == 4


# Slots and statistics


def lease_of(pool: ScriptedPool, batch: int) -> None:
    """Answers a batch with the bytes of its slot, as a pool that writes to slots does."""
    pool.answers(batch, payload=lambda lease: Reading(None if lease is None else lease.array))


def test_the_slot_of_a_dropped_task_is_free_when_it_is_answered_and_a_retried_one_keeps_its_own(pool):
    dispatcher = started(pool, tasks(0), ring_of(2), depth=1)
    dispatcher.begin(tasks(10))
    assert pool.leases[0]() is not None
    pool.answers(0)
    pool.dies(1)
    before = pool.leases[10]()
    take(dispatcher)
    assert pool.leases[0]() is None
    assert pool.leases[10]() is before and pool.workers == [(0, 0), (1, 10), (1, 10)]


@pytest.mark.parametrize(("slots", "writes_to_slots", "copied"), [(2, True, 0), (1, True, 1), (1, False, 0)])
def test_a_batch_lies_in_its_slot_unless_it_is_the_last_one(pool, slots, writes_to_slots, copied):
    pool.writes_to_slots = writes_to_slots
    lease_of(pool, 0)
    dispatcher = started(pool, tasks(0), ring_of(slots), depth=1)
    array = pool.leases[0]()
    array[:BATCH_BYTES] = np.arange(BATCH_BYTES)
    batch = take(dispatcher).batch
    assert dispatcher.stats.copied_batches == copied
    assert np.shares_memory(batch, array) != copied
    assert batch[:BATCH_BYTES].tolist() == [*range(BATCH_BYTES)]
    if copied:
        del array
        assert pool.leases[0]() is None  # the slot is free, though the batch is kept


def test_a_slot_is_made_for_the_last_task_only_if_a_worker_had_nothing_to_do_otherwise(pool):
    dispatcher = started(pool, tasks(*range(9)), ring_of(9), depth=3)
    batch = take(dispatcher)
    assert pool.batches == [0, 1, 2, 3]  # the pool dropped batch 0's slot, which serves batch 3
    lease_of(pool, 1)
    batch = take(dispatcher)
    assert pool.batches == [0, 1, 2, 3]  # batch 1's slot is held
    del batch
    take(dispatcher)
    assert pool.batches == [0, 1, 2, 3, 4, 5]
    for depth in (1, 2):
        pool = ScriptedPool(2)
        lease_of(pool, 0)
        dispatcher = started(pool, tasks(*range(9)), ring_of(9), depth=depth)
        batch = take(dispatcher)
        assert batch is not None and len(pool.submitted) == depth + 1


def test_stats_add_up(pool, monkeypatch):
    clock = iter(range(100))
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    skipped = [(4, "ValueError: bad")]
    pool.answers(0, needed=100, overflowed=True, work=Work(0.0, 2.0, 1.0, 0.125, 0.5, 3.0))
    work = Work(0.0, 0.5, 0.25, 0.0, 0.0, 0.25)
    pool.answers(1, needed=10, is_pickled=True, work=work, payload=Reading(1, skipped))
    dispatcher = started(pool, tasks(0, 1))
    rest(dispatcher)
    stats = dispatcher.stats.as_dict()
    assert {name: value for name, value in stats.items() if value} == {
        "batches": 2,
        "bytes": 110,
        "overflowed_batches": 1,
        "pickled_batches": 1,
        "read_batches": 2,
        "worker_busy_seconds": 2.5,
        "worker_cpu_seconds": 1.25,
        "worker_queued_seconds": 0.125,
        "worker_collate_seconds": 0.5,
        "worker_wait_seconds": 3.25,
        "wait_seconds": 2.0,
        "active_workers": 2,
        "skipped_samples": 1,
        "skipped": skipped,
    }


# A tuner


class OneMore:
    """In place of a Tuner: says what a test sets."""

    changes = 0

    def __init__(self) -> None:
        self.workers = 1
        self.new_workers: set[int] = set()
        self.calls: list[tuple] = []

    def delivered(self, now, waited, ready, in_flight, is_first, load) -> None:
        self.calls.append((ready, in_flight, is_first))


def test_only_as_many_workers_as_the_tuner_says_get_tasks_and_it_is_told_what_is_ready(pool):
    tuner = OneMore()
    dispatcher = started(pool, tasks(*range(8)), tuner=tuner)
    take(dispatcher)
    assert {worker for worker, _ in pool.workers} == {0}
    tuner.workers, tuner.new_workers = 2, {1}
    assert rest(dispatcher) == [1, 2, 3, 4, 5, 6, 7]
    assert {worker for worker, _ in pool.workers} == {0, 1} and not tuner.new_workers
    tuner.workers, given, tuner.calls = 1, len(pool.workers), []
    pool.answers(9, 8)
    dispatcher.begin(tasks(8, 9, 10))
    assert rest(dispatcher) == [8, 9, 10]
    assert {worker for worker, _ in pool.workers[given:]} == {0}
    assert tuner.calls == [(1, 2, True), (0, 1, False), (0, 0, False)]
