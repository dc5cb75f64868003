"""The memory of batches: what is kept never changes, limits are said in words, and no more is held than is needed."""

import gc
import os
import pickle
import re
import resource
import textwrap
from multiprocessing import active_children

import numpy as np
import pytest
import torch
from example_datasets import Numbers, WrittenImages, contents

from loaders import MachineFull, WorkerLoader


class Bytes(Numbers):
    """Sample i has `size` bytes of value i."""

    def __init__(self, length: int, size: int = 10_000) -> None:
        super().__init__(length)
        self.size = size

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((self.size,), index % 256, dtype=torch.uint8)


def loader_over(dataset, batch_size: int = 4, num_workers: int = 2, **settings) -> WorkerLoader:
    return WorkerLoader(dataset, batch_size, num_workers=num_workers, seed=0, persistent_workers=True, **settings)


def memory_in_use() -> int:
    """Bytes of all memories of loaders that this process has open."""
    links = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    return sum(512 * os.stat(link).st_blocks for link in links if is_memory(link))


def is_memory(link: str) -> bool:
    return os.path.lexists(link) and "memfd:loader" in os.readlink(link)


def mappings(pid: int | str = "self") -> int:
    with open(f"/proc/{pid}/maps") as file:
        return sum("memfd:loader" in line for line in file)


# What the consumer keeps


def test_batches_that_are_kept_never_change_and_those_beyond_eight_are_copies():
    with loader_over(Bytes(80)) as loader:
        kept = list(loader)
        assert loader.stats()["workers"]["copied_batches"] == 20 - 8
        list(loader)
    assert all((batch == torch.arange(4 * n, 4 * n + 4)[:, None]).all() for n, batch in enumerate(kept))


def test_small_tensors_do_not_keep_their_batch():
    with loader_over(WrittenImages(200)) as loader:
        labels = [batch["label"] for batch in loader]
        assert loader.stats()["workers"]["copied_batches"] == 0
    assert torch.cat(labels).tolist() == list(range(200))


class Keeping(Bytes):
    """Keeps what it wrote into, and looks whether that changes."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.kept: list = []

    def sample_spec(self) -> dict:
        return {"x": ((self.size,), torch.uint8)}

    def read_batch(self, indices, out, random) -> None:
        assert all((kept == value).all() for value, kept in self.kept)
        out["x"].copy_(torch.from_numpy(indices)[:, None])
        self.kept = [*self.kept[-20:], (out["x"].clone(), out["x"])]


def test_what_a_dataset_keeps_of_a_batch_is_not_written_again():
    with loader_over(Keeping(200)) as loader:
        for _ in range(2):
            assert [batch["x"][0, 0].item() for batch in loader] == list(range(0, 200, 4))


def test_a_batch_that_a_forked_child_can_see_never_changes_and_memory_stays_flat(bound):
    with loader_over(Bytes(64)) as loader:
        held = []
        for _ in range(30):
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
            held.append((memory_in_use(), mappings(), *(mappings(process.pid) for process in active_children())))
    assert max(held)[0] < 4 * 17 * 4 * 11_000
    assert max(maps for _, *every in held for maps in every) <= 3


# Limits


def run(python, program: str, bound: float) -> str:
    """What a program prints that has this module's names."""
    head = "import resource, torch, warnings\nfrom loaders import *\nwarnings.simplefilter('ignore')\n"
    dataset = """
class Bytes:
    def __init__(self, length, size):
        self.length, self.size = length, size
    def __len__(self):
        return self.length
    def __getitem__(self, index):
        return torch.full((self.size,), index % 256, dtype=torch.uint8)
"""
    started = python.start("-c", head + dataset + textwrap.dedent(program))
    printed, errors = started.communicate(timeout=bound)
    return printed + errors


@pytest.mark.parametrize(("limit", "size"), [("RLIMIT_AS", 8 << 30), ("RLIMIT_FSIZE", 64 << 20)])
def test_under_a_limit_of_the_system_batches_fit_or_a_sentence_says_why_not(limit, size, python, bound):
    program = f"""
        resource.setrlimit(resource.{limit}, ({size}, {size}))
        with WorkerLoader(Bytes(64, 10_000), 4, num_workers=2, seed=0) as loader:
            print(len(list(loader)))
        with WorkerLoader(Bytes(20, 20_000_000), 20, num_workers=1, seed=0) as loader:
            try:
                next(loader)
            except MachineFull as error:
                print("does not fit" in str(error))
    """
    lines = run(python, program, bound).splitlines()
    assert lines == ["16", "True"]


def test_a_worker_that_cannot_map_its_memory_says_so():
    def limit(worker: int) -> None:
        with open("/proc/self/statm") as file:
            size = int(file.read().split()[0]) * resource.getpagesize() + (1 << 28)
        resource.setrlimit(resource.RLIMIT_AS, (size, size))

    with (
        loader_over(Bytes(8), worker_init_fn=limit) as loader,
        pytest.raises(MachineFull, match="mapping the memory for batches in a worker failed: out of memory"),
    ):
        next(loader)


def test_descriptors_do_not_grow_with_what_is_read_ahead():
    before = len(os.listdir("/proc/self/fd"))
    counts = []
    for factor in (1, 64):
        with loader_over(Bytes(800), 1, prefetch_factor=factor) as loader:
            assert len(list(loader)) == 800
            counts.append(len(os.listdir("/proc/self/fd")))
    assert counts[0] == counts[1] <= before + 8


@pytest.mark.slow
def test_a_thousand_batches_ahead_and_a_hundred_workers_fit_into_a_thousand_descriptors(python, bound):
    program = """
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
        with WorkerLoader(Bytes(20_000, 100), 8, num_workers=8, prefetch_factor=128, seed=0) as loader:
            print(len(list(loader)), loader.stats()["workers"]["deaths"])
        loaders = [WorkerLoader(Bytes(4000, 100), 8, num_workers=32, prefetch_factor=4, seed=0) for _ in range(3)]
        print([sum(1 for _ in zip(range(50), loader)) for loader in map(iter, loaders)])
    """
    assert run(python, program, 10 * bound).splitlines()[:2] == ["2500 0", "[50, 50, 50]"]


def test_memory_is_left_out_of_core_dumps():
    with loader_over(Bytes(8)) as loader:
        next(loader)
        with open("/proc/self/smaps") as file:
            flags = re.search(r"memfd:loader.*?VmFlags: ([^\n]*)", file.read(), re.DOTALL)
        assert flags is not None and "dd" in flags.group(1).split()


class Uneven(Bytes):
    """One of 100 samples is large."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.zeros(20_000_000 if index % 100 == 50 else 1000, dtype=torch.uint8)


def test_memory_that_rare_large_batches_needed_is_given_back():
    with loader_over(Uneven(400), 1) as loader:
        most = max(memory_in_use() for _ in loader)
        gc.collect()
        assert most > 20_000_000 > 20 * memory_in_use()


# What travels


def arrived(sample):
    """The sample as it comes from a worker."""
    with WorkerLoader([sample], None, num_workers=1, collate_fn=as_it_is) as loader:
        return next(iter(loader))


def as_it_is(sample):
    return sample


class Marked(torch.Tensor):
    """A subclass with attributes."""


@pytest.mark.parametrize(
    "tensor",
    [
        torch.rand(2, 3, 8, 8).to(memory_format=torch.channels_last),
        torch.rand(3, 1, 4).expand(3, 1000, 4),
        torch.rand(4, 5).t(),
        torch.rand(40, 50)[:, ::7],
        torch.empty(0, 3),
        torch.tensor(3.5),
        torch.rand(6).to(torch.complex64).conj(),
        torch.eye(3).to_sparse(),
        torch.rand(3, requires_grad=True),
        torch.rand(300).as_subclass(Marked),
    ],
    ids=[
        "channels-last",
        "expanded",
        "transposed",
        "gaps",
        "empty",
        "scalar",
        "conjugate",
        "sparse",
        "grad",
        "subclass",
    ],
)
def test_a_tensor_arrives_with_its_values_type_and_layout(tensor):
    came = arrived(tensor)
    assert (type(came), came.dtype, came.shape, came.layout) == (
        type(tensor),
        tensor.dtype,
        tensor.shape,
        tensor.layout,
    )
    assert came.requires_grad == tensor.requires_grad
    values = (came.to_dense(), tensor.to_dense()) if tensor.is_sparse else (came, tensor)
    assert torch.equal(values[0].detach(), values[1].detach())
    if tensor.layout == torch.strided and tensor.shape != (40, 8):  # that one has gaps
        assert came.stride() == tensor.stride()


def test_of_a_large_storage_only_the_tensors_own_elements_travel():
    dataset = torch.rand(1000, 1000)
    with loader_over(dataset, 2, collate_fn=as_it_is) as loader:
        came = next(loader)
        assert loader.stats()["workers"]["bytes"] == 2 * 4000
    assert torch.equal(torch.stack(came), dataset[:2])


def test_a_tensor_that_occurs_twice_is_one_tensor_when_it_arrives():
    tensor = torch.rand(1000)
    first, second = arrived([tensor, tensor])
    assert first is second


class Unreadable:
    """Cannot be unpickled."""

    def __reduce__(self):
        return refuse, ()


def refuse():
    raise ValueError("this cannot be rebuilt")


def test_a_batch_that_cannot_be_rebuilt_is_an_error_once_in_its_place():
    dataset = [0, 1, Unreadable(), 3]
    with WorkerLoader(dataset, 1, num_workers=2, seed=0, collate_fn=as_it_is) as loader:
        iterator = iter(loader)
        assert [next(iterator), next(iterator)] == [[0], [1]]
        with pytest.raises(ValueError, match="this cannot be rebuilt"):
            next(iterator)
        assert list(iterator) == [[3]]


class Unpicklable(Exception):
    def __init__(self, first, second) -> None:
        super().__init__(first)
        self.lock = second


class Raising(Numbers):
    def __getitem__(self, index: int):
        raise Unpicklable("no sample", lambda: None)


def test_an_error_that_cannot_be_pickled_arrives_with_its_words():
    with loader_over(Raising(4)) as loader, pytest.raises(Exception, match="no sample"):
        next(loader)


# Samplers


@pytest.mark.parametrize("kind", [list, tuple, dict.fromkeys, np.array, iter, lambda batch: map(int, batch)])
def test_batches_of_a_batch_sampler_are_taken_as_they_are(kind, reader):
    batches = [[3, 1], [2], [0, 5, 4]]

    class Sampler:
        def __iter__(self):
            return map(kind, batches)

    with WorkerLoader(Numbers(6), batch_sampler=Sampler(), seed=0, **reader) as loader:
        assert contents(loader) == batches


class Endless:
    """Says that it has 24 items, and has more."""

    def __init__(self) -> None:
        self.drawn = 0

    def __len__(self) -> int:
        return 24

    def __iter__(self):
        while True:
            self.drawn += 1
            yield torch.randint(1000, ()).item()


def test_a_position_goes_on_past_a_samplers_length(reader):
    with WorkerLoader(Numbers(1000), 4, sampler=Endless(), seed=0, **reader) as loader:
        iterator = iter(loader)
        first = contents(next(iterator) for _ in range(10))
        state = loader.state_dict()
        then = contents(next(iterator) for _ in range(4))
    with WorkerLoader(Numbers(1000), 4, sampler=Endless(), seed=0, **reader) as resumed:
        resumed.load_state_dict(pickle.loads(pickle.dumps(state)))
        iterator = iter(resumed)
        assert contents(next(iterator) for _ in range(4)) == then != first[:4]


def test_a_sampler_is_drawn_in_blocks_and_the_global_generators_are_put_back():
    sampler, before = Endless(), torch.get_rng_state()
    with WorkerLoader(Numbers(1000), 4, sampler=sampler, seed=0) as loader:
        next(loader)
    assert sampler.drawn < 10_000
    assert torch.equal(torch.get_rng_state(), before)
