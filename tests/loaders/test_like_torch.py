"""No program can tell WorkerLoader from torch's DataLoader, but by the clock: random programs are run on both.

`python tests/loaders/test_like_torch.py 5000 1` runs 5,000 programs from seed 1 and prints how often each value and
each pair of values occurred. Excused are the differences in loaders/README.md, "Differences from torch".
"""

import gc
import json
import multiprocessing
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

sys.path[:0] = [str(Path(__file__).parents[level]) for level in (2, 1, 0)]  # as a program, too

from like_torch import (
    COLLATIONS,
    CONSUMERS,
    DATASETS,
    DTYPES,
    LEAVES,
    SAMPLERS,
    STREAMS,
    STRUCTURES,
    Program,
    TorchsLoader,
    run,
)
from pages import use_huge_pages

from loaders import WorkerLoader


@pytest.fixture(autouse=True)
def check_what_is_left():
    """Replaces the check of all tests here: `run` looks at what ours leaves, and torch's class leaves more."""


# Torch's own iterators are interrupted where a program hangs.
# The queues' threads of torch's class raise errors, too, if the garbage collector finds one of its iterators.
pytestmark = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning"),
]
multiprocessing.set_forkserver_preload(["torch", "torchvision.tv_tensors", "like_torch", "loaders"])

AXES: dict[str, tuple] = {
    "dtype": DTYPES,
    "structure": tuple(STRUCTURES),
    "dataset": tuple(DATASETS),
    "error": ("value", "key", "custom", "stop", "exit"),
    "collation": tuple(COLLATIONS),
    "consumer": tuple(CONSUMERS),
    "sampler": SAMPLERS,
    "batch_size": (None, 1, 3, 4),
    "num_workers": (0, 1, 3),
    "method": ("fork", "forkserver", "spawn"),
    "persistent": (False, True),
    "prefetch": (None, 1, 3),
    "timeout": (0, 30),
    "drop_last": (False, True),
    "in_order": (True, False),
    "seed": (None, 0),
    "worker_method": ("multiprocessing", "thread"),
}
SIMPLEST = Program(leaves=("plain",), **{axis: known[0] for axis, known in AXES.items()} | {"dataset": "fresh"})
SHAREABLE = DTYPES[: DTYPES.index("float8_e4m3fn")]  # that torch's workers can collate
SENDABLE = DTYPES[: DTYPES.index("uint16")]  # of which they can send subclasses
WEIGHTS = {
    "method": (92, 5, 3),
    "in_order": (85, 15),
    "seed": (60, 40),
    "worker_method": (75, 25),
    "num_workers": (2, 5, 3),
}
INLINE = {"method": "fork", "persistent": False, "prefetch": None, "timeout": 0, "worker_method": "multiprocessing"}
# Where these are not compared, the program itself depends on time: it keeps what it shares with torch's workers.
KEEPING = ("scratch", "cached", "collating", "loader inside", "threads")


def possible(program: Program) -> Program:
    """The nearest program that can be run and compared, and whose unused axes have their first value."""
    if program.dataset in STREAMS:
        program = without(program, "conjugate", "negative", "quantized")._replace(seed=None, sampler="sequential")
        if program.num_workers == 0 and program.consumer == "alarm":
            program = program._replace(consumer="keep")  # an exception ends a generator
        if program.consumer == "leave" and program.collation == "bank":
            program = program._replace(persistent=False)  # how much of an epoch that is left was collated is a race
    if program.num_workers == 0:
        program = program._replace(**INLINE, in_order=True)
    if program.method == "spawn":
        program = program._replace(num_workers=1)  # each takes seconds to start
    if program.seed is None:
        program = program._replace(worker_method="multiprocessing")
    if program.seed is not None and program.dataset in ("cached", "loader inside"):
        program = without(program, "random")  # what is kept, and so what is drawn, depends on who reads
    elif program.worker_method == "thread":
        program = program._replace(method="fork")
    if program.worker_method == "thread" and program.consumer == "fork" and program.dataset == "programs":
        program = program._replace(dataset="fresh")  # the child would inherit a pipe that subprocess waits for
    shares = (
        program.dataset in KEEPING or program.collation == "bank" or {"shared", "row", "far rows"} & {*program.leaves}
    )
    if program.worker_method == "thread" and shares and program.consumer in ("write", "share"):
        program = program._replace(consumer="keep")  # another thread may read the tensor that this moves
    if program.seed is not None and program.sampler == "generator":
        program = program._replace(sampler="shuffled")
    if program.batch_size is None:
        program = program._replace(drop_last=False, sampler=program.sampler.replace("batches", "sized"))
    if not program.in_order and program.consumer in ("nested", "leave"):
        program = program._replace(consumer="drop")  # which batches come before it leaves is a race
    if program.dataset == "errors" and program.error == "exit" and program.seed is None:
        program = without(program, "random")  # a worker that is restarted begins anew
    if program.dataset != "errors":
        program = program._replace(error="value")
    if program.num_workers and {"with dict", "with slots"} & {*program.leaves} and program.dtype not in SENDABLE:
        program = program._replace(dtype="float32")  # torch's workers cannot send subclasses of newer dtypes
    if program.collation not in ("as is", "not tensors") or program.consumer in ("write", "copy", "share", "pin"):
        program = without(program, "huge", instead="expanded")  # there is no memory for it
    if program.num_workers and (program.collation == "padded" or program.batch_size is None):
        program = without(program, "grad", "parameter")  # torch's workers hang over tensors that have a history
    if not program.in_order or (program.consumer == "alarm" and program.num_workers == 0):
        program = without(program, "random")  # who reads it, or how often, would decide what it draws
    if loses_bits(program) and program.seed is None:  # it is compared with torch's class without workers
        program = without(program, "random", "reduced", "stateful", "read-only")
        program = program._replace(error="value" if program.error == "custom" else program.error)
        program = program._replace(dataset=program.dataset.replace("loader inside", "fresh"))
        if program.sampler in ("shuffled", "weighted", "generator"):
            program = program._replace(sampler="sized")
        if program.consumer == "nested":
            program = program._replace(persistent=False)
    if is_changed_by_sending(program):
        program = without(
            program, "conjugate", "negative", "quantized", "channels_last"
        )  # torch's workers change them
    if is_changed_by_sending(program) and program.dtype not in SHAREABLE:
        program = program._replace(dtype="float32")  # with a seed, workers collate the others, too
    return program


def without(program: Program, *leaves: str, instead: str = "plain") -> Program:
    return program._replace(leaves=tuple(instead if leaf in leaves else leaf for leaf in program.leaves))


def drawn(random_: random.Random, **fixed: Any) -> Program:
    """A random program; `fixed` are some of its values."""
    values = {
        axis: random_.choices(known, WEIGHTS.get(axis), k=1)[0] for axis, known in AXES.items() if axis not in fixed
    }
    leaves = tuple(random_.sample(tuple(LEAVES), random_.choice((1, 2, 2, 3, 4))))
    if "leaves" in fixed:
        leaves = (fixed["leaves"], *leaves)[:4]
    return possible(Program(**{**values, **fixed, "leaves": leaves}))


def excuse(program: Program) -> str:
    """Which row of the table of differences excuses the program from being compared, or ""."""
    has_processes = program.num_workers > 0 and program.worker_method == "multiprocessing"
    keeps = (
        program.dataset in KEEPING or program.collation == "bank" or {"shared", "row", "far rows"} & {*program.leaves}
    )
    sends_samples = program.collation == "as is" or (program.collation == "default" and program.batch_size is None)
    if program.num_workers and sends_samples and program.dataset == "scratch":
        return "is_shared"
    if program.worker_method == "thread" and program.dataset == "scratch":
        return "threads"  # share the scratch tensor
    if has_processes and keeps and program.consumer in ("write", "share"):
        return "is_shared"
    return ""


def loses_bits(program: Program) -> bool:
    """Whether torch's workers deliver other values than the dataset's: they forget scales, and what is conjugated."""
    as_they_are = ("default", "not tensors")  # of what is not batched
    sends_samples = program.collation == "as is" or (program.batch_size is None and program.collation in as_they_are)
    changed = {"conjugate", "negative", "quantized"} & {*program.leaves}
    return program.num_workers > 0 and sends_samples and bool(changed)


def is_changed_by_sending(program: Program) -> bool:
    """Whether a program with a seed sees that its batches come from another process, as torch's show it too."""
    has_processes = program.num_workers > 0 and program.worker_method == "multiprocessing"
    changed = {"stateful", "reduced", "grad", "parameter"} & {*program.leaves}
    if program.batch_size is None:
        changed |= {"array", "fortran", "read-only"} & {*program.leaves}  # inline, tensors lie in the dataset's arrays
    if program.collation == "as is":
        changed |= {"read-only"} & {*program.leaves}  # sent arrays can be written
    return program.seed is not None and has_processes and bool(changed or program.error == "custom")


def epochs_of(program: Program) -> int:
    """How many epochs are compared: starting a process anew takes seconds, and persistent workers' data stay old."""
    changes = program.dataset in ("epochs", "growing") and program.persistent
    is_compared_inline = program.seed is not None or loses_bits(program)
    return 1 if program.method == "spawn" or (changes and is_compared_inline) else 2


def can_nest(program: Program) -> bool:
    """Whether a loader may have two iterators: with a seed, persistent workers serve one at a time."""
    return program.seed is None or not program.persistent


def oracles(program: Program, folder: str) -> Iterator[list]:
    """What ours has to show: what torch's class shows, or would if it lost nothing, and with a seed ours inline."""
    flag, epochs, nests = Path(folder, "flag"), epochs_of(program), can_nest(program)
    if program.error == "exit" and program.num_workers and program.worker_method == "multiprocessing":
        flag.touch()  # as if a worker had died already
    if program.consumer == "alarm":
        program = program._replace(consumer="keep")
    torchs = program._replace(error="runtime") if program.error == "stop" else program
    inline = {"num_workers": 0, **INLINE}
    if program.seed is None:
        yield run(torchs._replace(**inline) if loses_bits(program) else torchs, TorchsLoader, str(flag), epochs, nests)
        return
    sends = is_changed_by_sending(program)
    if not sends and ("random" not in program.leaves or program.worker_method == "multiprocessing"):
        yield run(program._replace(**inline), WorkerLoader, str(flag), epochs, nests)
    if program.sampler in ("sequential", "sized", "unsized", "batches") and "random" not in program.leaves:
        yield run(torchs if sends else torchs._replace(**inline), TorchsLoader, str(flag), epochs, nests)


def comparable(seen: list, program: Program) -> list:
    """What was seen, without the words of errors where they are ours, and draws where the oracle draws otherwise."""
    rereads = program.consumer == "alarm" and program.num_workers == 0
    if program.seed is not None or loses_bits(program) or rereads:
        seen = [item for item in seen if not (isinstance(item, tuple) and item[0] == "drawn")]
    is_other = is_changed_by_sending(program) or loses_bits(program)  # the oracle has no workers: theirs raise others
    keeps = 1 if is_other else 2 if program.error == "stop" else 3
    return [item[:keeps] if isinstance(item, tuple) and item[0] == "error" else item for item in seen]


hung: list[Program] = []  # over which torch's class hangs, so that there is nothing to compare


def differences(program: Program) -> tuple[list, list] | None:
    """What torch's class shows and ours does not, and the reverse; None if there is no difference."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ours = comparable(run(program, WorkerLoader, f"{folder}/ours", epochs_of(program), can_nest(program)), program)
        for oracle in oracles(program, folder):
            theirs = comparable(oracle, program)
            if "hung" in theirs or "TimeoutError" in repr(theirs):  # torch's workers hang if a batch can't be pickled
                hung.append(program)
            elif theirs != ours:
                return theirs, ours
    return None


def check(program: Program) -> None:
    if not excuse(program) and (found := differences(program)):
        theirs, mine = found
        at = next(
            (n for n, pair in enumerate(zip(theirs, mine, strict=False)) if pair[0] != pair[1]), min(map(len, found))
        )
        raise AssertionError(f"{program}\nafter {at}\ntorch: {theirs[at : at + 1]}\nours:  {mine[at : at + 1]}")


# Programs in which a difference was found.
FOUND = [
    SIMPLEST._replace(
        leaves=("reduced", "stateful", "strided"),
        structure="tuple",
        collation="shifted",
        batch_size=None,
        num_workers=1,
    ),
]


@pytest.mark.parametrize("program", FOUND)
def test_programs_that_saw_a_difference_see_none(program):
    check(program)


@pytest.mark.parametrize("part", range(10))
def test_programs_see_what_torchs_class_shows(part):
    for number in range(7 * part, 7 * part + 7):
        check(drawn(random.Random(number), method="fork"))


@pytest.mark.parametrize("part", range(3))
@settings(max_examples=9, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(program=st.integers(0, 2**32).map(lambda number: drawn(random.Random(number), method="fork")))
def test_new_programs_see_what_torchs_class_shows(part, program):
    check(program)


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_workers_that_are_not_forked_show_what_torchs_show(method):
    check(drawn(random.Random(0), method=method, num_workers=1, dataset="fresh"))


def shrunk(program: Program) -> Program:
    """A simpler program that still sees a difference."""
    for axis, value in zip(Program._fields, SIMPLEST, strict=True):
        simpler = possible(program._replace(**{axis: value}))
        if simpler != program and not excuse(simpler) and differences(simpler):
            program = simpler
    for leaf in program.leaves:
        fewer = tuple(name for name in program.leaves if name != leaf)
        if fewer and differences(program._replace(leaves=fewer)):
            program = program._replace(leaves=fewer)
    return program


def values(program: Program) -> list[tuple[str, Any]]:
    """The program's values on the axes that it uses."""
    unused = {"error"} if program.dataset != "errors" else set()
    if program.num_workers == 0 or program.worker_method == "thread":
        unused |= {"method"}
    if program.num_workers == 0:
        unused |= {"persistent", "prefetch", "timeout", "in_order", "worker_method"}
    own = [(axis, value) for axis, value in program._asdict().items() if axis not in unused | {"leaves"}]
    return [*own, *(("leaf", leaf) for leaf in program.leaves)]


def pairs(program: Program) -> list[str]:
    """The pairs of values across axes that occur in the program."""
    return [str(tuple(sorted(pair, key=str))) for pair in combinations(values(program), 2) if pair[0][0] != pair[1][0]]


class Chooser:
    """Draws programs whose pairs of values have been rare so far."""

    def __init__(self, number: int) -> None:
        self.random = random.Random(number)
        self.counts: Counter[str] = Counter()  # of values and pairs
        axes = {**AXES, "leaves": LEAVES}
        every = [(axis, value) for axis, known in axes.items() for value in known]
        self._wanted = [pair for pair in combinations(every, 2) if pair[0][0] != pair[1][0]]

    def next(self) -> Program:
        def key(pair: tuple) -> str:
            return str(tuple(sorted((("leaf" if axis == "leaves" else axis, value) for axis, value in pair), key=str)))

        while True:
            rarest = min(self.random.sample(self._wanted, 200), key=lambda pair: self.counts[key(pair)])
            fixed = dict(rarest)
            if "error" in fixed:
                fixed.setdefault("dataset", "errors")
            drawn_ones = [drawn(self.random, **fixed) for _ in range(6)]
            with_it = [program for program in drawn_ones if key(rarest) in pairs(program)]
            if with_it:
                break
            self._wanted.remove(rarest)  # no program can have it
        program = max(with_it, key=self._gain)
        self.counts.update(map(str, values(program)))
        self.counts.update(pairs(program))
        return program

    def _gain(self, program: Program) -> tuple[bool, float]:
        """How much running the program tells."""
        is_compared = not excuse(program) and not (program.seed is None and loses_bits(program))
        return is_compared, sum(1 / (1 + self.counts[pair]) for pair in pairs(program))


def run_many(count: int, number: int) -> dict[str, Any]:
    """Runs so many programs, and returns the counts of values, pairs and excuses, and the failures."""
    gc.collect()
    gc.freeze()
    use_huge_pages()
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000_000, resource.RLIM_INFINITY))  # no file is that large
    chooser = Chooser(number)
    excuses: Counter[str] = Counter()
    failures = []
    for at in range(count):
        if at % 20 == 10:
            gc.collect()
            gc.freeze()  # what was imported meanwhile: each program collects garbage
        program, began = chooser.next(), time.monotonic()
        excuses[excuse(program) or "conjugate" * (program.seed is None and loses_bits(program))] += 1
        try:
            check(program)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            if isinstance(error, AssertionError):
                text += f"\nshrunk: {shrunk(program)}"
            else:
                text += f" after {error.__context__!r}: {program} {traceback.format_exc()[-1200:]}"
            failures.append(text)
            print(f"#{at} {text[:2500]}", file=sys.stderr, flush=True)
        if time.monotonic() - began > 10:
            print(f"slow {at} {time.monotonic() - began:.0f} s {program}", file=sys.stderr, flush=True)
    return {"programs": count, "counts": chooser.counts, "excuses": excuses, "hung": len(hung), "failures": failures}


@pytest.mark.slow
@pytest.mark.timeout(4 * 3600)
def test_ten_thousand_programs_see_what_torchs_class_shows():
    count, parts = int(os.environ.get("PROGRAMS", "10000")), os.cpu_count() or 1
    command = [sys.executable, __file__, str(count // parts)]
    number = random.SystemRandom().randrange(10**6)
    running = [subprocess.Popen([*command, str(number + part)], stdout=subprocess.PIPE) for part in range(parts)]
    found = [json.loads(process.communicate()[0]) for process in running]
    counts, excuses = Counter(), Counter()
    for part in found:
        counts.update(part["counts"])
        excuses.update(part["excuses"])
    rarest = sorted((times, what) for what, times in counts.items())
    print(f"seeds from {number}; excused: {dict(excuses)}; values and pairs: {len(counts)}; the rarest: {rarest[:20]}")
    assert [failure for part in found for failure in part["failures"]] == []
    assert all(times <= count * 0.02 for row, times in excuses.items() if row)


if __name__ == "__main__":
    del __file__  # else each worker that is not forked would import this file, and pytest
    print(json.dumps(run_many(int(sys.argv[1]), int(sys.argv[2]))))
