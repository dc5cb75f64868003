"""Any sequence of calls, on any loader: the batches, the position and the state are those of the pure order.

Hypothesis draws the sequences. The oracle is Order alone: it counts no epochs and keeps no state, so all of that is
written down here once more, in the words of the contract. A sample may be bad, workers are killed, a state goes on in
another kind of loader and with another number of ranks, and every batch is kept to the end.
"""

import json
import os
import signal
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from example_datasets import Faulty
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from loaders import Preloader, ResidentLoader, TorchLoader, WorkerLoader
from loaders.order import Order

Make = Callable[..., Any]
workers = partial(WorkerLoader, num_workers=2, persistent_workers=True)
LOADERS: dict[str, Make] = {
    "torch": partial(TorchLoader, num_workers=1),
    "inline": partial(WorkerLoader, persistent_workers=True),
    "workers": workers,
    "threads": partial(workers, worker_method="thread"),
    "independent": partial(WorkerLoader, num_workers=1, prefetch_factor=1),
    "resident": ResidentLoader,
    "preloader": lambda *args, **order: Preloader(workers(*args, **order), "cpu", depth=2),
    "preloader at depth 0": lambda *args, **order: Preloader(workers(*args, **order), "cpu", depth=0),
    "preloader over torch": lambda *args, **order: Preloader(TorchLoader(*args, **order), "cpu", depth=1),
    "preloader over resident": lambda *args, **order: Preloader(ResidentLoader(*args, **order), "cpu", depth=2),
}
INDEPENDENT = {"independent"}  # iter() does not end an older iterator
READ_ONCE = {
    "resident",
    "preloader over resident",
}  # these read the whole set at the first iter(), so there are its errors
LENGTHS = st.sampled_from([22, 22, 22, 4, 0])  # of four, a batch may need two epochs
ORDERS = st.fixed_dictionaries(
    {
        "shuffle": st.booleans(),
        "seed": st.integers(0, 3),
        "last_batch": st.sampled_from(["keep", "drop", "rollover"]),
        "rank": st.integers(0, 1),
        "pad": st.booleans(),
    }
)


class Sequences(RuleBasedStateMachine):
    """Calls a loader in any sequence, and knows where it has to be."""

    kind: str  # of the first loader; a state may be loaded into one of another kind

    def __init__(self) -> None:
        super().__init__()
        self.loader: Any = None
        self.upcoming = (0, 0)  # the epoch that the next iter() runs, and the batch that it starts with
        self.running: tuple[int, int] | None = None  # the epoch, and the batch that next() returns
        self.iterator: Any = None
        self.saved: list[tuple[dict[str, Any], tuple[int, int]]] = []  # states, and where they continue
        self.kept: list[tuple[torch.Tensor, list[int]]] = []  # batches, and what they have to be for ever

    @initialize(given=ORDERS, length=LENGTHS, bad=st.sampled_from([-1, 13, 3]))
    def build(self, given: dict[str, Any], length: int, bad: int) -> None:
        self.given, self.dataset = given, Faulty(length, bad)
        self.replace_loader(self.kind, world_size=2)

    def replace_loader(self, kind: str, world_size: int) -> None:
        """Makes another loader, with the same global batches of six."""
        given = {**self.given, "rank": self.given["rank"] % world_size, "world_size": world_size}
        dataset = Faulty(self.dataset.length) if kind in READ_ONCE else self.dataset
        self.kind, self.bad = kind, dataset.bad
        self.loader = LOADERS[kind](dataset, 6 // world_size, **given)
        last_batch = given.pop("last_batch")
        given |= {"drop_last": last_batch == "drop", "rollover": last_batch == "rollover"}
        self.order = Order(dataset.length, 6 // world_size, **given)
        self.upcoming, self.running, self.iterator = (0, 0), None, None

    def batches(self, epoch: int) -> list[list[int]]:
        return [indices.tolist() for _, _, indices in self.order.batches(epoch)]

    def place(self) -> tuple[int, int]:
        """Where a state continues."""
        if self.running is None or self.running[1] >= len(self.batches(self.running[0])):
            return self.upcoming
        return self.running

    def expect(self, call: Callable[[], torch.Tensor]) -> bool:
        """Compares what a call of next() does with the order; returns whether the epoch goes on."""
        epoch, number = self.running
        left = self.batches(epoch)[number:]
        if not left:
            with pytest.raises(StopIteration):
                call()
            return False
        self.running = epoch, number + 1
        if set(left[0]) & set(self.bad):
            with pytest.raises(ValueError, match="is bad") as caught:
                call()
            assert "in __getitem__" in "".join(traceback.format_exception(caught.value))
        else:
            batch = call()
            assert batch.tolist() == left[0]
            self.kept.append((batch, left[0]))
        return True

    @rule()
    def begin(self) -> None:
        older = self.iterator
        self.iterator = iter(self.loader)
        self.running, self.upcoming = self.upcoming, (self.upcoming[0] + 1, 0)
        assert len(self.iterator) == len(self.batches(self.running[0]))
        self.has_ended(older)

    def has_ended(self, iterator: Any) -> None:
        if iterator is not None and self.kind not in INDEPENDENT:
            with pytest.raises((RuntimeError, StopIteration), match=r"ended this epoch|^$"):
                next(iterator)

    @precondition(lambda self: self.iterator is not None)
    @rule(count=st.integers(1, 5), of_the_loader=st.booleans())
    def go_on(self, count: int, of_the_loader: bool) -> None:
        epoch, number = self.running
        if of_the_loader and number + count > len(self.batches(epoch)):
            return  # at its end, next(loader) may begin another epoch: see test_contract.py
        source = self.loader if of_the_loader else self.iterator
        for _ in range(count):
            if not self.expect(lambda: next(source)):
                return

    @rule()
    def to_its_end(self) -> None:
        if self.iterator is None:
            self.begin()
        while self.expect(lambda: next(self.iterator)):
            pass

    @rule(epoch=st.integers(0, 6))
    def name_an_epoch(self, epoch: int) -> None:
        self.loader.set_epoch(epoch)
        if self.upcoming[0] != epoch:
            self.upcoming = epoch, 0

    @rule()
    def save(self) -> None:
        state = self.loader.state_dict()
        epoch, number = place = self.place()
        assert (state["epoch"], state["samples"]) == (epoch, self.order.samples_before(number))
        self.saved.append((json.loads(json.dumps(state)), place))

    @precondition(lambda self: self.saved)
    @rule(data=st.data(), elsewhere=st.sampled_from([None, *LOADERS]), world_size=st.sampled_from([1, 2]))
    def load(self, data: st.DataObject, elsewhere: str | None, world_size: int) -> None:
        state, place = data.draw(st.sampled_from(self.saved))
        if elsewhere is not None:
            self.loader.close()
            self.replace_loader(elsewhere, world_size)
        self.loader.load_state_dict(state)
        self.upcoming, self.running = place, None
        if elsewhere is None:
            self.has_ended(self.iterator)
        self.iterator = None

    @rule()
    def close(self) -> None:
        state = self.loader.state_dict()
        self.loader.close()
        self.loader.close()
        assert self.loader.state_dict() == state
        for call in (iter, next):
            with pytest.raises(RuntimeError, match="is closed"):
                call(self.loader)
        if self.iterator is not None:
            with pytest.raises((RuntimeError, StopIteration)):
                next(self.iterator)
        json.dumps(self.loader.stats())
        self.replace_loader(self.kind, 2)

    @precondition(lambda self: self.kind == "workers" and self.iterator is not None and self.iterator._workers)
    @rule(data=st.data())
    def kill(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(self.iterator._workers))
        os.kill(worker.pid, signal.SIGKILL)

    @invariant()
    def its_length_is_that_of_the_next_epoch(self) -> None:
        # A preloader tells its loader of an epoch that is named while another runs when that one has ended.
        if self.loader is not None and not (isinstance(self.loader, Preloader) and self.order.rollover):
            assert len(self.loader) == len(self.batches(self.upcoming[0]))

    def teardown(self) -> None:
        if self.loader is not None:
            self.loader.close()
        assert all(batch.tolist() == expected for batch, expected in self.kept)


@pytest.mark.parametrize("kind", LOADERS)
def test_any_sequence_of_calls_delivers_the_pure_order(kind):
    checks = list(HealthCheck)
    run_state_machine_as_test(
        type("Machine", (Sequences,), {"kind": kind}),
        settings=settings(max_examples=10, stateful_step_count=25, deadline=None, suppress_health_check=checks),
    )
