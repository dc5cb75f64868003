"""Reads byte ranges of objects in a bucket (s3://, gs://, az://) or on a web server, many at once.

The package obstore makes the requests; many at once are first made by libcurl, if it is there (data/range_client.py).
obstore repeats those that fail (server errors, broken connections, stalls), with growing pauses, and finds credentials
by itself: in the environment, AWS_PROFILE (with boto3) or the machine's role.

A forked process loads its own copy of obstore's extension. The threads of the copy that its parent has used did not
survive the fork, so a request would wait for them forever.
"""

import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import wraps
from importlib import import_module
from importlib.machinery import ExtensionFileLoader, ModuleSpec
from importlib.util import module_from_spec
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeVar

from data.errors import DataError, explained

SCHEMES = ("s3://", "gs://", "az://", "http://", "https://")
ATTEMPTS = 10  # of a request, unless it is told otherwise
OPENING_SECONDS, READING_SECONDS = 10, 600  # after which a request that fails is not repeated
STALL_SECONDS = 10  # a request that receives nothing for so long is repeated, or for a third of its seconds
VARIABLES = "AWS_ACCESS_KEY_ID, AWS_PROFILE, GOOGLE_APPLICATION_CREDENTIALS or AZURE_STORAGE_ACCOUNT_NAME"
REMEDIES = {
    "FileNotFoundError": "it was removed after its index was read: restore it, or start a new run",
    "PermissionDeniedError": f"set credentials that allow it: {VARIABLES}",
    "UnauthenticatedError": f"set credentials: {VARIABLES}",
    "PreconditionError": "it has changed since its index was read: restore it, or start a new run",
    "OSError": "raise the limit of open files (ulimit -n), or lower data.requests",
    "ModuleNotFoundError": "pip install boto3, or unset AWS_PROFILE",
    "ProfileNotFound": "set AWS_PROFILE to one of ~/.aws, or unset it",
}

T = TypeVar("T")
_copies: list[Any] = []  # of obstore and its modules; they stay alive, because the threads that would end them may not
_locks: dict[int, threading.RLock] = {}  # by process: one that a thread of the parent held would never be free again
_mine = threading.local()  # a thread's clients


class Version(NamedTuple):
    """What tells an object from another one that was written to the same URL."""

    bytes: int
    etag: str


def once(function: Callable[..., T]) -> Callable[..., T]:
    """Caches the results of function(process, ...). Unlike functools.cache, it lets no two threads call it at once."""
    results: dict[tuple[Any, ...], T] = {}

    @wraps(function)
    def call(process: int, *arguments: Any) -> T:
        if (key := (process, *arguments)) not in results:
            with _locks.setdefault(process, threading.RLock()):
                if key not in results:
                    results[key] = function(*key)
        return results[key]

    return call


@dataclass(frozen=True)
class RangeReader:
    """Reads `size` bytes of an object from `start` on, when it is called.

    It raises DataError after `attempts`, and if the object has another version. It may be called in a thread.
    """

    url: str
    start: int
    size: int
    version: Version
    attempts: int = ATTEMPTS

    def __call__(self) -> bytes:
        if not self.size:
            return b""  # no server sends an empty range
        (store, name), library = _place(self.url, self.attempts, READING_SECONDS), _library(os.getpid())
        end, etag = self.start + self.size, self.version.etag
        with store_errors(f"{self.url}, bytes {self.start:,} to {end:,},"):
            for attempt in range(self.attempts):
                if attempt:
                    time.sleep(min(10, 0.1 * 4**attempt))
                answer = library.get(store, name, options={"range": (self.start, end), "if_match": etag})
                if answer.meta["e_tag"] != etag:  # the server ignores If-Match
                    raise library.exceptions.PreconditionError("its ETag is another one")
                if len(data := bytes(answer.bytes())) == self.size:  # else its headers are wrong: obstore trusts them
                    return data
            raise ValueError(f"the server sent {len(data):,} bytes")


def answers(calls: Iterable[Callable[[], T]], most: int) -> Iterator[tuple[int, T]]:
    """Calls functions, `most` at a time; yields (number, result) in the order in which they return.

    The calls begin at once: RangeReaders as requests of libcurl, if it can make them, and others in threads. It raises
    the error of a call in its place, and then begins no more in threads.
    most=0: makes each call when its result is wanted, in this thread, in order.
    """
    if most == 0:
        return enumerate(call() for call in calls)
    numbers = dict(enumerate(calls))  # of the calls without a result
    ranges = {number: call for number, call in numbers.items() if isinstance(call, RangeReader)}
    client = _client(most) if ranges else None
    futures = list[Future[Any]]()
    found: SimpleQueue[tuple[int, Any]] = SimpleQueue()  # numbers, each with a future, or from libcurl bytes or None

    def begin(number: int, call: Callable[[], Any]) -> None:
        futures.append(Future())
        futures[-1].add_done_callback(lambda future: found.put((number, future)))
        _threads(os.getpid(), most).put((futures[-1], call))

    def results() -> Iterator[tuple[int, T]]:
        try:
            while numbers:
                number, result = client.wait(found) if client else found.get()
                if number not in numbers:  # a client that was closed may have answered before
                    continue
                if result is None:  # libcurl was the first attempt
                    begin(number, replace(ranges[number], attempts=max(1, ranges[number].attempts - 1)))
                    continue
                del numbers[number]
                yield number, result.result() if isinstance(result, Future) else result
        finally:
            for future in futures:
                future.cancel()

    for number, call in numbers.items():
        if not (client and number in ranges and client.ask(call, number, found)):
            begin(number, call)
    if client:
        client.poll()
    return results()


@once
def _threads(process: int, most: int) -> SimpleQueue[tuple[Future[Any], Callable[[], Any]]]:
    """The queue of this process's threads. An executor's would delay the interpreter's exit until a store answers."""
    queue: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()

    def run() -> None:
        while True:
            future, call = queue.get()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as error:
                    future.set_exception(error)
            del future, call  # an idle thread keeps no bytes

    for _ in range(most):
        threading.Thread(target=run, name="request", daemon=True).start()
    return queue


def _client(most: int) -> Any:
    """The connections of this thread, in this process; None without the package pycurl."""
    clients = vars(_mine).setdefault("clients", {})  # a forked process leaves its parent's as they are
    key = os.getpid(), most
    if key not in clients or (clients[key] and clients[key].is_closed):
        clients[key] = None
        with suppress(Exception):  # not installed, or there are too many open files
            clients[key] = import_module("data.range_client").RangeClient(most)
    return clients[key]


def is_remote(url: str) -> bool:
    return url.startswith(SCHEMES)


def find_version(url: str) -> Version:
    """The version that an object has now. Raises DataError after OPENING_SECONDS without an answer."""
    if (found := request("head", url)) is None:
        raise DataError(
            f"{url} is not there, or its bucket is not; check the name, and AWS_REGION for a bucket of AWS"
        )
    if (found["e_tag"] or "W/").startswith("W/"):
        raise DataError(
            f"{url}: the server sends no strong ETag, so a change would not be noticed; use another server"
        )
    return Version(found["size"], found["e_tag"])


def read_object(url: str) -> bytes | None:
    """The whole object; None if there is none."""
    found = request("get", url)
    with store_errors(url):
        return found and bytes(found.bytes())


def sign(url: str, seconds: int) -> str:
    """A URL with which any client can read an object of s3:// for so long."""
    store, name = _place(url, ATTEMPTS, OPENING_SECONDS)
    return _library(os.getpid()).sign(store, "GET", name, timedelta(seconds=seconds))


def request(method: str, url: str, *arguments: Any, **options: Any) -> Any:
    """Calls a function of obstore for an object; None if there is no such object. Raises DataError if that fails."""
    with store_errors(url), suppress(FileNotFoundError):
        return getattr(_library(os.getpid()), method)(*_place(url, ATTEMPTS, OPENING_SECONDS), *arguments, **options)
    return None


def _place(url: str, attempts: int, seconds: int) -> tuple[Any, str]:
    """The object's folder as a store, which this process keeps with its connections, and its name there."""
    folder, _, name = url.rpartition("/")
    return _store(os.getpid(), folder, attempts, seconds), name


@once
def _store(process: int, folder: str, attempts: int, seconds: int) -> Any:
    longest = timedelta(seconds=min(10, seconds / 4))  # ten attempts then last half a minute
    pauses = {"init_backoff": timedelta(seconds=0.1), "max_backoff": longest, "base": 4}
    retries = {"max_retries": attempts - 1, "retry_timeout": timedelta(seconds=seconds), "backoff": pauses}
    stall = timedelta(seconds=min(STALL_SECONDS, seconds / 3))
    times = {"connect_timeout": "3s", "read_timeout": stall, "timeout": "10min"}
    options: dict[str, Any] = {"retry_config": retries, "client_options": {"allow_http": True, **times}}
    with store_errors(folder):
        library = _library(process)
        if folder.startswith("s3://") and "AWS_PROFILE" in os.environ:
            options["credential_provider"] = import_module("obstore.auth.boto3").Boto3CredentialProvider()
        return library.store.from_url(folder, **options)


@once
def _library(process: int) -> Any:
    """The package obstore; loaded once more if this process was forked from one that has loaded it."""
    with explained("object stores are read with the package obstore", "pip install obstore", ImportError):
        if _copies:
            _copies.append({name: sys.modules.pop(name) for name in list(sys.modules) if name.startswith("obstore")})
            _load_copy("obstore._obstore", _copies[0]._obstore.__file__)
        _copies.append(import_module("obstore"))
    return _copies[-1]


def _load_copy(name: str, file: str) -> None:
    """Loads an extension from a copy of its file, because the linker would give the same file the same state."""
    with open(file, "rb") as original, open(os.memfd_create(name), "wb") as copy:
        copy.write(original.read())
        copy.flush()
        path = f"/proc/{os.getpid()}/fd/{copy.fileno()}"  # a name that no library of the parent has
        loader = ExtensionFileLoader(name, path)
        sys.modules[name] = module_from_spec(ModuleSpec(name, loader, origin=path))
        loader.exec_module(sys.modules[name])


@contextmanager
def store_errors(what: str) -> Iterator[None]:
    """Turns any exception of the block into a DataError."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        reason = re.sub(r"\?\S*", "", str(error).partition("\n")[0])  # a URL's query may have a signature
        # Not set, nor at the address where a machine's role would have its credentials.
        no_role = "Account must be specified" in reason or "169.254.169.254" in reason
        kind = "UnauthenticatedError" if no_role else type(error).__name__
        kind = "OSError" if "builder error" in reason else kind  # of the client, which opens files
        remedy = REMEDIES.get(kind, "check the network and the server")
        raise DataError(f"{what} cannot be read ({reason}); {remedy}") from None  # the error itself shows the query
