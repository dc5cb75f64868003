"""The items of an epoch: batches and errors in their places, each with the loader's state after it."""

import os
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from loaders import background
from loaders.base import ENDED
from loaders.preload import producer as module
from loaders.preload.device_copy import DeviceCopier
from loaders.preload.producer import InlineProducer, Item, ItemMaker, ThreadProducer
from loaders.randomness import Random


class Script:
    """An iterator that returns or raises what it was given, and counts the calls."""

    def __init__(self, *steps) -> None:
        self.steps = list(steps)
        self.calls = 0

    def __iter__(self):
        return self

    def __next__(self):
        self.calls += 1
        if not self.steps:
            raise StopIteration
        step = self.steps.pop(0)
        if isinstance(step, BaseException):
            raise step
        return step() if callable(step) else step

    def state(self) -> dict:
        return {"calls": self.calls}


def maker(script: Script, transform=None, depth: int = 2, **settings) -> ItemMaker:
    copier = DeviceCopier("cpu", transform, depth=0)
    settings = {"state": script.state, "key": (3, 2), "rank": 1, "number": 4, **settings}
    return ItemMaker(script, copier, depth, **settings)


def taken(producer) -> Item:
    """The next item, which makes room for another one."""
    item = producer.get()
    producer.done()
    return item


@pytest.fixture
def released(monkeypatch) -> list:
    """How a copier's host batches were released."""
    calls: list = []
    monkeypatch.setattr(DeviceCopier, "release_copied", lambda self, wait=False: calls.append(wait))
    return calls


# Making items


def test_items_are_numbered_batches_with_the_state_after_them_and_then_the_end():
    make = maker(Script(torch.tensor(7), torch.tensor(8)))
    items = [make() for _ in range(3)]
    assert [item.number for item in items] == [4, 5, 6]
    assert [item.batch if item.is_end else item.batch.item() for item in items] == [7, 8, None]
    assert [item.state for item in items] == [{"calls": 1}, {"calls": 2}, None]
    assert [item.is_end for item in items] == [False, False, True]
    assert [(item.error, item.ready) for item in items] == [(None, None)] * 3


def test_the_transform_draws_from_seed_epoch_batch_and_rank():
    make = maker(Script(torch.tensor(7)), lambda batch, random: random.uniform(3))
    assert make().batch.tolist() == Random(3, 2, 4, 1).uniform(3).tolist()


def test_an_error_of_the_loader_is_an_item_with_a_state_and_the_next_batch_follows():
    make = maker(Script(ValueError("bad"), torch.tensor(8)))
    item = make()
    assert (item.number, str(item.error), item.state, item.batch) == (4, "bad", {"calls": 1}, None)
    assert make().batch.item() == 8


def test_an_error_of_the_transform_is_an_item_with_a_state():
    def transform(batch, random):
        raise ValueError("cannot")

    item = maker(Script(torch.tensor(7)), transform)()
    assert (str(item.error), item.state, item.batch) == ("cannot", {"calls": 1}, None)


def test_of_the_loaders_error_and_its_states_the_first_is_reported():
    def no_state() -> dict:
        raise RuntimeError("no state")

    make = maker(Script(ValueError("bad"), torch.tensor(7)), state=no_state)
    assert [str(make().error) for _ in range(2)] == ["bad", "no state"]


def test_a_transforms_stop_iteration_does_not_end_the_epoch():
    stop = StopIteration()

    def transform(batch, random):
        raise stop

    item = maker(Script(torch.tensor(7)), transform)()
    assert (type(item.error), str(item.error)) == (RuntimeError, "the transform raised StopIteration")
    assert item.error.__cause__ is stop
    assert not item.is_end


def test_an_out_of_memory_error_names_the_device_the_number_of_samples_and_what_to_lower():
    full = torch.OutOfMemoryError("full")

    def transform(batch, random):
        raise full

    error = maker(Script(torch.zeros(12, 2)), transform, depth=3)().error
    assert type(error) is torch.OutOfMemoryError
    assert "on cpu while preparing a batch of 12 samples with depth=3: lower the batch size" in str(error)
    assert error.__cause__ is full


def test_a_batch_is_kept_if_a_keyboard_interrupt_comes_while_it_is_prepared():
    interrupts = [KeyboardInterrupt]

    def transform(batch, random):
        if interrupts:
            raise interrupts.pop()
        return batch

    make = maker(Script(torch.tensor(7), KeyboardInterrupt(), torch.tensor(8)), transform)
    for number, value in ((4, 7), (5, 8)):
        with pytest.raises(KeyboardInterrupt):
            make()
        item = make()
        assert (item.number, item.after, item.batch.item()) == (number, number + 1, value)


def test_an_error_that_belongs_to_no_batch_does_not_move_the_number():
    script = Script(ValueError("a timeout"), torch.tensor(7))
    script.position = SimpleNamespace(batch=4)
    make = maker(script)
    error = make()
    script.position.batch = 5
    batch = make()
    assert [(item.number, item.after) for item in (error, batch)] == [(4, 4), (4, 5)]


# In the consumer's call


def test_inline_an_item_is_made_when_it_is_asked_for_and_none_after_close(released):
    script = Script(torch.tensor(7), torch.tensor(8))
    inline = InlineProducer(maker(script))
    assert (script.calls, inline.queued) == (0, 0)
    assert inline.get().batch.item() == 7
    assert inline.get().batch.item() == 7, "until it is done"
    assert script.calls == 1
    inline.done()
    assert inline.get().batch.item() == 8
    inline.stop(0, lambda: None)
    assert released == []
    inline.close()
    assert released == [True]
    with pytest.raises(RuntimeError) as error:
        inline.get()
    assert str(error.value) == ENDED


# In a thread


@pytest.fixture
def produce():
    made = []

    def produce(script: Script, **settings) -> ThreadProducer:
        made.append(ThreadProducer(maker(script, **settings)))
        return made[-1]

    yield produce
    for one in made:
        one.close()


def test_a_thread_makes_all_items_and_exits(produce, bound, released):
    one = produce(Script(torch.tensor(7), ValueError("bad")), depth=3)
    one._thread.join(bound)
    assert not one._thread.is_alive()
    assert one.queued == 3
    items = [taken(one) for _ in range(3)]
    assert items[0].batch.item() == 7
    assert str(items[1].error) == "bad"
    assert items[2].is_end
    assert released == [True]


def test_an_exception_that_ends_the_thread_comes_in_its_place_and_ends_the_epoch(produce):
    interrupt = KeyboardInterrupt()
    one = produce(Script(torch.tensor(7), interrupt, torch.tensor(8)), depth=3)
    items = [taken(one) for _ in range(3)]
    assert [(item.number, item.error, item.is_end) for item in items] == [
        (4, None, False),
        (5, interrupt, False),
        (6, None, True),
    ]


def test_a_closed_producer_says_that_the_epoch_was_ended(produce, released, bound):
    one = produce(Script(*[torch.tensor(7)] * 9), depth=1)
    one.get()
    one.close()
    assert not one._thread.is_alive()
    assert (one.queued, released[-1]) == (0, True)
    with pytest.raises(RuntimeError) as error:
        one.get()
    assert str(error.value) == ENDED


def test_a_forked_child_is_refused_with_both_process_numbers(produce, monkeypatch):
    one, ours = produce(Script(torch.tensor(7))), os.getpid()
    monkeypatch.setattr(background, "os", SimpleNamespace(getpid=lambda: ours + 1))
    with pytest.raises(RuntimeError, match=rf"another process \({ours}\), of which this one \({ours + 1}\)"):
        one.get()


@pytest.fixture
def blocked(produce, bound, monkeypatch):
    """A producer whose thread is inside the loader's next() until `release` is set."""
    monkeypatch.setattr(module, "JOIN_SECONDS", 0.01)
    monkeypatch.setattr(module, "GIVE_UP_SECONDS", 0.01)
    inside, release = threading.Event(), threading.Event()

    def step() -> torch.Tensor:
        inside.set()
        assert release.wait(bound)
        return torch.tensor(7)

    one = produce(Script(step, *[torch.tensor(8)] * 9))  # more than the queue has room for
    assert inside.wait(bound)
    yield one, release
    release.set()


def test_closing_gets_a_blocked_thread_out_of_the_loader(blocked, caplog, monkeypatch, bound):
    one, release = blocked
    monkeypatch.setattr(module, "GIVE_UP_SECONDS", bound)
    one.close(unblock=release.set)
    assert not one._thread.is_alive()
    assert caplog.records == []


def test_closing_does_not_touch_the_loader_of_a_thread_that_exits(produce, monkeypatch, bound):
    monkeypatch.setattr(module, "JOIN_SECONDS", bound)
    touched = []
    one = produce(Script(torch.tensor(7)))
    one.close(unblock=lambda: touched.append("closed"))
    assert touched == []
    one.stop(0, lambda: touched.append("closed"))
    assert touched == []


def test_closing_leaves_a_thread_behind_that_does_not_come_out_and_says_so(blocked, caplog):
    one, _ = blocked
    one.close(unblock=lambda: None)
    assert caplog.messages == ["the preloader's thread is stuck in the loader's next() and was left behind"]


def test_closing_in_the_thread_itself_does_not_wait_for_it(produce, bound):
    made: list = []
    ready, closed = threading.Event(), threading.Event()

    def step() -> torch.Tensor:
        assert ready.wait(bound)
        made[0].close()
        closed.set()
        return torch.tensor(7)

    made.append(produce(Script(step)))
    ready.set()
    assert closed.wait(bound)


@pytest.mark.parametrize("raises", [False, True])
def test_at_exit_a_blocked_thread_is_got_out_until_the_deadline(blocked, bound, raises):
    one, release = blocked

    def unblock() -> None:
        release.set()
        if raises:
            raise ValueError("nobody is left to be told")

    one.stop(time.monotonic() + bound, unblock)
    assert not one._thread.is_alive()


def test_at_exit_a_thread_that_does_not_come_out_is_left_behind(blocked):
    one, _ = blocked
    one.stop(time.monotonic() - 1, lambda: None)
    assert one._thread.is_alive()
