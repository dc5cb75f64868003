"""Messages between the main process and a worker; each is received whole or not at all.

Otherwise a worker that is killed in the middle of a message could block its receiver. The kernel delivers a message of
a SOCK_SEQPACKET socket in one piece; a message that is too large for that is put into shared memory, and only its
descriptor is sent.
"""

from __future__ import annotations

import os
import socket
from array import array
from collections.abc import Sequence

from .shared_memory import read_shared, write_shared

LARGEST = 32 << 10  # bytes of a message that is sent through the socket
IN_SHARED_MEMORY = b"\0"  # the message is in the first descriptor's memory; no other message begins with this byte


class Connection:
    """One end of a pair of sockets. Only the worker's end is `blocking`, because the main process must never block."""

    def __init__(self, end: socket.socket, blocking: bool) -> None:
        self.socket = end
        end.setblocking(blocking)

    @classmethod
    def pair(cls) -> tuple[Connection, socket.socket]:
        """Returns the main process's end, and the worker's socket, to be sent to the worker."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return cls(ours, blocking=False), theirs

    def fileno(self) -> int:
        return self.socket.fileno()

    def send(self, message: bytes, descriptors: Sequence[int] = ()) -> bool:
        """Sends a message; False if there is no room for it now. Raises OSError if the other end is closed."""
        if len(message) <= LARGEST:
            return self._send(message, descriptors)
        fd = write_shared(message)
        try:
            return self._send(IN_SHARED_MEMORY, (fd, *descriptors))
        finally:
            os.close(fd)

    def receive(self) -> tuple[bytes, list[int]] | None:
        """Returns a message and its descriptors, or None if none has arrived. Raises EOFError at the end."""
        try:
            message, fds = self._receive()
        except BlockingIOError:
            return None
        if not message:
            raise EOFError
        if message == IN_SHARED_MEMORY:
            if not fds:  # this process has too many open files to receive it: the message is lost
                raise EOFError
            message = read_shared(fds.pop(0)).tobytes()
        return message, fds

    def close(self) -> None:
        self.socket.close()

    def _receive(self) -> tuple[bytes, list[int]]:
        # socket.recv_fds ignores its flags, and then programs that this process starts would inherit the descriptors.
        fds = array("i")
        room = socket.CMSG_LEN(2 * fds.itemsize)
        message, parts, *_ = self.socket.recvmsg(LARGEST, room, socket.MSG_CMSG_CLOEXEC)
        for *_, data in parts:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
        return message, fds.tolist()

    def _send(self, message: bytes, descriptors: Sequence[int]) -> bool:
        try:
            if descriptors:
                socket.send_fds(self.socket, [message], descriptors)
            else:
                self.socket.send(message)
        except BlockingIOError:
            return False
        return True
