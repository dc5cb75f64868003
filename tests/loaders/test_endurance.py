"""A loader that runs for weeks: memory stays flat and nothing is left over, also where an evaluation loader is forked
in each epoch. The short form runs always, the long one is slow.

`python tests/loaders/test_endurance.py preloader 10 40` prints the figures.
"""

import gc
import json
import multiprocessing
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest
from example_datasets import Images, WrittenImages

sys.path.insert(0, str(Path(__file__).parents[2]))  # as a program, too
from loaders import Preloader, WorkerLoader

SLOW = [pytest.mark.slow, pytest.mark.timeout(900)]


def loader_over(dataset, **settings):
    settings = {"num_workers": 2, "seed": 0, "persistent_workers": True, "shuffle": True, **settings}
    return WorkerLoader(dataset(60, size=128), 20, **settings)


def own_memory(pid):
    """Its share of memory in bytes, without that of files: libraries, which others on this machine use as well."""
    lines = (line.split() for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
    kilobytes = {name: int(value) for name, value, _ in lines}
    return 1024 * (kilobytes["Pss_Anon:"] + kilobytes["Pss_Shmem:"])


def family():
    """This process and its workers; not all children: another test's program may be ending."""
    return [psutil.Process(), *(psutil.Process(child.pid) for child in multiprocessing.active_children())]


def memory():
    """What this process and its workers hold in bytes."""
    gc.collect()
    return sum(own_memory(process.pid) for process in family())


def counts():
    """What else this process and its workers hold."""
    processes = family()
    return {
        "descriptors": sum(process.num_fds() for process in processes),
        "processes": len(processes),
        "threads": threading.active_count(),
        "mappings": sum(len(process.memory_maps(grouped=False)) for process in processes),
    }


WAYS = {
    "read_batch": lambda: loader_over(WrittenImages),
    "plain": lambda: loader_over(Images),
    "threads": lambda: loader_over(WrittenImages, worker_method="thread"),
    "preloader": lambda: Preloader(loader_over(WrittenImages), "cpu", 2),
}


def figures(way, early, late):
    """What is held after `early` epochs, after `late` epochs, and after the loader was closed.

    `memory` is a list: what was held after each of the last 5 epochs. It moves by up to some twenty batches, as many
    as the loader has slots: how many of them are in use depends on the workers' speed.
    """
    with WAYS[way]() as loader:

        def epoch():
            for number, batch in enumerate(loader):
                batch["image"].sum()  # pages that were never touched here would not count as this process's
                if number == 1:  # an evaluation loader is forked while a batch is held
                    with loader_over(WrittenImages, num_workers=1, persistent_workers=False) as evaluation:
                        next(iter(evaluation))
            del batch

        def after(epochs):
            for _ in range(epochs - 5):
                epoch()
            memories = []
            for _ in range(5):
                epoch()
                memories.append(memory())
            return {"memory": memories, **counts()}

        before = after(early)
        at_end = after(late - early)
        deaths = loader.stats()["workers"]["deaths"]
    children = len(multiprocessing.active_children())
    return {"before": before, "after": at_end, "left": {"deaths": deaths, "children": children}}


@pytest.mark.parametrize(
    ("way", "early", "late"),
    [
        ("preloader", 10, 40),
        pytest.param("preloader", 50, 1000, marks=SLOW),
        *(pytest.param(way, 50, 250, marks=SLOW) for way in ("read_batch", "plain", "threads")),
    ],
)
def test_epochs_with_an_evaluation_each_hold_no_more_at_the_end_than_at_the_beginning(way, early, late):
    # A new interpreter: workers copy the heap that they inherit little by little, and that of pytest or of the server
    # in tests/infrastructure/python_server.py is large.
    program = [sys.executable, __file__, way, str(early), str(late)]
    timeout = 100 if late < 100 else 800
    measured = json.loads(subprocess.run(program, capture_output=True, timeout=timeout, check=True).stdout)
    before = measured["before"]
    after = measured["after"]
    assert measured["left"] == {"deaths": 0, "children": 0}
    # What one batch (of 1 MB) in each epoch would come to in the short form.
    assert min(after["memory"]) < max(before["memory"]) + 30e6
    for figure in ("descriptors", "mappings"):
        assert after[figure] <= before[figure] + 24
    for figure in ("processes", "threads"):
        assert after[figure] <= before[figure]


if __name__ == "__main__":
    way, early, late = sys.argv[1:]
    print(json.dumps(figures(way, int(early), int(late))))
