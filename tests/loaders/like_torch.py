"""Small programs over a loader, and what each of them can see: what test_like_torch.py runs on torch's class and ours.

A Program names a value on each axis. `run` makes its dataset and its loader, lets its consumer use the loader for two
epochs, and returns what the program saw, as plain data: values, types, strides, aliasing, errors and their places.
"""

import copy
import ctypes
import dataclasses
import enum
import gc
import inspect
import multiprocessing
import os
import pickle
import random
import signal
import subprocess
import threading
import time
import weakref
import zlib
from collections import OrderedDict, UserDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import zip_longest
from multiprocessing import resource_sharer
from multiprocessing.reduction import ForkingPickler
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    Sampler,
    WeightedRandomSampler,
    default_collate,
    get_worker_info,
)

LENGTH = 9  # samples of a dataset
ERROR_AT = 4  # the sample that raises
ALARM_SECONDS = 0.004


class Program(NamedTuple):
    leaves: tuple[str, ...]  # the fields of a sample
    dtype: str  # of leaves that are tensors of any dtype
    structure: str  # of a sample
    dataset: str
    error: str  # that the dataset "errors" raises
    collation: str
    consumer: str
    sampler: str
    batch_size: int | None
    num_workers: int
    method: str
    persistent: bool
    prefetch: int | None
    timeout: float
    drop_last: bool
    in_order: bool
    seed: int | None
    worker_method: str = "multiprocessing"


# Leaves: functions of (index, dtype)

Pair = namedtuple("Pair", "a b")


@dataclasses.dataclass
class Point:
    x: Any
    y: Any


class Frozen(Mapping):
    """A mapping that cannot be changed."""

    def __init__(self, items) -> None:
        self.items_ = dict(items)

    def __getitem__(self, key):
        return self.items_[key]

    def __iter__(self):
        return iter(self.items_)

    def __len__(self) -> int:
        return len(self.items_)


class Plain:
    def __init__(self, value) -> None:
        self.value = value


class Color(enum.Enum):
    RED = 1
    BLUE = 2


class WithDict(torch.Tensor):
    pass


class WithSlots(torch.Tensor):
    __slots__ = ("unit",)


class Reduced(torch.Tensor):
    """Its __reduce_ex__ adds one, so that bypassing it shows."""

    def __reduce_ex__(self, protocol):
        return _reduced, (self.as_subclass(torch.Tensor) + 1,)


class Stateful(torch.Tensor):
    def __getstate__(self):
        return {"via": "getstate"}

    def __setstate__(self, state):
        self.via = state["via"]


def _reduced(tensor):
    return tensor.as_subclass(Reduced)


def tensor(index: int, dtype: str, *shape: int) -> torch.Tensor:
    kind = getattr(torch, dtype)
    count = int(np.prod(shape))
    values = torch.arange(count, dtype=torch.int64) * 3 + index
    if "float8" in dtype or ("int" in dtype and dtype[-1] in "1234567" and dtype[-2] not in "1236"):
        raw = (values % 2).to(torch.uint8)
        return torch.empty(0, dtype=kind).set_(raw.untyped_storage(), 0, shape, torch.empty(shape).stride())
    return (values % 100).to(kind).reshape(shape)


def subclass(kind: type, index: int, dtype: str, **attributes) -> torch.Tensor:
    made = tensor(index, dtype, 4).as_subclass(kind)
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


def tv_tensor(index: int, dtype: str):
    from torchvision import tv_tensors

    boxes = torch.full((2, 4), float(index))
    return tv_tensors.BoundingBoxes(boxes, format="XYXY", canvas_size=(5, index + 1))


TABLE, SHARED = torch.empty(LENGTH, 40), torch.empty(LENGTH, 4).share_memory_()
COLUMNS = torch.zeros(700_000, 2)  # 5.6 MB: a column of it is a copy, see the table of differences


def reset_tables() -> None:
    """Undoes what programs wrote into what they read."""
    for table in (TABLE, SHARED):
        torch.arange(table.numel(), dtype=torch.float32, out=table.view(-1))
    COLUMNS.zero_()


reset_tables()


def sparse(index: int, dtype: str):
    return torch.sparse_coo_tensor(torch.tensor([[0, 2], [1, 0]]), torch.tensor([1.0, index]), (3, 3)).coalesce()


def same_object(index: int, dtype: str):
    one = tensor(index, dtype, 6)
    return [one, one]


def equal_views(index: int, dtype: str):
    one = tensor(index, dtype, 6)
    return [one[1:3], one[1:3], one[2:]]


def structured(index: int, dtype: str):
    return np.array([(index, 0.5)], dtype=[("a", "<i8"), ("b", "<f4")])


def read_only(index: int, dtype: str):
    array = np.full((2, 3), index)
    array.setflags(write=False)
    return array


LEAVES: dict[str, Callable[[int, str], Any]] = {
    "plain": lambda i, d: tensor(i, d, 3, 4),
    "0-d": lambda i, d: tensor(i, d),
    "empty": lambda i, d: torch.empty(0, 3, dtype=getattr(torch, d)),
    "large": lambda i, d: torch.full((20_000,), i),
    "growing": lambda i, d: torch.full((100 << min(i, 8),), i),
    "strided": lambda i, d: tensor(i, d, 4, 6)[:, ::2],
    "column": lambda i, d: tensor(i, d, 5, 4)[:, 1],
    "expanded": lambda i, d: tensor(i, d, 1, 3).expand(4, 3),
    "huge": lambda i, d: torch.full((1, 1), float(i)).expand(120_000, 120_000) if i < 2 else torch.tensor(i),
    "transposed": lambda i, d: tensor(i, d, 2, 5).t(),
    "channels_last": lambda i, d: tensor(i, d, 1, 3, 4, 2).to(memory_format=torch.channels_last),
    "row": lambda i, d: TABLE[i],
    "far rows": lambda i, d: [TABLE[0, :2], TABLE[i, 30:], TABLE[-1, 5:]],
    "sparse column": lambda i, d: COLUMNS[:, 1] if i == 0 else COLUMNS[:3, 1],
    "same object": same_object,
    "equal views": equal_views,
    "grad": lambda i, d: torch.full((2,), float(i)).requires_grad_(i % 3 == 0),
    "parameter": lambda i, d: torch.nn.Parameter(torch.full((2,), float(i))),
    "with dict": lambda i, d: subclass(WithDict, i, d, name=f"n{i}"),
    "with slots": lambda i, d: subclass(WithSlots, i, d, unit=f"u{i}"),
    "reduced": lambda i, d: torch.full((3,), float(i)).as_subclass(Reduced),
    "stateful": lambda i, d: torch.full((3,), float(i)).as_subclass(Stateful),
    "tv_tensor": tv_tensor,
    "sparse": sparse,
    "csr": lambda i, d: torch.full((2, 2), float(i)).to_sparse_csr(),
    "nested": lambda i, d: torch.nested.nested_tensor([torch.full((2,), float(i)), torch.ones(3)]),
    "quantized": lambda i, d: torch.quantize_per_tensor(torch.full((3,), float(i)), 0.5, 1, torch.quint8),
    "conjugate": lambda i, d: torch.full((2,), complex(i, 1)).conj(),
    "negative": lambda i, d: torch.full((2,), complex(i, 1)).conj().imag,
    "meta": lambda i, d: torch.ones(2, i + 1, device="meta"),
    "shared": lambda i, d: SHARED[i],
    "random": lambda i, d: torch.rand(2) + random.random() + float(np.random.rand()),
    "array": lambda i, d: np.full((2, 3), i, dtype=np.float32),
    "fortran": lambda i, d: np.asfortranarray(np.arange(6.0).reshape(2, 3) + i),
    "read-only": read_only,
    "structured": structured,
    "objects": lambda i, d: np.array([f"a{i}", None], dtype=object),
    "numpy scalar": lambda i, d: np.float32(i),
    "str": lambda i, d: f"sample {i}",
    "bytes": lambda i, d: b"sample %d" % i,
    "none": lambda i, d: None,
    "number": lambda i, d: i + 0.5,
    "namedtuple": lambda i, d: Pair(torch.full((2,), i), i),
    "dataclass": lambda i, d: Point(torch.full((2,), i), f"p{i}"),
    "mapping": lambda i, d: Frozen({"t": torch.full((2,), i)}),
    "user dict": lambda i, d: UserDict(t=torch.full((2,), i)),
    "object": lambda i, d: Plain(torch.full((2,), i)),
    "others": lambda i, d: [{i, "x"}, Color.RED, range(i), deque([i]), defaultdict(list, a=[i]), OrderedDict(b=i)],
}
KNOWN_DTYPES = (
    *("uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64", "complex64", "bool"),
    *("uint16", "uint32", "uint64", "complex128", "float8_e4m3fn", "uint1", "uint4", "uint7", "int4"),
)
DTYPES = tuple(name for name in KNOWN_DTYPES if hasattr(torch, name))  # older versions have fewer

STRUCTURES: dict[str, Callable[[list], Any]] = {
    "dict": lambda values: {f"f{number}": value for number, value in enumerate(values)},
    "tuple": tuple,
    "list": list,
    "single": lambda values: values[0],
    "nested": lambda values: {"a": (values[0], {"b": values})},
    "namedtuple": lambda values: Pair(values[0], values[-1]),
}


# Datasets


class Custom(Exception):
    """Cannot be made from a message alone."""

    def __init__(self, code: int, *, detail: str) -> None:
        super().__init__(code, detail)


ERRORS: dict[str, Callable[[], BaseException]] = {
    "value": lambda: ValueError("bad sample"),
    "key": lambda: KeyError("missing"),
    "custom": lambda: Custom(3, detail="x"),
    "stop": lambda: StopIteration("stopped"),
    "runtime": lambda: RuntimeError("stopped"),
    "exit": lambda: os._exit(7),  # type: ignore[arg-type, return-value]
}


class Fresh:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.length = LENGTH
        self.epoch = 0
        self.pause = 0.0

    def __len__(self) -> int:
        return self.length

    def sample(self, index: int):
        program = self.program
        leaves = [LEAVES[name](index % LENGTH, program.dtype) for name in program.leaves]
        return STRUCTURES[program.structure](leaves)

    def __getitem__(self, index: int):
        if self.pause:
            time.sleep(self.pause)
        return self.sample(index)


class Cached(Fresh):
    """Keeps its samples."""

    def __getitem__(self, index: int):
        cache = self.__dict__.setdefault("cache", {})
        if index not in cache:
            cache[index] = super().__getitem__(index)
        return cache[index]


class Scratch(Fresh):
    """Writes each sample into the same tensor."""

    def __getitem__(self, index: int):
        scratch = self.__dict__.setdefault("scratch", torch.zeros(50))
        scratch.fill_(index)
        return scratch, super().__getitem__(index)


class Collating(Fresh):
    """Keeps what default_collate makes of some numbers: support sets."""

    def __getitem__(self, index: int):
        kept = self.__dict__.setdefault("kept", {})
        number = index % 3
        if number not in kept:
            kept[number] = default_collate([torch.full((30,), number * 10 + row) for row in range(4)])
        return kept[number] if index % 2 else kept[number].clone(), super().__getitem__(index)


class LoaderInside(Fresh):
    """Reads a loader of its own, and keeps its batches."""

    def __getitem__(self, index: int):
        if "inner" not in vars(self):
            numbers = [torch.full((20,), number) for number in range(6)]
            self.inner = list(DataLoader(numbers, 2))  # type: ignore[arg-type]
        return self.inner[index % 3], super().__getitem__(index)


class Failing(Fresh):
    def __getitem__(self, index: int):
        if index == ERROR_AT:
            if self.program.error == "exit":
                if os.path.exists(self.flag):  # a retry
                    return super().__getitem__(index)
                if multiprocessing.parent_process() is None:
                    raise ValueError("no worker to exit")
                open(self.flag, "w").close()
            raise ERRORS[self.program.error]()
        return super().__getitem__(index)


class Programs(Fresh):
    """Starts a program, and a thread that collates."""

    def __getitem__(self, index: int):
        code = subprocess.run(["false"]).returncode if index % 4 == 0 else 1
        return code, super().__getitem__(index)


class Threads(Fresh):
    """A thread collates while the sample is made."""

    def __getitem__(self, index: int):
        made = []
        thread = threading.Thread(target=lambda: made.append(default_collate([torch.full((30,), index)] * 3)))
        thread.start()
        sample = super().__getitem__(index)
        thread.join()
        self.__dict__.setdefault("kept", []).append(made[0])
        return made[0], int(self.kept[0][0, 0] - self.kept[0][2, 29]), sample


class Normalised(Fresh):
    """Changes its table in place when it is first read."""

    def __init__(self, program: Program) -> None:
        super().__init__(program)
        self.table = np.full(300_000, 2.0, np.float32)  # large enough to be shared between workers

    def __getitem__(self, index: int):
        if not vars(self).get("is_read"):
            self.is_read = True
            self.table /= 2
        return float(self.table[index % LENGTH]), super().__getitem__(index)


class Growing(Fresh):
    """The consumer makes it longer between epochs."""


class Epochs(Fresh):
    """The consumer tells it the epoch."""

    def __getitem__(self, index: int):
        return self.epoch, super().__getitem__(index)


class Whole(Fresh):
    """Reads all samples of a batch at once."""

    def __getitems__(self, indices: list[int]) -> list:
        return [self.sample(index) for index in indices]


class Stream(Fresh, IterableDataset):
    """Each worker gives its share, and shares are uneven."""

    def __iter__(self) -> Iterator:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for index in range(first, LENGTH - first, step):
            yield first, step, info is None or info.dataset is self, self[index]


class EagerStream(Stream):
    """Draws when an iterator over it is made, and not when that gives the first sample."""

    def __iter__(self) -> Iterator:
        number = torch.rand(()).item()
        return map(lambda sample: (number, sample), super().__iter__())


class FailingStream(Stream, Failing):
    """Its generator ends with its error."""


class GoingOn(FailingStream):
    """Its iterator goes on after its error."""

    def __iter__(self) -> Iterator:
        return map(self.__getitem__, range(2, LENGTH))


DATASETS = {
    "stream": Stream,
    "eager stream": EagerStream,
    "failing stream": FailingStream,
    "failing iterator": GoingOn,
    "fresh": Fresh,
    "cached": Cached,
    "scratch": Scratch,
    "collating": Collating,
    "loader inside": LoaderInside,
    "errors": Failing,
    "programs": Programs,
    "threads": Threads,
    "normalised": Normalised,
    "growing": Growing,
    "epochs": Epochs,
    "getitems": Whole,
}


# Collations


def map_tensors(batch: Any, to: Callable[[torch.Tensor], Any]) -> Any:
    if isinstance(batch, torch.Tensor):
        return to(batch)
    if isinstance(batch, dict):
        return {key: map_tensors(value, to) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        return [map_tensors(value, to) for value in batch]
    return batch


def as_is(samples):
    return samples


def shifted(samples):
    """A language model's: inputs and targets are views of the same ids."""
    return map_tensors(default_collate(samples), lambda t: {"in": t[:-1], "to": t[1:], "one": t[..., 0:1]})


def split(samples):
    return map_tensors(default_collate(samples), lambda t: [*t.split(2)[:5], t, t, t[::2], t.T if t.dim() == 2 else t])


def padded(samples):
    rows: list[torch.Tensor] = []
    map_tensors(list(samples) if isinstance(samples, list) else [samples], lambda t: rows.append(t.reshape(-1)[:50]))
    return torch.nn.utils.rnn.pad_sequence([row.float() for row in rows], batch_first=True), len(rows)


class Bank:
    """Keeps its batches, and says whether they have not changed."""

    def __init__(self) -> None:
        self.kept: list[Any] = []

    def __call__(self, samples):
        same = all(describe(batch) == before for batch, before in self.kept)
        batch = default_collate(samples)
        self.kept.append((batch, describe(batch)))
        return batch, same


def not_tensors(samples):
    return {"names": [type(sample).__name__ for sample in samples], "set": {len(samples)}, "array": np.arange(5)}


def twice(samples):
    first = default_collate(samples)
    return first, default_collate(samples), default_collate([{"n": number} for number in range(len(samples))])


def contiguous_format(samples):
    def change(item: torch.Tensor) -> torch.Tensor:
        return (
            item.to(memory_format=torch.channels_last) if item.dim() == 4 else item.t_() if item.dim() == 2 else item
        )

    return map_tensors(default_collate(samples), change)


COLLATIONS: dict[str, Callable[[], Any]] = {
    "default": lambda: None,
    "as is": lambda: as_is,
    "shifted": lambda: shifted,
    "split": lambda: split,
    "padded": lambda: padded,
    "bank": Bank,
    "not tensors": lambda: not_tensors,
    "twice": lambda: twice,
    "formats": lambda: contiguous_format,
}


# What a program sees of a batch


def describe(batch: Any) -> Any:
    """A batch as plain data: values, dtypes, shapes, strides, types, and which tensors share memory."""
    seen: dict[int, int] = {}
    ranges: list[tuple[int, int]] = []

    def walk(item: Any) -> Any:
        if isinstance(item, (torch.Tensor, Plain, Point, np.ndarray)):
            if id(item) in seen:
                return "again", seen[id(item)]
            seen[id(item)] = len(seen)
        if isinstance(item, torch.Tensor):
            if item.layout == torch.strided and not item.is_nested and item.device.type == "cpu" and item.numel():
                last = sum((n - 1) * step for n, step in zip(item.size(), item.stride(), strict=True))
                ranges.append((item.data_ptr(), item.data_ptr() + (last + 1) * item.itemsize))
            return describe_tensor(item)
        if isinstance(item, np.ndarray):
            flags = item.flags.c_contiguous, item.flags.f_contiguous, item.flags.writeable
            return type(item).__name__, str(item.dtype), item.shape, flags, repr(item.tolist())
        if isinstance(item, Mapping):
            return type(item).__name__, [(key, walk(value)) for key, value in item.items()]
        if isinstance(item, (list, tuple, deque)):
            return type(item).__name__, [walk(value) for value in item]
        if isinstance(item, (Plain, Point)):
            return type(item).__name__, walk(vars(item))
        if isinstance(item, set):
            return sorted(map(repr, item))
        return type(item).__name__, repr(item)

    described = walk(batch)
    pairs = [
        (a, b)
        for a in range(len(ranges))
        for b in range(a)
        if ranges[a][0] < ranges[b][1] and ranges[b][0] < ranges[a][1]
    ]
    return described, pairs


def describe_tensor(item: torch.Tensor) -> Any:
    kind = type(item).__name__, str(item.dtype), str(item.layout), item.requires_grad, item.device.type
    extra = {name: repr(value) for name, value in getattr(item, "__dict__", {}).items()}, getattr(item, "unit", None)
    plain = item.detach() if type(item) is torch.Tensor else item.detach().as_subclass(torch.Tensor)
    if plain.is_nested:
        return *kind, [describe_tensor(part) for part in plain.unbind()]
    if plain.layout == torch.sparse_coo:
        return *kind, describe_tensor(plain._indices()), describe_tensor(plain._values()), tuple(plain.shape)
    if plain.layout == torch.sparse_csr:
        return *kind, describe_tensor(plain.crow_indices()), describe_tensor(plain.values()), tuple(plain.shape)
    where = tuple(plain.size()), plain.stride()
    if plain.device.type == "meta":
        return *kind, where
    if plain.is_quantized:
        return *kind, where, plain.int_repr().tolist(), plain.q_scale(), plain.q_zero_point()
    if plain.numel() > 10_000_000:
        return *kind, where, plain[0, 0].item(), plain[-1, -1].item()
    return *kind, extra, where, content(plain)


def content(plain: torch.Tensor) -> str:
    if "int4" in str(plain.dtype) or "uint7" in str(plain.dtype) or str(plain.dtype)[6:] == "uint1":
        plain = plain.view(torch.uint8) if plain.dim() else plain.reshape(1).view(torch.uint8)
    resolved = plain.resolve_conj().resolve_neg()
    flat = torch.empty(resolved.numel(), dtype=resolved.dtype)
    torch.as_strided(flat, tuple(resolved.size()), torch.empty(resolved.size(), device="meta").stride()).copy_(
        resolved
    )
    data = ctypes.string_at(flat.data_ptr(), flat.nbytes)
    return data.hex() if len(data) <= 64 else f"{len(data)}:{zlib.crc32(data)}"


# Samplers and loaders


class Sized(Sampler):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        torch.rand(())  # as samplers do that shuffle here, and not when the first index is asked for
        return iter([index * 4 % self.length for index in range(self.length)])


class Unsized(Sampler):
    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        yield from reversed(range(self.length))


class Buckets(BatchSampler):
    """Makes all batches when it is iterated."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter(list(super().__iter__()))


def sampling(program: Program, dataset: Fresh) -> dict[str, Any]:
    length, kind = len(dataset), program.sampler
    batch_size: dict[str, Any] = {"batch_size": program.batch_size}
    if program.batch_size is not None:
        batch_size["drop_last"] = program.drop_last
    if kind == "shuffled":
        return batch_size | {"shuffle": True}
    if kind == "generator":
        return batch_size | {"shuffle": True, "generator": torch.Generator().manual_seed(5)}
    if kind == "sized":
        return batch_size | {"sampler": Sized(length)}
    if kind == "unsized":
        return batch_size | {"sampler": Unsized(length)}
    if kind == "weighted":
        return batch_size | {"sampler": WeightedRandomSampler([1.0 + index for index in range(length)], length)}
    if kind == "batches" and program.batch_size is not None:
        return {"batch_sampler": Buckets(Sized(length), program.batch_size, program.drop_last)}
    return batch_size


class TorchsLoader(DataLoader):
    """Torch's class, whose iterators can be shut down.

    An error keeps its iterator in a cycle. The garbage collector then ends the threads that would tell the workers to
    exit before the iterator uses them: it waits 5 s for the workers, and a pipe may be closed twice.
    """

    _iterators: ClassVar[weakref.WeakSet] = weakref.WeakSet()

    def _get_iterator(self) -> Any:
        iterator = super()._get_iterator()
        if self.num_workers:
            self._iterators.add(iterator)
        return iterator

    @classmethod
    def shut_down(cls) -> None:
        for iterator in list(cls._iterators):
            iterator._shutdown_workers()


STREAMS = ("stream", "eager stream", "failing stream", "failing iterator")
SAMPLERS = ("sequential", "shuffled", "generator", "sized", "unsized", "weighted", "batches")


def settings(program: Program, dataset: Fresh, kind: type) -> dict[str, Any]:
    chosen = sampling(program, dataset) | {"num_workers": program.num_workers, "in_order": program.in_order}
    chosen["collate_fn"] = COLLATIONS[program.collation]()
    if program.num_workers:
        chosen |= {"persistent_workers": program.persistent, "timeout": program.timeout}
        if program.prefetch is not None:
            chosen["prefetch_factor"] = program.prefetch
        if program.worker_method == "multiprocessing":
            chosen["multiprocessing_context"] = program.method
    if kind is not TorchsLoader and program.seed is not None:
        chosen |= {"seed": program.seed, "worker_method": program.worker_method}
    return chosen


# Consumers: each gets the loader and `note`, and describes what it sees


class Alarm(BaseException):
    pass


class Hung(BaseException):
    """The program takes too long."""


def take(iterator: Iterator, note: Callable[[Any], None]) -> Iterator[Any]:
    """Yields the batches, and notes each error in its place; gives up after the thirtieth."""
    errors = 0
    while errors < 30:
        try:
            yield next(iterator)
        except StopIteration:
            note("end")
            return
        except Exception as error:
            errors += 1
            note(("error", type(error).__name__, words(error)))


def words(error: BaseException) -> str:
    """The last line of an error, in torch's words a worker's own."""
    lines = str(error).strip().splitlines() or [""]
    is_reworded = any(
        part in lines[-1] for part in ("expects each tensor", "resize", "DispatchKey Negative", "QuantizedCPU")
    )
    return "" if is_reworded else lines[-1].split(": ")[-1][:60]


def drop(loader, note) -> None:
    for batch in take(iter(loader), note):
        note(describe(batch))


def draw(loader, note) -> None:
    """Draws from torch's generator after iter(), and at each step."""
    iterator = iter(loader)
    note(("drawn", torch.rand(()).item()))
    for batch in take(iterator, note):
        note(("drawn", torch.rand(()).item()))
        note(describe(batch))


def keep(loader, note) -> None:
    kept = list(take(iter(loader), note))
    for batch in kept:
        note(describe(batch))


def keep_views(loader, note) -> None:

    def first(item: torch.Tensor) -> torch.Tensor:
        return item[:1] if item.dim() and item.layout == torch.strided and not item.is_nested else item

    kept = [map_tensors(batch, first) for batch in take(iter(loader), note)]
    for batch in kept:
        note(describe(batch))


def write(loader, note) -> None:
    """Writes into each tensor, and keeps it."""

    def fill(item: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            try:
                item[...] = 1
            except Exception as error:
                note(type(error).__name__)
        return item

    kept = [map_tensors(batch, fill) for batch in take(iter(loader), note)]
    for batch in kept:
        note(describe(batch))


def fork(loader, note) -> None:
    """Children that were forked with a batch read it when the epoch is over."""
    children: list[tuple[int, int, int, bytes]] = []
    for number, batch in enumerate(take(iter(loader), note)):
        if number in (1, 3):
            (tells, told), (answers, answered) = os.pipe(), os.pipe()
            pid = os.fork()
            if pid == 0:
                try:
                    torch.set_num_threads(1)  # OpenMP hangs in a forked child
                    os.close(told)
                    os.read(tells, 1)
                    os.write(answered, repr(describe(batch)).encode()[:60_000])
                finally:  # never back into pytest
                    os._exit(3)
            os.close(tells), os.close(answered)
            children.append((pid, told, answers, repr(describe(batch)).encode()[:60_000]))
        del batch
    for _, told, *_ in children:
        os.write(told, b"x")  # a worker that was restarted may keep the pipe open
        os.close(told)
    for pid, _, answers, expected in children:
        with os.fdopen(answers, "rb") as file:
            note(file.read() == expected)
        note(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def thread(loader, note) -> None:
    """A thread gets the batches, and reads them at the end."""
    batches: deque[Any] = deque()
    done = threading.Event()
    seen: list[Any] = []

    def read() -> None:
        done.wait(60)
        seen.extend(map(describe, batches))

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for batch in take(iter(loader), note):
            batches.append(batch)
            del batch
    finally:  # also where torch's class hangs, and is interrupted
        done.set()
        reader.join()
    for described in seen:
        note(described)


def leave(loader, note) -> None:
    """Leaves an epoch early, twice, and then begins anew."""
    for number in (1, 2):
        for batch in take(iter(loader), note):
            if loader.in_order:
                note(describe(batch))
            number -= 1
            if not number:
                break
    keep(loader, note)


def alarmed(loader, note) -> None:
    """A watchdog raises inside of next(), which is then called again."""
    left, is_inside = 3, False

    def handle(_: int, frame: Any) -> None:
        nonlocal left
        if is_inside and left and not is_in_generator(frame):  # a sampler's generator would end
            left -= 1
            raise Alarm

    loader.dataset.pause = 2 * ALARM_SECONDS
    iterator, batches, errors = iter(loader), [], 0
    before = signal.signal(signal.SIGALRM, handle)
    timer = signal.setitimer(signal.ITIMER_REAL, ALARM_SECONDS, ALARM_SECONDS)
    try:
        while errors < 30:
            try:
                is_inside = True
                for batch in iterator:
                    is_inside = False  # no call before it: an alarm between next() and this would lose the batch
                    batches.append(batch)
                    is_inside = True
                is_inside = False
                note("end")
                break
            except Alarm:
                is_inside = False
            except Exception as error:
                is_inside = False
                errors += 1
                note(("error", type(error).__name__, words(error)))
    finally:
        is_inside = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, *timer)  # pytest's
        loader.dataset.pause = 0.0
    for batch in batches:
        note(describe(batch))


def is_in_generator(frame: Any) -> bool:
    while frame is not None:
        if frame.f_code.co_flags & inspect.CO_GENERATOR:
            return True
        frame = frame.f_back
    return False


def nested(loader, note) -> None:
    """Two iterators of one loader, the second inside the first."""
    for number, batch in enumerate(take(iter(loader), note)):
        note(describe(batch))
        if number == 0 and loader.nests:
            for inner in take(iter(loader), note):
                note(describe(inner))


def in_turns(loader, note) -> None:
    """Batches of two loaders in turns, over one dataset."""
    other = loader.another()
    for batches in list(zip_longest(take(iter(loader), note), take(iter(other), note))):
        for batch in batches:
            note(describe(batch))


def attempt(function: Callable[..., Any], *args: Any) -> Any:
    """What the function returns, or the name of its error's class."""
    try:
        return function(*args)
    except Exception as error:
        return type(error).__name__


def pickled(loader, note) -> None:
    for batch in take(iter(loader), note):
        note(attempt(lambda given: describe(pickle.loads(pickle.dumps(given))), batch))


def copied(loader, note) -> None:
    for batch in take(iter(loader), note):
        note(attempt(lambda given: [describe(copy.copy(given)), describe(copy.deepcopy(given))], batch))


def shared(loader, note) -> None:
    kept = []

    def share(item: torch.Tensor) -> torch.Tensor:
        try:
            return item.share_memory_()
        except Exception as error:
            note(type(error).__name__)
            return item

    for batch in take(iter(loader), note):
        kept.append(map_tensors(batch, share))
    for batch in kept:
        note(describe(batch))


def pinned(loader, note) -> None:
    for batch in take(iter(loader), note):
        note(describe(map_tensors(batch, lambda item: attempt(item.pin_memory))))


def internals(loader, note) -> None:
    """What clients do with the parts that torch's class has without an underscore's promise."""
    note(isinstance(loader, Iterator) and getattr(loader, "seed", None) is None)  # with a seed, next(loader) works
    iterator = iter(loader)
    if loader.in_order:
        for batch in take(iterator, note):
            note(describe(batch))
            break
    if loader.num_workers and loader.nests:
        iterator._shutdown_workers()
    del iterator
    loader._iterator = None
    note(attempt(lambda: len(ForkingPickler.dumps(loader)) > 0))
    resource_sharer.stop()  # a thread for descriptors in what was pickled
    drop(loader, note)


CONSUMERS: dict[str, Callable[[Any, Callable[[Any], None]], None]] = {
    "drop": drop,
    "draw": draw,
    "keep": keep,
    "keep views": keep_views,
    "write": write,
    "fork": fork,
    "thread": thread,
    "leave": leave,
    "alarm": alarmed,
    "nested": nested,
    "in turns": in_turns,
    "pickle": pickled,
    "copy": copied,
    "share": shared,
    "pin": pinned,
    "internals": internals,
}


def run(program: Program, kind: type, flag: str, epochs: int = 2, nests: bool = True) -> list[Any]:
    """What the program sees with loaders of this class, in the order in which it sees it. `flag`: a file's path."""
    seen: list[Any] = []
    dataset: Any = DATASETS[program.dataset](program)
    dataset.flag = flag
    if "tv_tensor" in program.leaves:
        tv_tensor(0, "")  # imports torchvision, which each worker would take a second for
    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    reset_tables()
    earlier = {*multiprocessing.active_children(), *threading.enumerate()}  # of torch's class, where it hangs
    try:
        ours = (
            60 if program.method == "fork" else 240
        )  # other methods import torch in each worker: 20 s if cores are busy
        with interrupted_after(5 if kind is TorchsLoader else ours):
            try:
                loader: Any = kind(dataset, **settings(program, dataset, kind))
            except (ValueError, TypeError) as error:
                return [("refused", type(error).__name__)]
            loader.nests = nests
            loader.another = lambda: kind(dataset, **settings(program, dataset, kind))
            for epoch in range(epochs):
                dataset.epoch = epoch
                if program.dataset == "growing" and epoch and not sampling_is_fixed(program):
                    dataset.length += 3
                seen.append(f"epoch {epoch}")
                try:
                    batches: list[Any] = []
                    CONSUMERS[program.consumer](loader, batches.append)
                finally:
                    seen.extend(batches if program.in_order else sorted(batches, key=repr))
            if program.seed is None:
                seen.append(("drawn", random.random(), float(np.random.rand()), torch.rand(()).item()))
            TorchsLoader.shut_down()
            del loader
            gc.collect()
    except Hung:
        seen.append("hung")
    TorchsLoader.shut_down()
    children = set(multiprocessing.active_children()) - earlier
    if kind is TorchsLoader:  # an iterator that was interrupted while it started its workers has ended none
        for process in children:
            with suppress(RuntimeError):  # torch's handler of SIGCHLD raises it here, and not in the next program
                process.kill()
                process.join()
        return [*seen, ("left", 0, [])]
    threads = set(threading.enumerate()) - earlier
    for left in threads:
        left.join(10)
    return [*seen, ("left", len(children), [left.name for left in threads if left.is_alive()])]


def sampling_is_fixed(program: Program) -> bool:
    """Whether the order is that of the first epoch's length."""
    return program.sampler not in ("sequential",)


@contextmanager
def interrupted_after(seconds: float) -> Iterator[None]:
    """Raises Hung in the main thread after so many seconds."""
    main, over = threading.get_ident(), threading.Event()

    def handle(*_: object) -> None:
        raise Hung

    def watch() -> None:
        if not over.wait(seconds):
            signal.pthread_kill(main, signal.SIGUSR2)

    before = signal.signal(signal.SIGUSR2, handle)
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()
        signal.signal(signal.SIGUSR2, before)
