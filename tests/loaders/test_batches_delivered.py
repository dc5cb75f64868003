"""What a delivered batch is: as torch collates it, on the CPU, and no larger than its own tensors."""

import importlib.util
import subprocess

import pytest
import torch
from example_datasets import Images, WrittenImages
from torch.utils.data import default_collate
from torch.utils.data._utils.collate import default_collate_fn_map

from loaders import Preloader, ResidentLoader, WorkerLoader

WORKERS = {"processes": {"num_workers": 2}, "threads": {"num_workers": 2, "worker_method": "thread"}}


class Arrays(WrittenImages):
    """The same as arrays."""

    def arrays(self) -> dict:
        return {name: tensor.numpy() for name, tensor in default_collate([self[i] for i in range(len(self))]).items()}


def check(batch: dict) -> None:
    """Whether a batch's fields belong together, and lie on the CPU."""
    assert {leaf.device.type for leaf in batch.values()} == {"cpu"}
    assert torch.equal(batch["image"], (batch["label"] % 256)[:, None, None, None].expand(-1, 3, 16, 16))


def over(dataset, batch_size: int = 8, depth: int | None = None, **settings):
    loader = WorkerLoader(dataset, batch_size, **{"persistent_workers": True, **settings})
    return loader if depth is None else Preloader(loader, "cpu", depth)


preloaded = pytest.mark.parametrize("depth", [None, 2], ids=lambda depth: f"preloader-{depth}")


# Memory


@pytest.mark.parametrize(("seed", "depth"), [(0, None), (0, 2), (None, None)])
@pytest.mark.parametrize("kind", [Images, WrittenImages])
@pytest.mark.parametrize("workers", WORKERS.values(), ids=WORKERS)
def test_keeping_the_labels_does_not_keep_the_images(workers, kind, seed, depth):
    with over(kind(60 * 8), seed=seed, shuffle=True, depth=depth, **workers) as loader:
        labels = [batch["label"] for batch in loader]
        stats = loader.stats()["workers"]
    assert len(labels) == 60
    assert all(label.untyped_storage().nbytes() == label.nbytes for label in labels)
    assert sorted(torch.cat(labels).tolist()) == list(range(60 * 8))
    # The slots are used again and again: no batch is copied for want of one, and only the first ones find none.
    assert stats["copied_batches"] == stats["pickled_batches"] == 0
    assert stats["overflowed_batches"] <= 4


SMALL_SHM = """
import ctypes, subprocess
import torch
from torch.utils.data import default_collate
from torchvision import tv_tensors
from loaders import WorkerLoader

CLONE_NEWNS = 0x20000
assert ctypes.CDLL(None).unshare(CLONE_NEWNS) == 0
subprocess.run("mount --make-rprivate / && mount -t tmpfs -o size=1m tmpfs /dev/shm", shell=True, check=True)

class Images:
    def __init__(self, kind):
        self.kind = kind
    def __len__(self):
        return 32 * 4
    def __getitem__(self, index):
        return self.kind(torch.full((3, 128, 128), index % 256, dtype=torch.uint8)), index

def mix(samples):
    images, labels = default_collate(samples)
    return images.float() + 1, labels

for kind, collate_fn, seed in (
    (torch.Tensor.clone, mix, 0),
    (torch.Tensor.clone, mix, None),
    (tv_tensors.Image, None, 0),
    (tv_tensors.Image, mix, None),
):
    with WorkerLoader(
        Images(kind), 32, num_workers=2, seed=seed, collate_fn=collate_fn, persistent_workers=True
    ) as loader:
        for _ in range(2):
            for images, labels in loader:
                assert type(images) is torch.Tensor
                assert (images == (labels % 256)[:, None, None, None] + bool(collate_fn)).all()
        stats = loader.stats()["workers"]
        assert stats["batches"] == 8 and stats["pickled_batches"] == 0, stats
        assert stats["overflowed_batches"] <= 4, stats
print("whole")
"""


def test_collating_in_a_worker_needs_no_dev_shm(python, bound):
    if importlib.util.find_spec("torchvision") is None:  # importing it would slow down all forks after this test
        pytest.skip("needs torchvision")
    if subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode:
        pytest.skip("unshare -m is not allowed here")
    assert python.run("-c", SMALL_SHM, timeout=bound, check=True).stdout == "whole\n"


# Collating as torch does


def padded(samples, *, collate_fn_map=None) -> torch.Tensor:
    """Makes all samples seven long."""
    return torch.stack([torch.nn.functional.pad(sample, (0, 7 - len(sample)), value=-1) for sample in samples])


@pytest.mark.parametrize("seed", [None, 0])
@pytest.mark.parametrize("length", [lambda index: 3, lambda index: 1 + index % 7], ids=["equal", "ragged"])
def test_a_users_own_collating_of_tensors_is_what_collates_them(length, seed, reader, monkeypatch):
    monkeypatch.setitem(default_collate_fn_map, torch.Tensor, padded)
    samples = [{"x": torch.full((length(index),), index)} for index in range(12)]
    with WorkerLoader(samples, 4, seed=seed, **reader) as loader:
        batches = [batch["x"] for batch in loader]
    for number, batch in enumerate(batches):
        assert torch.equal(batch, padded([sample["x"] for sample in samples[4 * number : 4 * number + 4]]))
    assert len(batches) == 3


# The default device


@pytest.fixture
def default_device(request):
    """Makes another device the default, as a program does that builds its model there."""
    torch.set_default_device(request.param)
    yield
    torch.set_default_device(None)


@pytest.mark.parametrize(("default_device", "depth"), [("cuda", None), ("meta", 2)], indirect=["default_device"])
@pytest.mark.parametrize("kind", [Images, WrittenImages])
def test_batches_are_on_the_cpu_whatever_the_default_device(kind, depth, reader, default_device):
    with over(kind(40), seed=0, shuffle=True, depth=depth, **reader) as loader:
        for _ in range(2):
            batches = list(loader)
            for batch in batches:
                check(batch)
            assert sorted(torch.cat([batch["label"] for batch in batches]).tolist()) == list(range(40))


@pytest.mark.parametrize("default_device", ["meta", "cuda"], indirect=True)
@pytest.mark.parametrize("kind", [Images, WrittenImages, Arrays])
def test_a_resident_set_is_on_its_device_whatever_the_default_device(kind, default_device):
    with ResidentLoader(kind(40), 8, shuffle=True, device="cpu") as loader:
        for batch in loader:
            check(batch)
