"""A program sees over WorkerLoader what it sees over torch's DataLoader, but for the table in loaders/README.md.

With a seed it sees the same with and without workers. `python tests/loaders/test_like_torch.py 5000 1` runs 5,000
random programs from seed 1.
"""

import json
import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from like_torch import DTYPES, ERRORS, GAPPED, LEAVES, SAMPLERS, STRUCTURES, Program, describe, run
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).parents[2]))  # as a program, too
from loaders import WorkerLoader

GUIDE = (Path(__file__).parents[2] / "loaders" / "README.md").read_text()

AXES = {
    "dtype": DTYPES,
    "structure": tuple(STRUCTURES),
    "dataset": ("fresh", "failing", "scratch"),
    "error": range(len(ERRORS)),
    "collation": ("default", "as is", "shifted"),
    "consumer": ("drop", "keep", "write", "fork", "leave"),
    "sampler": SAMPLERS,
    "batch_size": (None, 1, 3, 4),
    "num_workers": (1, 2, 3),
    "persistent": (False, True),
    "prefetch": (1, 2, 3),
    "drop_last": (False, True),
    "in_order": (True, True, True, False),
    "seed": (None, 0),
    "worker_method": ("multiprocessing", "multiprocessing", "thread"),
}
NOT_SENT_RIGHT = {"conjugate", "channels_last"}
HANG_SECONDS = 5  # torch's loader waits for ever for a batch that its worker could not send


def drawn(number):
    """Returns a random program that can be run and compared."""
    draw = random.Random(number)
    program = Program(**{axis: draw.choice(values) for axis, values in AXES.items()})
    leaves = set(draw.sample(tuple(LEAVES), draw.choice((1, 2, 2, 3))))
    if program.seed is None:
        program.worker_method = "multiprocessing"
    else:  # without workers it sees the dataset's own objects, and what it wrote into them
        leaves.discard("grad")
        program.sampler = program.sampler.replace("generator", "shuffled")
        if program.collation == "as is" or program.batch_size is None or program.worker_method == "thread":
            program.dataset = program.dataset.replace("scratch", "fresh")
        if program.consumer == "write":
            leaves.discard("row")
    if program.worker_method == "thread" or not program.in_order:
        leaves.discard("random")
    if not program.in_order:
        leaves -= {"column"}  # it is sorted by what it sees
        program.consumer = program.consumer.replace("leave", "keep")  # which batches come first is a race
    program.leaves = tuple(sorted(leaves)) or ("plain",)
    return program


def row_of(program):
    """Returns the row of the table because of which the program cannot be compared, or ""."""
    sends_samples = program.collation == "as is" or program.batch_size is None
    if program.dataset == "failing" and isinstance(ERRORS[program.error], StopIteration):
        return "`StopIteration` of a dataset"
    if program.seed is None and "random" in program.leaves:
        return "random numbers"
    writes = program.consumer == "write" and "row" in program.leaves
    if program.seed is None and (writes or (program.dataset == "scratch" and sends_samples)):
        return "a tensor that the dataset keeps"
    return ""


def oracle(program, counts):
    """Returns what the program has to see: what it sees with torch's workers, or if they fail with none."""
    alone = Program(**vars(program) | {"num_workers": 0})
    if program.seed is not None:
        return run(alone, WorkerLoader, seed=program.seed)
    row = "a sampler's error"
    expected = run(alone, DataLoader)
    if program.sampler != "breaking":
        row = "conjugated tensors, newer dtypes"
        if not NOT_SENT_RIGHT & {*program.leaves}:
            try:
                torchs = run(program, DataLoader, timeout=HANG_SECONDS, multiprocessing_context="fork")
            except RuntimeError as error:  # an iterator that could not even begin
                torchs = [["error", str(error)]]
            if all(torchs.count(item) == expected.count(item) for item in [*torchs, *expected] if item[0] == "error"):
                return torchs
    counts[row] += 1
    if program.sampler == "generator" or (program.persistent and program.sampler in ("shuffled", "weighted")):
        return [...]  # without workers torch draws another number of seeds, so the second epoch is another
    return [... if item[0] == "drawn" else item for item in expected]


def difference(expected, seen, counts):
    """Returns the first values that differ, or None."""
    if expected in (seen, ..., [...]):
        return None
    if GAPPED in (expected, seen):
        counts["strides"] += 1
        return None
    if isinstance(expected, (list, tuple)) and isinstance(seen, (list, tuple)) and len(expected) == len(seen):
        for pair in zip(expected, seen, strict=True):
            differs = difference(*pair, counts)
            if differs:
                return differs
        return None
    return expected, seen


def check(first, count):
    """Runs programs; returns what differs, and how many programs or values each row of the table excused."""
    differences = list[str]()
    counts = Counter[str]()
    for number in range(first, first + count):
        program = drawn(number)
        if row := row_of(program):
            counts[row] += 1
            continue
        options = {} if program.seed is None else {"seed": program.seed, "worker_method": program.worker_method}
        if differs := difference(oracle(program, counts), run(program, WorkerLoader, **options), counts):
            differences.append("#{} {}\nexpected {:.300}\nseen {:.300}".format(number, program, *map(str, differs)))
    return differences, counts


@pytest.mark.filterwarnings("ignore")
def test_every_leaf_arrives_with_its_values_type_and_layout():
    sample = {name: leaf(3, "float32") for name, leaf in LEAVES.items()}
    with WorkerLoader([sample], None, num_workers=1, collate_fn=dict) as loader:
        arrived = describe(next(iter(loader)))
    sample["column"] = sample["column"].contiguous()  # what has gaps arrives without them
    assert arrived == describe(sample)


# These have each value of each axis, and most pairs of values. Torch's workers hang for 20 seconds in some others.
@pytest.mark.parametrize("first", [657, 866, 2540])
@pytest.mark.filterwarnings("ignore")
def test_programs_see_what_torchs_class_shows(first):
    differences, counts = check(first, 8)
    assert differences == []
    assert all(f"| {row} |" in GUIDE for row in counts)


@pytest.mark.slow
@pytest.mark.timeout(4 * 3600)
def test_random_programs_see_what_torchs_class_shows():
    count = int(os.environ.get("PROGRAMS", "1200"))
    parts = 4
    first = random.SystemRandom().randrange(10**9)
    command = [sys.executable, "-W", "ignore", __file__, str(count // parts)]
    starts = range(first, first + count, count // parts)
    running = [subprocess.Popen([*command, str(start)], stdout=subprocess.PIPE) for start in starts]
    differences, counts = zip(*(json.loads(process.communicate()[0]) for process in running), strict=True)
    print(f"{count} programs from {first}; excused by the rows of the table: {sum(map(Counter, counts), Counter())}")
    assert not any(differences), differences


if __name__ == "__main__":
    print(json.dumps(check(int(sys.argv[2]), int(sys.argv[1]))))
