"""Requests many byte ranges at once with libcurl (the package pycurl), without threads.

An image of 70 kB takes less than half of the CPU time that it takes with obstore, which needs a thread for each. This
is the fast way only: object_store.answers asks obstore for all that fails here, for its retries and its errors.
"""

import io
import os
import ssl
import time
from collections import deque
from contextlib import suppress
from functools import lru_cache
from queue import SimpleQueue
from typing import Any
from urllib.parse import quote

import pycurl

from data import object_store
from data.object_store import RangeReader

REFUSED = (400, 401, 403)  # a signature is not all that this server needs; obstore reads from it for some time
RESERVED = "!$&'()*+,;=:@~"  # characters that stay as they are in a URL
POLL_SECONDS, WAIT_SECONDS = 0.005, 0.001  # between polls: while there are answers to use, and while there are none
SIGNED_SECONDS = 150  # a signature is used for so long, and valid for twice as long

Found = SimpleQueue[tuple[int, Any]]
Request = tuple[RangeReader, int, Found]


class RangeClient:
    """The requests of one thread, `most` at a time. They go on while the thread calls `poll` or `wait`.

    is_closed: an exception, as of Ctrl-C, has ended a `poll` between two of its steps: use another client.
    """

    def __init__(self, most: int) -> None:
        self._multi = pycurl.CurlMulti()
        self._multi.setopt(pycurl.M_MAXCONNECTS, most)
        self._idle = [new_handle() for _ in range(most)]
        self._waiting: deque[Request] = deque()
        self._begun: dict[Any, Request] = {}  # by handle
        self._refused: set[tuple[str, int]] = set()  # folders, and the period in which they were
        self._polled = 0.0  # when
        self.is_closed = False

    def ask(self, part: RangeReader, number: int, found: Found) -> bool:
        """Asks for a range; the next `poll` sends the request. Returns False for a range that only obstore can read.

        Puts (number, bytes) into `found` when the range has arrived, or (number, None) if the request has failed.
        """
        is_refused = (folder(part), period()) in self._refused
        if is_refused or not part.size or address(os.getpid(), part.url, period()) is None:
            return False
        self._waiting.append((part, number, found))
        return True

    def wait(self, found: Found) -> tuple[int, Any]:
        """Takes the next result out of `found`, where threads may put theirs too. Polls until there is one."""
        if found.empty() or time.monotonic() - self._polled > POLL_SECONDS:
            self.poll()
        while found.empty():
            time.sleep(WAIT_SECONDS)  # Python 3.11's get(timeout) may wait forever if it is so short
            self.poll()
        return found.get()

    def poll(self) -> None:
        """Sends and receives what it can without waiting."""
        if self.is_closed:
            return
        try:
            self._send()
            self._receive()
            self._polled = time.monotonic()
        except BaseException:
            self.is_closed = True
            for _, number, found in (*self._begun.values(), *self._waiting):
                found.put((number, None))
            raise

    def _send(self) -> None:
        while self._idle and self._waiting:
            handle = self._idle.pop()
            self._begun[handle] = part, *_ = self._waiting[0]
            self._waiting.popleft()
            handle.body, handle.headers = io.BytesIO(), io.BytesIO()
            handle.setopt(pycurl.URL, address(os.getpid(), part.url, period()) or part.url)
            handle.setopt(pycurl.RANGE, f"{part.start}-{part.start + part.size - 1}")
            handle.setopt(pycurl.HTTPHEADER, [f"If-Match: {part.version.etag}"])
            handle.setopt(pycurl.MAXFILESIZE, part.size)  # not the whole object, from a server that has no ranges
            handle.setopt(pycurl.WRITEDATA, handle.body)
            handle.setopt(pycurl.WRITEHEADER, handle.headers)
            self._multi.add_handle(handle)

    def _receive(self) -> None:
        self._multi.perform()
        _, done, failed = self._multi.info_read()
        for handle in (*done, *(handle for handle, *_ in failed)):
            self._multi.remove_handle(handle)
            part, number, found = self._begun[handle]
            status = handle.getinfo(pycurl.RESPONSE_CODE)
            if status in REFUSED or not (status or handle.getinfo(pycurl.PRETRANSFER_TIME)):  # or not even connected
                self._refused.add((folder(part), period()))
            data, (*_, headers) = handle.body.getvalue(), handle.headers.getvalue().split(b"\r\n\r\nHTTP/")
            # The values of ETag and Content-Range, whatever the case of their names.
            expected = f": {part.version.etag}\r\n".encode(), b": bytes %d-" % part.start
            fits = status == 206 and len(data) == part.size and all(value in headers for value in expected)
            found.put((number, data if fits else None))
            handle.body.close()  # else it would keep the bytes until its next request
            del self._begun[handle]
            self._idle.append(handle)


def new_handle() -> Any:
    handle = pycurl.Curl()
    options = {"NOSIGNAL": 1, "BUFFERSIZE": 1 << 18, "CONNECTTIMEOUT": 3, "FOLLOWLOCATION": 1, "MAXREDIRS": 10}
    options |= {"LOW_SPEED_LIMIT": 1, "LOW_SPEED_TIME": object_store.STALL_SECONDS}
    options |= {"HTTP_VERSION": pycurl.CURL_HTTP_VERSION_1_1}  # a connection for each request
    for name, value in options.items():
        handle.setopt(getattr(pycurl, name), value)
    if certificates := ssl.get_default_verify_paths().cafile:  # else those that libcurl knows
        handle.setopt(pycurl.CAINFO, certificates)
    return handle


@lru_cache(maxsize=1 << 14)
def address(process: int, url: str, period: int) -> str | None:
    """The URL that libcurl can read, signed for this period and the next one; None if only obstore can."""
    if url.startswith("http"):
        before, _, name = url.rpartition("/")
        return f"{quote(before, safe=RESERVED + '%/?#[]')}/{quote(name, safe=RESERVED)}"
    if url.startswith("s3://") and "AWS_SKIP_SIGNATURE" not in os.environ:
        with suppress(Exception):  # obstore will raise it again
            return object_store.sign(url, 2 * SIGNED_SECONDS)
    return None


def period() -> int:
    return int(time.monotonic() // SIGNED_SECONDS)


def folder(part: RangeReader) -> str:
    return part.url.rpartition("/")[0]
