"""A program over WorkerLoader sees what it sees over torch's DataLoader, but for the table in loaders/README.md.

With a seed, it sees without workers what it sees with them. `python tests/loaders/test_like_torch.py 5000 1` runs
5,000 random programs from seed 1.
"""

import json
import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from like_torch import (
    COLLATIONS,
    DATASETS,
    DTYPES,
    ERRORS,
    GAPPED,
    LEAVES,
    SAMPLERS,
    STRUCTURES,
    Program,
    run,
)
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).parents[2]))  # as a program, too
from loaders import WorkerLoader

AXES: dict[str, tuple[Any, ...]] = {
    "dtype": DTYPES,
    "structure": tuple(STRUCTURES),
    "dataset": tuple(DATASETS),
    "grows": (False, True),
    "error": tuple(ERRORS),
    "collation": tuple(COLLATIONS),
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
LOST_IN_TORCHS_WORKERS = {"conjugate", "negative", "quantized"}
HANG_SECONDS = 10  # torch's loader waits for ever for a batch that its worker could not send


def drawn(number: int) -> Program:
    """Returns a random program that can be run and compared."""
    draw = random.Random(number)
    values = {axis: draw.choice(known) for axis, known in AXES.items()}
    leaves = set(draw.sample(tuple(LEAVES), draw.choice((1, 2, 2, 3))))
    sends_samples = values["collation"] == "as is" or values["batch_size"] is None
    if not sends_samples or values["collation"] != "as is" or values["consumer"] == "write":
        leaves.discard("huge")  # there is no memory for it
    if values["seed"] is None:
        values["worker_method"] = "multiprocessing"
    else:  # inline, the program sees the dataset's own objects, and what it wrote into them
        leaves -= {"reduced", "grad"}
        values["sampler"] = values["sampler"].replace("generator", "shuffled")
        if sends_samples:
            values["dataset"] = values["dataset"].replace("scratch", "fresh")
        if values["consumer"] == "write":
            leaves.discard("row")
    if values["worker_method"] == "thread":
        leaves.discard("random")
        values["dataset"] = values["dataset"].replace("scratch", "fresh")  # threads share it
    if not values["in_order"]:
        leaves.discard("random")
        values["consumer"] = values["consumer"].replace("leave", "keep")  # which batches come first is a race
    return Program(leaves=tuple(sorted(leaves)) or ("plain",), **values)


def excused(program: Program) -> str:
    """Returns the row of the table because of which the program cannot be compared, or ""."""
    sends_samples = program.collation == "as is" or program.batch_size is None
    if program.seed is None and "random" in program.leaves:
        return "random numbers"
    if program.dataset == "failing" and program.error == "stop":
        return "StopIteration"
    if program.seed is None and program.dataset == "scratch" and sends_samples:
        return "shared with the worker"
    if (
        program.seed is None
        and program.consumer == "write"
        and (program.collation == "bank" or "row" in program.leaves)
    ):
        return "shared with the worker"
    return ""


def oracle(program: Program, counts: Counter[str]) -> list[Any]:
    """Returns what the program has to see."""
    inline = Program(**vars(program) | {"num_workers": 0})
    if program.seed is not None:
        return run(inline, WorkerLoader, seed=program.seed)
    if program.sampler == "breaking":
        counts["a sampler's error"] += 1
        return run(inline, DataLoader)
    if LOST_IN_TORCHS_WORKERS & {*program.leaves}:
        counts["bits lost"] += 1
        return run(inline, DataLoader)
    torchs = run(program, DataLoader, timeout=HANG_SECONDS)
    without_workers = run(inline, DataLoader)
    if len(errors(torchs)) > len(errors(without_workers)):  # its workers cannot send it
        counts["cannot be sent"] += 1
        return without_workers
    return torchs


def errors(seen: list[Any]) -> list[Any]:
    return [item for item in seen if item[0] == "error"]


def difference(expected: Any, seen: Any, counts: Counter[str]) -> Any:
    """Returns the first values that differ, or None. Tensors with gaps arrive without them."""
    if expected == seen:
        return None
    if GAPPED in (expected, seen):
        counts["views apart"] += 1
        return None
    if isinstance(expected, (list, tuple)) and isinstance(seen, (list, tuple)) and len(expected) == len(seen):
        if expected and expected[0] == "error" and expected[1:] == ["Custom", *seen[2:]]:
            return None  # it crossed no process in the oracle: torch's workers make a RuntimeError of it, too
        return next((found for pair in zip(expected, seen, strict=True) if (found := difference(*pair, counts))), None)
    return expected, seen


def check(number: int, counts: Counter[str]) -> str:
    """Runs a program; returns what differs, or ""."""
    program = drawn(number)
    if row := excused(program):
        counts[row] += 1
        return ""
    more = {} if program.seed is None else {"seed": program.seed, "worker_method": program.worker_method}
    found = difference(oracle(program, counts), run(program, WorkerLoader, **more), counts)
    return (
        "" if found is None else f"#{number} {program}\nexpected {str(found[0])[:300]}\nseen     {str(found[1])[:300]}"
    )


@pytest.mark.parametrize("part", range(4))
@pytest.mark.filterwarnings("ignore")
def test_programs_see_what_torchs_class_shows(part):
    counts: Counter[str] = Counter()
    found = [text for number in range(10 * part, 10 * part + 10) if (text := check(number, counts))]
    print(dict(counts))
    assert found == []


@pytest.mark.slow
@pytest.mark.timeout(4 * 3600)
def test_ten_thousand_programs_see_what_torchs_class_shows():
    count, parts = int(os.environ.get("PROGRAMS", "10000")), 2 * (os.cpu_count() or 1)
    first = random.SystemRandom().randrange(10**9)
    command = [sys.executable, "-W", "ignore", __file__, str(count // parts)]
    running = [
        subprocess.Popen([*command, str(first + part * count)], stdout=subprocess.PIPE) for part in range(parts)
    ]
    results = [json.loads(process.communicate()[0]) for process in running]
    counts = sum((Counter(result["excused"]) for result in results), Counter())
    print(f"{count} programs from {first}; excused by the rows of the table: {dict(counts)}")
    assert [text for result in results for text in result["found"]] == []


if __name__ == "__main__":
    excuses: Counter[str] = Counter()
    texts = [text for number in range(int(sys.argv[1])) if (text := check(int(sys.argv[2]) + number, excuses))]
    print(json.dumps({"excused": excuses, "found": texts}))
