"""Measures how many images per second each loader delivers for the same work.

    python scripts/bench_loaders.py --workload transport            # ready-made 3x224x224 images: moving bytes
    python scripts/bench_loaders.py --workload cifar                # 3x32x32 images, cropped, mirrored, normalised
    python scripts/bench_loaders.py --workload tiny                 # 8 numbers, 64 per batch: the loader's own work
    python scripts/bench_loaders.py --workload batch-1 --json a.json
    python extras/benchmarks/bench_images.py --workload jpeg        # image files

The rows of the table are loaders:
- `torch`: the stock DataLoader with persistent workers;
- `workers` and `threads`: WorkerLoader with a seed, which uses the dataset's `read_batch` if it has one;
- `workers-plain` and `threads-plain`: WorkerLoader without a seed, which uses `__getitem__`, as the stock one does;
- `workers-seeded-plain`: WorkerLoader with a seed, which uses `__getitem__`;
- `prefetch`: `workers`, with the preloader's thread;
- `resident`: ResidentLoader, for data in memory.

All rows have the same batch size and prefetch factor, and do nothing with the batches. They take turns of a few
seconds, each in a new process. The table has the medians of --rounds rounds: `ratio` is relative to `torch`, and
`documented` is the ratio in docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import sys
import time
from collections.abc import Collection, Iterator
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from loaders import rows as rows_of
from scripts.bench_harness import ROUNDS, Columns, Row, chosen, in_turns, parser, report
from scripts.bench_workloads import DOCUMENTED, WORKLOADS, Maker
from training.config import ConfigError
from training.script import run_script

FORK = multiprocessing.get_context("fork")
COLUMNS: Columns = (
    ("loader", "loader", "{}"),
    ("images_per_second", "images/s", "{:,.0f}"),
    ("spread", "±", "{:.0%}"),
    ("ratio_to_torch", "ratio", "{:.2f}"),
    ("documented", "documented", "{:.2f}"),
    ("first_batch_seconds", "1st batch", "{:.3f} s"),
    ("cpu_seconds_per_1000", "CPU s/1000", "{:.3f}"),
)


def bench(makers: dict[str, Maker], documented: dict[str, float], arguments: argparse.Namespace) -> list[Row]:
    """Measures the loaders in turns, for --seconds in total."""
    turn_seconds = arguments.seconds / (arguments.rounds * len(makers))

    def measure(name: str) -> dict[str, float]:
        return measure_in_child(name, makers[name], arguments.workers, turn_seconds)

    measured = in_turns(makers, measure, arguments.rounds)
    speeds = {row["loader"]: row["images_per_second"] for row in measured}
    for row in measured:
        row["ratio_to_torch"] = row["images_per_second"] / speeds["torch"] if "torch" in speeds else None
        row["documented"] = documented.get(row["loader"])
    return measured


def measure_in_child(name: str, make: Maker, num_workers: int, seconds: float) -> dict[str, float]:
    """Measures a turn in a child process. Raises ConfigError if the loader fails."""
    receiver, sender = FORK.Pipe(duplex=False)
    process = FORK.Process(target=_measure, args=(make, num_workers, seconds, sender))
    process.start()
    sender.close()
    try:
        outcome = receiver.recv()
    except EOFError:
        outcome = "its process died"
    process.join()
    if isinstance(outcome, str):
        raise ConfigError(f"{name}: {outcome}")
    return outcome


def _measure(make: Maker, num_workers: int, seconds: float, sender: Any) -> None:
    """Runs in the child. Sends the figures, or a sentence if the loader has failed."""
    try:
        began = time.perf_counter()
        loader = make(num_workers)
        batches = chain.from_iterable(repeat(loader))
        images = rows_of(next(batches))
        first = time.perf_counter() - began
        images += count(batches, seconds / 4)  # warm-up: fills the queues and makes the slots
        began = time.perf_counter()
        counted = count(batches, seconds)
        rate = counted / (time.perf_counter() - began)
        if hasattr(loader, "close"):
            loader.close()
        del batches, loader
        gc.collect()  # ends the stock loader's workers: os.times() counts only children that have exited
        cpu = 1000 * sum(os.times()[:4]) / (images + counted)
        sender.send({"images_per_second": rate, "first_batch_seconds": first, "cpu_seconds_per_1000": cpu})
    except Exception as error:
        sender.send(f"{type(error).__name__}: {error}")


def count(batches: Iterator[Any], seconds: float) -> int:
    """How many samples `batches` deliver in `seconds`, or in the time of one batch."""
    images = 0
    until = time.perf_counter() + seconds
    while not images or time.perf_counter() < until:
        images += rows_of(next(batches))
    return images


def options(about: str | None, workloads: Collection[str]) -> argparse.ArgumentParser:
    """The options of this script and of extras/benchmarks/bench_images.py."""
    command_line = parser(about)
    command_line.add_argument("--workload", required=True, choices=workloads)
    command_line.add_argument("--workers", type=int, default=2, help="processes or threads of each loader (2)")
    command_line.add_argument("--loaders", help="rows to measure, separated by commas (all)")
    command_line.add_argument("--rounds", type=int, default=ROUNDS, help=f"turns of each row ({ROUNDS})")
    command_line.add_argument("--seconds", type=float, default=90, help="of measuring, over all rows and rounds (90)")
    return command_line


def compare(makers: dict[str, Maker], documented: dict[str, float], arguments: argparse.Namespace) -> None:
    """Measures the rows that the options ask for, and prints their table."""
    torch.set_num_threads(1)  # this process forks, and torch's threads do not exist in a fork
    names = chosen("--loaders", arguments.loaders, makers)
    rows = bench({name: makers[name] for name in names}, documented, arguments)
    result = {"workload": arguments.workload, "num_workers": arguments.workers, "rows": rows}
    title = f"{arguments.workload}, {arguments.workers} workers, medians of {arguments.rounds} rounds"
    report(title, COLUMNS, result, arguments.json)


def main(typed: list[str] | None = None) -> None:
    arguments = options(__doc__, WORKLOADS).parse_args(typed)
    compare(WORKLOADS[arguments.workload](), DOCUMENTED[arguments.workload], arguments)


if __name__ == "__main__":
    run_script(main)
