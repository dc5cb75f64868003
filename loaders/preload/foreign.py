"""Numbers for the batches of an iterator that is not ours, which can only be asked for its next batch."""

import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from ..background import reraise_of_signal
from ..errors import warn_once
from ..iterators import BatchEngine, Consumer, EpochIterator, Position
from ..offered import has_state
from ..plans import Plan
from ..workers.messages import Reading

EMPTY = (
    "a Preloader over a %s gave no batch in epoch %s (they count from 0): an iterator can be read only once, so make "
    "it and its Preloader anew for each epoch, or give an object whose __iter__ begins anew"
)


def state_reader(loader: Any) -> Callable[[], Any]:
    """Returns a function that returns the loader's state, or None if the loader has none."""
    if has_state(loader):
        try:
            loader.state_dict()
            return loader.state_dict  # type: ignore[no-any-return]  # the loader is any object
        except Exception as error:  # it cannot be resumed, or is another thing of the same name
            reraise_of_signal(error)
    return lambda: None


class ForeignTask(NamedTuple):
    """The iterator is like a single stream, whose place is the loader's state."""

    stream: int = 0


class ForeignEpoch(Plan, BatchEngine):
    """Is plan, engine and loader of an EpochIterator. `get` may be asked for the same task again, or for the next.

    state_of: see state_reader.
    """

    pin_memory = False
    steps_per_epoch = None

    def __init__(self, batches: Iterator[Any], state_of: Callable[[], Any]) -> None:
        super().__init__()
        self._batches = batches
        self._state_of = state_of
        self._epoch = 0
        self._end = sys.maxsize  # how many tasks there are, once that is known
        self._number = -1  # number of the last reading's task
        self._reading = Reading()

    def iterator(self, epoch: int, first: int) -> EpochIterator:
        """Returns an iterator over the batches; `first` is the number of the first one in the epoch."""
        self._epoch = epoch
        consumer = Consumer(Position(epoch, first, first, {0: self._state_of()}), self)
        return EpochIterator(self, consumer, self, owns_engine=False)

    def has(self, number: int) -> bool:
        return number < self._end

    def get(self, plan: Plan, number: int) -> Reading:
        """Returns what comes next, or again what came last. Raises a signal handler's error: it is no batch's."""
        if number != self._number:
            reading = Reading(task=ForeignTask())
            try:
                # Not next(): no signal handler runs before the batch is kept.
                reading.batch = self._batches.__next__()
            except StopIteration:
                reading.is_empty = True
                self._end = number + 1
                if number == 0 and self._epoch > 0:
                    warn_once(EMPTY, type(self._batches).__name__, str(self._epoch))
            except Exception as error:
                reraise_of_signal(error)
                reading.error = error
            self._reading = reading
            self._number = number
        self._reading.place = self._state_of()
        return self._reading

    def state_at(self, position: Position) -> Any:
        return (position.places or {})[0]
