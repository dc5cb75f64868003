"""What all loaders share: which epoch runs, where it stands, its iterator, and the state to resume from.

The position in an epoch has one owner: a Position, which the epoch's iterator moves as its last act before it returns
a batch. A batch counts as delivered if and only if the consumer received it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from types import MethodType
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from torch.utils.data import BatchSampler

from .order import Order

VERSION = 2  # of the state
ENDED = "this epoch was ended by a newer iter() or load_state_dict(), or the loader was closed"
INTERRUPTED = "an exception, perhaps of a signal handler, interrupted this iterator inside next(): begin a new epoch"
Method = TypeVar("Method", bound=Callable[..., Any])


class Delivery(NamedTuple):
    """A batch, or the error in its place, and its number in the epoch (None: an error that is not a batch's)."""

    number: int | None
    batch: Any = None
    error: BaseException | None = None


class Source(Protocol):
    """Where the batches of one epoch come from."""

    def next(self) -> Delivery | None:
        """Waits for the next batch; None at the end of the epoch. Raises what concerns no batch, such as a timeout."""

    def close(self) -> None:
        """Ends the epoch."""


@dataclass
class Position:
    """How much of an epoch the consumer has received: batch number `batch` comes next."""

    epoch: int
    batch: int = 0
    received: int = 0  # batches and errors, since the epoch's source began
    finished: bool = False


class EpochIterator:
    """One epoch of a loader, as its consumer holds it."""

    def __init__(self, source: Source, position: Position, length: int | None = None) -> None:
        self.position = position
        self._source: Source | None = source
        self._length = length

    def __iter__(self) -> EpochIterator:
        return self

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError("this epoch's number of batches is unknown: its sampler has no length")
        return self._length

    def __next__(self) -> Any:
        position, source = self.position, self._source
        if position.finished:
            raise StopIteration
        if source is None:
            raise RuntimeError(ENDED)
        delivery = source.next()
        if delivery is None:
            position.finished = True
            self.end()
            raise StopIteration
        number, batch, error = delivery
        if error is not None:
            position.received += 1
            if number is not None:
                position.batch = number + 1
            try:
                raise error
            finally:  # or the error and this frame, which its traceback holds, would keep each other alive
                del error, delivery
        # A signal handler may raise after any call. There is none from here on: either the consumer gets the batch and
        # it is counted, or neither.
        position.received += 1
        if number is not None:
            position.batch = number + 1
        return batch

    def end(self) -> None:
        """Ends the epoch; another call of next() raises."""
        source, self._source = self._source, None
        if source is not None:
            source.close()

    @property
    def is_running(self) -> bool:
        return self._source is not None

    @property
    def _workers(self) -> list[Any]:
        """The worker processes, under the name that torch gives them."""
        return getattr(self._source, "processes", [])


class Epochs:
    """Counts a loader's epochs, and makes and reads its state."""

    def __init__(self, order: Order, kind: str) -> None:
        self.order = order
        self.kind = kind  # what makes the order: "shuffled", "sequential", "sampler" or "batch_sampler"
        self.position: Position | None = None  # of the newest epoch
        self._next: tuple[int, int] | None = None  # epoch and batch that set_epoch or load_state_dict named

    @property
    def is_running(self) -> bool:
        """Whether the newest epoch has batches left."""
        position = self.position
        return position is not None and not position.finished and position.batch < len(self.order)

    def upcoming(self) -> tuple[int, int]:
        """Returns epoch and first batch that the next `begin` starts."""
        return self._next or (0 if self.position is None else self.position.epoch + 1, 0)

    def begin(self) -> Position:
        """Starts an epoch."""
        self.position = Position(*self.upcoming())
        self._next = None
        return self.position

    def set_epoch(self, epoch: int) -> None:
        """Names the epoch that the next `begin` starts. The epoch of a loaded state keeps its position."""
        if isinstance(epoch, bool) or not isinstance(epoch, int) or epoch < 0:
            raise ValueError(f"set_epoch({epoch!r}): an epoch is an integer from 0")
        if self._next is None or self._next[0] != epoch:
            self._next = (epoch, 0)

    def state_dict(self) -> dict[str, Any]:
        position = self.position
        epoch, batch = (position.epoch, position.batch) if position and self.is_running else self.upcoming()
        return {"version": VERSION, "epoch": epoch, "samples": self.order.samples_before(batch), **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Sets what the next `begin` starts. Raises ValueError for a state of another version, order or dataset."""
        for key, ours in {"version": VERSION, **self._identity()}.items():
            if state.get(key) != ours:
                raise ValueError(
                    f"this state has {key}={state.get(key)!r}, but the loader has {key}={ours!r}: "
                    f"resume with the {key} of the state, or start afresh"
                )
        self._next, self.position = (state["epoch"], state["samples"] // self.order.global_batch_size), None

    def _identity(self) -> dict[str, Any]:
        order = self.order
        return {
            "seed": order.seed,
            "dataset_length": order.length,
            "global_batch_size": order.global_batch_size,
            "order": self.kind,
        }


class OrderSampler:
    """A loader's own order as a sampler, for other loaders too: this rank's indices, epoch by epoch.

    Each `iter()` is the next epoch, unless `set_epoch` names another. It does not move the loader that it belongs to.
    """

    def __init__(self, order: Order) -> None:
        self.order = order
        self._next = 0

    def set_epoch(self, epoch: int) -> None:
        """Names the epoch of the next `iter()`."""
        self._next = epoch

    def __len__(self) -> int:
        last = len(self.order) - 1
        return last * self.order.batch_size + len(self.order.positions(last)) if last >= 0 else 0

    def __iter__(self) -> Iterator[int]:
        epoch, self._next = self._next, self._next + 1
        return self._indices(epoch)

    def _indices(self, epoch: int) -> Iterator[int]:
        for _, _, indices in self.order.batches(epoch):
            yield from indices.tolist()


class OrderBatchSampler(BatchSampler):
    """An OrderSampler's indices in batches; a last batch that is to be dropped is not among them."""

    sampler: OrderSampler

    def __init__(self, sampler: OrderSampler) -> None:
        super().__init__(sampler, sampler.order.batch_size, sampler.order.drop_last)

    def set_epoch(self, epoch: int) -> None:
        """Names the epoch of the next `iter()`."""
        self.sampler.set_epoch(epoch)


class EpochLoader:
    """Base of the loaders that read in the calling thread or through torch: batches of a map-style dataset in our order.

    A subclass says how an epoch's batches are made (`_open`). `iter()` ends the iterator before.
    Raises TypeError for a dataset without a length, ValueError for a batch size below 1.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        rank: int = 0,
        world_size: int = 1,
        pad: bool = True,
    ) -> None:
        if not hasattr(dataset, "__len__"):
            raise TypeError(
                f"{type(self).__name__} needs a map-style dataset, and {type(dataset).__name__} has no __len__: "
                "use torch's own DataLoader for an iterable dataset"
            )
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size}: give a number from 1")
        order = Order(len(dataset), batch_size, shuffle, seed, drop_last, rank, world_size, pad)
        self.dataset = dataset
        self.batch_size, self.seed, self.rank, self.world_size = batch_size, order.seed, rank, world_size
        self._order = order
        self._epochs = Epochs(order, order_kind(order))
        self.sampler = OrderSampler(order)
        self.batch_sampler = OrderBatchSampler(self.sampler)
        self._iterator: EpochIterator | None = None
        self._closed = False

    def _prepare(self) -> None:
        """Makes what all epochs need, before the first of them. If this raises, no epoch has begun."""

    def _open(self, epoch: int, first: int) -> Source:
        """Returns the batches of epoch `epoch` from number `first` on."""
        raise NotImplementedError

    def __len__(self) -> int:
        """Batches per epoch, on this rank."""
        return len(self._order)

    def __iter__(self) -> EpochIterator:
        if self._closed:
            raise RuntimeError(f"this {type(self).__name__} is closed: make a new one")
        if len(self.dataset) != self._order.length:
            raise RuntimeError(
                f"{type(self.dataset).__name__} had {self._order.length:,} samples when this {type(self).__name__} was "
                f"made and has {len(self.dataset):,} now: make a new loader"
            )
        self._end_epoch()
        self._prepare()
        source = self._open(*self._epochs.upcoming())
        self._iterator = EpochIterator(source, self._epochs.begin(), len(self))
        return self._iterator

    def __next__(self) -> Any:
        """Continues the running epoch, or begins the next one."""
        if self._iterator is None or self._iterator.position.finished:
            iter(self)
        assert self._iterator is not None
        return next(self._iterator)

    def set_epoch(self, epoch: int) -> None:
        """Names the epoch that the next `iter()` runs."""
        self._epochs.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Where the epoch stands, counted in global samples delivered: plain JSON."""
        return self._epochs.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Sets what the next `iter()` runs. Raises ValueError for a state of another seed, length or global batch."""
        self._epochs.load_state_dict(state)
        self._end_epoch()

    def stats(self) -> dict[str, Any]:
        """Empty: this loader keeps no figures."""
        return {}

    def close(self) -> None:
        """Ends the epoch; delivered batches stay valid. Idempotent, in any state."""
        self._closed = True
        self._end_epoch()

    def __enter__(self) -> EpochLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _end_epoch(self) -> None:
        if self._iterator is not None:
            self._iterator.end()
            self._iterator = None


class IteratorSource:
    """A source over an iterator of (number, batch)."""

    def __init__(self, batches: Iterator[tuple[int, Any]]) -> None:
        self._batches = batches

    def next(self) -> Delivery | None:
        try:
            return Delivery(*next(self._batches))
        except StopIteration:
            return None

    def close(self) -> None:
        self._batches = iter(())


class available_if(Generic[Method]):
    """Decorator: the method exists only where `condition(loader)` holds; elsewhere hasattr() is false.

    Libraries call what they find: one that finds `set_epoch` or `state_dict` on a loader that cannot have it fails.
    After scikit-learn's decorator of the same name.
    """

    def __init__(self, condition: Callable[[Any], bool]) -> None:
        self._condition = condition

    def __call__(self, method: Method) -> available_if[Method]:
        self._method = method
        self.__doc__ = method.__doc__
        return self

    def __get__(self, loader: Any, owner: type) -> Any:
        if loader is None:
            return self
        if not self._condition(loader):
            raise AttributeError(
                f"this {owner.__name__} has no {self._method.__name__}(): that needs a loader with a seed, as without "
                "one the order is torch's and cannot be resumed"
            )
        return MethodType(self._method, loader)


def order_kind(order: Order) -> str:
    return "shuffled" if order.shuffle else "sequential"


def pass_on_epoch(epoch: int, *samplers: Any) -> None:
    """Calls `set_epoch` of the given samplers, and of the samplers inside them, where they have it."""
    seen: set[int] = set()
    for sampler in samplers:
        while sampler is not None and id(sampler) not in seen:
            seen.add(id(sampler))
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)
            sampler = getattr(sampler, "sampler", None)


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """Returns a question for an error message, or nothing if no known name is close."""
    near = get_close_matches(str(given), list(known), n=1)
    return f"did you mean {near[0]}? " if near else ""


def check_choice(key: str, value: str, choices: Iterable[str], error: type[ValueError] = ValueError) -> None:
    """Raises `error` unless `value` is one of `choices`."""
    if value not in choices:
        raise error(f"{key}={value}: {did_you_mean(value, choices)}it is one of {', '.join(choices)}")
