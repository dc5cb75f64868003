"""Any sequence of calls, on any loader: the batches, the position and the state are those of the pure order.

Hypothesis draws the sequences. The oracle is Case.batches alone: it counts no epochs and keeps no state, so all of
that is written down here once more, in the words of the contract. A sample may be bad, workers are killed, calls are
interrupted, a state goes on in another kind of loader and with another number of ranks, and every batch is kept.
"""

import json
import multiprocessing
import traceback

import pytest
from every_loader import LOADERS, make
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
from strikes import Interrupted, struck

SETTINGS = st.fixed_dictionaries(
    {
        "shuffle": st.booleans(),
        "seed": st.integers(0, 3),
        "drop_last": st.booleans(),
        "rank": st.integers(0, 1),
        "pad": st.booleans(),
    }
)
SIZE = 6  # of the global batch
FEW = ("processes", "streams", "preloader", "torch")  # those that begin


class Sequences(RuleBasedStateMachine):
    """Calls a loader in any sequence, and knows where it has to be."""

    kind: str  # of the first loader; a state may be loaded into one of another kind

    def __init__(self):
        super().__init__()
        self.loader = None
        self.upcoming = (0, 0)  # the epoch that the next iter() runs, and the batch that it starts with
        self.running = None  # the epoch, and the batch that next() returns
        self.iterator = None
        self.saved = []  # states, and where they continue
        self.kept = []  # batches, and what they have to be for ever

    @initialize(options=SETTINGS, length=st.sampled_from([22, 22, 22, 4, 0]), bad=st.sampled_from([-1, 13, 3]))
    def build(self, options, length, bad):
        if LOADERS[self.kind].is_stream:
            length = 22  # a stream without a batch is an error
        if options["shuffle"]:
            length = max(length, 1)  # nothing to shuffle is an error
        self.options = options
        self.dataset = Faulty(length, bad)
        self.replace_loader(self.kind, world_size=2)

    def replace_loader(self, kind, world_size):
        """Makes another loader, with the same global batches."""
        self.kind = kind
        self.case = LOADERS[kind]
        world_size = 1 if self.case.is_stream else world_size
        options = {**self.options, "rank": self.options["rank"] % world_size, "world_size": world_size}
        # An error ends torch's epoch and that of a set that is read at once, and moves a stream's batches.
        has_errors = not (self.case.reads_once or self.case.is_stream or self.case.is_torchs)
        dataset = self.dataset if has_errors else Faulty(self.dataset.length)
        self.bad = dataset.bad
        self.size = SIZE // world_size
        self.loader = make(kind, dataset, self.size, **options)
        self.order = options
        self.upcoming = 0, 0
        self.is_named = False
        self.first = None  # where the running epoch began
        self.running = None
        self.iterator = None

    def batches(self, epoch):
        return self.case.batches(epoch, length=self.dataset.length, batch_size=self.size, **self.order)

    def place(self):
        """Where a state continues."""
        if self.running is None or self.running[1] >= len(self.batches(self.running[0])):
            return self.upcoming
        return self.running

    def expect(self, call):
        """Compares what a call of next() does with the order; returns whether the epoch goes on."""
        assert self.running is not None
        epoch, number = self.running
        left = self.batches(epoch)[number:]
        if not left:
            with pytest.raises(StopIteration):
                call()
            return False
        if set(left[0]) & set(self.bad):
            with pytest.raises(ValueError, match="is bad") as caught:
                call()
            assert "in __getitem__" in "".join(traceback.format_exception(caught.value))
        else:
            batch = call()
            assert batch.tolist() == left[0]
            self.kept.append((batch, left[0]))
        self.running = epoch, number + 1
        return True

    @rule()
    def begin(self):
        older = self.iterator
        is_untouched = self.running is not None and self.running == self.first and not self.case.is_independent
        if is_untouched and self.running[1] >= len(self.batches(self.running[0])):
            is_untouched = False
            if self.case.is_stream:  # that nothing is left may not be known: so a loop names the next one
                self.loader.set_epoch(self.upcoming[0])
        self.iterator = iter(self.loader)
        if self.is_named or not is_untouched:
            self.running = self.upcoming
        self.first = self.running
        self.is_named = False
        self.upcoming = self.running[0] + 1, 0
        self.has_ended(older)

    def has_ended(self, older):
        if older is not None and not self.case.is_independent:
            with pytest.raises((RuntimeError, StopIteration), match=r"ended this epoch|^$"):
                next(older)

    @precondition(lambda self: self.iterator is not None)
    @rule(count=st.integers(1, 5), of_the_loader=st.booleans())
    def go_on(self, count, of_the_loader):
        assert self.running is not None
        if of_the_loader and self.running[1] + count > len(self.batches(self.running[0])):
            return  # at its end, next(loader) may begin another epoch: see test_contract.py
        source = self.loader if of_the_loader else self.iterator
        for _ in range(count):
            if not self.expect(lambda: next(source)):
                return

    @rule()
    def to_its_end(self):
        if self.iterator is None:
            self.begin()
        while self.expect(lambda: next(self.iterator)):
            pass

    @precondition(lambda self: self.iterator is not None and not self.case.is_torchs)
    @rule(moment=st.integers(1, 150))
    def interrupt_next(self, moment):
        def call():
            with struck(moment):
                return next(self.iterator)

        try:
            self.expect(call)
        except Interrupted:  # no batch is lost: the position is as it was
            return

    @precondition(lambda self: not self.case.is_torchs)
    @rule(moment=st.integers(1, 150))
    def interrupt_iter(self, moment):
        try:
            with struck(moment):
                iter(self.loader)
        except Interrupted:
            self.loader.set_epoch(self.upcoming[0])  # what runs is the loader's to decide: so a loop names it
        self.begin_again()

    def begin_again(self):
        """Names the epoch that comes next, from its first batch on, since an interrupt may have spent its iter()."""
        self.upcoming = self.upcoming[0] + 1, 0
        self.loader.set_epoch(self.upcoming[0])
        self.running = None
        self.iterator = None
        self.begin()

    @rule(epoch=st.integers(0, 6))
    def name_an_epoch(self, epoch):
        self.loader.set_epoch(epoch)
        self.is_named = True
        if self.upcoming[0] != epoch:
            self.upcoming = epoch, 0

    @rule()
    def save(self):
        state = self.loader.state_dict()
        epoch, number = self.place()
        if self.case.is_stream and self.running is not None and state["epoch"] == self.running[0]:
            epoch, number = self.running  # that nothing is left is not known before more is asked for
        samples = {"samples": min(number * SIZE, self.dataset.length)} if not self.case.is_stream else {}
        assert state == {**state, "epoch": epoch, **samples}
        self.saved.append((json.loads(json.dumps(state)), (epoch, number)))

    @precondition(lambda self: self.saved)
    @rule(data=st.data(), elsewhere=st.sampled_from([None, *LOADERS]), world_size=st.sampled_from([1, 2]))
    def load(self, data, elsewhere, world_size):
        state, place = data.draw(st.sampled_from(self.saved))
        if elsewhere is not None and LOADERS[elsewhere].is_stream == self.case.is_stream:
            self.loader.close()
            self.replace_loader(elsewhere, world_size)
        older = self.iterator
        self.running = None
        self.iterator = None
        self.loader.load_state_dict(state)
        self.upcoming = place
        self.has_ended(older)

    @rule()
    def close(self):
        state = self.loader.state_dict()
        self.loader.close()
        self.loader.close()
        assert self.loader.state_dict() == state
        for call in (iter, next):
            with pytest.raises(RuntimeError, match="closed"):
                call(self.loader)
        if self.iterator is not None:
            with pytest.raises((RuntimeError, StopIteration)):
                next(self.iterator)
        assert multiprocessing.active_children() == []
        self.replace_loader(self.kind, 2)

    @precondition(lambda self: not self.case.is_torchs)
    @rule(which=st.integers(0, 3))
    def kill(self, which):
        for worker in sorted(multiprocessing.active_children(), key=lambda child: child.pid)[which : which + 1]:
            worker.kill()

    @invariant()
    def its_length_is_that_of_every_epoch(self):
        if self.loader is not None and not self.case.is_stream:
            assert len(self.loader) == len(self.batches(0))

    def teardown(self):
        if self.loader is not None:
            self.loader.close()
        assert all(batch.tolist() == expected for batch, expected in self.kept)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # an interrupt inside a finaliser
@pytest.mark.parametrize("kind", [*FEW, pytest.param("every", marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
def test_any_sequence_of_calls_delivers_the_pure_order(kind):
    for name in [kind] if kind in LOADERS else LOADERS:
        run_state_machine_as_test(
            type("Machine", (Sequences,), {"kind": name}),
            settings=settings(
                max_examples=6 if kind in LOADERS else 50,
                stateful_step_count=25,
                deadline=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
