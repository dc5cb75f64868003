"""A message is received whole, with its descriptors, or not at all; and the main process's end never blocks."""

import os

import pytest

from loaders.workers import connection as module
from loaders.workers.connection import LARGEST, Connection


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


def open_descriptors() -> list[str]:
    return os.listdir("/proc/self/fd")


@pytest.mark.parametrize("size", [1, 2, LARGEST - 1, LARGEST, LARGEST + 1, 40 * LARGEST])
def test_messages_of_any_size_arrive_whole_and_in_order(ends, size):
    ours, theirs = ends
    before = open_descriptors()
    messages = [os.urandom(size), b"between", os.urandom(size)]
    for message in messages:
        assert ours.send(message)
    assert [theirs.receive() for _ in messages] == [(message, []) for message in messages]
    assert theirs.receive() is None
    assert open_descriptors() == before


def test_only_large_messages_take_shared_memory(ends, monkeypatch):
    ours, theirs = ends
    written = []
    monkeypatch.setattr(module, "write_shared", lambda message: written.append(message) or pipe_with(b""))
    ours.send(bytes(b"x" * LARGEST))
    assert written == []
    ours.send(b"x" * (LARGEST + 1))
    assert len(written) == 1
    theirs.receive()


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
    assert len(open_descriptors()) == before + 1
    os.close(received)
    os.close(fd)


@pytest.mark.parametrize("size", [1000, LARGEST + 1])
def test_a_full_connection_refuses_a_message_and_takes_it_later(ends, size):
    ours, theirs = ends
    message = b"x" * size
    sent = 0
    before = open_descriptors()
    while ours.send(message):
        sent += 1
    for _ in range(sent):
        assert theirs.receive() == (message, [])
    assert theirs.receive() is None  # what was refused never arrives
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
    assert theirs.receive() == (b"last", [])
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
