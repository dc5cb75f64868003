"""A program that forks while a loader runs: the child gets a sentence, and the parent's epoch does not change."""

import os
import select
import signal
import subprocess
import sys
import threading

import pytest
from every_loader import LOADERS, make
from example_datasets import Numbers, contents

from loaders.randomness import Random

FORKED = ("processes", "independent", "threads", "streams", "torch", "preloader", "preloader_at_depth_0")


def in_child(function, bound):
    """Calls `function` in a forked child: its value or its error, as text."""
    receives, sends = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            said = f"returned {function()!r}"
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(sends, said.encode())
        os._exit(0)
    os.close(sends)
    try:
        assert select.select([receives], [], [], bound)[0], "the child hangs"
        return os.read(receives, 1 << 16).decode()
    finally:
        os.close(receives)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@pytest.mark.parametrize("name", FORKED)
def test_a_child_gets_a_sentence_or_its_own_loaders_batches_and_the_parent_every_batch(name, bound):
    whole = LOADERS[name].batches(0, length=80)
    with make(name, Numbers(80)) as loader, make(name, Numbers(80)) as not_started:
        iterator = iter(loader)
        seen = [next(iterator)]
        asks = [lambda: next(iterator)]
        if not LOADERS[name].is_independent:
            asks += [lambda: next(loader), lambda: next(iter(loader))]
        said = [in_child(ask, bound / 3) for ask in asks]
        assert in_child(loader.close, bound / 3) == "returned None"

        def epoch():
            with not_started:
                return contents(not_started)

        assert in_child(epoch, bound) == f"returned {whole!r}"
        seen += iterator
        assert contents(seen) == whole
        assert loader.stats()["workers"]["deaths"] == 0
    for sentence in said:
        assert sentence.startswith("RuntimeError: ") and "process" in sentence
        assert "\n" not in sentence


class Waiting:
    """A key that waits while it is hashed."""

    is_reached = threading.Event()
    go_on = threading.Event()

    @property
    def ndim(self):
        self.is_reached.set()
        return 0 if self.go_on.wait(60) else 1


def test_a_child_draws_random_numbers_though_another_thread_was_drawing(in_thread, bound):
    thread = in_thread(lambda: Random(Waiting()).uniform(1))
    assert Waiting.is_reached.wait(bound)
    try:
        assert in_child(lambda: Random(0).uniform(1).shape, bound / 3) == "returned (1,)"
    finally:
        Waiting.go_on.set()
        thread.exception(bound)


IMPORTING = """
import os, sys
from loaders import WorkerLoader

class Imported:
    known = set()
    __len__ = lambda self: 2
    __getitem__ = lambda self, index: sorted(set(sys.modules) - self.known)

os.register_at_fork(before=lambda: Imported.known.update(sys.modules))
print(list(WorkerLoader(Imported(), 1, num_workers=1, seed=0, collate_fn=list)))
"""


def test_a_worker_imports_nothing_as_another_thread_may_have_held_the_lock_of_a_module(bound):
    fresh = [sys.executable, "-c", IMPORTING]
    assert subprocess.run(fresh, capture_output=True, timeout=bound, check=True).stdout == b"[[[]], [[]]]\n"


STARTING_AT_ONCE = """
import os, signal, threading
from loaders import WorkerLoader

forking = []
has_begun = threading.Event()
may_go_on = threading.Event()

def stay_in_fork():
    if threading.current_thread() is not threading.main_thread():
        forking.append(threading.current_thread())
        has_begun.set()
        may_go_on.wait(60)

def read():
    with WorkerLoader(range(8), 4, num_workers=1, seed=0) as loader:
        return list(loader)

os.register_at_fork(before=stay_in_fork)
threads = [threading.Thread(target=read) for _ in range(2)]
for thread in threads:
    thread.start()
has_begun.wait(60)
child = os.fork()
if child == 0:
    signal.alarm(20)  # it ends the child if it hangs
    os._exit(len(read()))
code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
at_once = len(forking)
may_go_on.set()
for thread in threads:
    thread.join()
print(code, at_once, len(forking))  # not before a fork: the child would write it, too
"""


def test_one_thread_at_a_time_starts_workers_and_a_child_does_not_wait_for_it(python, bound):
    """Filelock refuses two forks at once."""
    assert python.run("-c", STARTING_AT_ONCE, timeout=bound, check=True).stdout == "2 1 2\n"


EXITING_CHILD = """
import gc, os, sys
from loaders import Preloader, TorchLoader, WorkerLoader

for kind, seed in ((WorkerLoader, 0), (WorkerLoader, None), (TorchLoader, 0), (TorchLoader, 1)):
    loader = kind(range(80), 4, num_workers=2, seed=seed, persistent_workers=True)
    if seed == 0:
        loader = Preloader(loader, "cpu", 2)
    batches = iter(loader)
    seen = next(batches).tolist()
    child = os.fork()
    if child == 0:
        if seed != 0:
            del loader, batches
            gc.collect()
        sys.exit(0)
    os.waitpid(child, 0)
    seen += [row for batch in batches for row in batch.tolist()]
    print(seen == list(range(80)), loader.stats()["workers"]["deaths"])
    loader.close()
"""


def test_a_child_that_exits_leaves_its_parents_workers_alone(python, bound):
    done = python.run("-c", EXITING_CHILD, timeout=bound, check=True)
    assert done.stdout == 4 * "True 0\n"
