"""What a loader holds of the machine stays small, comes back, and small limits are enough or are named in words."""

import gc
import multiprocessing
import os
import re
import subprocess
from pathlib import Path

import pytest
import torch
from example_datasets import Numbers, Sized

from loaders import WorkerLoader

MB = 1 << 20
SHARED = re.compile(r"^(/memfd:|/dev/shm/|.*\(deleted\)$)")


def is_whole(batch, number, dataset):
    return batch.shape == (1, dataset.sizes[number]) and bool((batch == number % 251).all())


def family():
    return [os.getpid(), *(process.pid for process in multiprocessing.active_children())]


def shared(pid):
    """The bytes allocated to each nameless file that a process has open: by (device, inode)."""
    allocated = {}
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            if SHARED.match(os.readlink(link)):
                status = os.stat(link)
                allocated[status.st_dev, status.st_ino] = 512 * status.st_blocks
        except FileNotFoundError:  # closed meanwhile
            continue
    return allocated


def held():
    """The bytes of shared memory that this process and its workers keep from the system."""
    gc.collect()
    files = {}
    for pid in family():
        files |= shared(pid)
    return sum(files.values())


def test_the_memory_of_a_closed_loader_goes_back_though_a_later_loaders_workers_live():
    before = held()
    dataset = Sized([4 * MB] * 8)
    first = WorkerLoader(dataset, 1, num_workers=2, persistent_workers=True)
    for number, batch in enumerate(first):
        assert is_whole(batch, number, dataset)
    assert held() - before > 4 * MB
    with WorkerLoader(Numbers(8), 4, num_workers=2, persistent_workers=True) as later:
        assert len(list(later)) == 2
        first.close()
        assert is_whole(batch, 7, dataset)  # kept
        del batch
        assert held() - before < 6 * MB  # the later workers map that batch alone: their dataset might read it
    assert held() - before < 2 * MB


def test_the_pages_of_rare_large_batches_are_given_back():
    sizes = [MB // 4] * 150
    sizes[20] = sizes[40] = 30 * MB
    before = held()
    dataset = Sized(sizes)
    with WorkerLoader(dataset, 1, num_workers=2, seed=0, persistent_workers=True) as loader:
        assert sum(is_whole(batch, number, dataset) for number, batch in enumerate(loader)) == len(sizes)
        assert held() - before < 20 * MB


def mappings(pid):
    return Path(f"/proc/{pid}/maps").read_text().count("memfd:loader")


def test_a_batch_that_a_forked_child_can_see_never_changes_and_memory_stays_flat():
    # Other tests' loaders may have some.
    before = held()
    most = mappings(os.getpid())
    with WorkerLoader(Sized([10_000] * 64), 4, num_workers=2, seed=0, persistent_workers=True) as loader:
        for _ in range(8):
            iterator = iter(loader)
            batch = next(iterator)
            receiving, sending = os.pipe()
            child = os.fork()
            if child == 0:
                os.read(receiving, 1)
                os._exit(0 if (batch == torch.arange(4)[:, None]).all() else 1)
            del batch
            list(iterator)
            os.write(sending, b"x")
            assert os.waitpid(child, 0)[1] == 0
            os.close(receiving), os.close(sending)
            assert held() - before < 4 * 17 * 4 * 11_000
            assert max(map(mappings, family())) <= most + 3


# Small limits. Each program sets its own.

PROGRAM = """
import json, os, resource, sys, threading
sys.path.insert(0, "tests/loaders")
import torch
from example_datasets import Numbers, Sized, WrittenImages, contents
from loaders import MachineFull, WorkerLoader

def limit(what, value):
    resource.setrlimit(getattr(resource, "RLIMIT_" + what), (value, value))

def epochs(dataset, batch_size, count=2, **settings):
    with WorkerLoader(dataset, batch_size, num_workers=2, seed=0, persistent_workers=True, **settings) as loader:
        for _ in range(count):
            labels = []
            for batch in loader:
                assert (batch["image"][:, 0, 0, 0] == batch["label"] % 256).all()
                labels += batch["label"].tolist()
            assert labels == list(range(len(dataset))), labels
        assert loader.stats()["workers"]["deaths"] == 0

"""

LIMITS = {
    "16_MB_of_shm": """
import ctypes, subprocess
assert ctypes.CDLL(None).unshare(0x20000) == 0  # CLONE_NEWNS
subprocess.run("mount --make-rprivate / && mount -t tmpfs -o size=16m tmpfs /dev/shm", shell=True, check=True)
epochs(WrittenImages(128, size=256), 32)  # 6 MB a batch
def mix(samples):
    batch = torch.utils.data.default_collate(samples)
    return {"image": batch["image"] + 0, "label": batch["label"]}
epochs(WrittenImages(128, size=256), 32, collate_fn=mix)
with WorkerLoader(WrittenImages(128, size=256), 32, num_workers=2) as loader:
    assert sum(len(batch["label"]) for batch in loader) == 128
    assert not any(name.startswith(("torch", "sem", "pym")) for name in os.listdir("/dev/shm")), os.listdir("/dev/shm")
""",
    "virtual_memory": """
epochs(WrittenImages(16), 4)
taken = int(open("/proc/self/statm").read().split()[0]) * 4096
limit("AS", taken + (3 << 30))
epochs(WrittenImages(128, size=64), 16)
""",
    "file_size": """
limit("FSIZE", 20 << 20)
epochs(WrittenImages(128, size=128), 16)  # 0.8 MB a batch
try:
    epochs(WrittenImages(64, size=1024), 32)  # 100 MB a batch
except (MachineFull, RuntimeError) as error:
    said = str(error)
    assert isinstance(error, MachineFull), (type(error), said)
else:
    raise AssertionError("a batch that is larger than any file may be was delivered")
fills_a_slot = (20 << 20) - 64  # bytes of the first sample: after it there is no room for the second, nor its error
with WorkerLoader(Sized([fills_a_slot] * 2 + [9, 9]), 2, num_workers=1, seed=0, collate_fn=list) as loader:
    try:
        next(loader)
    except MachineFull as error:
        assert "does not fit" in str(error), error
    else:
        raise AssertionError("a batch of two slots was delivered")
    assert [len(sample) for sample in next(loader)] == [9, 9]
""",
    "descriptors_for_much_read_ahead": """
limit("NOFILE", 256)
with WorkerLoader(Numbers(4000), 4, num_workers=2, prefetch_factor=128, seed=0, persistent_workers=True) as loader:
    seen = []
    for number, batch in enumerate(loader):
        seen += batch.tolist()
        if number in (0, 50, 500):
            threading.Event().wait(0.1)  # meanwhile all that may be loaded ahead is
    assert seen == list(range(4000))
    assert loader.stats()["workers"]["deaths"] == 0
""",
    "descriptors_for_three_loaders": """
limit("NOFILE", 64)  # with sixteen times as many workers each, 1,024
loaders = [WorkerLoader(Numbers(200), 4, num_workers=2, prefetch_factor=16, seed=0, persistent_workers=True)]
loaders += [WorkerLoader(Numbers(100), 4, num_workers=2, prefetch_factor=16, seed=0, persistent_workers=True)]
loaders += [WorkerLoader(Numbers(100), 4, num_workers=2, prefetch_factor=16)]
for batches in zip(*loaders):
    pass
for loader in loaders:
    assert sum(contents(loader), []) == list(range(len(loader.dataset)))
    loader.close()
""",
}


@pytest.mark.parametrize("name", LIMITS)
def test_small_limits_are_enough_or_are_named(name, python, bound):
    if (
        name == "16_MB_of_shm"
        and subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode
    ):
        pytest.skip("unshare -m is not allowed here")
    done = python.run("-c", PROGRAM + LIMITS[name] + "\nprint('whole')", timeout=bound)
    assert (done.returncode, done.stdout) == (0, "whole\n"), done.stderr
