"""A loader that runs for weeks: memory stays flat, nothing is left over, small limits are enough. All are slow."""

import gc
import multiprocessing
import threading
from pathlib import Path

import psutil
import pytest
from example_datasets import Images, WrittenImages

from loaders import Preloader, WorkerLoader

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]


def loader_over(dataset: type[Images], **settings) -> WorkerLoader:
    settings = {"num_workers": 2, "seed": 0, "persistent_workers": True, "shuffle": True, **settings}
    return WorkerLoader(dataset(200, size=128), 20, **settings)


def own_memory(pid: int) -> int:
    """Its share of memory in bytes, without that of files: libraries, which others on this machine use as well."""
    lines = (line.split() for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
    kilobytes = {name: int(value) for name, value, _ in lines}
    return 1024 * (kilobytes["Pss_Anon:"] + kilobytes["Pss_Shmem:"])


def held() -> dict[str, int]:
    """What this process and its children hold: bytes, descriptors, processes, threads."""
    gc.collect()
    this = psutil.Process()
    family = [this, *this.children(recursive=True)]
    return {
        "bytes": sum(own_memory(process.pid) for process in family),
        "descriptors": sum(process.num_fds() for process in family),
        "processes": len(family),
        "threads": threading.active_count(),
        "mappings": sum(len(process.memory_maps(grouped=False)) for process in family),
    }


WAYS = {
    "read_batch": lambda: loader_over(WrittenImages),
    "plain": lambda: loader_over(Images),
    "threads": lambda: loader_over(WrittenImages, worker_method="thread"),
    "preloader": lambda: Preloader(loader_over(WrittenImages), "cpu", 2),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("breaks_off", [False, True], ids=["epochs", "loaders that are broken off"])
def test_a_thousand_hold_no_more_than_fifty(way, breaks_off):
    with WAYS[way]() as loader:

        def use() -> None:
            if not breaks_off:
                for _ in loader:
                    pass
                return
            with WAYS[way]() as other:
                for _ in zip(range(2), other, strict=False):
                    pass

        for _ in range(50):
            use()
        early = held()
        for _ in range(950):
            use()
        late = held()
    assert multiprocessing.active_children() == []
    assert late["bytes"] < early["bytes"] + 8e6
    for what in ("descriptors", "processes", "threads"):
        assert late[what] <= early[what]
    assert late["mappings"] <= early["mappings"] + 8
