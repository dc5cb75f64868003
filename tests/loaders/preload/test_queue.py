import gc
import threading
import weakref

import pytest

from loaders.preload.queue import ClosableQueue, Closed


class Item:
    pass


def test_items_come_out_in_the_order_they_went_in(in_thread, bound):
    channel = ClosableQueue(2)
    producer = in_thread(lambda: [channel.put(number) for number in range(100)])
    assert [channel.get() for _ in range(100)] == list(range(100))
    producer.result(bound)


def test_it_is_never_fuller_than_its_depth(in_thread, bound):
    channel, lengths = ClosableQueue(3), []
    producer = in_thread(lambda: [(channel.put(number), lengths.append(len(channel))) for number in range(200)])
    for _ in range(200):
        lengths.append(len(channel))
        channel.get()
    producer.result(bound)
    assert max(lengths) <= 3
    assert len(channel) == 0


class Watched(threading.Condition):
    """Tells when somebody begins to wait on it."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting = threading.Event()

    def wait(self, timeout=None) -> bool:
        self.waiting.set()
        return super().wait(timeout)


def watched(depth: int) -> Channel:
    channel = ClosableQueue(depth)
    channel._changed = Watched()
    return channel


def full() -> Channel:
    channel = watched(1)
    channel.put("first")
    return channel


def test_a_put_waits_for_room(in_thread, bound):
    channel = full()
    producer = in_thread(channel.put, "second")
    assert channel._changed.waiting.wait(bound)
    assert not producer.done()
    assert channel.get() == "first"
    producer.result(bound)
    assert channel.get() == "second"


def test_a_get_waits_for_an_item(in_thread, bound):
    channel = watched(1)
    consumer = in_thread(channel.get)
    assert channel._changed.waiting.wait(bound)
    assert not consumer.done()
    channel.put("item")
    assert consumer.result(bound) == "item"


def test_close_wakes_a_waiting_put(in_thread, bound):
    channel = full()
    producer = in_thread(channel.put, "second")
    assert channel._changed.waiting.wait(bound)
    channel.close()
    with pytest.raises(Closed):
        producer.result(bound)


def test_close_wakes_a_waiting_get(in_thread, bound):
    channel = watched(1)
    consumer = in_thread(channel.get)
    assert channel._changed.waiting.wait(bound)
    channel.close()
    with pytest.raises(Closed):
        consumer.result(bound)


def test_a_closed_channel_waits_for_nothing_and_holds_nothing():
    channel = ClosableQueue(2)
    item = Item()
    alive = weakref.ref(item)
    channel.put(item)
    del item
    channel.close()
    channel.close()
    gc.collect()
    assert alive() is None
    assert len(channel) == 0
    with pytest.raises(Closed):
        channel.get()
    with pytest.raises(Closed):
        channel.put("late")
    assert len(channel) == 0


def test_an_item_belongs_to_who_got_it():
    channel = ClosableQueue(1)
    channel.put(Item())
    alive = weakref.ref(channel.get())
    assert alive() is None
