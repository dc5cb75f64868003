"""Measures how many images per second each loader delivers for the same work.

    python scripts/bench_loaders.py --workload transport                # 3x224x224 images in memory: moving bytes
    python scripts/bench_loaders.py --workload jpeg --data-root DIR     # DIR/train/CLASS/*.jpg (default: made-up)
    python scripts/bench_loaders.py --workload packed                   # the same images, packed
    python scripts/bench_loaders.py --workload cifar --workers 4 --json cifar.json

The rows of the table are loaders:
- `torch`: the stock DataLoader with persistent workers;
- `workers` and `threads`: WorkerLoader with a seed, which uses the dataset's `read_batch` if it has one;
- `workers-plain` and `threads-plain`: WorkerLoader without a seed, which uses `__getitem__`, as the stock one does;
- `prefetch`: `workers`, with the preloader's thread;
- `resident`: ResidentLoader, for data in memory.

All have the same batch size and prefetch factor, and nothing is done with the batches. In the workload `overhead`,
rows that end in `-1` have batches of 1, the others of 64. The loaders take turns of some seconds, each in a new
process, and the medians over three rounds are compared.

Memory is the peak of all processes of a loader together. Shared pages count once.
"""

from __future__ import annotations

import argparse
import gc
import mmap
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from data.errors import check_choice
from loaders.nested import rows
from scripts.bench_harness import ROUNDS, BenchError, Columns, Row, in_turns, parsed, report, run
from scripts.bench_workloads import PICTURE_WORKLOADS, WORKLOADS, Maker, Transport, make_pictures

FORK = multiprocessing.get_context("fork")
MEMORY_INTERVAL = 0.2  # seconds between two readings of the processes' memory
COLUMNS: Columns = (
    ("loader", "loader", str),
    ("images_per_second", "images/s", "{:,.0f}".format),
    ("ratio_to_torch", "ratio", lambda ratio: "-" if ratio is None else f"{ratio:.2f}"),
    ("first_batch_seconds", "1st batch", "{:.3f} s".format),
    ("cpu_seconds_per_1000", "CPU s/1000", "{:.3f}".format),
    ("peak_memory_mb", "memory", "{:,.0f} MB".format),
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


def measure_in_child(name: str, make: Maker, num_workers: int, seconds: float) -> Row:
    """Measures one turn in a child process, and meanwhile its memory. Raises BenchError if the loader fails."""
    receiver, sender = FORK.Pipe(duplex=False)
    process = FORK.Process(target=_measure, args=(make, num_workers, seconds, sender))
    process.start()
    sender.close()
    peak = memory_bytes(process.pid)  # at least once, however short the turn is
    try:
        while not receiver.poll(MEMORY_INTERVAL):
            peak = max(peak, memory_bytes(process.pid))
        outcome = receiver.recv()
    except EOFError:
        outcome = "its process died"
    process.join()
    if isinstance(outcome, str):
        raise BenchError(f"{name}: {outcome}")
    return {**outcome, "peak_memory_mb": peak / 1e6}


def _measure(make: Maker, num_workers: int, seconds: float, sender: Any) -> None:
    """Runs in the child. Sends its figures, or a sentence if the loader failed."""
    try:
        began = time.perf_counter()
        loader = make(num_workers)
        batches = chain.from_iterable(repeat(loader))
        images = rows(next(batches))
        first = time.perf_counter() - began
        images += _count(batches, seconds / 4)  # warm-up: fills the queues and makes the slots
        began = time.perf_counter()
        counted = _count(batches, seconds)
        rate = counted / (time.perf_counter() - began)
        if hasattr(loader, "close"):
            loader.close()
        del batches, loader
        gc.collect()  # ends the stock loader's workers: os.times() counts only children that have exited
        cpu = 1000 * sum(os.times()[:4]) / (images + counted)
        sender.send({"images_per_second": rate, "first_batch_seconds": first, "cpu_seconds_per_1000": cpu})
    except Exception as error:
        sender.send(f"{type(error).__name__}: {error}")


def _count(batches: Iterator[Any], seconds: float) -> int:
    images, until = 0, time.perf_counter() + seconds
    while not images or time.perf_counter() < until:
        images += rows(next(batches))
    return images


def memory_bytes(pid: int | None) -> int:
    """The memory that a process and its children use now."""
    total = 0
    with suppress(psutil.Error):  # the process may have exited
        for process in (found := psutil.Process(pid), *found.children(recursive=True)):
            with suppress(psutil.Error):
                total += process.memory_full_info().pss
    return total


def copying_rate(num_workers: int, seconds: float) -> float:
    """How many images of `transport` per second processes copy into shared memory if they do nothing else."""
    counts, images = FORK.Array("q", num_workers), Transport().images.numpy()
    processes = [FORK.Process(target=_copy, args=(images, counts, worker, seconds)) for worker in range(num_workers)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return sum(counts[:]) / seconds


def _copy(images: np.ndarray, counts: Any, worker: int, seconds: float) -> None:
    slots = np.frombuffer(mmap.mmap(-1, 3 * 256 * images[0].nbytes), np.uint8).reshape(-1, *images[0].shape)
    slots[:] = 0  # the system gives the pages now, not while the copies are timed
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        for row in range(len(slots)):
            slots[row] = images[row % 64]
        counts[worker] += len(slots)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", required=True, help=", ".join(WORKLOADS))
    parser.add_argument("--workers", type=int, default=2, help="processes or threads of each loader (2)")
    parser.add_argument("--loaders", help="rows to measure, separated by commas (all)")
    parser.add_argument("--data-root", type=Path, help=f"a folder of images, for {', '.join(PICTURE_WORKLOADS)}")
    parser.add_argument("--seconds", type=float, default=90, help="of measuring, over all rows and rounds (90)")
    given = parsed(parser, arguments, positive=("workers", "seconds"))
    check_choice("--workload", given.workload, WORKLOADS, BenchError)
    if given.data_root is not None and given.workload not in PICTURE_WORKLOADS:
        raise BenchError(f"--data-root: only {', '.join(PICTURE_WORKLOADS)} read images from a folder; leave it out")

    torch.set_num_threads(1)  # this process forks, and torch's threads do not exist in a fork
    with tempfile.TemporaryDirectory() as folder:
        root = given.data_root or Path(folder, "images")
        if given.workload in PICTURE_WORKLOADS and given.data_root is None:
            make_pictures(root)
        makers = WORKLOADS[given.workload](root, Path(folder))
        names = given.loaders.split(",") if given.loaders else list(makers)
        for name in names:
            check_choice("--loaders", name, makers, BenchError)
        found = bench({name: makers[name] for name in names}, given.workers, given.seconds)
    result = {"workload": given.workload, "num_workers": given.workers, "rows": found}
    if given.workload == "transport":
        result["copying_images_per_second"] = copying_rate(given.workers, given.seconds / 20)
    report(f"{given.workload}, {given.workers} workers, medians of {ROUNDS} rounds", COLUMNS, result, given.json)
    if given.workload == "transport":
        print(f"\n{given.workers} processes that only copy: {result['copying_images_per_second']:,.0f} images/s")


if __name__ == "__main__":
    run(main)
