"""The second part of what every loader promises: errors, workers that die, what is kept, and how a loader ends."""

import gc
import json
import multiprocessing
import os
import signal
import traceback
from itertools import islice

import pytest
from every_loader import LENGTH, make, saved
from example_datasets import Faulty, Noisy, contents, plain

from loaders import ExpectedError


def test_a_samples_error_is_raised_in_its_batchs_place_and_the_epoch_goes_on(name, case, build):
    batches = case.batches(0)
    bad = batches[1][-1]
    loader = build(Faulty(LENGTH, bad))
    if case.reads_once:
        with pytest.raises(ValueError, match=f"sample {bad} is bad"):
            next(loader)
        return
    iterator = iter(loader)
    assert contents(islice(iterator, 1)) == batches[:1]
    with pytest.raises(ValueError, match=f"sample {bad} is bad") as caught:
        next(iterator)
    assert "in __getitem__" in "".join(traceback.format_exception(caught.value))
    state = saved(loader)
    if case.is_torchs:
        with pytest.raises(RuntimeError, match="ended this epoch"):
            next(iterator)
    else:
        assert contents(iterator) == batches[2:]
    with make(name) as resumed:
        resumed.load_state_dict(state)  # the error has taken its batch's place, but for torch it ends the epoch
        assert contents(resumed) == batches[1 if case.is_torchs else 2 :]
    loader.close()  # though the error, which is kept here, refers to the frames that it came through
    assert multiprocessing.active_children() == []


def test_killed_workers_are_restarted_and_no_sample_is_lost_changed_or_repeated(name, case, build):
    if case.is_torchs:
        pytest.skip("a worker that dies is torch's error: test_torch_loader.py")
    dataset = Noisy(60)
    with make("streams_inline" if case.is_stream else "inline", dataset) as inline:
        epochs = [contents(inline) for _ in range(2)]
    loader = build(dataset)
    iterator = iter(loader)
    seen = [next(iterator)]
    workers = multiprocessing.active_children()
    for worker in workers:
        os.kill(worker.pid, signal.SIGKILL)
    seen += islice(iterator, 3)
    for worker in multiprocessing.active_children()[:1]:
        os.kill(worker.pid, signal.SIGKILL)
    seen += iterator
    deaths = loader.stats().get("workers", {}).get("deaths", 0)
    second = contents(loader)
    if not case.is_keyed or case.reads_once:
        seen = [batch["index"] for batch in seen]
        second = [batch["index"] for batch in second]
        epochs = [[batch["index"] for batch in epoch] for epoch in epochs]
    assert [contents(seen), second] == epochs
    assert deaths >= len(workers) and (deaths > 0) == bool(workers)
    json.dumps(loader.stats())


@pytest.mark.parametrize("bad", [(2,), (0, 2, 4, 6)])
def test_on_error_skip_leaves_out_samples_that_raise_and_an_empty_batch_raises(name, case, bad, closed_later):
    if case.is_torchs or case.reads_once:
        pytest.skip("they cannot leave out samples")
    bad = bad if case.is_stream else tuple(index // 2 for index in bad)
    loader = closed_later(make(name, Faulty(LENGTH, *bad), shuffle=False, on_error="skip"))
    iterator = iter(loader)
    first = case.batches(0, shuffle=False)[0]
    if set(bad) == set(first):
        with pytest.raises(ExpectedError, match=r"left out every sample.* is bad.*remove these") as error:
            next(iterator)
        assert isinstance(error.value, RuntimeError)
    else:
        assert plain(next(iterator)) == [row for row in first if row not in bad]
    assert contents(iterator) == case.batches(0, shuffle=False)[1:]
    skipped = loader.stats()["workers"]["skipped"]
    assert all("is bad" in reason for _, reason in skipped)
    assert skipped or set(bad) == set(first)


# What a batch is, and closing


def test_close_ends_everything_in_any_state_and_says_so_to_later_calls(build):
    for begin in (lambda loader: None, iter, next, list):
        loader = build()
        begun = begin(loader)
        loader.close()
        loader.close()
        for call in (iter, next):
            with pytest.raises(RuntimeError, match="closed"):
                call(loader)
        if begin is iter:
            with pytest.raises(RuntimeError, match="closed"):
                next(begun)
        assert multiprocessing.active_children() == []
        json.dumps([loader.stats(), loader.state_dict()])
    with pytest.raises(KeyError, match="mine"), build() as loader:
        next(loader)
        raise KeyError("mine")
    with pytest.raises(RuntimeError, match="closed"):
        iter(loader)


def test_a_loader_that_is_forgotten_ends_its_workers(name, torch_looks_often):
    loader = make(name)
    next(loader)
    del loader
    gc.collect()  # there may be a cycle
    for process in multiprocessing.active_children():
        process.join(5)  # torch terminates those that are slow, and does not wait for them
    assert multiprocessing.active_children() == []  # threads: conftest.py


def test_a_loop_over_a_temporary_loader_gets_the_whole_epoch(name, case):
    assert [plain(batch) for batch in make(name)] == case.batches(0)
    gc.collect()
    assert multiprocessing.active_children() == []
