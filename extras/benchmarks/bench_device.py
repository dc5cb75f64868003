"""Measures how close each loader comes to training on data that are already on the GPU.

    python extras/benchmarks/bench_device.py --model resnet50 # 224x224, batches of 256, bf16, channels last
    python extras/benchmarks/bench_device.py --model small_cnn --workers 8 # 32x32, batches of 1024: short steps
    python extras/benchmarks/bench_device.py --model none # no network: how fast batches reach the GPU
    python extras/benchmarks/bench_device.py --tiny # almost no work, to see that everything runs

The rows of the table are loaders:
- `limit`: one normalised batch that stays on the device: the training speed if data cost nothing; with --model none,
  what the link carries: page-locked batches, copied one after the other and not normalised;
- `ready`: page-locked batches made beforehand, through the Preloader: its gap to `limit` is the Preloader's cost;
- `torch`: the stock DataLoader with pinned memory and asynchronous copies;
- `predata`, `timm` (if it is installed): the idea of PreDataLoader, and timm's PrefetchLoader, over that DataLoader;
- `workers` and `prefetch`: build_loader's, without and with the preloader's thread.

The rows take turns of --steps steps each, in three rounds, and the medians are compared. Samples are made-up bytes.
`idle` is the share of a step in which the device waited for its batch.
"""

import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from data.batch_transform import Normalize
from data.synthetic import Synthetic
from extras.benchmarks.device_peers import Pairs, PreDataLoader, timm_batches
from extras.benchmarks.picture import draw_bars
from loaders import Accelerator, LoaderConfig, Preloader, StepTimer, build_loader, chosen_device
from models.resnet import resnet
from models.small_cnn import SmallCNN
from scripts.bench_harness import ROUNDS, Columns, Row, in_turns, parser, report
from training.config import ConfigError
from training.script import run_script

LOADERS = ("limit", "ready", "torch", "predata", "timm", "workers", "prefetch")
OURS = ("workers", "prefetch")
READY = 4  # batches made beforehand, used again and again

# For each model: its constructor, pixels per side, classes, batch size, steps per turn.
MODELS: dict[str, tuple[Callable[[], nn.Module], int, int, int, int]] = {
    "resnet50": (lambda: resnet("resnet50", 1000, 3, small_images=False), 224, 1000, 256, 100),
    "small_cnn": (lambda: SmallCNN(10, 3, width=64), 32, 10, 1024, 300),
    "none": (nn.Identity, 224, 1000, 256, 200),
    "tiny": (lambda: SmallCNN(10, 3), 32, 10, 8, 3),
}
COLUMNS: Columns = (
    ("loader", "loader", "{}"),
    ("steps_per_second", "steps/s", "{:.2f}"),
    ("images_per_second", "images/s", "{:,.0f}"),
    ("ratio_to_limit", "of limit", "{:.3f}"),
    ("idle", "idle", "{:.1%}"),
)


class Bench:
    """What all rows share. `warmup_steps` at the start of each turn use up the batches that were loaded before it."""

    def __init__(self, model: str, batch_size: int | None, steps: int | None, workers: int, device: torch.device):
        self.model = model
        self.make_model, size, classes, its_batch_size, its_steps = MODELS[model]
        self.batch_size = batch_size or its_batch_size
        self.steps = steps or its_steps
        self.workers = workers
        self.device = device
        self.accelerator = Accelerator(device)
        self.dtype = torch.bfloat16 if self.accelerator.has_bf16() else torch.float32
        self.warmup_steps = 3 * workers + 2
        self.batches = 2 * ROUNDS * (self.steps + self.warmup_steps)  # more than are used, so that no epoch ends
        self.dataset = Synthetic(True, self.batch_size * self.batches, image_size=size, num_classes=classes)
        spec = self.dataset.sample_spec().values()
        self.field_bytes = [self.batch_size * math.prod(shape) * dtype.itemsize for shape, dtype in spec]

    def rows(self) -> list[Row]:
        """Measures the loaders in turns."""
        normalize = Normalize(self.dataset.mean, self.dataset.std, self.dtype)
        names = [name for name in LOADERS if name != "timm" or find_spec("timm")]
        with ExitStack() as cleanup:
            batches = {name: iter(cleanup.enter_context(self.loader(name, normalize))) for name in names}
            step = first_numbers if self.model == "none" else training_step(self.make_model(), self.device)
            for _ in range(self.warmup_steps):  # cuDNN searches for the fastest kernels outside of all turns
                step(next(batches["limit"]))
            rows = in_turns(names, lambda name: self.turn(step, batches[name]))
        for row in rows:
            row["ratio_to_limit"] = row["steps_per_second"] / rows[0]["steps_per_second"]
        return rows

    def loader(self, name: str, transform: Any) -> AbstractContextManager[Any]:
        """The loader of a row. It delivers batches on the device, transformed."""
        if name == "limit" and self.model == "none":
            return Preloader(self.ready_batches() * (self.batches // READY), self.device, 0)
        if name == "limit":
            batch = next(Preloader(self.ready_batches(), self.device, 0, transform))
            return Preloader([batch] * self.batches, self.device, 0)
        if name == "ready":
            return Preloader(self.ready_batches() * (self.batches // READY), self.device, 2, transform)
        if name == "torch":
            return Preloader(self.stock(self.dataset), self.device, 0, transform)  # which copies asynchronously
        if name == "predata":
            return PreDataLoader(self.stock(self.dataset), self.device, transform)
        if name == "timm":
            from timm.data.loader import fast_collate

            stock = self.stock(Pairs(self.dataset), fast_collate)
            return nullcontext(timm_batches(stock, self.dataset, self.device, self.dtype))
        return build_loader(
            LoaderConfig(name, num_workers=self.workers, preload_depth=2 if name == "prefetch" else 0),
            self.dataset,
            batch_size=self.batch_size,
            shuffle=True,
            drop_last=True,
            seed=0,
            device=self.device,
            transform=transform,
        )

    def stock(self, dataset: Any, collate: Any = None) -> DataLoader[Any]:
        """torch's DataLoader, with pinned memory."""
        return DataLoader(
            dataset,
            self.batch_size,
            shuffle=True,
            drop_last=True,
            num_workers=self.workers,
            persistent_workers=True,
            multiprocessing_context="fork",
            pin_memory=self.accelerator.has_streams,
            collate_fn=collate,
        )

    def ready_batches(self) -> list[dict[str, torch.Tensor]]:
        """Batches on the host, page-locked for a GPU. Each is one block of memory, which takes a single copy."""
        batches = []
        for indices in np.arange(READY * self.batch_size).reshape(READY, -1):
            block = torch.empty(sum(self.field_bytes), dtype=torch.uint8, pin_memory=self.accelerator.has_streams)
            fields = zip(self.dataset.sample_spec().items(), block.split(self.field_bytes), strict=True)
            batch = {name: memory.view(dtype).view(-1, *shape) for (name, (shape, dtype)), memory in fields}
            self.dataset.read_batch(indices, batch, None)
            batches.append(batch)
        return batches

    def turn(self, step: Callable[[Any], None], batches: Iterator[Any]) -> dict[str, float]:
        """Measures `self.steps` steps."""
        timer = StepTimer(self.device, self.warmup_steps)
        for batch in timer.batches(islice(batches, self.warmup_steps + self.steps)):
            step(batch)
        window = timer.run()
        return {
            "steps_per_second": window.steps / window.seconds,
            "images_per_second": window.images_per_second,
            "idle": window.data_wait_fraction,
        }


def training_step(model: nn.Module, device: torch.device) -> Callable[[dict[str, torch.Tensor]], None]:
    model.to(device).to(memory_format=torch.channels_last).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=Accelerator(device).has_bf16())

    def step(batch: dict[str, torch.Tensor]) -> None:
        with autocast:
            logits = model(batch["image"])
        nn.functional.cross_entropy(logits.float(), batch["label"]).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def first_numbers(batch: dict[str, torch.Tensor]) -> None:
    """Reads the batch, and does almost nothing."""
    batch["image"].flatten()[0].add(batch["label"][0])


def main(typed: list[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument("--model", default="resnet50", choices=MODELS)
    options.add_argument("--device", help="cpu, cuda, cuda:1, ... (cuda; with --tiny, cpu)")
    options.add_argument("--workers", type=int, default=min(8, os.cpu_count() or 1), help="(8, or as many as cores)")
    options.add_argument("--batch-size", type=int, help="(depends on the model)")
    options.add_argument("--steps", type=int, help="per turn (depends on the model)")
    options.add_argument("--picture", type=Path, help="draw the rows into this PNG file")
    options.add_argument("--tiny", action="store_true", help="almost no work; the same as --model tiny on the CPU")
    arguments = options.parse_args(typed)
    try:
        device = chosen_device(arguments.device or ("cpu" if arguments.tiny else "cuda"))
    except RuntimeError as error:
        raise ConfigError(str(error)) from error
    Accelerator(device).make_current()
    torch.backends.cudnn.benchmark = True
    torch.set_num_threads(1)  # this process forks, and torch's threads do not exist in a fork

    bench = Bench(
        "tiny" if arguments.tiny else arguments.model, arguments.batch_size, arguments.steps, arguments.workers, device
    )
    title = f"{bench.model}, batches of {bench.batch_size}, {arguments.workers} workers, on {device}"
    result: dict[str, Any] = {"model": bench.model, "batch_size": bench.batch_size, "num_workers": arguments.workers}
    result |= {"device": str(device), "rows": bench.rows()}
    report(title, COLUMNS, result, arguments.json)
    if arguments.picture:
        rows = {row["loader"]: row for row in result["rows"]}
        arguments.picture.write_bytes(draw_bars(title, rows, OURS))


if __name__ == "__main__":
    run_script(main)
