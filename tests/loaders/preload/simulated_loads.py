"""What the scenarios on the simulated GPU load, how they consume it, and what they have to see: a CPU's bytes."""

import weakref
from functools import cache

import numpy as np
import torch
from torch.utils.data import DataLoader

from loaders import Preloader, ResidentLoader, WorkerLoader
from tests.infrastructure import simulated_gpu as sim

DEVICE = torch.device("sim:0")
ROWS = 48
BATCH = 4
WIDTH = 3000


class Rows:
    """Row i is full of i."""

    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        return {"x": torch.full((WIDTH,), index, dtype=torch.int32), "label": index}


class Ring:
    """A loader with page-locked memory of its own, which it rewrites as soon as nothing holds the batch in it."""

    def __init__(self, wrap=dict):
        self._wrap = wrap
        self._free = []

    def __iter__(self):
        return map(self._batch, range(ROWS // BATCH))

    def _batch(self, number):
        if not self._free:
            self._free.append(np.empty((BATCH, WIDTH), np.int32))
            sim.lock(self._free[0])
        buffer = self._free.pop()
        view = buffer[:]  # which lives as long as the batch
        weakref.finalize(view, self._free.append, buffer)
        view[:] = labels = np.arange(number * BATCH, (number + 1) * BATCH)[:, None]
        return self._wrap({"x": torch.from_numpy(view), "label": torch.tensor(labels[:, 0])})


def doubled(batch, random):
    return {"x": batch["x"] * 2, "label": batch["label"]}


def is_doubled(batch):
    return (batch["x"].cpu() == 2 * batch["label"].cpu()[:, None]).all()


def workers(dataset=None, **settings):
    return WorkerLoader(dataset or Rows(), BATCH, **{"pin_memory": True, "num_workers": 1, "seed": 3, **settings})


LOADERS = {
    "seeded": workers,
    "unseeded": lambda: workers(seed=None),
    "persistent": lambda: workers(num_workers=2, persistent_workers=True, prefetch_factor=1, pin_memory=False),
    "inline": lambda: workers(num_workers=0),
    "threads": lambda: workers(worker_method="thread"),
    "torch": lambda: DataLoader(Rows(), BATCH),  # type: ignore[arg-type]
    "ring": Ring,
    "resident": lambda: ResidentLoader(Rows(), BATCH, seed=3, device=DEVICE),
}


def consumed(loader, epochs=1, kept=0, leave_at=None):
    """What a consumer reads of each batch, late: it queues its work, and reads the results at the end."""
    results = []
    held = []
    for _ in range(epochs):
        for number, batch in enumerate(loader):
            x = batch["x"].to(torch.int64)
            results.append((x.amin(1), x.amax(1), batch["label"] + 0))
            held = [*held, batch][-kept:] if kept else []
            if number == leave_at:
                break
    return [tuple(part.cpu().tolist() for part in parts) for parts in results]


@cache
def expected(kind, **how):
    """The same on the CPU."""
    loader = LOADERS[kind]() if kind != "resident" else ResidentLoader(Rows(), BATCH, seed=3)
    return consumed(Preloader(loader, "cpu", 0, doubled), **how)
