"""A WorkerLoader with a seed: order and random numbers are pure functions of (seed, epoch, position, index).

So batches have the same bytes with any number of workers, a resume is exact, and nothing but a position is saved.
"""

import logging
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
from torch.utils.data import BatchSampler, IterableDataset

from .arguments import LoaderConfigError, as_index, checked_epoch
from .held import Same, contents_of
from .iterators import IN_USE, Consumer, EpochIterator, Position
from .order import Order
from .plans import OrderPlan, Plan, SamplerPlan, length_or_maxsize
from .randomness import fold
from .samplers import OrderSampler, Watched, check_resumable, epochs_of, pass_on_epoch
from .worker_loader import WorkerLoader

log = logging.getLogger(__name__)

VERSION = 4  # the format of the state

T_co = TypeVar("T_co", covariant=True)


class SeededLoader(WorkerLoader[T_co]):
    """Batches in our own order, or in the order of a sampler, which is iterated once per epoch.

    Arguments are those of WorkerLoader. `iter()` runs the epoch that `set_epoch` named, else the next one, from 0.
    With persistent_workers=True it ends the running epoch, and workers load the next epoch's first batches ahead,
    but not in the order of a sampler of yours.
    A dataset may offer `sample_spec()` and `read_batch(indices, out, random)`, which writes into the batch itself:
    `out` has a tensor (len(indices), *shape) for each field of the spec, and `random` is a loaders.Random with a
    stream per row. A collate_fn of your own gets what `__getitem__` returns instead.
    """

    # iter() sets the newest epoch's, and load_state_dict one that has not begun.
    _consumer: Consumer | None = None
    # Where the next epoch begins, if set_epoch or load_state_dict has named that; iter() clears it.
    _upcoming: Position | None = None
    # The iterator behind next(loader), which sets it; iter() and load_state_dict clear it.
    _current: EpochIterator | None = None
    # The epochs that the samplers have got from the loader: another one was named by the program.
    _told: list[int] | None = None
    _keeps_samples = False  # they were read once
    # iter() sets these.
    _length = 0  # the dataset's length when the workers got it
    _contents: Any = None  # what it and collate_fn held then; without copies its sample_spec(), and collate_fn itself

    def _begin(self) -> EpochIterator:
        position = self.next_position()
        self._base_seed = int(fold(self.seed or 0, self.rank) >> np.uint64(2))
        self._restart_if_changed()
        pass_on_epoch(position.epoch, self.batch_sampler, self.sampler)
        consumer = Consumer(position, first=position.batch)
        consumer.plan = self._plan_of(consumer)
        iterator = self._start(consumer)
        told = epochs_of(self.batch_sampler, self.sampler)
        # From here on no call, after which a signal handler could raise: the epoch would be spent.
        attributes = vars(self)  # DataLoader.__setattr__ is Python code, in which a signal handler can run
        attributes["_consumer"] = consumer
        attributes["_upcoming"] = None
        attributes["_current"] = None
        attributes["_told"] = told
        return iterator

    def _restart_if_changed(self) -> None:
        """Starts persistent workers again if the dataset or collate_fn has changed since they got it."""
        before = self._length, self._contents
        self._length = length_or_maxsize(self.dataset)
        self._contents = self._contents_now()
        engine = self._engine
        if engine is None or before == (self._length, self._contents):
            return
        name = type(self.dataset).__name__
        if self._length != before[0]:
            log.warning("%s had %d samples before, and has %d from this epoch on", name, before[0], self._length)
        else:
            log.info("attributes of %s, or of collate_fn, have changed: it is read anew", name)
        self._engine = None  # if the next lines fail, the next iter() builds it
        engine.close()
        self._engine = self._build_engine()
        self._engine.stats = engine.stats  # totals, and what was warned of

    def _contents_now(self) -> Any:
        """What dataset and collate_fn hold, if samples are read from a copy of them, or are kept."""
        reads_copy = self.num_workers > 0 or isinstance(self.dataset, IterableDataset)  # each stream reads one
        if not self._persists or not (reads_copy or self._keeps_samples):
            return self._spec(), Same([self.collate_fn])
        collate_fn = self.collate_fn  # not a method: its object may train, or lead to the whole program
        return contents_of((self.dataset, None if hasattr(collate_fn, "__self__") else collate_fn))

    def __next__(self) -> Any:
        """Returns the next batch of the running epoch, or of a new one if none is running."""
        current = self._current
        if current is None or not current.is_running:
            newest = self._newest()
            current = newest if newest is not None and newest.is_running else iter(self)
            self._current = current
        if current.preloading is not None:
            raise RuntimeError(IN_USE)
        try:
            return next(current)
        except StopIteration:
            self._current = None
            raise

    def __len__(self) -> int:
        """Batches of the epoch that the next `iter()` runs, on this rank."""
        order = self._order()
        if order.length == sys.maxsize:
            raise TypeError("the sampler has no length, so the loader has none either")
        return len(order)

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch that the next `iter()` runs, from 0, or from the batch of a loaded state of the same epoch.

        Also calls `set_epoch` of your sampler, if it has one.
        """
        epoch = checked_epoch(epoch)
        if self._upcoming is None or self._upcoming.epoch != epoch:
            self._upcoming = Position(epoch)
        self._tell(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Returns the position in the newest epoch, counted in samples delivered to all ranks: plain JSON.

        With a batch sampler `samples` counts batches.
        Raises ValueError if an epoch cannot be resumed: with in_order=False, or a sampler that holds a generator.
        """
        return self.state_at(self.position)

    def state_at(self, position: Position) -> dict[str, Any]:
        """Returns the state at a position, which may be an earlier one of the newest epoch."""
        if not self.in_order:
            raise ValueError("in_order=False has no state: what was delivered is not a prefix of the epoch")
        check_resumable(self.batch_sampler, self.sampler)
        samples = position.batch * self._order().global_batch_size
        length = self._sampler_length() if samples else None  # before its epoch it may be another one
        has_length = {} if length is None else {"sampler_length": length}
        return {"version": VERSION, "epoch": position.epoch, "samples": samples, **has_length, **self._identity()}

    @property
    def position(self) -> Position:
        """Where the newest epoch is, or where the next one begins if no batch is left in it.

        It is what `state_at` takes, and costs less than the state.
        """
        consumer = self._consumer
        if consumer is None or consumer.is_exhausted(self.steps_per_epoch):
            return self.next_position()
        return consumer.position

    def next_position(self) -> Position:
        """Returns where the next `iter()` begins: at what was named or loaded, else in the next epoch.

        The program may have named another one to a sampler, by its set_epoch. Lightning does so, and names it again
        when it has begun.

        It is the newest one again if none of its batches was delivered, and no iterator can still deliver one: an
        independent one (persistent_workers=False) can.
        """
        epochs = epochs_of(self.batch_sampler, self.sampler)
        for named, told in zip(epochs, self._told or [0] * len(epochs), strict=False):
            if named != told and (self._upcoming is None or self._upcoming.epoch != named):
                return Position(named)
        if self._upcoming is not None:
            return self._upcoming
        consumer = self._consumer
        if consumer is None:
            return Position()
        newest = self._newest()
        will_go_on = not self._persists and newest is not None and newest.is_running
        none_taken = consumer.position.batch == consumer.first and not consumer.is_exhausted(self.steps_per_epoch)
        if none_taken and not will_go_on:
            return consumer.position
        return Position(consumer.position.epoch + 1)

    def _tell(self, epoch: int) -> None:
        pass_on_epoch(epoch, self.batch_sampler, self.sampler)
        self._told = epochs_of(self.batch_sampler, self.sampler)

    @property
    def at_epoch_end(self) -> bool:
        """Whether all batches of the newest epoch were delivered, or none: `samples` in the state is 0."""
        return self.position.batch == 0

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Sets what the next `iter()` runs. Raises ValueError for a state of another seed, length, batch or order."""
        self._check_state(state)
        position = self._position_in(state)
        self._end_newest()
        self._newest = lambda: None  # next(loader) must not continue it
        vars(self).update(_consumer=Consumer(position), _upcoming=position, _current=None)
        self._tell(position.epoch)
        length = state.get("sampler_length")
        if length is not None and length != self._sampler_length():
            log.warning(
                "this state was saved in an epoch in which the sampler had %s items, and it has %s now: the rest of "
                "the epoch may be other samples than those that were left",
                length,
                self._sampler_length(),
            )

    def _sampler_length(self) -> int | None:
        """How many items a sampler of the program has in the epoch that it was told; None if that is not known."""
        length = self._order().length
        return None if isinstance(self.sampler, OrderSampler) or length == sys.maxsize else length

    def _position_in(self, state: dict[str, Any]) -> Position:
        batch = state["samples"] // self._order().global_batch_size
        return Position(state["epoch"], batch, batch)

    def _check_state(self, state: dict[str, Any]) -> None:
        """Raises ValueError if the state is another loader's, or is not a loader's state."""
        if not isinstance(state, Mapping) or "version" not in state:
            raise ValueError(f"load_state_dict({str(state)[:200]}): give it a state that state_dict() returned")
        for key, ours in {"version": VERSION, **self._identity()}.items():
            if state.get(key) != ours:
                raise ValueError(
                    f"this state has {key}={state.get(key)!r}, but the loader has {key}={ours!r}: "
                    f"resume with the {key} of the state, or start afresh"
                )
        epoch = state.get("epoch")
        samples = state.get("samples")
        if as_index(epoch) < 0 or as_index(samples) < 0:
            raise ValueError(
                f"this state has epoch={epoch!r} and samples={samples!r}: both have to be integers from 0; use a "
                "state that state_dict() returned"
            )

    def _order(self) -> Order:
        """Returns the order, with the length that the dataset or the sampler has now."""
        if isinstance(self.sampler, OrderSampler):
            dataset: Any = self.dataset
            order = self.sampler.order
            if order.length != len(dataset):  # else plans keep one order: they are compared at each batch
                order = self.sampler.order = replace(order, length=len(dataset))
            return order
        assert self.seed is not None
        length = length_or_maxsize(self._index_sampler if self.batch_size is None else self.sampler)
        split = self.drop_last, self.rank, self.world_size, self.pad
        return Order(length, self.batch_size or 1, False, self.seed, *split)

    def _plan_of(self, consumer: Consumer) -> Plan:
        order = self._order()
        batched = self._auto_collation
        epoch = consumer.position.epoch
        if batched and self.batch_size is not None:
            self._check_batch_sampler()
        if isinstance(self.sampler, OrderSampler):
            if order.shuffle and not order.length:  # as torch's RandomSampler does
                raise LoaderConfigError(f"{type(self.dataset).__name__} has no samples to shuffle: look at its files")
            return OrderPlan(order, epoch, batched)
        if self.batch_size is None:
            return SamplerPlan(Watched(self._index_sampler), None, order.seed, epoch, batched)
        return SamplerPlan(Watched(self.sampler), order, order.seed, epoch)

    def _check_batch_sampler(self) -> None:
        """Raises LoaderConfigError if the loader's own batch sampler was changed: only torch's loader reads it."""
        kind = type(self.batch_sampler)
        place = f"{type(self).__name__}.batch_sampler"
        if kind is not BatchSampler:
            raise LoaderConfigError(
                f"{place} was replaced, by a {kind.__name__}, which a loader with a seed does not read: leave the "
                "loader's own (persistent_workers=True keeps the workers from epoch to epoch), give the argument "
                "batch_sampler, or use a WorkerLoader without a seed"
            )
        sampler: Any = self.batch_sampler
        same = {
            "batch_size": sampler.batch_size == self.batch_size,
            "drop_last": sampler.drop_last == self.drop_last,
            "sampler": sampler.sampler is self.sampler,  # it may be an array
        }
        for name, is_same in same.items():
            if not is_same:
                raise LoaderConfigError(
                    f"{place}.{name} was changed, which a loader with a seed does not read: make a new loader with "
                    f"this {name}, and give it the epoch by set_epoch, or use a WorkerLoader without a seed"
                )

    def _identity(self) -> dict[str, Any]:
        order = self._order()
        kind = "sampler" if self.batch_size is not None else "batch_sampler"
        mixture = {} if order.mixture is None else {"mixture": order.mixture.as_dict()}
        return {
            "order": order.kind if isinstance(self.sampler, OrderSampler) else kind,  # first: others follow from it
            "seed": order.seed,
            "dataset_length": length_or_maxsize(self.dataset),
            "global_batch_size": order.global_batch_size,
            **mixture,
        }

    def __getstate__(self) -> dict[str, Any]:
        return {
            **super().__getstate__(),
            "_consumer": self._consumer and Consumer(self._consumer.position),
            "_current": None,
            "_contents": None,
        }


WorkerLoader.seeded_class = SeededLoader
