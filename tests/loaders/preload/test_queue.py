import gc
import threading
import weakref
from queue import SimpleQueue

import pytest

from loaders.preload.queue import ClosableQueue, Closed


class Item:
    pass


def taken(queue: ClosableQueue):
    """The next item, which makes room for another one."""
    item = queue.get()
    queue.done()
    return item


def test_items_come_out_in_the_order_they_went_in(in_thread, bound):
    queue = ClosableQueue(2)
    producer = in_thread(lambda: [queue.put(number) for number in range(100)])
    assert [taken(queue) for _ in range(100)] == list(range(100))
    producer.result(bound)


def test_the_queue_never_holds_more_than_its_depth(in_thread, bound):
    queue, lengths = ClosableQueue(3), []
    producer = in_thread(lambda: [(queue.put(number), lengths.append(len(queue))) for number in range(200)])
    for _ in range(200):
        lengths.append(len(queue))
        taken(queue)
    producer.result(bound)
    assert max(lengths) <= 3
    assert len(queue) == 0


class Watched:
    """A SimpleQueue that tells when somebody begins to wait for an entry."""

    def __init__(self, queue: SimpleQueue) -> None:
        self.queue = queue
        self.waiting = threading.Event()

    def get(self, block: bool = True):
        if self.queue.empty():
            self.waiting.set()
        return self.queue.get(block)

    def __getattr__(self, name: str):
        return getattr(self.queue, name)


@pytest.fixture
def full(monkeypatch) -> ClosableQueue:
    queue = ClosableQueue(1)
    queue.put("first")
    monkeypatch.setattr(queue, "_room", Watched(queue._room))
    return queue


@pytest.fixture
def empty(monkeypatch) -> ClosableQueue:
    queue = ClosableQueue(1)
    monkeypatch.setattr(queue, "_items", Watched(queue._items))
    return queue


def test_a_put_waits_until_there_is_room(full, in_thread, bound):
    producer = in_thread(full.put, "second")
    assert full._room.waiting.wait(bound)
    assert full.get() == "first"
    assert not producer.done(), "what is not done yet takes room"
    full.done()
    producer.result(bound)
    assert taken(full) == "second"


def test_a_get_returns_the_same_item_until_it_is_done():
    queue = ClosableQueue(2)
    queue.put("first")
    queue.put("second")
    assert [queue.get(), queue.get(), taken(queue), queue.get()] == ["first"] * 3 + ["second"]
    for _ in range(3):
        queue.done()  # more often than there are items
    queue.put("third")
    queue.put("fourth")
    assert len(queue) == 2


def test_a_get_waits_for_an_item(empty, in_thread, bound):
    consumer = in_thread(empty.get)
    assert empty._items.waiting.wait(bound)
    assert not consumer.done()
    empty.put("item")
    assert consumer.result(bound) == "item"


def test_close_wakes_a_waiting_put(full, in_thread, bound):
    producer = in_thread(full.put, "second")
    assert full._room.waiting.wait(bound)
    full.close()
    with pytest.raises(Closed):
        producer.result(bound)
    assert len(full) == 0
    assert full._items.qsize() == 1  # the sign that it is closed: the late item was let go


def test_close_wakes_every_waiting_get(empty, in_thread, bound):
    consumers = []
    for _ in range(2):
        empty._items.waiting.clear()
        consumers.append(in_thread(empty.get))
        assert empty._items.waiting.wait(bound)
    empty.close()
    for consumer in consumers:
        with pytest.raises(Closed):
            consumer.result(bound)


def test_a_closed_queue_waits_for_nothing_and_holds_nothing():
    queue = ClosableQueue(2)
    item = Item()
    alive = weakref.ref(item)
    queue.put(item)
    queue.put(item)
    del item
    queue.get()
    queue.close()
    queue.close()
    gc.collect()
    assert alive() is None
    assert len(queue) == 0
    with pytest.raises(Closed):
        queue.get()
    with pytest.raises(Closed):
        queue.put("late")
    assert len(queue) == 0


def test_the_queue_keeps_no_reference_to_an_item_that_is_done():
    queue = ClosableQueue(1)
    queue.put(Item())
    alive = weakref.ref(taken(queue))
    assert alive() is None
