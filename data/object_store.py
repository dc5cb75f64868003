"""Reads byte ranges of objects in a bucket (s3://, gs://, az://) or on a web server (http://, https://), many at once.

The package obstore makes the requests. It repeats those that fail (server errors, broken connections, stalls), with
growing pauses, and finds credentials by itself: in the environment, AWS_PROFILE (with boto3) or the machine's role.

Every process uses its own copy of obstore's extension. The threads of the copy that its parent has used did not
survive the fork, so a request would wait for them forever.
"""

import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from importlib import import_module
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from itertools import islice
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeVar

from data.errors import DataError

SCHEMES = ("s3://", "gs://", "az://", "http://", "https://")
OPENING_SECONDS, READING_SECONDS = 12, 600  # a request that fails later is not repeated
STALL_SECONDS = 10  # a request that receives nothing for so long is repeated
ATTEMPTS = 10  # of a request, unless it is told otherwise

T = TypeVar("T")
_copies: list[Any] = []  # of obstore and its modules; they stay alive, because the threads that would end them may not


class Version(NamedTuple):
    """What tells an object from another one that has been written to the same URL."""

    bytes: int
    etag: str


def is_remote(url: str) -> bool:
    return url.startswith(SCHEMES)


def find_version(url: str) -> Version:
    """The version that an object has now. Raises DataError after OPENING_SECONDS without an answer."""
    client, name, store = open_store(url, ATTEMPTS, OPENING_SECONDS)
    with store_errors(url):
        found = client.head(store, name)
    if (found["e_tag"] or "W/").startswith("W/"):
        raise DataError(
            f"{url}: the server sends no strong ETag, so a change would not be noticed; use another server"
        )
    return Version(found["size"], found["e_tag"])


def read_range(url: str, start: int, size: int, version: Version, attempts: int = ATTEMPTS) -> bytes:
    """The `size` bytes of an object from `start` on. Raises DataError if that fails, or the version is another one."""
    return range_reader(url, start, size, version, attempts)()


def range_reader(url: str, start: int, size: int, version: Version, attempts: int) -> Callable[[], bytes]:
    """A function, for a thread, that does what `read_range` does."""
    client, name, store = open_store(url, attempts, READING_SECONDS)  # here, because threads would make several

    def read() -> bytes:
        if not size:
            return b""  # such a range cannot be asked for
        with store_errors(url, f", bytes {start:,} to {start + size:,}"):
            answer = client.get(store, name, options={"range": (start, start + size), "if_match": version.etag})
            if answer.meta["e_tag"] != version.etag:  # the server ignores If-Match
                raise client.exceptions.PreconditionError(f"its ETag is {answer.meta['e_tag']}, not {version.etag}")
            if len(data := bytes(answer.bytes())) != size:
                raise ValueError(f"the server sent {len(data):,} bytes")
            return data

    return read


def read_ranges(url: str, starts: list[int], ends: list[int]) -> list[bytes]:
    """Several ranges of an object, without its neighbours' bytes; `ends` are exclusive."""
    client, name, store = open_store(url, ATTEMPTS, READING_SECONDS)
    with store_errors(url):
        return [bytes(data) for data in client.get_ranges(store, name, starts=starts, ends=ends, coalesce=0)]


def read_object(url: str) -> bytes | None:
    """The whole object; None if there is none."""
    client, name, store = open_store(url, ATTEMPTS, OPENING_SECONDS)
    with store_errors(url):
        try:
            return bytes(client.get(store, name).bytes())
        except FileNotFoundError:
            return None


def write_object(url: str, content: bytes) -> None:
    client, name, store = open_store(url, ATTEMPTS, OPENING_SECONDS)
    with store_errors(url):
        client.put(store, name, content)


def as_they_arrive(calls: Iterable[Callable[[], T]], most: int) -> Iterator[tuple[int, T]]:
    """Runs `calls` in threads, and yields (number of the call, result) in the order in which they end.

    At most `most` of them run, or wait with their results, at a time. With `most=0` the caller's thread runs them.
    """
    if not most:
        yield from enumerate(call() for call in calls)
        return
    threads, ended, numbers, rest = _threads(os.getpid(), most), SimpleQueue[Future[T]](), {}, enumerate(calls)

    def start(count: int) -> None:
        for number, call in islice(rest, count):
            future = threads.submit(call)
            numbers[future] = number
            future.add_done_callback(ended.put)

    try:
        start(most)
        while numbers:
            future = ended.get()
            number = numbers.pop(future)
            start(1)
            yield number, future.result()
    finally:
        for future in numbers:
            future.cancel()


@cache
def _threads(process: int, most: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(most, "requests")


def open_store(url: str, attempts: int, seconds: int) -> tuple[Any, str, Any]:
    """(obstore, the object's name, its folder as a store); this process keeps the store and its connections."""
    folder, _, name = url.rpartition("/")
    return _library(os.getpid()), name, _store(os.getpid(), folder, attempts, seconds)


@cache
def _store(process: int, folder: str, attempts: int, seconds: int) -> Any:
    library = _library(process)
    pauses = {"init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=3), "base": 2}
    retries = {"max_retries": attempts - 1, "retry_timeout": timedelta(seconds=seconds), "backoff": pauses}
    times = {"connect_timeout": "3s", "read_timeout": f"{STALL_SECONDS}s", "timeout": "10min"}
    options: dict[str, Any] = {"retry_config": retries, "client_options": {"allow_http": True, **times}}
    with store_errors(folder):
        if folder.startswith("s3://") and "AWS_PROFILE" in os.environ:
            options["credential_provider"] = import_module("obstore.auth.boto3").Boto3CredentialProvider()
        return library.store.from_url(folder, **options)


@cache
def _library(process: int) -> Any:
    """The package obstore. If another process, this one's parent, has loaded it, it is loaded once more."""
    try:
        if _copies:
            _copies.append({name: sys.modules.pop(name) for name in list(sys.modules) if name.startswith("obstore")})
            _load_copy("obstore._obstore", _copies[0]._obstore.__file__)
        _copies.append(import_module("obstore"))
    except ImportError as error:
        raise DataError(
            f"reading from an object store needs the package obstore ({error}): pip install obstore"
        ) from error
    return _copies[-1]


def _load_copy(name: str, file: str) -> None:
    """Loads an extension a second time, with its own state: the linker shares only what is the same file."""
    with open(file, "rb") as original, open(os.memfd_create(name), "wb") as copy:
        copy.write(original.read())
        copy.flush()
        path = f"/proc/self/fd/{copy.fileno()}"
        spec = spec_from_file_location(name, path, loader=ExtensionFileLoader(name, path))
        assert spec is not None and spec.loader is not None
        sys.modules[name] = module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])


REMEDIES = {
    "FileNotFoundError": "check the bucket and the name",
    "PermissionDeniedError": "set credentials that may read it, such as AWS_ACCESS_KEY_ID or AWS_PROFILE",
    "UnauthenticatedError": "set credentials, such as AWS_ACCESS_KEY_ID or AWS_PROFILE",
    "PreconditionError": "it has changed since its index was read: restore it, or start a new run",
    "ImportError": "pip install boto3, or set AWS_ACCESS_KEY_ID",
}


@contextmanager
def store_errors(url: str, what: str = "") -> Iterator[None]:
    """Turns any exception of the block into a DataError with the URL and `what`."""
    try:
        yield
    except Exception as error:
        reason = re.sub(r"\?\S*", "", str(error).partition("\n")[0])  # a URL's query may have a signature
        kind = next((kind.__name__ for kind in type(error).__mro__ if kind.__name__ in REMEDIES), "")
        remedy = REMEDIES.get(kind, "check the network and the server")
        raise DataError(f"{url}{what} cannot be read ({reason}); {remedy}") from None  # which shows signatures, too
