"""Runs the epochs of a WorkerLoader on its engine: with a seed as we define them, else as torch does."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any

from torch.autograd.profiler import record_function
from torch.utils.data._utils.pin_memory import pin_memory
from torch.utils.data.dataloader import _BaseDataLoaderIter

from ..base import Delivery, EpochIterator, Epochs, OptionalMethods, Position
from ..order import Order
from ..preload.accelerator import page_locked_until
from ..preload.transfer import strided_parts
from ..samplers import length_of
from .dispatcher import Dispatcher
from .tasks import OwnTasks, UnseededTasks, choose_tasks

log = logging.getLogger(__name__)

Loader = Any  # a WorkerLoader, which imports this file


class SeededMethods(OptionalMethods):
    """The extra methods of a WorkerLoader with a seed, whose order can be resumed."""

    def __next__(self: Any) -> Any:
        """Returns the next batch of the newest iterator, or of a new one if that is at its end."""
        current = self._newest() if self._current is None else self._current
        if current is None or not getattr(current, "is_running", True):
            current = iter(self)
        try:
            return next(current)
        except StopIteration:
            self._end_epoch()
            current = None
            raise
        finally:
            self._current = current  # a subclass may have wrapped the newest: keep the wrapper

    @property
    def _iterator(self: Any) -> Any:
        """The newest iterator, as torch's loader keeps it. Programs set it to None to have new workers started."""
        return self._newest()

    @_iterator.setter
    def _iterator(self: Any, _: None) -> None:
        if "_runner" in vars(self):  # else DataLoader.__init__ sets it
            self._runner.engine = None

    def set_epoch(self: Any, epoch: int) -> None:
        """Sets the epoch that the next `iter()` runs; also calls `set_epoch` of your sampler, if it has one."""
        self._runner.set_epoch(epoch)

    def state_dict(self: Any) -> dict[str, Any]:
        """Returns the position in the newest epoch, counted in samples delivered to all ranks: plain JSON.

        Raises ValueError if an epoch cannot be resumed: with in_order=False, or a sampler that holds a generator.
        """
        if not self.in_order:
            raise ValueError("in_order=False has no state: what was delivered is not a prefix of the epoch")
        state: dict[str, Any] = self._runner.state_dict()
        return state

    def load_state_dict(self: Any, state: dict[str, Any]) -> None:
        """Sets what the next `iter()` runs. Raises ValueError for a state of another seed, length, batch or order."""
        self._adopt_new_length()
        self._runner.load_state_dict(state)
        self._end_epoch()


class EpochRunner(Epochs):
    """Runs the epochs of a seeded loader. All epochs share one engine if workers persist, else each has one.

    A shared engine loads the next epoch's first batches ahead, if batches come in order and the order is ours. A
    user's sampler is iterated only when its epoch begins, because the user may change it between epochs. The runner
    must not refer to the loader: else only the garbage collector would end the workers of an abandoned loader.
    """

    def __init__(self, loader: Loader, own_order: Order | None, one_at_a_time: bool) -> None:
        super().__init__(choose_tasks(loader, own_order), loader.batch_sampler, loader.sampler)
        self.engine: Dispatcher | None = None  # the shared one
        self.one_at_a_time = one_at_a_time  # a new iterator ends the one before
        self._is_shared = one_at_a_time and loader.has_pool
        self._reads_ahead = self._is_shared and loader.in_order

    def samples_now(self, loader: Loader) -> int:
        """Returns the length that the dataset or the sampler has now."""
        return len(loader.dataset) if isinstance(self.tasks, OwnTasks) else length_of(self.tasks.sampler)

    def batches_now(self, loader: Loader, epoch: int) -> int | None:
        """Returns the number of batches of an epoch of `samples_now`, on this rank; None without a known length."""
        length = self.samples_now(loader)
        return None if length == sys.maxsize else replace(self.order, length=length).batches_in(epoch)

    def change_length(self, loader: Loader, length: int) -> None:
        """Uses the new length of a dataset or sampler that has changed, as torch does."""
        before, self.tasks.order = self.order.length, replace(self.order, length=length)
        if isinstance(self.tasks, OwnTasks):
            log.warning(
                "%s had %d samples and has %d now: this epoch uses the new length, and the workers are restarted",
                type(loader.dataset).__name__,
                before,
                length,
            )
            loader.sampler.order = self.order
            self.close()

    def start(self, loader: Loader) -> EpochIterator:
        """Starts the upcoming epoch."""
        position = Position(*self.upcoming())
        source = EpochSource(loader, self, position)
        self.begin(position)
        return EpochIterator(source, position, self.batches_now(loader, position.epoch))

    def open(self, build: Callable[[], Dispatcher], epoch: int, first: int) -> Dispatcher:
        """Returns an engine that delivers the epoch from batch `first` on."""
        engine = self.engine or build()
        if self._is_shared:
            self.engine = engine
        if not isinstance(self.tasks, OwnTasks) or not self._reads_ahead:
            engine.begin(self.tasks.epoch(epoch, first))
        elif not engine.continues_with(epoch, first):
            engine.begin(self.tasks.onwards(epoch, first))
        return engine

    def close_unless_shared(self, engine: Dispatcher) -> None:
        """Closes the engine of an epoch that has ended, unless later epochs share it."""
        if engine is not self.engine:
            engine.close()

    def close(self) -> None:
        """Closes the shared engine; the next epoch builds a new one."""
        if self.engine is not None:
            self.engine.close()
            self.engine = None

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "engine": None}


class EpochSource:
    """The batches of an epoch of a seeded loader. It keeps the loader alive."""

    def __init__(self, loader: Loader, runner: EpochRunner, position: Position) -> None:
        self._loader, self._runner, self._position = loader, runner, position
        self.engine = runner.open(loader.build_engine, position.epoch, position.batch)
        self.engine.timeline = loader.timeline  # it may have been set since the engine was built
        self._pins = loader.pins_batches

    @property
    def processes(self) -> list[Any]:
        return self.engine.processes

    def next(self) -> Delivery | None:
        delivery = self.engine.next(self._position.epoch)
        if delivery is not None and delivery.error is None and self._pins:
            delivery.batch = _pinned(delivery.batch)
        return delivery

    def close(self) -> None:
        self._runner.close_unless_shared(self.engine)


class UnseededIterator(_BaseDataLoaderIter):
    """Behaves exactly as torch's iterator over worker processes, on our engine."""

    def __init__(self, loader: Loader) -> None:
        super().__init__(loader)
        self.engine: Dispatcher = loader.build_engine(int(self._base_seed))
        self._is_closed = False
        self._reset(loader, first_iter=True)

    @property
    def _workers(self) -> list[Any]:
        return self.engine.processes

    def _reset(self, loader: Loader, first_iter: bool = False) -> None:
        super()._reset(loader, first_iter)
        self.engine.check_process()
        self.is_running = True
        self._pins = loader.pins_batches
        self.engine.timeline = loader.timeline
        self.engine.begin(UnseededTasks(self._sampler_iter))

    def __next__(self) -> Any:
        if self._is_closed:
            raise RuntimeError("this WorkerLoader is closed: make a new one")
        with record_function(self._profile_name):
            delivery = self.engine.next()
        if delivery is None:
            self.is_running = False
            if not self._persistent_workers:
                self.engine.close()
            raise StopIteration
        if self._pins and delivery.error is None:
            delivery.batch = _pinned(delivery.batch)
        # No call from here on: see loaders.base.
        batch, error = delivery.batch, delivery.error
        delivery.is_taken = True
        delivery.batch = delivery.error = None
        if error is None:
            self._num_yielded += 1
            return batch
        try:
            raise error
        finally:  # else the error and this frame, which its traceback refers to, would keep each other alive
            del error, delivery

    def end(self) -> None:
        """Ends the workers. A later next() raises RuntimeError."""
        self._is_closed = True
        self.engine.close()

    _shutdown_workers = end  # torch's name


def _pinned(batch: Any) -> Any:
    """Returns the batch in torch's own pinned memory, which torch does not reuse while a copy from it is under way.

    A batch that lies in a page-locked slot is copied out of it first: torch takes that for pinned memory of its own.
    """
    if any(page_locked_until(part.data_ptr()) is not None for part in strided_parts(batch)):
        batch = deepcopy(batch)
    return pin_memory(batch)
