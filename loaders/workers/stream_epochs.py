"""Runs the epochs of a WorkerLoader over an iterable dataset with a seed: its position is a place in each stream."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable
from copy import copy
from typing import Any

from ..base import Delivery
from ..order import Order
from .dispatcher import Dispatcher
from .epochs import EngineEpochs, EpochSource, Loader
from .streams import Place, StreamError, StreamTasks
from .tasks import SamplerTasks

log = logging.getLogger(__name__)


def merge_states(states: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Joins the states of all ranks into one that each rank can load. A map-style dataset's are the same on all ranks.

    If ranks are in different epochs, because one was at its end first, all go on with the latest of these epochs.
    """
    states = list(states)
    newest = max(states, key=lambda state: state["epoch"])
    if "places" not in newest:
        return dict(newest)
    places: dict[str, Any] = {}
    for state in states:
        is_late = state["epoch"] < newest["epoch"]
        places |= dict.fromkeys(state["places"], Place(newest["epoch"])._asdict()) if is_late else state["places"]
    return {**newest, "places": places}


class Reached:
    """Where the consumer is in an epoch."""

    def __init__(self, places: dict[int, Place], batch: int) -> None:
        self._places, self._batch = places, batch
        self._first = 1 + max(place.at for place in places.values()) - batch
        self.newest: Delivery | None = None

    def now(self) -> tuple[int, dict[int, Place]]:
        """Returns the number of the next batch, and the place of each stream."""
        newest = self.newest
        if newest is not None and newest.is_taken:  # this may be done twice
            if newest.number is not None:
                self._batch = newest.number + 1
            if newest.progress is not None and newest.progress.place is not None:
                at = self._first + self._batch - 1
                self._places[newest.progress.stream] = newest.progress.place._replace(at=at)
        return self._batch, self._places

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_places": dict(self.now()[1]), "newest": None}


class StreamEpochs(EngineEpochs):
    """Counts epochs, and keeps the place of each of this rank's streams.

    With `steps_per_epoch` streams go on from one epoch to the next. Else each epoch begins them anew.
    """

    def __init__(self, loader: Loader, one_at_a_time: bool) -> None:
        added = loader._added
        self.steps = added.steps_per_epoch
        split = {"rank": added.rank, "world_size": added.world_size}
        samples = (loader.batch_size or 1) * added.world_size * self.steps if self.steps else sys.maxsize
        order = Order(samples, loader.batch_size or 1, False, added.seed, **split)
        tasks = SamplerTasks(range(samples) if self.steps else None, order, "stream")
        tasks.overruns = not self.steps  # the end of an epoch is known when it is there
        super().__init__(loader, tasks, one_at_a_time or self.steps is not None)
        self._is_shared |= self.steps is not None  # inline too
        self._rows = loader.batch_size
        self._streams, self._shuffle_buffer = added.streams, added.shuffle_buffer
        self._mine = range(added.rank, added.streams, added.world_size)
        self._most = None if loader.in_order else loader.prefetch_factor
        self._places: dict[int, Place] | None = None  # where the next epoch begins, after load_state_dict
        self.reached: Reached | None = None  # in the newest epoch

    def open(self, build: Callable[[], Dispatcher], epoch: int, first: int) -> Dispatcher:
        """Returns an engine that delivers the epoch from batch `first` on."""
        goes_on = self.engine is not None and self.steps is not None and self._places is None
        places = self._upcoming_places(epoch)
        engine = self.engine or build()
        if self._is_shared:
            self.engine = engine
        if not goes_on:
            engine.begin(StreamTasks(places, self._rows, epoch, self._most))
        self._places, self.reached = None, Reached(places, first)
        return engine

    def _upcoming_places(self, epoch: int) -> dict[int, Place]:
        if self._places is not None:
            return dict(self._places)
        if self.steps is not None and self.reached is not None:
            return dict(self.reached.now()[1])
        return {stream: Place(epoch if self.steps is None else 0) for stream in self._mine}

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch that `start` starts next. With steps_per_epoch it is only its number: streams go on."""
        super().set_epoch(epoch)
        if self.steps is None and self._next is not None and self._next[1] == 0:
            self._places = None

    def state_dict(self) -> dict[str, Any]:
        """Returns the position: plain JSON, but for what the dataset's own states have."""
        state = super().state_dict()
        is_running = self.position is not None and self.is_running
        places = self.reached.now()[1] if is_running and self.reached else self._upcoming_places(state["epoch"])
        ranks = {"world_size": self.order.world_size, "global_batch_size": self.order.global_batch_size}
        return state | ranks | {"places": {str(stream): place._asdict() for stream, place in places.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Sets what `start` starts next. Raises ValueError for a state of another seed or number of streams."""
        super().load_state_dict(state)
        places = state["places"]
        if missing := [stream for stream in self._mine if str(stream) not in places]:
            self._next = None
            raise ValueError(
                f"this state lacks the streams {', '.join(map(str, missing))} of rank {self.order.rank}: save what "
                "loaders.merge_states returns for the states of all ranks, and load that on each of them"
            )
        if state["world_size"] != self.order.world_size:
            log.info(
                "resuming on %d ranks from a state of %d: each stream goes on at its sample, but which streams' "
                "batches make a global batch is different from now on",
                self.order.world_size,
                state["world_size"],
            )
        self._places = {stream: Place(**places[str(stream)]) for stream in self._mine}

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "reached": copy(self.reached)}

    def _identity(self) -> dict[str, Any]:
        added = {"streams": self._streams, "shuffle_buffer": self._shuffle_buffer}
        identity = super()._identity()
        return {key: identity[key] for key in ("seed", "order")} | added


class StreamSource(EpochSource):
    """The batches of an epoch of streams."""

    _epochs: StreamEpochs

    def __init__(self, loader: Loader, epoch: int, first: int) -> None:
        super().__init__(loader, epoch, first)
        assert self._epochs.reached is not None
        self._reached, self._steps = self._epochs.reached, self._epochs.steps

    def next(self) -> Delivery | None:
        number, _ = self._reached.now()
        if number == self._steps:
            return None
        delivery = self.engine.next(None)
        if delivery is None:
            is_alone = self._epochs.order.world_size == 1  # a rank may evaluate none of few files
            if self._steps is not None or (number == 0 and is_alone):
                raise StreamError(
                    f"{type(self._loader.dataset).__name__} gave no batch, in none of this rank's streams: are its "
                    "files there, does its __iter__ begin anew each time, and does drop_last=True leave any batch?"
                )
            return None
        if delivery.number is not None:
            delivery.number = number
        self._reached.newest = delivery
        return delivery
