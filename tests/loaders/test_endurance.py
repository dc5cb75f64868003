"""A loader that runs for weeks: memory stays flat, nothing is left over, small limits are enough. All are slow."""

import gc
import multiprocessing
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest
import torch

from loaders import Preloader, WorkerLoader

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]


class Images:
    """200 images of 48 KB."""

    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> dict:
        return {"image": torch.full((3, 128, 128), index, dtype=torch.uint8), "label": index}


class Written(Images):
    def sample_spec(self) -> dict:
        return {"image": ((3, 128, 128), torch.uint8), "label": ((), torch.int64)}

    def read_batch(self, indices, out, random) -> None:
        out["image"].copy_(torch.from_numpy(indices)[:, None, None, None].expand_as(out["image"]))
        out["label"].copy_(torch.from_numpy(indices))


def loader_over(dataset, **settings) -> WorkerLoader:
    settings = {"num_workers": 2, "seed": 0, "persistent_workers": True, "shuffle": True, **settings}
    return WorkerLoader(dataset, 20, **settings)


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
    "read_batch": lambda: loader_over(Written()),
    "plain": lambda: loader_over(Images()),
    "threads": lambda: loader_over(Written(), worker_method="thread"),
    "preloader": lambda: Preloader(loader_over(Written()), "cpu", 2),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_thousand_epochs_hold_no_more_than_ten(way):
    with WAYS[way]() as loader:
        for epoch in range(1000):
            for _ in loader:
                pass
            if epoch == 50:
                early = held()
        late = held()
    assert late["bytes"] < early["bytes"] + 8e6
    for what in ("descriptors", "processes", "threads"):
        assert late[what] == early[what]
    assert late["mappings"] <= early["mappings"] + 8


@pytest.mark.parametrize("way", WAYS)
def test_a_thousand_loaders_broken_off_leave_nothing_behind(way):
    def use() -> None:
        with WAYS[way]() as loader:
            for _ in zip(range(2), loader, strict=False):
                pass

    for _ in range(20):
        use()
    early = held()
    for _ in range(1000):
        use()
    late = held()
    assert multiprocessing.active_children() == []
    assert late["bytes"] < early["bytes"] + 8e6
    for what in ("descriptors", "processes", "threads"):
        assert late[what] <= early[what]
    assert late["mappings"] <= early["mappings"] + 8


SCRIPT = """
import torch
from loaders import Preloader, WorkerLoader

class Large:
    def __len__(self):
        return 256 * 8
    def sample_spec(self):
        return {"image": ((3, 224, 224), torch.uint8)}
    def read_batch(self, indices, out, random):
        out["image"].copy_(torch.from_numpy(indices % 256)[:, None, None, None].expand_as(out["image"]))
    def __getitem__(self, index):
        return {"image": torch.full((3, 224, 224), index % 256, dtype=torch.uint8)}

class Plain:
    __len__ = Large.__len__
    __getitem__ = Large.__getitem__

for dataset in (Large(), Plain()):
    for method in ("multiprocessing", "thread"):
        loader = WorkerLoader(
            dataset, 256, num_workers=2, seed=0, persistent_workers=True, shuffle=True, worker_method=method
        )
        with Preloader(loader, "cpu", 2) as batches:
            for _ in range(2):
                for batch in batches:
                    assert (batch["image"] == batch["image"][:, :1, :1, :1]).all()
print("whole")
"""


SMALL = "mount -t tmpfs -o size=16m tmpfs /dev/shm"
MISSING = """mount -t tmpfs tmpfs /dev
mknod -m 666 /dev/null c 1 3; mknod -m 666 /dev/zero c 1 5; mknod -m 666 /dev/urandom c 1 9
! test -e /dev/shm"""


@pytest.mark.parametrize("shm", [SMALL, MISSING], ids=["small", "missing"])
def test_a_small_or_missing_dev_shm_is_enough_for_large_batches(shm):
    if subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode:
        pytest.skip("unshare -m is not allowed here")
    command = f'set -e; {shm}; ulimit -n 128; exec "{sys.executable}" -c "$0"'
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", command, SCRIPT], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.stdout == "whole\n", done.stderr


def test_120_descriptors_are_enough_for_eight_workers_in_each_of_two_loaders(descriptors_left):
    descriptors_left(120)
    with loader_over(Written(), num_workers=8) as loader, loader_over(Images(), num_workers=8) as other:
        for _ in range(3):
            for batch, another in zip(loader, other, strict=True):
                assert torch.equal(batch["image"], another["image"])
