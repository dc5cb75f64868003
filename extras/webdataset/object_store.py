"""Reads byte ranges of objects in a bucket (s3://, gs://, az://) or on a web server, many at once.

The package obstore makes the requests. It repeats requests that fail (server errors, broken connections, stalls), with
growing pauses. It finds credentials by itself: in the environment, AWS_PROFILE (with boto3) or the machine's role.

obstore's threads do not survive a fork: in a child of a process that has used obstore, a request would wait for ever.
So a process that forks workers must not use obstore itself; it reads what it needs by `in_another_process`.
"""

import multiprocessing
import os
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from importlib import import_module
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeVar

from data.errors import DataError, explained

SCHEMES = ("s3://", "gs://", "az://", "http://", "https://")
ATTEMPTS = 10  # how often a request is tried, by default
# For so many seconds a request that fails is repeated.
OPENING_SECONDS = 10
READING_SECONDS = 600
STALL_SECONDS = 10  # a request that receives nothing for so long (or for a third of its limit) is repeated
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
_user: int | None = None  # the process that has used obstore


class Version(NamedTuple):
    """Tells an object from another one that was written to the same URL."""

    bytes: int
    etag: str


@dataclass(frozen=True)
class RangeReader:
    """When it is called, reads `size` bytes of an object from `start` on.

    Raises DataError if `attempts` requests fail, or if the object has another version. Any thread may call it.
    """

    url: str
    start: int
    size: int
    version: Version
    attempts: int = ATTEMPTS

    def __call__(self) -> bytes:
        if not self.size:
            return b""  # no server sends an empty range
        store, name = _place(self.url, self.attempts, READING_SECONDS)
        obstore = library()
        end = self.start + self.size
        etag = self.version.etag
        with store_errors(f"{self.url}, bytes {self.start:,} to {end:,},"):
            answer = obstore.get(store, name, options={"range": (self.start, end), "if_match": etag})
            if answer.meta["e_tag"] != etag:  # the server ignores If-Match
                raise obstore.exceptions.PreconditionError("its ETag is different")
            data = bytes(answer.bytes())
            if len(data) != self.size:  # the headers were wrong, and obstore trusts them
                raise ValueError(f"the server sent {len(data):,} bytes")
            return data


def answers(calls: Iterable[Callable[[], T]], most: int) -> Iterator[tuple[int, T]]:
    """Calls functions in threads, `most` at a time; yields (number, result) in the order in which they return.

    The calls begin at once. A call's error is raised in place of its result, and the calls that wait are cancelled.
    most=0: calls each function in this thread, in order, when its result is asked for.
    """
    if most == 0:
        return enumerate(call() for call in calls)
    library()  # raises an error in a forked process, which has none of the threads
    futures = dict[Future[T], int]()  # with their numbers
    for number, call in enumerate(calls):
        future = Future[T]()
        futures[future] = number
        _threads(most).put((future, call))

    def results() -> Iterator[tuple[int, T]]:
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        finally:
            for future in futures:
                future.cancel()

    return results()


@cache
def _threads(most: int) -> SimpleQueue[tuple[Future[Any], Callable[[], Any]]]:
    """The queue of this process's threads. An executor's threads would delay the exit until the store has answered."""
    queue: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()

    def run() -> None:
        while True:
            future, call = queue.get()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as error:
                    future.set_exception(error)
            del future, call  # so that an idle thread keeps no bytes

    for _ in range(most):
        threading.Thread(target=run, name="request", daemon=True).start()
    return queue


def in_another_process(function: Callable[..., T], *arguments: Any) -> T:
    """Calls the function in a child, so that this process does not use obstore, and can fork workers that do."""
    if _user == os.getpid() or sys.platform != "linux" or multiprocessing.current_process().daemon:
        return function(*arguments)  # it has used obstore, has threads as workers, or may have no children
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
        return pool.submit(function, *arguments).result()


def is_remote(url: str) -> bool:
    return url.startswith(SCHEMES)


def find_version(url: str) -> Version:
    """The version that an object has now. Raises DataError after OPENING_SECONDS without an answer."""
    meta = request("head", url)
    if meta is None:
        raise DataError(f"{url} does not exist, or its bucket does not; check the name, and AWS_REGION for AWS")
    etag = meta["e_tag"]
    if etag is None or etag.startswith("W/"):
        raise DataError(f"{url}: the server sends no strong ETag, so changes would go unnoticed; use another server")
    return Version(meta["size"], etag)


def read_object(url: str) -> bytes | None:
    """The whole object; None if it does not exist."""
    answer = request("get", url)
    with store_errors(url):
        return None if answer is None else bytes(answer.bytes())


def request(method: str, url: str, *arguments: Any, **options: Any) -> Any:
    """Calls a function of obstore for an object; None if the object does not exist. Other errors are DataErrors."""
    with store_errors(url), suppress(FileNotFoundError):
        function = getattr(library(), method)
        store, name = _place(url, ATTEMPTS, OPENING_SECONDS)
        return function(store, name, *arguments, **options)
    return None


def _place(url: str, attempts: int, seconds: int) -> tuple[Any, str]:
    """The store of the object's folder, whose connections this process keeps, and the object's name in it."""
    folder, _, name = url.rpartition("/")
    return _store(folder, attempts, seconds), name


@cache
def _store(folder: str, attempts: int, seconds: int) -> Any:
    longest_stall = min(STALL_SECONDS, seconds / 3)
    options: dict[str, Any] = {
        "retry_config": {"max_retries": attempts - 1, "retry_timeout": timedelta(seconds=seconds)},
        "client_options": {
            "allow_http": True,
            "connect_timeout": "3s",
            "read_timeout": timedelta(seconds=longest_stall),
            "timeout": "10min",
        },
    }
    with store_errors(folder):
        if folder.startswith("s3://") and "AWS_PROFILE" in os.environ:
            options["credential_provider"] = import_module("obstore.auth.boto3").Boto3CredentialProvider()
        return library().store.from_url(folder, **options)


def library() -> Any:
    """The package obstore. Raises DataError in a process that was forked from one that has used it."""
    global _user
    with explained("object stores are read with the package obstore", "pip install obstore", ImportError):
        obstore = import_module("obstore")
    if _user not in (None, os.getpid()):
        raise DataError(
            "this process was forked from one that had read from an object store, so it cannot read from it: read no "
            "sample before workers start, or start them with multiprocessing_context='spawn'"
        )
    _user = os.getpid()
    return obstore


@contextmanager
def store_errors(subject: str) -> Iterator[None]:
    """Turns any exception of the block into a DataError: `subject` cannot be read."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        reason = re.sub(r"\?\S*", "", str(error).partition("\n")[0])  # a URL's query may have a signature
        kind = type(error).__name__
        # obstore found no credentials, not even those of the machine's role, which are at this address.
        if "Account must be specified" in reason or "169.254.169.254" in reason:
            kind = "UnauthenticatedError"
        if "builder error" in reason:  # the client could not open its files
            kind = "OSError"
        remedy = REMEDIES.get(kind, "check the network and the server")
        raise DataError(
            f"{subject} cannot be read ({reason}); {remedy}"
        ) from None  # the original error shows the query
