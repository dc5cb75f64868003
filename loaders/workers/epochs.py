"""Runs the epochs of a WorkerLoader on its engine: with a seed as we define them, else as torch does."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import is_not
from typing import Any

from torch.autograd.profiler import record_function
from torch.utils.data import IterableDataset
from torch.utils.data.dataloader import (
    _BaseDataLoaderIter,
    _MultiProcessingDataLoaderIter,
    _SingleProcessDataLoaderIter,
)

from ..base import Delivery, EpochIterator, Epochs, Position
from ..epoch_loader import EpochMethods
from ..optional_methods import OptionalMethods
from ..timeline import Timeline
from .dispatcher import Dispatcher
from .engine import build_engine, has_pool, pins_batches
from .streams import Place, StreamTasks
from .tasks import OwnTasks, UnseededTasks

Loader = Any  # a WorkerLoader, which imports this file


class SeededMethods(OptionalMethods, EpochMethods):
    """The extra methods of a WorkerLoader with a seed, whose order can be resumed."""

    timeline: Timeline | None = None  # records what the workers do; set it before an epoch

    @property
    def _epochs(self: Any) -> Any:  # type: ignore[override]  # it has one owner, `_added`
        return self._added.epochs

    @property
    def _iterator(self: Any) -> Any:
        """The newest iterator, as torch's loader keeps it. Programs set it to None to have new workers started."""
        return self._epochs.newest()

    @_iterator.setter
    def _iterator(self: Any, _: None) -> None:
        if self._epochs is not None:  # else DataLoader.__init__ sets it
            self._epochs.engine = None


class EngineEpochs(Epochs):
    """Counts the epochs of a seeded loader. All epochs share one engine if workers persist, else each has one.

    A shared engine loads the next epoch's first batches ahead, if batches come in order and the order is ours. A
    user's sampler is iterated only when its epoch begins, because the user may change it between epochs. This must
    not refer to the loader: else only the garbage collector would end the workers of an abandoned loader.
    """

    def __init__(self, loader: Loader, tasks: Any, one_at_a_time: bool) -> None:
        super().__init__(tasks, loader.batch_sampler, loader.sampler)
        self.engine: Dispatcher | None = None  # the shared one
        self.one_at_a_time = one_at_a_time
        self._is_shared = one_at_a_time and has_pool(loader)
        self._reads_ahead = self._is_shared and loader.in_order

    def check_samplers(self, loader: Loader) -> None:
        """Raises ValueError if the program has given the loader other samplers since: they would not be read."""
        batch_sampler, sampler = loader.batch_sampler, loader.sampler
        now = [batch_sampler, sampler, batch_sampler if loader._auto_collation else sampler]
        given = [*self._samplers, loader._index_sampler]
        if isinstance(self.tasks, OwnTasks):
            now, given = [*now, getattr(batch_sampler, "sampler", sampler)], [*given, sampler]
        if any(map(is_not, now, given)):
            raise ValueError(
                "the program has replaced the loader's sampler or batch_sampler, but with a seed the order is that of "
                "the arguments: pass the sampler as one, or leave out the seed"
            )

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

    def close(self) -> None:
        """Closes the shared engine; the next epoch builds a new one."""
        if self.engine is not None:
            self.engine.close()
            self.engine = None

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "engine": None}


class EpochSource:
    """The batches of an epoch of a seeded loader. It keeps the loader alive."""

    def __init__(self, loader: Loader, epoch: int, first: int) -> None:
        epochs: EngineEpochs = loader._added.epochs
        epochs.check_samplers(loader)
        self._loader, self._epochs, self._epoch = loader, epochs, epoch
        self.engine = epochs.open(partial(build_engine, loader), epoch, first)
        self.engine.use(loader.timeline, pins_batches(loader))

    @property
    def processes(self) -> list[Any]:
        return self.engine.processes

    def next(self) -> Delivery | None:
        return self.engine.next(self._epoch)

    def close(self) -> None:
        if self.engine is not self._epochs.engine:  # which later epochs share
            self.engine.close()


class TorchIterator(EpochIterator, _BaseDataLoaderIter):  # type: ignore[misc]  # both return themselves
    """Behaves exactly as torch's iterators, on our engine."""

    _torchs_class: type = _SingleProcessDataLoaderIter

    _shutdown = False  # whether the workers have ended: programs that end them ask for it

    def __init__(self, loader: Loader) -> None:
        _BaseDataLoaderIter.__init__(self, loader)
        self.engine: Dispatcher = build_engine(loader, int(self._base_seed))
        self._profile_name = f"enumerate(DataLoader)#{self._torchs_class.__name__}.__next__"  # where people look
        self._reset(loader, first_iter=True)

    __len__ = _BaseDataLoaderIter.__len__
    _next_data = EpochIterator.__next__

    def __next__(self) -> Any:
        # Torch's own warns if an iterable dataset gives more batches than the len() that the program has asked for.
        base = EpochIterator if self._IterableDataset_len_called is None else _BaseDataLoaderIter
        batch = base.__next__(self)
        self._num_yielded += base is EpochIterator  # torch's own has counted it
        return batch

    def _reset(self, loader: Loader, first_iter: bool = False) -> None:
        self.end_reader()
        if self._num_workers > 0 or not first_iter:  # as in torch: it iterates over the sampler, as __init__ has done
            _BaseDataLoaderIter._reset(self, loader, first_iter)
        self.engine.check_process()
        timeline = getattr(loader, "timeline", None)  # perhaps the program's own
        self.engine.use(timeline if isinstance(timeline, Timeline) else None, pins_batches(loader))
        if isinstance(loader.dataset, IterableDataset):
            workers = dict.fromkeys(range(max(1, loader.num_workers)), Place())
            most = None if loader.in_order else loader.prefetch_factor
            self.engine.begin(StreamTasks(workers, loader.batch_size, most=most))
        else:
            self.engine.begin(UnseededTasks(self._sampler_iter))
        source = TorchSource(self.engine, self._profile_name, self._persistent_workers)
        EpochIterator.__init__(self, source, Position(0))

    def end(self) -> None:
        """Ends the workers. A later next() raises RuntimeError."""
        super().end()
        self.engine.close()
        self._shutdown = True

    def _close_source(self) -> None:
        super()._close_source()
        self._shutdown |= not self._persistent_workers

    def __del__(self) -> None:
        """Does nothing: the engine ends its workers itself."""


class TorchInlineIterator(TorchIterator, _SingleProcessDataLoaderIter):  # type: ignore[misc]
    """An instance of what torch has without workers."""


class TorchWorkersIterator(TorchIterator, _MultiProcessingDataLoaderIter):  # type: ignore[misc, override]
    """An instance of what torch has with workers."""

    _torchs_class = _MultiProcessingDataLoaderIter


class TorchSource:
    """The batches of an epoch of a loader without a seed."""

    def __init__(self, engine: Dispatcher, name: str, persists: bool) -> None:
        self.engine, self._name, self._persists = engine, name, persists

    @property
    def processes(self) -> list[Any]:
        return self.engine.processes

    def next(self) -> Delivery | None:
        with record_function(self._name):  # as torch's profiler knows it
            return self.engine.next()

    def close(self) -> None:
        if not self._persists:
            self.engine.close()
