"""The memory of batches: what is kept never changes and keeps nothing else, and what is dropped is used again."""

from functools import partial

import pytest
import torch
from example_datasets import Images, Numbers, WrittenImages, contents
from torch.utils.data import default_collate

from loaders import Preloader, ResidentLoader, WorkerLoader

WORKERS = {
    "processes": partial(WorkerLoader, num_workers=2, persistent_workers=True, seed=0),
    "unseeded": partial(WorkerLoader, num_workers=2),
    "threads": partial(WorkerLoader, num_workers=2, persistent_workers=True, seed=0, worker_method="thread"),
    "preloader": lambda *args: Preloader(WORKERS["processes"](*args), "cpu", 2),
}
EVERY = pytest.mark.parametrize("make", WORKERS.values(), ids=WORKERS)


def is_whole(batch, first):
    labels = batch["label"]
    wanted = torch.arange(first, first + len(labels))
    return torch.equal(labels, wanted) and torch.equal(
        batch["image"], (labels % 256)[:, None, None, None].expand_as(batch["image"]).to(torch.uint8)
    )


@EVERY
@pytest.mark.parametrize("kind", [Images, WrittenImages])
def test_kept_batches_never_change_whatever_is_loaded_afterwards_and_after_close(make, kind):
    loader = make(kind(240), 8)
    kept = []
    for _ in range(2):
        for number, batch in enumerate(loader):
            if number % 3 == 0:
                kept.append((8 * number, batch))
    half = [(first, batch["image"][::2], batch["image"].clone()) for first, batch in kept[::2]]
    for kind_of_next in (lambda: list(loader), loader.close):
        kind_of_next()
        assert len(kept) == 2 * 10 and all(is_whole(batch, first) for first, batch in kept)
    del kept, batch
    with make(kind(240), 8) as other:  # takes the memory that is free now
        list(other)
    assert all(torch.equal(view, whole[::2]) for _, view, whole in half)


@EVERY
def test_keeping_the_labels_does_not_keep_the_images(make):
    with make(WrittenImages(480), 6) as loader:
        labels = [batch["label"] for batch in loader]
        copied = loader.stats()["workers"]["copied_batches"]
    assert all(label.untyped_storage().nbytes() == label.nbytes for label in labels)
    assert torch.cat(labels).tolist() == list(range(480))
    assert all(label.data_ptr() % 64 == 0 for label in labels), "a kernel may add up in another order"
    assert copied == 0


@EVERY
@pytest.mark.parametrize(("held", "copies"), [(3, False), (20, True)])
def test_who_holds_more_than_eight_batches_gets_the_next_ones_as_copies(make, held, copies):
    kept = []
    with make(WrittenImages(320), 4) as loader:
        for batch in loader:
            kept = [*kept, batch][-held:]
        copied = loader.stats()["workers"]["copied_batches"]
    assert len(kept) == held
    for number, batch in enumerate(kept):
        assert is_whole(batch, 320 - 4 * held + 4 * number)
    if make is not WORKERS["threads"]:  # they write into memory of their own
        assert (copied > 0) == copies


class Keeper(WrittenImages):
    """Keeps what it wrote into, and sees whether somebody else has written there since."""

    def __init__(self, length):
        super().__init__(length)
        self.kept = []

    def read_batch(self, indices, out, random):
        super().read_batch(indices, out, random)
        self.kept.append((out["image"], out["image"].clone()))
        out["changed"] = [any(not torch.equal(image, then) for image, then in self.kept)] * len(indices)


def test_what_a_dataset_keeps_of_its_out_is_not_written_again(method):
    with WorkerLoader(Keeper(240), 20, num_workers=2, seed=0, persistent_workers=True, worker_method=method) as loader:
        for _ in range(3):
            for number, batch in enumerate(loader):
                assert is_whole(batch, 20 * number)
                assert True not in batch["changed"]


class Refilled:
    """A collate_fn that fills the same tensor for each batch."""

    def __init__(self):
        self.memory = torch.zeros(4, dtype=torch.int64)

    def __call__(self, samples):
        self.memory[: len(samples)] = torch.tensor(samples)
        return self.memory[: len(samples)]


def test_a_collate_fn_may_fill_the_same_memory_again_in_a_worker(seed):
    with WorkerLoader(Numbers(80), 4, num_workers=2, seed=seed, collate_fn=Refilled()) as loader:
        batches = list(loader)  # all are kept
    assert contents(batches) == torch.arange(80).view(-1, 4).tolist()


# The default device of a program that builds its model there


class Arrays(WrittenImages):
    """The same as arrays."""

    def arrays(self):
        return {name: tensor.numpy() for name, tensor in default_collate([self[i] for i in range(len(self))]).items()}


@pytest.fixture
def meta():
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


LOADERS = {
    **{name: make for name, make in WORKERS.items() if name != "unseeded"},  # torch itself draws the seed there
    "inline": partial(WorkerLoader, seed=0),
    "resident": partial(ResidentLoader, device="cpu"),
}


@pytest.mark.parametrize("make", LOADERS.values(), ids=LOADERS)
@pytest.mark.parametrize("kind", [Images, Arrays])
def test_batches_are_on_the_cpu_whatever_the_default_device(make, kind, meta):
    with make(kind(40), 8) as loader:
        for batch in loader:
            assert {leaf.device.type for leaf in batch.values()} == {"cpu"}
            assert torch.equal(batch["image"][:, 0, 0, 0], (batch["label"] % 256).to(torch.uint8))
