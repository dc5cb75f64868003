"""A message is received whole, with its descriptors, or not at all; and the main process's end never blocks."""

import os

import pytest

from loaders.workers import connection as module
from loaders.workers.connection import LARGEST, Connection, Control
from loaders.workers.shared_memory import page_aligned


@pytest.fixture
def ends():
    ours, socket = Connection.pair()
    theirs = Connection(socket, blocking=False)
    yield ours, theirs
    ours.close()
    theirs.close()


def pipe_with(data: bytes) -> int:
    """The reading end of a pipe that holds `data`."""
    reading, writing = os.pipe()
    os.write(writing, data)
    os.close(writing)
    return reading


def taken(connection: Connection) -> tuple[bytes, list[int]] | None:
    """The next message, with copies of its descriptors; it is dropped."""
    if (received := connection.receive()) is not None:
        received = received[0], [os.dup(fd) for fd in received[1]]
        connection.done()
    return received


def open_descriptors() -> list[str]:
    return os.listdir("/proc/self/fd")


@pytest.mark.parametrize("size", [1, 2, LARGEST - 1, LARGEST, LARGEST + 1, 40 * LARGEST])
def test_messages_of_any_size_arrive_whole_and_in_order(ends, size):
    ours, theirs = ends
    before = open_descriptors()
    messages = [os.urandom(size), b"between", os.urandom(size)]
    for message in messages:
        assert ours.send(message)
    assert [taken(theirs) for _ in messages] == [(message, []) for message in messages]
    assert theirs.receive() is None
    assert open_descriptors() == before


def test_only_large_messages_take_shared_memory(ends, monkeypatch):
    ours, _ = ends
    written = []
    monkeypatch.setattr(module, "write_shared", lambda message: written.append(message) or pipe_with(b""))
    ours.send(bytes(b"x" * LARGEST))
    assert written == []
    ours.send(b"x" * (LARGEST + 1))
    assert len(written) == 1


@pytest.mark.parametrize("size", [5, LARGEST + 1])
def test_a_descriptor_travels_with_its_message(ends, size):
    ours, theirs = ends
    fd = pipe_with(b"inside")
    before = len(open_descriptors())
    assert ours.send(b"x" * size, [fd])
    message, (received,) = theirs.receive()
    assert message == b"x" * size
    assert os.read(received, 9) == b"inside"
    assert not os.get_inheritable(received)
    theirs.done()
    assert len(open_descriptors()) == before
    os.close(fd)


@pytest.mark.parametrize("size", [5, LARGEST + 1])
def test_a_message_is_received_again_until_it_is_done(ends, size):
    ours, theirs = ends
    fd = pipe_with(b"")
    before = open_descriptors()
    ours.send(b"x" * size, [fd])
    ours.send(b"next")
    first = theirs.receive()
    assert theirs.receive() == first
    assert first[0] == b"x" * size
    theirs.done()
    assert theirs.receive() == (b"next", [])
    ours.send(b"more", [fd])
    theirs.done()
    assert theirs.receive() is not None
    theirs.close()  # with a message that is not done
    assert len(open_descriptors()) == len(before) - 1
    os.close(fd)


def test_the_call_that_sends_a_message_notes_it(ends):
    ours, theirs = ends
    sent: list = []
    while ours.send(b"x" * 1000, [], sent):
        pass
    count = 0
    while taken(theirs) is not None:
        count += 1
    assert len(sent) == count > 0


@pytest.mark.parametrize("size", [1000, LARGEST + 1])
def test_a_full_connection_refuses_a_message_and_takes_it_later(ends, size):
    ours, theirs = ends
    message = b"x" * size
    sent = 0
    before = open_descriptors()
    while ours.send(message):
        sent += 1
    for _ in range(sent):
        assert taken(theirs) == (message, [])
    assert taken(theirs) is None  # what was refused never arrives
    assert open_descriptors() == before
    assert ours.send(message)
    assert theirs.receive() == (message, [])


def test_a_full_connection_refuses_descriptors_too(ends):
    ours, _ = ends
    fd = pipe_with(b"")
    while ours.send(b"x" * 1000):
        pass
    assert not ours.send(b"x" * 1000, [fd])
    os.close(fd)


def test_receive_on_a_blocking_connection_waits_for_a_message(in_thread, bound):
    ours, socket = Connection.pair()
    theirs = Connection(socket, blocking=True)
    assert socket.getblocking()
    assert not ours.socket.getblocking()
    receiving = in_thread(theirs.receive)
    ours.send(b"message")
    assert receiving.result(bound) == (b"message", [])
    ours.close()
    theirs.close()


def test_messages_before_the_end_arrive_and_then_it_is_the_end(ends):
    ours, theirs = ends
    ours.send(b"last")
    ours.close()
    assert taken(theirs) == (b"last", [])
    with pytest.raises(EOFError):
        theirs.receive()
    with pytest.raises(OSError, match="Broken pipe"):
        theirs.send(b"too late")


def test_a_large_message_whose_descriptor_is_lost_ends_the_connection(ends):
    ours, theirs = ends
    ours.socket.send(module.IN_SHARED_MEMORY)  # as the kernel delivers it to a process that may open no more files
    with pytest.raises(EOFError):
        theirs.receive()


def test_a_connection_can_be_waited_for(ends):
    ours, _ = ends
    assert ours.fileno() == ours.socket.fileno()


@pytest.mark.parametrize("num_workers", [1, 7, page_aligned(1) // 8])
def test_each_worker_has_a_row_and_all_see_that_they_have_to_stop(num_workers):
    before = open_descriptors()
    ours = Control(num_workers)
    theirs = Control(num_workers, os.dup(ours.fd))
    ours.rows[:num_workers] = range(1, num_workers + 1)
    assert not theirs.is_stopping
    ours.close()
    ours.close()
    ours.stop()  # the memory stays mapped
    assert theirs.is_stopping
    assert theirs.rows[:num_workers].tolist() == [*range(1, num_workers + 1)]
    theirs.close()
    assert open_descriptors() == before
