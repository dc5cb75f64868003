"""Messages between the main process and a worker; each is received whole or not at all.

Otherwise a worker that is killed in the middle of a message could block its receiver. The kernel delivers a message of
a SOCK_SEQPACKET socket in one piece; a message that is too large for that is put into shared memory, and only its
descriptor is sent.
"""

from __future__ import annotations

import os
import socket
from array import array
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, ClassVar

from .shared_memory import array_on, map_memory, write_shared

LARGEST = 32 << 10  # bytes of a message that is sent through the socket
ROOM = socket.CMSG_LEN(2 * array("i").itemsize)  # bytes for the descriptors of a message
CLOSE_ON_EXEC = int(getattr(socket, "MSG_CMSG_CLOEXEC", 0))  # not an enum's member, whose | is slow; only Linux has it
IN_SHARED_MEMORY = b"\0"  # the message is in the first descriptor's memory; no other message begins with this byte


class Connection:
    """One end of a pair of sockets. Only the worker's end is `blocking`, because the main process must never block."""

    # Open sockets. The garbage collector would close one before it calls the finalizer that ends the workers.
    _open: ClassVar[set[socket.socket]] = set()

    def __init__(self, end: socket.socket, blocking: bool) -> None:
        self.socket = end
        self._open.add(end)
        self._arrived: deque[tuple[bytes, list[Any], int, Any]] = deque()  # as recvmsg returns it
        end.setblocking(blocking)

    @classmethod
    def pair(cls) -> tuple[Connection, socket.socket]:
        """Returns the main process's end, and the worker's socket, to be sent to the worker."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return cls(ours, blocking=False), theirs

    def fileno(self) -> int:
        return self.socket.fileno()

    def send(self, message: bytes, descriptors: Sequence[int] = (), sent: list[Any] | None = None) -> bool:
        """Sends a message; False if there is no room for it now. Raises OSError if the other end is closed.

        The call that sends it also appends to `sent`, so that an exception from a signal handler cannot come between.
        """
        fd = write_shared(message) if len(message) > LARGEST else None
        if fd is not None:
            message, descriptors = IN_SHARED_MEMORY, (fd, *descriptors)
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", descriptors))] if descriptors else []
        try:
            ([] if sent is None else sent).extend(map(self.socket.sendmsg, ([message],), (ancillary,)))
        except BlockingIOError:
            return False
        finally:
            if fd is not None:
                os.close(fd)
        return True

    def receive(self, flags: int = 0) -> tuple[bytes, list[int]] | None:
        """Returns the next message and its descriptors, or None if none has arrived. Raises EOFError at the end.

        It is the same message again until `done` is called. The descriptors are closed then. With MSG_DONTWAIT in
        `flags` a blocking end does not wait either.
        """
        if not self._arrived:
            # socket.recv_fds ignores its flags: programs that this process starts would inherit the descriptors.
            with suppress(BlockingIOError):
                self._arrived.extend(map(self.socket.recvmsg, (LARGEST,), (ROOM,), (CLOSE_ON_EXEC | flags,)))
            if not self._arrived:
                return None
        received = self._arrived[0]
        message, descriptors = received[0], _descriptors(received)
        if not message:
            raise EOFError
        if message == IN_SHARED_MEMORY:
            if not descriptors:  # this process has too many open files to receive it: the message is lost
                raise EOFError
            message = array_on(map_memory(descriptors.pop(0))).tobytes()
        return message, descriptors

    @property
    def has_arrived(self) -> bool:
        """Whether a message is here that is not done."""
        return bool(self._arrived)

    def done(self) -> None:
        """Drops the message that `receive` returned."""
        with suppress(IndexError):  # a thread that closes the pool has dropped it
            for fd in _descriptors(self._arrived.popleft()):
                os.close(fd)

    def close(self) -> None:
        while self._arrived:
            self.done()
        self.socket.close()
        self._open.discard(self.socket)


def _descriptors(received: tuple[bytes, list[Any], int, Any]) -> list[int]:
    if not received[1]:
        return []
    fds = array("i")
    for *_, data in received[1]:
        fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return fds.tolist()
