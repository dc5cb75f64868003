"""Measures how many images per second each loader delivers for the same work.

    python scripts/bench_loaders.py --workload transport                # 3x224x224 images in memory: moving bytes
    python scripts/bench_loaders.py --workload jpeg --data-root DIR     # DIR/train/CLASS/*.jpg (default: made-up)
    python scripts/bench_loaders.py --workload packed                   # the same images, packed
    python scripts/bench_loaders.py --workload decoders --workers 1     # the same images, with each decoder
    python scripts/bench_loaders.py --workload cifar --workers 4 --json cifar.json

The rows of the table are loaders:
- `torch`: the stock DataLoader with persistent workers;
- `workers` and `threads`: WorkerLoader with a seed, which uses the dataset's `read_batch` if it has one;
- `workers-plain` and `threads-plain`: WorkerLoader without a seed, which uses `__getitem__`, as the stock one does;
- `prefetch`: `workers`, with the preloader's thread;
- `resident`: ResidentLoader, for data in memory.

All have the same batch size and prefetch factor, and nothing is done with the batches. In the workload `overhead`,
rows that end in `-1` have batches of 1, the others of 64. In `decoders`, the rows are the installed decoders
(data.decoder), in `workers`. The rows take turns of some seconds, each in a new process, and the medians over three
rounds are compared.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from loaders import rows
from scripts.bench_harness import ROUNDS, Columns, Row, chosen, in_turns, parser, report
from scripts.bench_workloads import PICTURE_WORKLOADS, WORKLOADS, Maker, make_pictures
from scripts.command import run_script
from training.config import ConfigError

FORK = multiprocessing.get_context("fork")
COLUMNS: Columns = (
    ("loader", "loader", "{}"),
    ("images_per_second", "images/s", "{:,.0f}"),
    ("spread", "±", "{:.0%}"),
    ("ratio_to_torch", "ratio", "{:.2f}"),
    ("first_batch_seconds", "1st batch", "{:.3f} s"),
    ("cpu_seconds_per_1000", "CPU s/1000", "{:.3f}"),
)


def bench(makers: dict[str, Maker], num_workers: int, seconds: float) -> list[Row]:
    """Measures the loaders in turns, for `seconds` in total."""
    turn_seconds = seconds / (ROUNDS * len(makers))
    found = in_turns(makers, lambda name: measure_in_child(name, makers[name], num_workers, turn_seconds))
    rates = {row["loader"]: row["images_per_second"] for row in found}
    for row in found:
        base = rates.get("torch-1" if row["loader"].endswith("-1") else "torch")
        row["ratio_to_torch"] = row["images_per_second"] / base if base else None
    return found


def measure_in_child(name: str, make: Maker, num_workers: int, seconds: float) -> dict[str, float]:
    """Measures one turn in a child process. Raises ConfigError if the loader fails."""
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
    """Runs in the child. Sends its figures, or a sentence if the loader failed."""
    try:
        began = time.perf_counter()
        loader = make(num_workers)
        batches = chain.from_iterable(repeat(loader))
        images = rows(next(batches))
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
    images, until = 0, time.perf_counter() + seconds
    while not images or time.perf_counter() < until:
        images += rows(next(batches))
    return images


def main(arguments: list[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument("--workload", required=True, choices=WORKLOADS)
    options.add_argument("--workers", type=int, default=2, help="processes or threads of each loader (2)")
    options.add_argument("--loaders", help="rows to measure, separated by commas (all)")
    options.add_argument("--data-root", type=Path, help=f"a folder of images, for {', '.join(PICTURE_WORKLOADS)}")
    options.add_argument("--seconds", type=float, default=90, help="of measuring, over all rows and rounds (90)")
    given = options.parse_args(arguments)
    if given.data_root is not None and given.workload not in PICTURE_WORKLOADS:
        raise ConfigError(f"--data-root: only {', '.join(PICTURE_WORKLOADS)} read images from a folder; leave it out")
    torch.set_num_threads(1)  # this process forks, and torch's threads do not exist in a fork
    with tempfile.TemporaryDirectory() as folder:
        root = given.data_root or Path(folder, "images")
        if given.workload in PICTURE_WORKLOADS and given.data_root is None:
            make_pictures(root)
        makers = WORKLOADS[given.workload](root, Path(folder))
        names = chosen("--loaders", given.loaders, makers)
        found = bench({name: makers[name] for name in names}, given.workers, given.seconds)
    result = {"workload": given.workload, "num_workers": given.workers, "rows": found}
    report(f"{given.workload}, {given.workers} workers, medians of {ROUNDS} rounds", COLUMNS, result, given.json)


if __name__ == "__main__":
    run_script(main)
