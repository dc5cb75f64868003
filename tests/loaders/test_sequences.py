"""Any sequence of calls, on any loader: the batches, the position and the state are those of the pure order.

Hypothesis draws the sequences. The oracle is Order alone: it counts no epochs and keeps no state, so all of that is
written down here once more, in the words of the contract.
"""

import json
import os
import signal
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from example_datasets import Numbers
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
LENGTH = 22
workers = partial(WorkerLoader, num_workers=2, persistent_workers=True)
LOADERS: dict[str, Make] = {
    "torch": TorchLoader,
    "inline": partial(WorkerLoader, persistent_workers=True),
    "workers": workers,
    "threads": partial(workers, worker_method="thread"),
    "resident": ResidentLoader,
    "preloader": lambda *args, **order: Preloader(workers(*args, **order), "cpu", depth=2),
    "preloader at depth 0": lambda *args, **order: Preloader(workers(*args, **order), "cpu", depth=0),
    "preloader over torch": lambda *args, **order: Preloader(TorchLoader(*args, **order), "cpu", depth=1),
}
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

    make: Make
    kills = False  # worker processes, at any moment

    def __init__(self) -> None:
        super().__init__()
        self.loader: Any = None
        self.upcoming = (0, 0)  # the epoch that the next iter() runs, and the batch that it starts with
        self.running: tuple[int, int] | None = None  # the epoch, and the batch that next() returns
        self.iterator: Any = None
        self.saved: list[tuple[dict[str, Any], tuple[int, int]]] = []  # states, and where they continue

    @initialize(given=ORDERS)
    def build(self, given: dict[str, Any]) -> None:
        parts = given["shuffle"], given["seed"], given["last_batch"] == "drop", given["rank"], 2, given["pad"]
        self.order = Order(LENGTH, 3, *parts, given["last_batch"] == "rollover")
        self.settings = {**given, "world_size": 2}
        self.replace_loader()

    def replace_loader(self) -> None:
        self.loader = type(self).make(Numbers(LENGTH), 3, **self.settings)
        self.upcoming, self.running, self.iterator = (0, 0), None, None

    def batches(self, epoch: int) -> list[list[int]]:
        return [indices.tolist() for _, _, indices in self.order.batches(epoch)]

    def place(self) -> tuple[int, int]:
        """Where a state continues."""
        if self.running is None or self.running[1] >= len(self.batches(self.running[0])):
            return self.upcoming
        return self.running

    @rule()
    def begin(self) -> None:
        older = self.iterator
        self.iterator = iter(self.loader)
        self.running, self.upcoming = self.upcoming, (self.upcoming[0] + 1, 0)
        if older is not None:
            with pytest.raises((RuntimeError, StopIteration)):
                next(older)

    @precondition(lambda self: self.iterator is not None)
    @rule(count=st.integers(1, 5))
    def go_on(self, count: int) -> None:
        for _ in range(count):
            epoch, number = self.running
            left = self.batches(epoch)[number:]
            if not left:
                with pytest.raises(StopIteration):
                    next(self.iterator)
                return
            assert next(self.iterator).tolist() == left[0]
            self.running = epoch, number + 1

    @rule()
    def to_its_end(self) -> None:
        if self.iterator is None:
            self.begin()
        epoch, number = self.running
        assert [batch.tolist() for batch in self.iterator] == self.batches(epoch)[number:]
        self.running = epoch, len(self.batches(epoch))

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
    @rule(data=st.data(), elsewhere=st.booleans())
    def load(self, data: st.DataObject, elsewhere: bool) -> None:
        state, place = data.draw(st.sampled_from(self.saved))
        if elsewhere:
            self.loader.close()
            self.replace_loader()
        self.loader.load_state_dict(state)
        self.upcoming, self.running, self.iterator = place, None, None

    @rule()
    def close(self) -> None:
        self.loader.close()
        self.loader.close()
        with pytest.raises(RuntimeError, match="is closed"):
            iter(self.loader)
        self.replace_loader()

    @precondition(lambda self: self.kills and self.iterator is not None and self.iterator._workers)
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


@pytest.mark.parametrize("name", LOADERS)
def test_any_sequence_of_calls_delivers_the_pure_order(name):
    machine = type("Machine", (Sequences,), {"make": staticmethod(LOADERS[name]), "kills": name == "workers"})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=10, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
