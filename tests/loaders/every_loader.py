"""Every loader under one face: how to make it, what its epochs have to be, and which promises it does not make.

What an epoch has to be is computed here by pure functions. A new loader joins by a line in LOADERS.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any

from example_datasets import Numbers
from torch.utils.data import IterableDataset, get_worker_info

from loaders import Mixture, Preloader, ResidentLoader, RolloverBatches, TorchLoader, WorkerLoader
from loaders.order import Order

LENGTH = 18  # five batches, the last with two samples; six batches from two streams
BATCH_SIZE = 4
STREAMS = 2


class Streamed(IterableDataset):
    """A dataset's samples as streams: an error of a sample does not end its stream."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __iter__(self):
        info = get_worker_info()
        return map(self.dataset.__getitem__, range(info.id, len(self.dataset), info.num_workers))


def ordered(epoch, length=LENGTH, batch_size=BATCH_SIZE, **settings):
    """The batches of an epoch in our order."""
    order = Order(length, batch_size, **{"shuffle": True, "seed": 0, **settings})
    return [order.indices(epoch, order.positions(number)).tolist() for number in range(len(order))]


def streamed(epoch, length=LENGTH, batch_size=BATCH_SIZE, drop_last=False, **_):
    """The batches of an epoch from streams: turn t belongs to stream t modulo their number; no turn is empty."""
    parts = []
    for stream in range(STREAMS):
        rows = list(range(stream, length, STREAMS))
        parts.append([rows[at : at + batch_size] for at in range(0, len(rows), batch_size)])
        if drop_last and len(rows) % batch_size:
            parts[-1].pop()
    return [batch for turn in zip_longest(*parts) for batch in turn if batch]


MIXED = Mixture((13, 5), (0.7, 0.3))  # of LENGTH samples


def rolling(epoch=0):
    sampler = RolloverBatches(LENGTH, BATCH_SIZE, 3)
    sampler.set_epoch(epoch)
    return sampler


ORDERS = {  # what may make the order in place of `shuffle`: the settings, and the batches of an epoch
    "mixture": (lambda: {"sampler": MIXED}, lambda epoch: ordered(epoch, shuffle=False, mixture=MIXED)),
    "batch sampler": (lambda: {"batch_sampler": rolling(), "batch_size": 1}, lambda epoch: list(rolling(epoch))),
}


@dataclass(frozen=True)
class Case:
    """A loader under test: `make(dataset, batch_size, shuffle=..., seed=..., ...)` builds it."""

    make: Callable[..., Any]
    batches: Callable[..., list[list[int]]] = ordered  # of an epoch
    is_keyed: bool = True  # a plain dataset's random numbers are: a thread never touches the global generators
    is_torchs: bool = False  # torch's own numbers and errors; a worker that dies is an error
    reads_once: bool = False  # the whole dataset when the first epoch begins
    is_independent: bool = False  # iter() does not end an older iterator

    @property
    def is_stream(self):
        return self.batches is streamed


def stream_loader(dataset, batch_size, shuffle=False, **settings):
    return WorkerLoader(Streamed(dataset), batch_size, streams=STREAMS, **settings)


# Tests kill more workers in a row than a loader allows by default.
workers = partial(WorkerLoader, num_workers=2, persistent_workers=True, max_restarts=100)
one_worker = partial(workers, num_workers=1)
threads = partial(workers, worker_method="thread")
torchs = partial(TorchLoader, num_workers=1)
streams = partial(stream_loader, num_workers=2, persistent_workers=True, max_restarts=100)


def preloaded(make, depth=2):
    return lambda *args, **settings: Preloader(make(*args, **settings), "cpu", depth)


LOADERS = {
    "inline": Case(partial(WorkerLoader, persistent_workers=True)),
    "processes": Case(workers),
    "independent": Case(partial(WorkerLoader, num_workers=1, prefetch_factor=1), is_independent=True),
    "threads": Case(threads, is_keyed=False),
    "streams": Case(streams, streamed),
    "streams_inline": Case(stream_loader, streamed),
    "torch": Case(torchs, is_torchs=True, is_keyed=False),
    "resident": Case(ResidentLoader, reads_once=True),
    "preloader": Case(preloaded(one_worker)),
    "preloader_at_depth_0": Case(preloaded(one_worker, 0)),
    "preloader_over_inline": Case(preloaded(WorkerLoader, 1), is_keyed=False),
    "preloader_over_threads": Case(preloaded(threads), is_keyed=False),
    "preloader_over_streams": Case(preloaded(partial(streams, num_workers=1)), streamed),
    "preloader_over_torch": Case(preloaded(torchs, 1), is_torchs=True, is_keyed=False),
    "preloader_over_resident": Case(preloaded(ResidentLoader), reads_once=True),
}


def make(name, dataset=None, batch_size=BATCH_SIZE, **settings):
    dataset = Numbers(LENGTH) if dataset is None else dataset
    return LOADERS[name].make(dataset, batch_size, **{"shuffle": True, "seed": 0, **settings})


def saved(loader):
    """Its state, after a checkpoint."""
    return json.loads(json.dumps(loader.state_dict()))
