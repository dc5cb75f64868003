"""Programs over a loader, and what each sees: test_like_torch.py runs them on torch's class and on ours.

A program names a value on each axis. `run` makes its dataset and its loader, uses the loader for two epochs, and
returns what the program saw as plain data: values, dtypes, shapes, strides, types, errors in their places, what it had
kept, and what a forked child read.
"""

import ctypes
import gc
import math
import os
import random
import zlib
from collections import OrderedDict, namedtuple
from collections.abc import Mapping
from types import SimpleNamespace as Program
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, WeightedRandomSampler, default_collate

LENGTH = 9  # samples of a dataset
ERROR_AT = 4  # the sample that raises
GAPPED = "gapped"  # in the place of a tensor's strides, if it does not fill its memory

Pair = namedtuple("Pair", "a b")


class Named(torch.Tensor):
    """Has attributes."""


def full(index, dtype, *shape):
    values = (torch.arange(math.prod(shape)) * 3 + index) % 100
    return values.to(getattr(torch, dtype)).reshape(shape)


def named(index, dtype):
    tensor = full(index, dtype, 4).as_subclass(Named)
    tensor.tag = f"n{index}"  # type: ignore[attr-defined]
    return tensor


TABLE = full(0, "float32", LENGTH, 40)
LEAVES = {
    "plain": lambda i, d: full(i, d, 3, 4),
    "empty": lambda i, d: full(i, d, 0, 3),
    "large": lambda i, d: torch.full((20_000,), i),
    "growing": lambda i, d: torch.full((100 << i,), i),
    "ragged": lambda i, d: full(i, d, 2 + i % 2),
    "column": lambda i, d: full(i, d, 5, 4)[:, 1],
    "expanded": lambda i, d: full(i, d, 1, 3).expand(4, 3),
    "transposed": lambda i, d: full(i, d, 2, 5).t(),
    "channels_last": lambda i, d: full(i, d, 1, 3, 4, 2).to(memory_format=torch.channels_last),
    "row": lambda i, d: TABLE[i],
    "same object": lambda i, d: [full(i, d, 6)] * 2,
    "views": lambda i, d: list(full(i, d, 6).split(2)),
    "grad": lambda i, d: torch.full((2,), float(i)).requires_grad_(i % 3 == 0),
    "named": named,
    "sparse": lambda i, d: torch.sparse_coo_tensor([[0, 2], [1, 0]], [1.0, i], (3, 3)).coalesce(),
    "nested": lambda i, d: torch.nested.nested_tensor([torch.full((2,), float(i)), torch.ones(3)]),
    "conjugate": lambda i, d: torch.full((2,), complex(i, 1)).conj(),
    "meta": lambda i, d: torch.ones(2, i + 1, device="meta"),
    "random": lambda i, d: torch.rand(2) + random.random() + float(np.random.rand()),
    "arrays": lambda i, d: [np.asfortranarray(np.ones((2, 3)) * i), np.array([(i, 0.5)], [("a", "i8"), ("b", "f4")])],
    "scalars": lambda i, d: [np.float32(i), torch.tensor(i), f"sample {i}", b"sample %d" % i, i + 0.5],
    "namedtuple": lambda i, d: Pair(torch.full((2,), i), i),
    "others": lambda i, d: [None, {i}, range(i), OrderedDict(b=i), np.array([{}])],
}
DTYPES = ("float32", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float64", "complex64", "bool")
DTYPES += ("uint16", "uint32", "complex128", "float8_e4m3fn")  # which torch's workers cannot collate
STRUCTURES = {
    "dict": lambda values: {f"f{number}": value for number, value in enumerate(values)},
    "tuple": tuple,
    "single": lambda values: values[0],
    "nested": lambda values: {"a": (values[0], {"b": values})},
    "namedtuple": lambda values: Pair(values[0], values[-1]),
}
UNDECODABLE = UnicodeDecodeError("utf-8", b"", 0, 1, "bad")  # cannot be made again from a message alone
ERRORS = (ValueError("bad sample"), KeyError("missing"), UNDECODABLE, StopIteration("stopped"))


class Data:
    def __init__(self, program):
        self.program = program
        self.scratch = torch.zeros(50)

    def __len__(self):
        return LENGTH

    def __getitem__(self, index):
        program = self.program
        if program.dataset == "failing" and index == ERROR_AT:
            raise ERRORS[program.error]
        leaves = [LEAVES[name](index, program.dtype) for name in program.leaves]
        sample = STRUCTURES[program.structure](leaves)
        return (self.scratch.fill_(index), sample) if program.dataset == "scratch" else sample


def map_tensors(batch, to):
    if isinstance(batch, torch.Tensor):
        return to(batch)
    if isinstance(batch, dict):
        return {key: map_tensors(value, to) for key, value in batch.items()}
    return [map_tensors(value, to) for value in batch] if isinstance(batch, (list, tuple)) else batch


def shifted(samples):
    """A language model's: inputs and targets are views of the same ids."""
    return map_tensors(default_collate(samples), lambda t: {"in": t[:-1], "to": t[1:], "one": t[..., 0:1]})


class Own(list):
    """A sampler that draws when it is iterated, as those do that shuffle there. TypeError for None in it."""

    def __iter__(self):
        torch.rand(())
        return (int(index) for index in super().__iter__())  # which an error ends


SIZED = [index * 4 % LENGTH for index in range(LENGTH)]
SAMPLERS = ("sequential", "shuffled", "generator", "weighted", "batches", "sized", "breaking")


def settings(program):
    kind = program.sampler
    size = program.batch_size
    chosen = {"batch_size": size} | ({} if size is None else {"drop_last": program.drop_last})
    if kind == "batches":
        chosen = {"batch_sampler": BatchSampler(Own(SIZED), size or 2, program.drop_last)}
    elif kind == "weighted":
        chosen["sampler"] = WeightedRandomSampler([1.0 + index for index in range(LENGTH)], LENGTH)
    elif kind in ("sized", "breaking"):
        chosen["sampler"] = Own(SIZED if kind == "sized" else [*SIZED[:5], None, 1])
    elif kind != "sequential":
        chosen |= {"shuffle": True, "generator": torch.Generator().manual_seed(5) if kind == "generator" else None}
    if program.num_workers:
        chosen |= {"persistent_workers": program.persistent, "prefetch_factor": program.prefetch}
        chosen |= {"num_workers": program.num_workers, "in_order": program.in_order}
    return chosen | {"collate_fn": {"as is": lambda samples: samples, "shifted": shifted}.get(program.collation)}


def describe(batch):
    """A batch as plain data: values, dtypes, shapes, strides, types, and which leaves are the same object."""
    seen = {}

    def walk(item):
        if isinstance(item, (torch.Tensor, Program, np.ndarray)):
            if id(item) in seen:
                return ["again", seen[id(item)]]
            seen[id(item)] = len(seen)
        name = type(item).__name__
        if isinstance(item, torch.Tensor):
            return [name, *describe_tensor(item)]
        if isinstance(item, np.ndarray):
            return [name, str(item.dtype), item.shape, item.strides, repr(item.tolist())]
        if isinstance(item, Mapping):
            return [name, [[key, walk(value)] for key, value in item.items()]]
        if isinstance(item, (list, tuple)):
            return [name, [walk(value) for value in item]]
        return [name, walk(vars(item)) if isinstance(item, Program) else repr(item)]

    return walk(batch)


def describe_tensor(item):
    plain = item.detach() if type(item) is torch.Tensor else item.detach().as_subclass(torch.Tensor)
    kind = [str(item.dtype), str(item.layout), item.requires_grad, item.device.type, repr(getattr(item, "tag", None))]
    if plain.is_nested or plain.layout != torch.strided or plain.device.type == "meta":
        return [*kind, repr(plain)]
    is_filled = 0 in plain.stride() or torch.empty_like(plain).stride() == plain.stride()
    kind += [tuple(plain.shape), plain.stride() if is_filled else GAPPED]
    flat = plain.resolve_conj().resolve_neg().contiguous()
    data = ctypes.string_at(flat.data_ptr(), flat.nbytes) if flat.nbytes else b""
    return [*kind, data.hex() if len(data) <= 64 else f"{len(data)}:{zlib.crc32(data)}"]


def take(iterator, note):
    """Yields the batches, and notes each error in its place."""
    for _ in range(40):
        try:
            yield next(iterator)
        except StopIteration:
            return note("end")
        except Exception as error:
            last = (str(error).strip().splitlines() or [""])[-1].split(": ")[-1]
            name = type(error).__name__.replace("UnicodeDecodeError", "RuntimeError")  # if it did not cross a process
            note(["error", name, "" if "expects each tensor" in last or "resize" in last else last])
            if "timed out" in last:
                return None
    return None


def fill(item):
    try:
        return item.detach().fill_(1) and item
    except RuntimeError as error:
        return type(error).__name__


def fork(batch):
    """Forks a child, which reads the batch when it is told to; it exits with 1 if it is the same then."""
    tells, told = os.pipe()
    expected = repr(describe(batch))
    if (pid := os.fork()) == 0:
        gc.disable()
        torch.set_num_threads(1)  # OpenMP hangs in a forked child
        os.read(tells, 1)
        os._exit(repr(describe(batch)) == expected)
    os.close(tells)
    return pid, told


def consume(loader, consumer, note):
    """Uses the loader for an epoch."""
    kept = []
    children = []
    iterators = []
    for number in (1, 2) if consumer == "leave" else ():  # an epoch is left early, twice
        iterators.append(iter(loader))
        for _, batch in zip(range(number), take(iterators[-1], note), strict=False):
            note(describe(batch))
    iterators.append(iter(loader))
    for number, batch in enumerate(take(iterators[-1], note)):
        if consumer == "fork" and number in (1, 3):
            children.append(fork(batch))
        if consumer in ("keep", "write"):
            kept.append(map_tensors(batch, fill) if consumer == "write" else batch)
        else:
            note(describe(batch))
        del batch
    for pid, told in children:
        os.write(told, b"x")
        os.close(told)
        note(["child", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])])
    for batch in kept:
        note(describe(batch))
    for iterator in [] if loader.persistent_workers else iterators:
        getattr(iterator, "_shutdown_workers", bool)()  # torch's are in cycles, and the collector waits for each


def run(program, kind, **options):
    """Returns what the program sees with loaders of this class, in the order in which it sees it."""
    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    TABLE.copy_(full(0, "float32", LENGTH, 40))
    loader = kind(Data(program), **settings(program), **options)
    seen = list[Any]()
    for _ in range(2):
        noted = []
        consume(loader, program.consumer, noted.append)
        seen += noted if program.in_order else sorted(noted, key=repr)
        if program.seed is None:
            seen.append(["drawn", random.random(), float(np.random.rand()), torch.rand(()).item()])
    getattr(loader, "close", bool)()
    if (persistent := loader._iterator) is not None:
        persistent._shutdown_workers()
    return seen
