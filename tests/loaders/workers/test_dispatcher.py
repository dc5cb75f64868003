"""The dispatcher over a pool that does what a test's script says: no worker, no waiting."""

import os
import weakref
from collections import deque
from copy import copy
from types import SimpleNamespace

import numpy as np
import pytest

from loaders.base import Delivery
from loaders.timeline import Work
from loaders.workers import dispatcher as module
from loaders.workers.dispatcher import Dispatcher
from loaders.workers.pool import NO_ROW, WHOLE_BATCH, Death, EngineError, Result, WorkerFailure
from loaders.workers.reader import Reading
from loaders.workers.shared_memory import MachineFull
from loaders.workers.slots import SlotRing
from loaders.workers.tasks import SamplerError, Task

BATCH_BYTES = 64


class ScriptedPool:
    """Answers the oldest task first, as long as there is no script of what `wait` does."""

    writes_to_slots = False

    def __init__(self, num_workers: int) -> None:
        self.num_workers = num_workers
        self.processes: list = ["a process"]
        self.submitted: list[tuple[int, Task]] = []  # (worker, task), in order
        self.full: set[int] = set()  # workers that take no task now
        self.error: Exception | None = None  # what the next call of `submit` raises
        self.calls: list[str] = []
        self.unanswered: dict[int, tuple[int, Task]] = {}
        self.leases: dict[int, weakref.ref] = {}  # of arrays, by batch
        self.script: deque = deque()
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
        assert self.script or self.unanswered, "the dispatcher waits for nothing"
        if not self.script:
            self.events.append(self.result(next(iter(self.unanswered))))
            return
        step = self.script.popleft()
        if isinstance(step, BaseException):
            raise step
        self.events.extend(self._event(item) for item in step)

    def open(self, result: Result, lease) -> Reading | BaseException:
        if callable(result.payload):
            return result.payload(lease)
        return result.payload

    def close(self) -> None:
        self.calls.append("close")

    # What a test scripts: each call is what one `wait` reports.

    def answers(self, *batches: int, **fields) -> None:
        self.script.append([(batch, fields) for batch in batches])

    def dies(self, worker: int, row: int = WHOLE_BATCH) -> None:
        self.script.append([Death(worker, f"Worker {worker} was killed.", row)])

    def raises(self, error: BaseException) -> None:
        self.script.append(error)

    def result(self, number: int, **fields) -> Result:
        _, task = self.unanswered.pop(number)
        return Result(number, **{"payload": Reading(task.number), "needed": BATCH_BYTES, **fields})

    def _event(self, item) -> Result | Death:
        if isinstance(item, Death):
            self.unanswered = {n: given for n, given in self.unanswered.items() if given[0] != item.worker}
            return item
        batch, fields = item
        (number,) = [number for number, (_, task) in self.unanswered.items() if task.number == batch]
        return self.result(number, **fields)

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


def rest(dispatcher: Dispatcher, epoch: int | None = None) -> list:
    """What is left of the epoch: batches, or errors."""
    found = []
    while (delivery := take(dispatcher, epoch)) is not None:
        found.append(delivery.batch if delivery.error is None else delivery.error)
    return found


def take(dispatcher: Dispatcher, epoch: int | None = None) -> Delivery | None:
    """The next delivery, taken as an epoch's iterator takes it."""
    delivery = dispatcher.next(epoch)
    if delivery is None:
        return None
    delivery.is_taken = True
    taken, delivery.batch, delivery.error = copy(delivery), None, None
    return taken


@pytest.fixture
def pool() -> ScriptedPool:
    return ScriptedPool(2)


# Order, depth and choice of workers


def test_batches_are_put_back_in_order(pool):
    pool.answers(2)
    pool.answers(1)
    pool.answers(0)
    assert rest(started(pool, tasks(*range(5)))) == [0, 1, 2, 3, 4]


def test_without_order_batches_are_delivered_as_they_come(pool):
    pool.answers(2)
    pool.answers(1)
    assert rest(started(pool, tasks(*range(4)), in_order=False)) == [2, 1, 0, 3]


def test_a_delivery_tells_the_number_of_its_batch(pool):
    dispatcher = started(pool, tasks(7))
    assert take(dispatcher) == Delivery(7, 7, is_taken=True)
    assert take(dispatcher) is None


def test_a_delivery_is_returned_again_until_it_is_taken(pool):
    dispatcher = started(pool, tasks(0, 1))
    first = dispatcher.next()
    assert dispatcher.next() is first
    assert (take(dispatcher).batch, take(dispatcher).batch) == (0, 1)
    assert dispatcher.stats.batches == 2


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_depth_batches_are_loaded_ahead(depth):
    pool = ScriptedPool(5)
    dispatcher = started(pool, tasks(*range(9)), depth=depth)
    assert pool.batches == [*range(depth)]
    take(dispatcher)
    assert pool.batches == [*range(depth + 1)]


def test_depth_0_reads_each_batch_when_it_is_asked_for(pool):
    dispatcher = started(pool, tasks(*range(3)), depth=0)
    assert pool.batches == []
    for number in range(3):
        assert take(dispatcher).batch == number
        assert pool.batches == [*range(number + 1)]
    assert take(dispatcher) is None


def test_round_robin_gives_task_k_to_worker_k_modulo_their_number(pool):
    pool.answers(1)
    pool.answers(0)
    rest(started(pool, tasks(*range(5)), round_robin=True))
    assert pool.workers == [(0, 0), (1, 1), (0, 2), (1, 3), (0, 4)]


def test_round_robin_starts_afresh_with_each_epoch(pool):
    dispatcher = started(pool, tasks(0), round_robin=True)
    rest(dispatcher)
    dispatcher.begin(tasks(10, 11))
    assert pool.workers == [(0, 0), (0, 10), (1, 11)]


def test_a_task_goes_to_the_worker_with_the_fewest_tasks(pool):
    dispatcher = started(pool, tasks(*range(6)), depth=4)
    pool.answers(1, 3, 0)
    rest(dispatcher)
    # Worker 1 has answered both of its tasks when batch 0 is delivered, and worker 0 one of two.
    assert pool.workers[:5] == [(0, 0), (1, 1), (0, 2), (1, 3), (1, 4)]


def test_a_task_that_a_worker_has_no_room_for_waits_for_that_worker(pool):
    pool.full = {1}
    dispatcher = started(pool, tasks(*range(4)), round_robin=True)
    assert pool.batches == [0]
    assert take(dispatcher).batch == 0
    assert pool.batches == [0]
    pool.full = set()
    assert rest(dispatcher) == [1, 2, 3]
    assert pool.workers == [(0, 0), (1, 1), (0, 2), (1, 3)]


def test_a_task_that_no_worker_has_room_for_waits_for_answers_to_tasks_that_nobody_wants(pool):
    dispatcher = started(pool, tasks(0, 1), depth=2)
    pool.full = {0, 1}
    dispatcher.begin(tasks(10, 11))
    answer = pool.wait

    def wait() -> None:
        pool.full = set()
        answer()

    pool.wait = wait
    assert rest(dispatcher) == [10, 11]


# Beginning and ending


def test_begin_drops_what_is_in_flight_and_what_waits():
    pool = ScriptedPool(3)
    dispatcher = started(pool, tasks(*range(9)))
    pool.answers(1)
    pool.answers(0)
    assert take(dispatcher).batch == 0
    dispatcher.begin(tasks(10, 11, 12, 13))
    assert pool.batches == [0, 1, 2, 3, 10, 11, 12]  # dropped tasks take no place from wanted ones
    assert rest(dispatcher) == [10, 11, 12, 13]
    assert dispatcher.stats.batches == 5


def test_begin_drops_a_task_that_was_held(pool):
    pool.full = {0}
    dispatcher = started(pool, tasks(0))
    pool.full = set()
    dispatcher.begin(tasks(10))
    assert rest(dispatcher) == [10]
    assert pool.batches == [10]


def test_as_with_torch_an_epoch_that_is_left_has_sent_all_its_tasks(pool):
    """Else the workers, which go on, would have drawn fewer random numbers."""
    pool.full = {0}
    dispatcher = started(pool, tasks(0), round_robin=True)
    pool.full = set()
    dispatcher.begin(tasks(10))
    assert pool.batches == [0, 10]


def test_the_slot_of_a_dropped_task_is_free_when_it_is_answered_and_not_before(pool):
    ring = SlotRing(2, False)
    ring.fit(BATCH_BYTES)
    dispatcher = started(pool, tasks(0), ring, depth=1)
    dispatcher.begin(tasks(10))
    assert pool.leases[0]() is not None
    pool.answers(0)
    pool.answers(10)
    take(dispatcher)
    assert pool.leases[0]() is None


def test_close_ends_the_workers_and_frees_all(pool):
    ring = SlotRing(4, False)
    ring.fit(BATCH_BYTES)
    dispatcher = started(pool, tasks(*range(9)), ring)
    pool.answers(1)
    pool.answers(0)
    take(dispatcher)
    dispatcher.close()
    assert pool.calls == ["begin", "close"]
    assert all(lease() is None for lease in pool.leases.values())
    assert ring.acquire() is None
    assert take(dispatcher) is None


def test_a_dispatcher_that_nobody_holds_closes_its_pool(pool):
    dispatcher = started(pool, tasks(0))
    del dispatcher
    assert pool.calls[-1] == "close"


def test_a_forked_child_is_told_that_the_workers_are_not_its_own(pool, monkeypatch):
    dispatcher = started(pool, tasks(0))
    parent = os.getpid()
    monkeypatch.setattr(module.os, "getpid", lambda: parent + 1)
    for call in (dispatcher.next, lambda: dispatcher.begin(tasks()), lambda: dispatcher.continues_with(0, 0)):
        with pytest.raises(RuntimeError, match=f"process \\({parent}\\), of which this one \\({parent + 1}\\)"):
            call()
    monkeypatch.undo()
    assert rest(dispatcher) == [0]


# Epochs


def test_the_next_epoch_is_loaded_ahead_and_continues(pool):
    def onwards():
        yield from tasks(0, 1, epoch=0)
        yield from tasks(0, 1, epoch=1)

    dispatcher = started(pool, onwards())
    assert not dispatcher.continues_with(0, 1)
    assert dispatcher.continues_with(0, 0)
    assert rest(dispatcher, 0) == [0, 1]
    assert not dispatcher.continues_with(1, 1)
    assert not dispatcher.continues_with(2, 0)
    assert dispatcher.continues_with(1, 0)
    assert rest(dispatcher, 1) == [0, 1]
    assert not dispatcher.continues_with(2, 0)  # nothing is left


# Deaths


def test_the_tasks_of_a_dead_worker_are_retried_by_the_same_worker_before_new_ones(pool):
    dispatcher = started(pool, tasks(*range(6)), depth=4)
    pool.answers(0)
    pool.dies(0)
    pool.answers(1)
    assert rest(dispatcher) == [0, 1, 2, 3, 4, 5]
    assert pool.workers == [(0, 0), (1, 1), (0, 2), (1, 3), (0, 4), (0, 2), (0, 4), (1, 5)]
    assert dispatcher.stats.deaths == 1


def test_a_death_is_logged_with_the_number_of_batches_to_retry(pool, caplog):
    pool.dies(0)
    rest(started(pool, tasks(0, 1, 2)))
    assert [record.message for record in caplog.records] == ["Worker 0 was killed. Restarting it; batches to retry: 2"]


def test_a_retried_task_keeps_its_slot(pool):
    ring = SlotRing(2, False)
    ring.fit(BATCH_BYTES)
    pool.dies(0)
    dispatcher = started(pool, tasks(0), ring, depth=1)
    before = pool.leases[0]()
    take(dispatcher)
    assert pool.leases[0]() is before


def test_dropped_tasks_of_a_dead_worker_are_not_retried(pool):
    dispatcher = started(pool, tasks(0, 1, 2))
    dispatcher.begin(tasks(10, 11))
    pool.dies(0)
    assert rest(dispatcher) == [10, 11]
    assert pool.workers == [(0, 0), (1, 1), (0, 2), (1, 10), (0, 11), (0, 11)]


def test_a_task_that_its_worker_has_no_room_for_is_retried_later_and_once(pool):
    dispatcher = started(pool, tasks(0, 1, 2, 3), depth=2)
    pool.dies(0)
    pool.dies(0)  # again, before it took its task back
    pool.full = {0}
    pool.answers(1)
    pool.raises(EngineError("nothing comes"))
    with pytest.raises(EngineError):
        take(dispatcher)
    assert pool.workers == [(0, 0), (1, 1)]
    pool.full = set()
    assert rest(dispatcher) == [0, 1, 2, 3]
    assert pool.batches == [0, 1, 0, 2, 3]


def test_a_crash_counts_only_against_the_first_task_of_the_dead_worker(pool):
    dispatcher = started(pool, tasks(0, 1, 2), depth=3, max_restarts=1)
    pool.dies(0)
    rest(dispatcher)
    retried = [task for _, task in pool.submitted[3:]]
    assert [(task.number, task.singly) for task in retried] == [(0, True), (2, False)]


def test_a_task_that_has_a_result_is_not_charged(pool):
    dispatcher = started(pool, tasks(0, 1, 2, 3), depth=4, max_restarts=1)
    pool.answers(1)
    pool.dies(1)
    assert rest(dispatcher) == [0, 1, 2, 3]
    assert [(task.number, task.singly) for _, task in pool.submitted[4:]] == [(3, True)]


def test_the_last_attempt_reads_sample_by_sample(pool):
    dispatcher = started(pool, tasks(0), depth=1, max_restarts=3)
    for _ in range(3):
        pool.dies(0)
    assert rest(dispatcher) == [0]
    assert [task.singly for _, task in pool.submitted] == [False, False, False, True]


@pytest.mark.parametrize(
    ("row", "where"),
    [
        (1, "while reading sample 1"),
        (0, "while reading sample 0"),
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
    assert len(pool.submitted) == max_restarts + 2


def test_the_other_tasks_of_the_worker_are_read_after_a_failure(pool):
    dispatcher = started(pool, tasks(0, 1, 2), max_restarts=0)
    pool.dies(0, 1)
    first, *others = rest(dispatcher)
    assert isinstance(first, WorkerFailure)
    assert others == [1, 2]
    assert pool.batches == [0, 1, 2, 2]


def test_a_sample_that_kills_workers_is_left_out_and_the_batch_gets_all_attempts_again(pool):
    dispatcher = started(pool, tasks(3), depth=1, max_restarts=1, skips=True)
    pool.dies(0, WHOLE_BATCH)
    pool.dies(0, 1)
    pool.dies(0, 2)
    pool.dies(0, 2)
    assert rest(dispatcher) == [3]
    assert [(task.singly, set(task.without)) for _, task in pool.submitted] == [
        (False, set()),
        (True, set()),
        (True, {1}),
        (True, {1}),
        (True, {1, 2}),
    ]
    assert dispatcher.stats.skipped == [(31, "Worker 0 was killed."), (32, "Worker 0 was killed.")]
    assert dispatcher.stats.skipped_samples == 2


def test_with_skips_a_batch_is_read_sample_by_sample_before_it_fails(pool):
    dispatcher = started(pool, tasks(0), depth=1, max_restarts=0, skips=True)
    pool.dies(0, WHOLE_BATCH)
    pool.dies(0, 0)
    assert rest(dispatcher) == [0]
    assert [(task.singly, set(task.without)) for _, task in pool.submitted] == [
        (False, set()),
        (True, set()),
        (True, {0}),
    ]


@pytest.mark.parametrize("row", [WHOLE_BATCH, NO_ROW])
def test_with_skips_a_batch_fails_if_no_sample_is_to_blame(pool, row):
    dispatcher = started(pool, tasks(0), depth=1, max_restarts=0, skips=True)
    pool.dies(0, row)
    if row == WHOLE_BATCH:
        pool.dies(0, row)  # sample by sample too
    (error,) = rest(dispatcher)
    assert isinstance(error, WorkerFailure)
    assert dispatcher.stats.skipped_samples == 0


def test_tasks_that_are_retried_count_once_where_a_task_goes(pool):
    dispatcher = started(pool, tasks(*range(8)), SlotRing(0, False), depth=6)
    pool.dies(1)
    pool.answers(1, 3)
    pool.answers(0)
    assert take(dispatcher).batch == 0
    pool.script.clear()
    dispatcher._submit()
    assert pool.workers[-1] == (1, 6)  # worker 0 has two tasks, worker 1 had one
    assert take(dispatcher).batch == 1
    dispatcher._submit()
    assert pool.workers[-1] == (0, 7)


def test_the_slots_of_dropped_tasks_are_free_when_their_worker_dies(pool):
    ring = SlotRing(9, False)
    ring.fit(BATCH_BYTES)
    dispatcher = started(pool, tasks(0, 1, 2), ring)
    dispatcher.begin(tasks(10))
    pool.dies(0)
    rest(dispatcher)
    assert [pool.leases[batch]() for batch in (0, 1, 2)] == [None] * 3


# Errors


@pytest.mark.parametrize("error", [MachineFull("full"), EngineError("slow")], ids=["MachineFull", "EngineError"])
def test_an_error_that_concerns_no_batch_leaves_everything_in_its_place(pool, error):
    dispatcher = started(pool, tasks(*range(5)))
    pool.answers(1)
    pool.raises(error)
    with pytest.raises(type(error)):
        take(dispatcher)
    assert rest(dispatcher) == [0, 1, 2, 3, 4]


def test_a_full_machine_keeps_a_task_that_cannot_be_submitted(pool):
    dispatcher = started(pool, tasks())
    pool.error = MachineFull("full")
    with pytest.raises(MachineFull):
        dispatcher.begin(tasks(*range(4)))
    assert rest(dispatcher) == [0, 1, 2, 3]


def test_a_full_machine_costs_no_batch_that_is_ready(pool):
    dispatcher = started(pool, tasks(*range(5)), depth=1)
    pool.error = MachineFull("full")
    assert take(dispatcher).batch == 0
    pool.error = MachineFull("still full")
    with pytest.raises(MachineFull, match="still"):
        take(dispatcher)
    assert rest(dispatcher) == [1, 2, 3, 4]


def test_a_full_machine_keeps_a_task_that_waits_to_be_retried(pool):
    dispatcher = started(pool, tasks(0, 1))
    pool.dies(0)
    pool.error = MachineFull("full")
    with pytest.raises(MachineFull):
        take(dispatcher)
    assert rest(dispatcher) == [0, 1]


def test_a_full_machine_while_a_batch_is_opened_is_that_batchs_error(pool):
    def full(lease):
        raise MachineFull("full")

    pool.answers(0, payload=full)
    dispatcher = started(pool, tasks(0, 1))
    delivery = take(dispatcher)
    assert (delivery.number, type(delivery.error)) == (0, MachineFull)
    assert rest(dispatcher) == [1]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError()], ids=["KeyboardInterrupt", "ValueError"])
@pytest.mark.parametrize("depth", [0, 1, 3])
def test_an_interrupted_wait_loses_nothing(pool, error, depth):
    dispatcher = started(pool, tasks(*range(5)), depth=depth)
    assert take(dispatcher).batch == 0
    pool.raises(error)
    with pytest.raises(type(error)):
        dispatcher.next()
    assert rest(dispatcher) == [1, 2, 3, 4]
    assert pool.batches == [0, 1, 2, 3, 4]


def test_an_interruption_while_tasks_are_made_loses_none(pool):
    steps = deque([0, 1, KeyboardInterrupt(), 2, 3])

    class Interrupted:
        def __iter__(self):
            return self

        def __next__(self) -> Task:
            if not steps:
                raise StopIteration
            if isinstance(steps[0], BaseException):
                raise steps.popleft()
            return next(tasks(steps.popleft()))

    dispatcher = started(pool, tasks())
    with pytest.raises(KeyboardInterrupt):
        dispatcher.begin(Interrupted())
    assert rest(dispatcher) == [0, 1, 2, 3]


def test_after_an_interrupt_a_death_counts_once_and_its_task_is_retried_once(pool, monkeypatch):
    dispatcher = started(pool, tasks(0), depth=1, max_restarts=1)
    pool.dies(0)

    def interrupted(*_) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(module.log, "warning", interrupted)
    with pytest.raises(KeyboardInterrupt):
        dispatcher.next()
    assert rest(dispatcher) == [0]
    assert pool.batches == [0, 0]


def test_a_samplers_error_comes_once_after_the_batches_before_it(pool):
    def failing():
        yield from tasks(0, 1)
        raise SamplerError from ValueError("no more")

    dispatcher = started(pool, failing(), depth=5)
    assert [take(dispatcher).batch for _ in range(2)] == [0, 1]
    delivery = take(dispatcher)
    assert delivery.number is None
    assert isinstance(delivery.error, ValueError)
    assert take(dispatcher) is None


def test_begin_forgets_a_samplers_error(pool):
    def failing():
        raise SamplerError from ValueError("no more")
        yield

    dispatcher = started(pool, failing())
    dispatcher.begin(tasks(0))
    assert rest(dispatcher) == [0]


def test_a_batchs_error_comes_in_its_place(pool):
    read, opened = ValueError("read"), ValueError("opened")
    pool.answers(0, error=read)
    pool.answers(1, payload=opened)
    dispatcher = started(pool, tasks(0, 1, 2))
    assert rest(dispatcher) == [read, opened, 2]
    assert dispatcher.stats.batches == 3


@pytest.mark.parametrize("field", ["error", "payload"])
def test_a_workers_stop_iteration_is_raised_as_a_runtime_error(pool, field):
    stop = StopIteration()
    pool.answers(0, **{field: stop})
    (error,) = rest(started(pool, tasks(0)))
    assert type(error) is RuntimeError
    assert str(error) == "a worker raised StopIteration"
    assert error.__cause__ is stop


# Slots and statistics


def lease_of(pool: ScriptedPool, batch: int) -> None:
    """Answers a batch with the bytes of its slot, as a pool that writes to slots does."""
    pool.answers(batch, payload=lambda lease: Reading(None if lease is None else lease.array))


def test_a_batch_lies_in_its_slot_while_there_is_a_spare_one(pool):
    pool.writes_to_slots = True
    ring = SlotRing(2, False)
    ring.fit(BATCH_BYTES)
    lease_of(pool, 0)
    dispatcher = started(pool, tasks(0), ring, depth=1)
    array = pool.leases[0]()
    assert take(dispatcher).batch is array
    assert dispatcher.stats.copied_batches == 0


@pytest.mark.parametrize("writes_to_slots", [True, False])
def test_the_last_slot_is_never_given_away(pool, writes_to_slots):
    pool.writes_to_slots = writes_to_slots
    ring = SlotRing(1, False)
    ring.fit(BATCH_BYTES)
    lease_of(pool, 0)
    dispatcher = started(pool, tasks(0), ring, depth=1)
    array = pool.leases[0]()
    array[:BATCH_BYTES] = np.arange(BATCH_BYTES)
    batch = take(dispatcher).batch
    assert dispatcher.stats.copied_batches == writes_to_slots
    if not writes_to_slots:
        assert batch is array
        return
    assert batch.tolist() == [*range(BATCH_BYTES)]
    assert not np.shares_memory(batch, array)
    del array
    assert pool.leases[0]() is None  # the slot is free, though the batch is kept


def test_an_error_or_a_batch_without_a_slot_is_not_copied(pool):
    pool.writes_to_slots = True
    ring = SlotRing(1, False)
    dispatcher = started(
        pool, tasks(0, 1, 2), ring, depth=1
    )  # there is no slot before the first batch's size is known
    assert take(dispatcher).batch == 0
    pool.answers(1, error="an error's own form", payload=ValueError("read"))
    assert isinstance(take(dispatcher).error, ValueError)
    assert dispatcher.stats.copied_batches == 0


def test_no_slot_is_made_for_the_last_task_while_workers_are_busy(pool):
    ring = SlotRing(9, False)
    ring.fit(BATCH_BYTES)
    dispatcher = started(pool, tasks(*range(9)), ring, depth=3)
    batch = take(dispatcher)
    assert pool.batches == [0, 1, 2, 3]  # the pool dropped batch 0's slot, which serves batch 3
    lease_of(pool, 1)
    batch = take(dispatcher)
    assert pool.batches == [0, 1, 2, 3]  # batch 1's slot is held
    del batch
    take(dispatcher)
    assert pool.batches == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("depth", [1, 2])
def test_a_slot_is_made_if_a_worker_had_nothing_to_do_otherwise(pool, depth):
    ring = SlotRing(9, False)
    ring.fit(BATCH_BYTES)
    lease_of(pool, 0)
    dispatcher = started(pool, tasks(*range(9)), ring, depth=depth)
    batch = take(dispatcher)
    assert batch is not None
    assert len(pool.submitted) == depth + 1


def test_slots_follow_the_sizes_of_batches(pool):
    ring = SlotRing(9, False)
    dispatcher = started(pool, tasks(0, 1), ring, depth=1)
    assert pool.leases == {}
    take(dispatcher)
    assert ring.capacity >= BATCH_BYTES
    assert list(pool.leases) == [1]


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


def test_only_as_many_workers_as_the_tuner_says_get_tasks(pool):
    tuner = OneMore()
    dispatcher = started(pool, tasks(*range(8)), tuner=tuner)
    take(dispatcher)
    assert {worker for worker, _ in pool.workers} == {0}
    tuner.workers, tuner.new_workers = 2, {1}
    assert rest(dispatcher) == [1, 2, 3, 4, 5, 6, 7]
    assert {worker for worker, _ in pool.workers} == {0, 1} and not tuner.new_workers
    tuner.workers = 1
    given = len(pool.workers)
    dispatcher.begin(tasks(8, 9))
    assert rest(dispatcher) == [8, 9]
    assert {worker for worker, _ in pool.workers[given:]} == {0}


def test_a_tuner_is_told_what_is_ready_and_when_an_epoch_begins(pool):
    tuner = OneMore()
    pool.answers(1, 0)
    dispatcher = started(pool, tasks(0, 1, 2, epoch=0), tuner=tuner)
    rest(dispatcher, 0)
    assert tuner.calls == [(1, 2, True), (0, 1, False), (0, 0, False)]
    dispatcher.begin(tasks(0, epoch=1))
    rest(dispatcher, 1)
    assert tuner.calls[3] == (0, 0, True)
