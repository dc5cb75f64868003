"""Small datasets that show what a loader did with them."""

import faulthandler
import multiprocessing
import os
import random
import signal
import threading

import numpy as np
import torch
from torch.utils.data import IterableDataset


class Numbers:
    """Sample i is i."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return index


class Stream(IterableDataset, Numbers):
    """Gives 0, 1, ..."""

    def __iter__(self):
        return iter(range(self.length))


class Waiting(Numbers):
    """Sample i is i; who reads sample `late`, or a later one, says that it `begins`, and waits for `go`."""

    def __init__(self, length, late, events=multiprocessing):
        super().__init__(length)
        self.late = late
        self.go = events.Event()
        self.begins = events.Event()

    def __getitem__(self, index):
        if index >= self.late:
            self.begins.set()
            assert self.go.wait(60)
        return index


class Slow(Numbers):
    """A sample takes a while; the first one says that it has `begun`."""

    def __init__(self, length):
        super().__init__(length)
        self.begun = multiprocessing.Event()

    def __getitem__(self, index):
        self.begun.set()
        threading.Event().wait(0.02)
        return index


class Sized(Numbers):
    """Sample i is `sizes[i]` bytes of value i modulo 251."""

    def __init__(self, sizes):
        super().__init__(len(sizes))
        self.sizes = sizes

    def __getitem__(self, index):
        return torch.full((self.sizes[index],), index % 251, dtype=torch.uint8)


class Faulty(Numbers):
    """Sample i is i, but reading one of `bad` raises."""

    def __init__(self, length, *bad):
        super().__init__(length)
        self.bad = bad

    def __getitem__(self, index):
        if index in self.bad:
            raise ValueError(f"sample {index} is bad")
        return index


class Augmented(Numbers):
    """Sample i is i and a draw from each of the three global generators that augmentations use."""

    def __getitem__(self, index):
        return [index, random.random(), np.random.random(), torch.rand(()).item()]


class Noisy(Numbers):
    """Sample i is i and three draws from torch's default generator."""

    def __getitem__(self, index):
        self.before(index)
        return {"index": index, "noise": torch.rand(3, dtype=torch.float64)}

    def before(self, index):
        """What happens before a sample is read."""


class Written(Noisy):
    """The same through read_batch, which draws from the `random` that it is given."""

    def sample_spec(self):
        return {"index": ((), torch.int64), "noise": ((3,), torch.float64)}

    def read_batch(self, indices, out, random):
        for index in indices.tolist():
            self.before(index)
        out["noise"].copy_(torch.from_numpy(random.uniform(3)))
        out["index"].copy_(torch.from_numpy(indices))


def failing(kind, how, bad, times=None, length=48):
    """A dataset that fails at the samples `bad`: each `times` times, or always."""

    class Failing(kind):
        # No lock: a worker that is killed would keep it, and only one at a time reads a sample.
        failed = multiprocessing.RawArray("q", length)
        hangs = multiprocessing.Event()

        def before(self, index):
            if index not in bad or self.failed[index] == times:
                return
            self.failed[index] += 1
            if how == "raise":
                raise ValueError(f"sample {index} is bad")
            if how == "stop":
                next(iter(()))
            if how == "exit":
                os._exit(0)
            if how == "hang":
                self.hangs.set()
                threading.Event().wait()
            faulthandler.disable()  # the test's output is long enough
            os.kill(os.getpid(), getattr(signal, how))

    return Failing(length)


class Images(Numbers):
    """Sample i is an image full of i, and i as its label."""

    def __init__(self, length, size=16):
        super().__init__(length)
        self.shape = 3, size, size

    def __getitem__(self, index):
        image = torch.full(self.shape, index % 256, dtype=torch.uint8, device="cpu")
        return {"image": image, "label": torch.tensor(index, device="cpu")}


class WrittenImages(Images):
    """The same through read_batch."""

    def sample_spec(self):
        return {"image": (self.shape, torch.uint8), "label": ((), torch.int64)}

    def read_batch(self, indices, out, random):
        out["label"].copy_(torch.from_numpy(indices))
        out["image"].copy_(out["label"][:, None, None, None].expand_as(out["image"]) % 256)


def global_states():
    """The states of the three global generators that augmentations use."""
    name, words, *rest = np.random.get_state()
    return random.getstate(), (name, words.tolist(), *rest), torch.get_rng_state().tolist()


def plain(batch):
    """A batch as numbers, in lists and dicts."""
    if isinstance(batch, dict):
        return {name: plain(field) for name, field in batch.items()}
    if isinstance(batch, list):
        return [plain(field) for field in batch]
    return batch.tolist() if isinstance(batch, torch.Tensor) else batch


def contents(batches):
    """Batches as nested lists."""
    return [plain(batch) for batch in batches]


def rows(loader):
    """One epoch's samples in their order."""
    return [row for batch in contents(loader) for row in batch]


def outcomes(loader):
    """Each batch of an epoch as numbers, or the error in its place as text."""
    seen = []
    iterator = iter(loader)
    while True:
        try:
            seen.append(plain(next(iterator)))
        except StopIteration:
            return seen
        except Exception as error:
            seen.append(str(error))
