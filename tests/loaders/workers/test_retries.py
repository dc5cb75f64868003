"""Reading again after an error that can pass: no sample is lost, and none has other random numbers."""

import errno
import os
import random
import signal
import tempfile

import numpy as np
import pytest
import torch
from every_loader import Streamed
from example_datasets import Augmented, Numbers, Written, contents, outcomes

from loaders import WorkerLoader
from loaders.workers.retries import can_pass

STALE = OSError(errno.ESTALE, "Stale file handle")


@pytest.fixture(autouse=True)
def files_go(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


class Flaky(Augmented):
    """Reading sample 5 draws random numbers, and then fails `times` times with an error that another one may wrap.

    A sample also has a draw from each generator in `held`.
    """

    held = ()

    def __init__(self, length=12, times=1, error=STALE):
        super().__init__(length)
        self.error = error
        self.left = [tempfile.mkstemp()[1] for _ in range(times)]  # files, which all copies of the dataset share

    def fail(self, index):
        left = [path for path in self.left if os.path.exists(path)]
        if index == 5 and left:
            os.unlink(left[0])
            self.draw()
            try:
                raise self.error
            except OSError as error:
                raise RuntimeError("could not be decoded") from error

    def draw(self):
        torch.rand(3), np.random.random(), random.random()
        return [draw_from(generator) for generator in self.held]

    def __getitem__(self, index):
        sample = [*super().__getitem__(index), *self.draw()]
        self.fail(index)
        return sample


def draw_from(generator):
    is_torch = isinstance(generator, torch.Generator)
    return torch.rand((), generator=generator).item() if is_torch else generator.random()


class Together(Flaky):
    """A whole batch at once, which is the only way, if there is a seed."""

    __getitem__ = None

    def __getitems__(self, indices):
        samples = [[*Augmented.__getitem__(self, index), *self.draw()] for index in indices]
        self.fail(max(indices))
        return samples


class FlakyWritten(Flaky, Written):
    """By read_batch."""

    def before(self, index):
        self.fail(index)

    __getitem__ = Written.__getitem__

    def sample_spec(self):
        return {**Written.sample_spec(self), "held": ((len(self.held),), torch.float64)}

    def read_batch(self, indices, out, random):
        out["held"][:] = torch.tensor(self.draw(), dtype=torch.float64)
        Written.read_batch(self, indices, out, random)


@pytest.mark.parametrize("settings", [{"seed": 0}, {"seed": None, "num_workers": 2}], ids=["seed", "no seed"])
@pytest.mark.parametrize("kind", [Flaky, Together, FlakyWritten])
@pytest.mark.parametrize("holds", [False, True])
def test_a_sample_is_read_again_with_the_same_random_numbers(holds, kind, settings, reader):
    draws_from_random = kind is FlakyWritten and not holds
    is_seeded = reader.get("worker_method") != "thread" or draws_from_random  # threads do not seed generators
    if settings["seed"] is None and (reader["num_workers"] == 0 or kind is FlakyWritten):
        pytest.skip("torch's own code reads")
    expected = []
    seen = []
    for times, into in ((0, expected), (1, seen)):
        torch.manual_seed(3)
        dataset = kind(times=times)
        if holds:
            dataset.held = np.random.default_rng(), random.Random(), torch.Generator(), np.random.RandomState()
        with WorkerLoader(dataset, 3, retries=1, **{**reader, **settings}) as loader:
            into += contents(loader)
            assert loader.stats()["workers"]["retried_samples"] == times
    assert seen == expected or not is_seeded
    assert [batch[0] for batch in seen if isinstance(batch, list)] == [b[0] for b in expected if isinstance(b, list)]


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_a_stream_goes_back_to_its_last_batch(on_error, reader):
    if reader.get("worker_method") == "thread":
        pytest.skip("threads read no streams")
    expected = []
    seen = []
    for times, into in ((0, expected), (1, seen)):
        dataset = Streamed(Flaky(24, times=times))
        settings = {"streams": 2, "on_error": on_error, "retries": 1, "seed": 0}
        with WorkerLoader(dataset, 3, **reader, **settings) as loader:
            into += contents(loader)
            assert loader.stats()["workers"]["retried_samples"] == times
    assert seen == expected and len(seen) == 8


@pytest.mark.parametrize(
    ("faults", "settings", "said", "retried"),
    [
        ({"times": 100}, {"retries": 1}, "could not be decoded", 1),
        ({"error": FileNotFoundError(errno.ENOENT, "no such file")}, {"retries": 1}, "no such file", 0),
        ({}, {}, "Stale file handle", 0),  # by default nothing is read again
    ],
)
def test_an_error_that_stays_is_raised_in_its_place_and_one_that_cannot_pass_at_once(faults, settings, said, retried):
    with WorkerLoader(Flaky(**faults), 3, num_workers=1, seed=0, **settings) as loader:
        batches = outcomes(loader)
        assert said in batches[1] and len(batches) == 4
        assert loader.stats()["workers"]["retried_samples"] == retried


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (OSError(errno.EIO, ""), True),
        (TimeoutError("timed out"), True),  # a socket's, which has no errno
        (ConnectionResetError(), True),
        (FileNotFoundError(errno.ENOENT, ""), False),
        (OSError("image file is truncated"), False),
        (ValueError(errno.EIO), False),
    ],
)
def test_which_errors_can_pass(error, passes):
    assert can_pass(error) == passes
    wrapped = KeyError()
    wrapped.__context__ = error  # without `from`
    assert can_pass(wrapped) == passes


def test_an_alarm_inside_a_sample_is_no_error_of_the_sample(alarm):
    class Long(Numbers):
        alarms = 0

        def __getitem__(self, index):
            if index == 5:
                self.alarms += 1
                signal.raise_signal(signal.SIGALRM)
            return index

    with WorkerLoader(Long(12), 3, seed=0, retries=1, on_error="skip") as loader:
        iterator = iter(loader)
        next(iterator)
        with pytest.raises(TimeoutError):
            next(iterator)
        assert loader.dataset.alarms == 1
