"""The tasks of an iterable dataset's streams: which stream gives the next batch, and where each stream is.

Invariant: all tasks of a stream go to one worker, in their order. The first that this worker gets, also after a
restart, says where the stream begins: at its place after the latest answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple


class StreamError(ValueError):
    """The dataset cannot be read as streams: it cannot be pickled, or has no samples, or fewer than before."""


class Place(NamedTuple):
    """Where a stream is. The loader's state has one for each stream."""

    epoch: int = 0  # part of the key of its random numbers
    samples: int = 0  # that were read in this epoch; with a shuffle_buffer, before the buffer was filled
    taken: int = 0  # samples taken out of the buffer
    ended: bool = False
    state: dict[str, Any] | None = None  # the dataset's and its iterator's own, after `samples`
    at: int = -1  # the number of its latest batch, among those of all streams


class Progress(NamedTuple):
    """What a worker's answer tells about its stream."""

    stream: int
    place: Place | None = None  # after the task; None: as before it
    is_over: bool = False  # further tasks would be empty
    is_empty: bool = False  # this one has no batch
    dropped: tuple[int, float] | None = None  # how many samples were read and dropped to resume, and the seconds
    digest: bytes | None = None  # of the first samples of its epoch


class StreamTask(NamedTuple):
    """The next batch of a stream."""

    stream: int
    host: int  # the worker of this number, modulo the number of workers, reads the stream
    rows: int | None  # None: a single sample, without automatic batching
    epoch: int | None
    number: int
    start: Place | None = None  # where the stream begins; None: where its previous task has ended
    singly: bool = False  # `timeout` is the limit for each sample
    without: frozenset[int] = frozenset()  # of a Task: no sample of a stream can be passed over

    @property
    def indices(self) -> list[str]:
        """The rows, in words."""
        return [f"{row} of a batch of stream {self.stream}" for row in range(self.rows or 1)]


class StreamTasks:
    """Iterates over tasks: a batch of each stream in turn, of those that have not ended.

    places: where each stream begins, by its number. rows: of a batch; None without automatic batching.
    most: how many tasks of a stream may be in flight; None: no limit.
    """

    def __init__(
        self, places: Mapping[int, Place], rows: int | None, epoch: int | None = None, most: int | None = None
    ) -> None:
        self.places = dict(places)  # after the latest answer
        self.unopened = set(places)  # streams whose worker does not know their place
        self._rows, self.epoch, self._most = rows, epoch, most
        self._hosts = {stream: host for host, stream in enumerate(places)}
        self._live = list(places)
        self._in_flight = dict.fromkeys(places, 0)
        self._previous = max(places, key=lambda stream: (places[stream].at, stream))
        if places[self._previous].at < 0:
            self._previous = -1
        self._number = 0

    def __iter__(self) -> Iterator[StreamTask]:
        return self

    def __next__(self) -> StreamTask:
        most = self._most and self._most * len(self._hosts) // max(1, len(self._live))
        free = [stream for stream in self._live if not most or self._in_flight[stream] < most]
        if not free:
            raise StopIteration
        stream = next((stream for stream in free if stream > self._previous), free[0])
        task = StreamTask(stream, self._hosts[stream], self._rows, self.epoch, self._number)
        self._in_flight[stream] += 1
        self._previous, self._number = stream, self._number + 1  # no call from here on
        return task

    def open(self, flight: Any) -> None:
        """Makes a task in flight, which is sent now, begin at its stream's place if its worker does not know that."""
        task: StreamTask = flight.task
        if task.stream in self.unopened:
            place = self.places[task.stream]
            flight.task = task._replace(start=place, singly=place.samples + place.taken > 0)
            self.unopened.discard(task.stream)

    def restart(self, worker: int, workers: int) -> None:
        """Notes that a worker, one of so many, has died: it has to open its streams again."""
        self.unopened |= {stream for stream, host in self._hosts.items() if host % workers == worker}

    def answered(self, stream: int, progress: Progress | None) -> None:
        """Notes that a task of the stream was answered, and where the stream is now."""
        self._in_flight[stream] -= 1
        if progress is not None and progress.place is not None:
            self.places[stream] = progress.place
        if progress is not None and progress.is_over and stream in self._live:
            self._live.remove(stream)


def drops_its_buffer(pipeline: Any) -> bool:
    """Returns whether it is one of Hugging Face's with a shuffle buffer, whose state lacks the buffer's samples."""
    inner = [getattr(pipeline, name, None) for name in ("_ex_iterable", "ex_iterable")]
    inner += getattr(pipeline, "ex_iterables", None) or []
    return hasattr(pipeline, "buffer_size") or any(drops_its_buffer(one) for one in inner if one is not None)
