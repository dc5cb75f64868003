"""A message is received whole, with its descriptors, or not at all; and the main process's end never blocks."""

import os

import pytest

from loaders.workers.connection import IN_SHARED_MEMORY, LARGEST, Connection


@pytest.fixture
def ends():
    ours, socket = Connection.pair()
    theirs = Connection(socket, blocking=False)
    yield ours, theirs
    ours.close()
    theirs.close()


@pytest.fixture
def pipe():
    """The reading end of a pipe that holds a word."""
    reading, writing = os.pipe()
    os.write(writing, b"inside")
    os.close(writing)
    yield reading
    os.close(reading)


def taken(connection: Connection) -> tuple[bytes, int] | None:
    """The next message, and how many descriptors came with it; it is dropped."""
    if (received := connection.receive()) is None:
        return None
    told = received[0], len(received[1])
    connection.done()
    return told


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("size", [1, LARGEST, LARGEST + 1, 40 * LARGEST])
def test_messages_of_any_size_arrive_whole_again_and_again_until_they_are_done(ends, pipe, size):
    ours, theirs = ends
    before, messages = open_descriptors(), [b"x" + os.urandom(size - 1), b"between", b"y" + os.urandom(size - 1)]
    for message in messages:
        assert ours.send(message, [pipe])
    for message in messages:
        for _ in range(2):
            received, (fd,) = theirs.receive()
            assert received == message and theirs.has_arrived and not os.get_inheritable(fd)
        theirs.done()
    assert theirs.receive() is None and not theirs.has_arrived
    assert open_descriptors() == before
    ours.send(messages[0], [pipe])
    _, (fd,) = theirs.receive()
    assert os.read(fd, 9) == b"inside"
    theirs.close()  # with a message that is not done
    assert open_descriptors() == before - 1


@pytest.mark.parametrize("size", [1000, LARGEST + 1])
def test_a_full_connection_refuses_a_message_and_takes_it_later(ends, pipe, size):
    ours, theirs = ends
    message, sent, before = b"x" * size, [], open_descriptors()
    while ours.send(message, [], sent):
        pass
    assert not ours.send(message, [pipe], sent)
    for _ in sent:
        assert taken(theirs) == (message, 0)
    assert taken(theirs) is None, "what was refused never arrives"
    assert open_descriptors() == before
    assert ours.send(message)
    assert taken(theirs) == (message, 0)


def test_after_the_last_message_it_is_the_end_as_it_is_if_a_large_ones_descriptor_was_lost(ends):
    ours, theirs = ends
    ours.send(b"last")
    ours.socket.send(IN_SHARED_MEMORY)  # as the kernel delivers it to a process that may open no more files
    assert taken(theirs) == (b"last", 0)
    with pytest.raises(EOFError):
        theirs.receive()
    theirs.done()
    ours.close()
    with pytest.raises(EOFError):
        theirs.receive()
    with pytest.raises(OSError, match="Broken pipe"):
        theirs.send(b"too late")
