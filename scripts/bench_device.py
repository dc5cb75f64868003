"""How near each way of feeding a GPU comes to training on data that are there already, measured in one run.

    python scripts/bench_device.py --model resnet50                 # 224x224, batches of 256, bf16, channels last
    python scripts/bench_device.py --model small_cnn --workers 8    # 32x32, batches of 1024: short steps
    python scripts/bench_device.py --tiny                           # next to no work, to see that all parts run

Rows take turns of --steps steps each, in rounds, and medians over the rounds are compared:
- `limit`: one batch, on the device and normalised: what training costs when data cost nothing;
- `ready`: page-locked batches made beforehand, through the Preloader: what is missing to the limit is the Preloader's;
- `torch`: the stock DataLoader with pinned memory, and copies that the host does not wait for;
- `workers` and `prefetch`: build_loader's, without and with the preloader's thread.

Samples are made-up bytes. `idle` is the share of a step in which the device waited for its batch. Last, without a step
beside them, the rates at which batches cross the bus: ready-made ones, loaded ones, and one large page-locked piece.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from data.synthetic import Synthetic
from data.transform import Normalize
from loaders import Preloader, build_loader
from loaders.build import LoaderConfig
from loaders.base import check_choice
from loaders.workers.batch_buffer import BatchBuffer
from loaders.workers.reader import batch_bytes, spec_of
from loaders.preload.device_copy import Transform, present_device
from loaders.timing import StepTimer
from models.resnet import resnet
from models.small_cnn import SmallCNN

LOADERS = ("limit", "ready", "torch", "workers", "prefetch")
ROUNDS = 3
READY = 4  # ready-made batches, which take turns
PIECE = 256 << 20  # bytes of the one large copy


class BenchError(ValueError):
    """What cannot be measured, and why, in a sentence."""


# What makes the network, pixels a side, classes, a batch's size, steps of a turn.
WORKS = {
    "resnet50": (lambda: resnet("resnet50", 1000, 3, small_images=False), 224, 1000, 256, 100),
    "small_cnn": (lambda: SmallCNN(10, 3, width=64), 32, 10, 1024, 300),
    "tiny": (lambda: SmallCNN(10, 3), 32, 10, 8, 3),
}


class Bench:
    """What all rows share; `warmup_steps` come before a turn's steps, and use up what was queued."""

    def __init__(self, model: str, batch_size: int | None, steps: int | None, workers: int, device: torch.device):
        self.make_model, size, classes, its_batch_size, its_steps = WORKS[model]
        self.batch_size, self.steps = batch_size or its_batch_size, steps or its_steps
        self.workers, self.device, self.on_cuda = workers, device, device.type == "cuda"
        self.warmup_steps = 3 * workers + 2
        self.batches = 2 * ROUNDS * (self.steps + self.warmup_steps)  # more than are used: no epoch ends
        self.dataset = Synthetic(True, self.batch_size * self.batches, image_size=size, num_classes=classes)
        self.spec = spec_of(self.dataset)
        self.batch_bytes = batch_bytes(self.spec, self.batch_size)

    def rows(self, seconds: float) -> list[dict[str, Any]]:
        """The rows' medians; a turn ends after its steps, or its share of `seconds`."""
        dtype = torch.bfloat16 if self.on_cuda else torch.float32
        normalize = Normalize(self.dataset.mean, self.dataset.std, dtype)
        turns: dict[str, list[dict[str, float]]] = {name: [] for name in LOADERS}
        with ExitStack() as cleanup:
            batches = {name: iter(cleanup.enter_context(self.loader(name, normalize))) for name in LOADERS}
            step = training_step(self.make_model(), self.device)
            for _ in range(self.warmup_steps):  # the choice of kernels belongs to no row
                step(next(batches["limit"]))
            for _ in range(ROUNDS):
                for name in LOADERS:
                    turns[name].append(self.turn(step, batches[name], seconds / ROUNDS / len(LOADERS)))
        rows: list[dict[str, Any]] = []
        for name, measured in turns.items():
            row = {key: statistics.median(turn[key] for turn in measured) for key in measured[0]}
            ratio = row["steps_per_second"] / (rows or [row])[0]["steps_per_second"]
            rows.append({"loader": name, **row, "ratio_to_limit": ratio})
        return rows

    def loader(self, name: str, transform: Transform | None) -> Preloader:
        """A row's loader: its batches are on the device, and transformed."""
        if name == "limit":
            batch = next(Preloader(self.ready_batches(), self.device, 0, transform))
            return Preloader([batch] * self.batches, self.device, 0)
        if name == "ready":
            return Preloader(self.ready_batches() * (self.batches // READY), self.device, 2, transform)
        settings = {"batch_size": self.batch_size, "shuffle": True, "drop_last": True}
        if name == "torch":
            settings |= {"num_workers": self.workers, "pin_memory": self.on_cuda, "persistent_workers": True}
            stock = DataLoader(self.dataset, multiprocessing_context="fork", **settings)
            return Preloader(stock, self.device, 0, transform)  # copies without waiting
        config = LoaderConfig(name, num_workers=self.workers)
        return build_loader(config, self.dataset, seed=0, device=self.device, transform=transform, **settings)

    def ready_batches(self) -> list[dict[str, torch.Tensor]]:
        """Host batches, each in one piece of memory as a loader's slots are; page-locked for a GPU."""
        batches = []
        for indices in np.arange(READY * self.batch_size).reshape(READY, -1):
            room = BatchBuffer(torch.empty(self.batch_bytes, dtype=torch.uint8, pin_memory=self.on_cuda))
            batch = {name: room.empty((len(indices), *shape), dtype) for name, (shape, dtype) in self.spec.items()}
            self.dataset.read_batch(indices, batch, None)
            batches.append(batch)
        return batches

    def turn(self, step: Callable[[Any], None], batches: Iterator[Any], seconds: float) -> dict[str, float]:
        timer, until = StepTimer(self.device, self.warmup_steps), time.perf_counter() + seconds
        for number, batch in enumerate(timer.batches(batches), 1 - self.warmup_steps):
            step(batch)
            if number == self.steps or (number > 0 and time.perf_counter() > until):
                break
        window = timer.run()
        return {
            "steps_per_second": window.steps / window.seconds,
            "images_per_second": window.images_per_second,
            "idle": window.data_wait_fraction,
        }

    def copying(self) -> dict[str, float]:
        """Bytes a second from the host to the GPU, of each way of copying."""
        rates = {}
        for name in ("ready", "prefetch"):
            with self.loader(name, None) as loader:
                for count in (self.warmup_steps, self.steps):
                    began = time.perf_counter()
                    for number in range(count):
                        next(loader)
                        if number % 8 == 7 or number == count - 1:  # on the way too, or memory would run out
                            torch.cuda.synchronize()
                rates[name] = self.steps * self.batch_bytes / (time.perf_counter() - began)
        source = torch.empty(PIECE, dtype=torch.uint8, pin_memory=True)
        target = source.to(self.device)
        torch.cuda.synchronize()
        began = time.perf_counter()
        target.copy_(source)
        return {**rates, "one piece": PIECE / (time.perf_counter() - began)}


def training_step(model: nn.Module, device: torch.device) -> Callable[[dict[str, torch.Tensor]], None]:
    model = model.to(device, memory_format=torch.channels_last).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")

    def step(batch: dict[str, torch.Tensor]) -> None:
        with autocast:
            logits = model(batch["image"])
        nn.functional.cross_entropy(logits.float(), batch["label"]).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet50", help=", ".join(WORKS) + " (resnet50)")
    parser.add_argument("--device", help="cpu, cuda, cuda:1, ... (cuda; with --tiny, cpu)")
    parser.add_argument("--workers", type=int, default=min(8, os.cpu_count() or 1), help="(8, or as many as cores)")
    parser.add_argument("--batch-size", type=int, help="(the model's own)")
    parser.add_argument("--steps", type=int, help="of a turn (the model's own)")
    parser.add_argument("--seconds", type=float, default=600, help="of steps, over all rows and rounds, at most (600)")
    parser.add_argument("--json", type=Path, help="write the result to this file")
    parser.add_argument("--tiny", action="store_true", help="next to no work: the model of that name")
    given = parser.parse_args(arguments)
    check_choice("--model", given.model, WORKS, BenchError)
    for key in ("workers", "batch_size", "steps", "seconds"):
        value = getattr(given, key)
        if value is not None and not 0 < value < math.inf:
            raise BenchError(f"--{key.replace('_', '-')} {value:g}: give a number above 0")
    if given.json is not None and not given.json.absolute().parent.is_dir():
        raise BenchError(f"--json {given.json}: there is no folder {given.json.parent}")
    try:
        device = present_device(given.device or ("cpu" if given.tiny else "cuda"))
    except RuntimeError as error:
        raise BenchError(f"--{error}") from error
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.backends.cudnn.benchmark = True
    torch.set_num_threads(1)  # this process forks, and threads of an operation would not come along

    model = "tiny" if given.tiny else given.model
    bench = Bench(model, given.batch_size, given.steps, given.workers, device)
    rows, rates = bench.rows(given.seconds), bench.copying() if bench.on_cuda else None
    print(f"{model}, batches of {bench.batch_size}, {given.workers} workers, on {device}\n")
    print(f"{'loader':<10}{'steps/s':>10}{'images/s':>12}{'of limit':>10}{'idle':>9}")
    for row in rows:
        speed = f"{row['steps_per_second']:>10.2f}{row['images_per_second']:>12,.0f}{row['ratio_to_limit']:>10.3f}"
        print(f"{row['loader']:<10}{speed}{100 * row['idle']:>7.1f} %")
    if rates is not None:
        print("\nto the device:", ", ".join(f"{way} {rate / 1e9:.1f} GB/s" for way, rate in rates.items()))
    if given.json is not None:
        result = {"model": model, "batch_size": bench.batch_size, "num_workers": given.workers, "device": str(device)}
        given.json.write_text(json.dumps({**result, "rows": rows, "bytes_per_second": rates}, indent=2) + "\n")


if __name__ == "__main__":
    try:
        main()
    except (BenchError, torch.OutOfMemoryError) as error:
        sys.exit(f"error: {error}")
