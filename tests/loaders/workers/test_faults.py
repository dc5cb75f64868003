"""Nothing kills an epoch: workers that die, hang or do not start, samples that cannot be read, a full machine."""

import builtins
import multiprocessing
import os
import resource
import signal
import subprocess
import threading
from contextlib import closing
from itertools import islice

import pytest
import torch
from example_datasets import Noisy, Numbers, Written, contents, failing, outcomes, rows

from loaders import MachineFull, WorkerFailure, WorkerLoader


def loader_over(dataset, num_workers=2, **settings):
    settings = {"batch_size": 4, "shuffle": True, "seed": 5, "persistent_workers": True, **settings}
    return WorkerLoader(dataset, num_workers=num_workers, **settings)


def epochs(loader):
    """The batches of three epochs."""
    return [batch for _ in range(3) for batch in contents(loader)]


def undisturbed(kind, **settings):
    with loader_over(kind(48), 0, **settings) as loader:
        return epochs(loader)


def batches_or_errors(loader):
    """The indices of each batch of an epoch, or the error in its place."""
    return [outcome if isinstance(outcome, str) else outcome["index"] for outcome in outcomes(loader)]


# Workers that die or hang; hanging ones are replaced: test_stuck_workers.py


@pytest.mark.parametrize(
    ("kind", "how", "bad", "times", "settings"),
    [
        (Noisy, "SIGSEGV", 7, 2, {}),
        (Written, "exit", 46, 3, {"batch_size": 5}),
    ],
)
def test_the_tasks_of_a_worker_that_died_are_retried_with_the_same_bytes(kind, how, bad, times, settings, caplog):
    with loader_over(failing(kind, how, (bad,), times), **settings) as loader:
        assert epochs(loader) == undisturbed(kind, **settings)
        assert loader.stats()["workers"]["deaths"] == times
    assert caplog.text.count("DataLoader worker (pid ") == times


def test_a_worker_that_dies_in_an_abandoned_epoch_does_not_disturb_the_next(bound):
    dataset = failing(Noisy, "hang", (7,), times=1)
    with loader_over(dataset, shuffle=False) as loader:
        next(iter(loader))
        assert dataset.hangs.wait(bound)
        loader.set_epoch(5)
        iterator = iter(loader)  # what was open is not wanted any more, the batch that hangs among it
        for process in iterator._workers:
            process.kill()
        seen = contents(iterator)
    with loader_over(Noisy(48), 0, shuffle=False) as calm:
        calm.set_epoch(5)
        assert seen == contents(calm)


@pytest.mark.parametrize("kind", [Noisy, Written])
def test_a_sample_that_always_kills_is_named_and_the_epoch_goes_on(kind):
    with loader_over(failing(kind, "SIGKILL", (7,)), shuffle=False, max_restarts=1) as loader:
        seen = batches_or_errors(loader)
        assert loader.stats()["workers"]["deaths"] == 2
    assert "is killed by signal: Killed" in seen[1]
    assert ("reading sample 7" if kind is Noisy else "reading one of [4, 5, 6, 7]") in seen[1]
    epoch = torch.arange(48).view(-1, 4).tolist()
    assert seen[:1] + seen[2:] == epoch[:1] + epoch[2:]


def test_without_restarts_no_restart_is_announced(caplog):
    with loader_over(failing(Noisy, "SIGKILL", (0,)), num_workers=1, shuffle=False, max_restarts=0) as loader:
        loader.prefetch_factor = 1
        with pytest.raises(WorkerFailure, match="reading sample 0"):
            next(iter(loader))
    assert "Restarting" not in caplog.text


def die(worker_or_samples):
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("batch_size", "said"), [(4, r"reading one of \[0, 1, 2, 3\], or collating them"), (None, "reading sample 0")]
)
def test_a_crash_in_collate_fn_is_not_blamed_on_the_last_sample(batch_size, said):
    settings = {"batch_size": batch_size, "shuffle": False, "collate_fn": die, "max_restarts": 0}
    with loader_over(Noisy(48), **settings) as loader, pytest.raises(WorkerFailure, match=said):
        next(iter(loader))


def test_a_worker_init_fn_that_kills_is_an_error_that_says_where():
    with (
        loader_over(Noisy(48), worker_init_fn=die) as loader,
        pytest.raises(WorkerFailure, match=r"killed by signal: Killed.*worker_init_fn"),
    ):
        next(iter(loader))


class Forking(Noisy):
    """Each sample starts a process. One leaves it behind with the worker's descriptors, and kills the worker."""

    def __init__(self, length):
        super().__init__(length)
        self.pipe = os.pipe()

    def before(self, index):
        subprocess.run(["true"], check=True)
        if index == 7:
            if os.fork() == 0:
                reads, writes = self.pipe
                os.close(writes)
                os.read(reads, 1)  # until the test closes its end
                os._exit(0)
            os.kill(os.getpid(), signal.SIGKILL)

    def close(self):
        for fd in self.pipe:
            os.close(fd)


def test_a_workers_death_is_noticed_though_its_child_holds_its_pipes():
    dataset = Forking(12)
    with closing(dataset), loader_over(dataset, shuffle=False, max_restarts=0) as loader:
        seen = batches_or_errors(loader)
    assert "is killed by signal" in seen[1]
    assert seen[2] == [8, 9, 10, 11]


# Errors that belong to no batch


def test_a_machine_that_is_full_for_a_while_costs_no_batch_and_no_position(descriptors_left):
    with loader_over(Noisy(48), shuffle=False) as loader:
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        descriptors_left(7)  # enough for the first worker, and not for the second
        with pytest.raises(MachineFull, match=r"too many open files: .*ulimit -n"):
            iter(loader)
        assert loader.state_dict()["epoch"] == 0
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        iterator = iter(loader)
        seen = [next(iterator)]
        descriptors_left(1)
        iterator._workers[0].kill()
        with pytest.raises(MachineFull):
            while True:
                seen.append(next(iterator))
        assert loader.state_dict()["samples"] == 4 * len(seen)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        seen += iterator
    with loader_over(Noisy(48), 0, shuffle=False) as calm:
        assert contents(seen) == contents(calm)


# Samples that cannot be read


class Wordless(Exception):
    def __str__(self):
        return self.args[5]


class WithWordless(Numbers):
    def __getitem__(self, index):
        if index == 5:
            raise Wordless("short")
        return super().__getitem__(index)


def test_a_sample_is_left_out_also_if_its_error_has_no_text(reader):
    with WorkerLoader(WithWordless(8), 4, seed=0, on_error="skip", **reader) as loader:
        assert [rows([batch]) for batch in loader] == [[0, 1, 2, 3], [4, 6, 7]]
        assert loader.stats()["workers"]["skipped"] == [(5, "Wordless (its __str__ raised IndexError)")]


@pytest.mark.parametrize("kind", [Noisy, Written])
def test_bad_samples_are_left_out_and_all_else_stays_as_it_was(kind, reader, caplog):
    bad = (5, 6, 47)
    with loader_over(failing(kind, "raise", bad), on_error="skip", shuffle=False, **reader) as loader:
        seen = epochs(loader)
        stats = loader.stats()["workers"]
        assert loader.state_dict()["epoch"] == 3
    assert stats["skipped_samples"] >= 3 * len(bad)
    assert sorted(stats["skipped"]) == [(index, f"ValueError: sample {index} is bad") for index in bad]
    sentence = "sample 47 could not be read and is left out: ValueError: sample 47 is bad"
    assert caplog.messages.count(sentence) == 1, "over all epochs and workers"
    draws_anew = kind is not Written and reader.get("worker_method") == "thread"
    for batch, whole in zip(seen, undisturbed(kind, shuffle=False), strict=True):
        keep = [row for row, index in enumerate(whole["index"]) if index not in bad]
        for name in ["index"] if draws_anew else whole:
            assert batch[name] == [whole[name][row] for row in keep]


class Alarmed(Numbers):
    """Sample 2 exceeds the time that it has set itself."""

    def __getitem__(self, index):
        def expire(*_):
            raise TimeoutError("this sample takes too long")

        signal.signal(signal.SIGALRM, expire)
        if index == 2:
            signal.raise_signal(signal.SIGALRM)
        return index


class AlarmedStream(Alarmed, torch.utils.data.IterableDataset):
    def __iter__(self):
        return map(self.__getitem__, range(len(self)))


@pytest.mark.parametrize(
    ("dataset", "batches"), [(Alarmed, [[0, 1], [3, 4, 5]]), (AlarmedStream, [[0, 1], [3, 4, 5]])]
)
def test_the_alarm_that_a_sample_has_set_in_a_worker_is_its_own_error(dataset, batches):
    with WorkerLoader(dataset(6), 3, num_workers=1, seed=0, on_error="skip", streams=1) as loader:
        assert contents(loader) == batches


class WithDefault(Exception):
    message = "cannot read"

    def __init__(self, path):
        super().__init__(path)


class WithProperty(WithDefault):
    @property
    def message(self):
        return f"cannot read {self.args[0]}"


class Keyed(ValueError):
    def __init__(self, *, path):
        super().__init__(path)


def grouped(path):
    group = getattr(builtins, "ExceptionGroup", None)  # Python 3.10 has none
    return group(path, [OSError(path)]) if group else WithDefault(path)


@pytest.mark.parametrize("made", [WithDefault, WithProperty, lambda path: Keyed(path=path), grouped])
def test_an_error_that_cannot_be_made_anew_is_a_runtime_error_with_all_that_the_worker_said(made, seed):
    class Unreadable(Numbers):
        def __getitem__(self, index):
            if index == 3:
                raise made("3.png")
            return index

    with WorkerLoader(Unreadable(6), 2, num_workers=1, seed=seed) as loader:
        iterator = iter(loader)
        assert next(iterator).tolist() == [0, 1]
        with pytest.raises(RuntimeError, match=r"(?s)in __getitem__.*3\.png"):
            next(iterator)
        assert next(iterator).tolist() == [4, 5]


class FirstWaits(Numbers):
    """Who reads sample 0 waits for `go`."""

    def __init__(self, length):
        super().__init__(length)
        self.go = multiprocessing.RawValue("b")  # no Event: killing who waits for one damages it

    def __getitem__(self, index):
        while index == 0 and not self.go.value:
            threading.Event().wait(0.01)
        return index


def test_out_of_order_a_worker_that_dies_late_loses_no_sample(seed):
    settings = {"num_workers": 2, "prefetch_factor": 1, "in_order": False, "seed": seed}
    with WorkerLoader(FirstWaits(1200), 1, **settings) as loader:
        iterator = iter(loader)
        seen = rows(islice(iterator, 1100))
        assert 0 not in seen
        os.kill(iterator._workers[0].pid, signal.SIGKILL)
        loader.dataset.go.value = 1
        assert sorted(seen + rows(iterator)) == list(range(1200))
