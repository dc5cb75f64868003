"""Preloader over WorkerLoader on a GPU: no batch is torn, mixed up or early, whatever streams and allocator do.

A batch's content is a function of its number in the epoch. It is compared on the device, on a stream that lags behind
while slots and device memory are used again and again; the mismatches are counted there, and read once at the end.
"""

import itertools
import random
import shutil
from collections.abc import Callable
from contextlib import ExitStack

import numpy as np
import pytest
import torch

from loaders import Preloader, WorkerLoader

pytestmark = pytest.mark.cuda

BATCHES, ROWS, SIZE = 64, 32, 49_152  # of an epoch, of a batch, and the bytes of a row
BEHIND = 200_000  # cycles, some 0.1 ms, that the consumer's stream is kept busy at each batch
METHODS = pytest.mark.parametrize("method", ["multiprocessing", "thread"])


class Pattern:
    """Sample i is SIZE bytes that are like those of no other batch, and i."""

    bytes = (np.arange(SIZE + 251) % 251).astype(np.uint8)

    def __len__(self) -> int:
        return BATCHES * ROWS

    def sample_spec(self) -> dict:
        return {"image": ((SIZE,), torch.uint8), "label": ((), torch.int64)}

    def read_batch(self, indices: np.ndarray, out: dict[str, torch.Tensor], random) -> None:
        images = out["image"].numpy()
        for row, start in enumerate((31 * indices % 251).tolist()):
            images[row] = self.bytes[start : start + SIZE]
        out["label"].copy_(torch.from_numpy(indices))


def labels_of(number: int, device: torch.device) -> torch.Tensor:
    """int64 (ROWS,): those of the epoch's batch `number`."""
    return torch.arange(number * ROWS, (number + 1) * ROWS, device=device)


def images_of(labels: torch.Tensor) -> torch.Tensor:
    """uint8 (B, SIZE), by another way than Pattern's."""
    return ((31 * labels[:, None] + torch.arange(SIZE, device=labels.device)) % 251).to(torch.uint8)


class Pressure:
    """Takes memory of the calling thread's stream, overwrites it, and hands it back."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def __call__(self, device: torch.device) -> None:
        for _ in range(2):
            torch.empty(self._random.randrange(1, 1 << 22), dtype=torch.uint8, device=device).fill_(255)


class Inverted:
    """A transform that gives the image new memory, under pressure."""

    def __init__(self) -> None:
        self._press = Pressure(seed=1)

    def __call__(self, batch: dict[str, torch.Tensor], random) -> dict[str, torch.Tensor]:
        self._press(batch["image"].device)
        return {**batch, "image": ~batch["image"]}


def mismatches(batch: dict[str, torch.Tensor], number: int) -> torch.Tensor:
    """How many elements of an inverted batch are not as they should be: int64 (), on the device."""
    labels = labels_of(number, batch["label"].device)
    return (batch["label"] != labels).sum() + (~batch["image"] != images_of(labels)).sum()


def count_mismatches(loader: Preloader, batches: int) -> int:
    """Goes through `batches` batches, epoch after epoch; the last one is broken off."""
    press, wrong = Pressure(seed=2), torch.zeros((), dtype=torch.int64, device=loader.device)
    while batches:
        for number, batch in enumerate(itertools.islice(loader, batches)):
            torch.cuda._sleep(BEHIND)
            wrong += mismatches(batch, number)
            press(loader.device)
            batches -= 1
    return wrong.item()


def on_host(method: str = "multiprocessing") -> WorkerLoader:
    return WorkerLoader(
        Pattern(), ROWS, num_workers=2, seed=0, pin_memory=True, persistent_workers=True, worker_method=method
    )


@pytest.fixture
def make():
    with ExitStack() as stack:

        def make(depth: int, method: str = "multiprocessing") -> Preloader:
            return stack.enter_context(Preloader(on_host(method), "cuda", depth, Inverted()))

        yield make


@METHODS
@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("batches", [250, pytest.param(2500, marks=pytest.mark.slow)])
def test_every_batch_is_whole_and_in_its_place(make, method, depth, batches):
    assert count_mismatches(make(depth, method), batches) == 0


@pytest.fixture
def sync_is_an_error():
    """Whoever synchronises the host with a stream, in whichever thread, gets a RuntimeError; events may be waited for.

    The mode is the process's: so it is also a check of the preloader's thread, whose errors come out of next().
    """
    yield lambda: torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("depth", [0, 2])
def test_neither_consumer_nor_thread_synchronises_with_the_device(make, sync_is_an_error, depth):
    loader, wrong = make(depth), torch.zeros((), dtype=torch.int64, device="cuda")
    assert count_mismatches(loader, BATCHES) == 0  # from now on all memory is there
    sync_is_an_error()
    for number, batch in enumerate(loader):
        torch.cuda._sleep(BEHIND)
        wrong += mismatches(batch, number)
    with pytest.raises(RuntimeError, match="synchroniz"):
        wrong.item()
    torch.cuda.set_sync_debug_mode("default")
    assert wrong.item() == 0


def digest(image: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    """int64 (B,): a sum in whole numbers, equal in whatever order it is made."""
    return (image.to(torch.int64) * torch.arange(SIZE, device=image.device)).sum(dim=1) + label


class Graphed:
    """`digest` as a CUDA graph, over inputs of its own; captured while the preloader's thread runs."""

    def __init__(self) -> None:
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, image: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        if self._graph is None:
            self._capture(image, label)
        self._image.copy_(image)
        self._label.copy_(label)
        self._graph.replay()
        return self._digest

    def _capture(self, image: torch.Tensor, label: torch.Tensor) -> None:
        self._image, self._label = image.clone(), label.clone()
        warm_up = torch.cuda.Stream()
        warm_up.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(warm_up):
            digest(self._image, self._label)
        torch.cuda.current_stream().wait_stream(warm_up)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._digest = digest(self._image, self._label)


def compiled() -> Callable[..., torch.Tensor]:
    pytest.importorskip("triton")
    if not (shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")):
        pytest.skip("torch.compile needs a C compiler")
    return torch.compile(digest, mode="reduce-overhead")


@pytest.mark.parametrize("consumer", [Graphed, compiled])
def test_a_consumer_that_is_compiled_or_captured_gets_the_same_batches(make, consumer, monkeypatch):
    monkeypatch.setattr("torch._inductor.config.compile_threads", 1)  # a pool of compilers would be left behind
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)  # and so would the thread of their progress bar
    loader, consume = make(depth=2), consumer()
    for _ in range(2):
        digests = [consume(batch["image"], batch["label"]).clone() for batch in loader]
        for number, made in enumerate(digests):
            labels = labels_of(number, loader.device)
            assert torch.equal(made, digest(~images_of(labels), labels))
        assert len(digests) == BATCHES
