"""How many images a second each loader gives for the same work, measured in one run.

    python scripts/bench_loaders.py --workload transport                # ready-made 3x224x224 images: moving bytes
    python scripts/bench_loaders.py --workload jpeg --data-root DIR     # DIR/train/CLASS/*.jpg; without it, made ones
    python scripts/bench_loaders.py --workload packed                 # the same pictures, packed in a temporary folder
    python scripts/bench_loaders.py --workload cifar --workers 4 --json cifar.json

Loaders take turns, a round of some seconds each in a process of its own, and medians over the rounds are compared: so
what else happens on the machine strikes all alike. Each row is a loader: `torch`, the stock DataLoader with persistent
workers; `workers` and `threads`, WorkerLoader with a seed, through the dataset's read_batch where it has one;
`workers-plain` and `threads-plain`, WorkerLoader in torch's place, over `__getitem__`; `prefetch`, `workers` with the
preloader's thread; `resident`, ResidentLoader, where the data are in memory. All have the same batch size and prefetch
factor, and nobody uses the batches. In `overhead`, rows ending in `-1` have batches of 1, others of 64.

Memory is the peak over all processes, pages that they share counted once, libraries left out, and what lies in
/dev/shm unmapped counted in.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import mmap
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from PIL import Image
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder as TorchImageFolder
from torchvision.io import ImageReadMode, decode_jpeg, read_file
from torchvision.transforms import v2
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from data.array_dataset import ArrayDataset
from data.errors import DataError
from data.fashion import FashionMini
from data.image_folder import ImageFolder
from data.packed import Packed
from data.synthetic import Synthetic
from data.transform import Normalize
from loaders import Preloader, ResidentLoader, WorkerLoader
from loaders.nested import rows
from loaders.base import check_choice

ROUNDS = 3
OF_PICTURES = ("jpeg", "evaluation", "packed")
MEMORY_INTERVAL = 0.2  # seconds between two looks at the processes' memory

Maker = Callable[[int], Any]  # from a number of workers to a loader
Workload = Callable[[Path, Path], dict[str, Maker]]  # from folders of pictures and for its own files to rows
Row = dict[str, Any]  # as the JSON file has it


class BenchError(ValueError):
    """What cannot be measured, and why, in a sentence."""


class Transport:
    """Ready-made images: reading one is copying it."""

    def __init__(self, length: int = 25_600) -> None:
        self.length = length
        generator = np.random.default_rng(0)
        self.images = torch.from_numpy(generator.integers(256, size=(64, 3, 224, 224), dtype=np.uint8))

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"image": self.images[index % 64], "label": index % 10}

    def sample_spec(self) -> dict[str, Any]:
        return {"image": ((3, 224, 224), torch.uint8), "label": ((), torch.int64)}

    def read_batch(self, indices: np.ndarray, out: dict[str, torch.Tensor], random: Any) -> None:
        images, source = out["image"].numpy(), self.images.numpy()
        for row, index in enumerate(indices.tolist()):
            images[row] = source[index % 64]
        out["label"].copy_(torch.from_numpy(indices % 10))


class Tiny(Transport):
    """Samples so small that only the loader's own work is left."""

    def __init__(self, length: int = 64_000) -> None:
        self.length, self.images = length, torch.rand(64, 8)

    def sample_spec(self) -> dict[str, Any]:
        return {"image": ((8,), torch.float32), "label": ((), torch.int64)}

    def read_batch(self, indices: np.ndarray, out: dict[str, torch.Tensor], random: Any) -> None:
        out["image"].copy_(self.images[indices % 64])
        out["label"].copy_(torch.from_numpy(indices % 10))


class Plain:
    """A dataset without its read_batch."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        return self._dataset[index]


class Transformed(Plain):
    """(image, label) pairs in memory, each image sent through a torchvision transform."""

    def __init__(self, images: torch.Tensor, labels: list[int], transform: Callable[[torch.Tensor], torch.Tensor]):
        super().__init__(images)
        self._labels, self._transform = labels, transform

    def __getitem__(self, index: int) -> Any:
        return self._transform(self._dataset[index]), self._labels[index]


def loader_rows(ours: Any, stock: dict[str, Any], batch_size: int, transform: Any = None) -> dict[str, Maker]:
    """The rows over one dataset: `ours` for WorkerLoader, and under their rows' names the stock DataLoader's."""
    common = {"batch_size": batch_size, "shuffle": True, "drop_last": True, "persistent_workers": True}

    def of_torch(dataset: Any) -> Maker:
        return lambda n: DataLoader(dataset, num_workers=n, multiprocessing_context="fork", **common)

    def of_ours(dataset: Any, seed: int | None, method: str = "multiprocessing", depth: int = 0) -> Maker:
        def make(n: int) -> Preloader:
            loader = WorkerLoader(dataset, num_workers=n, seed=seed, worker_method=method, **common)
            return Preloader(loader, "cpu", depth, transform)

        return make

    return {
        **{name: of_torch(dataset) for name, dataset in stock.items()},
        "workers": of_ours(ours, 0),
        "workers-plain": of_ours(Plain(ours), None),
        "threads": of_ours(ours, 0, "thread"),
        "threads-plain": of_ours(Plain(ours), None, "thread"),
        "prefetch": of_ours(ours, 0, depth=2),
    }


def transport(*_: Path) -> dict[str, Maker]:
    dataset = Transport()
    return loader_rows(dataset, {"torch": dataset}, 256)


def overhead(*_: Path) -> dict[str, Maker]:
    dataset = Tiny()
    single = loader_rows(dataset, {"torch": dataset}, 1)
    return loader_rows(dataset, {"torch": dataset}, 64) | {f"{name}-1": make for name, make in single.items()}


def cifar(*_: Path, length: int = 50_000) -> dict[str, Maker]:
    generator = np.random.default_rng(0)
    images = generator.integers(256, size=(length, 32, 32, 3), dtype=np.uint8)
    about = {"classes": range(10), "mean": (0.491, 0.482, 0.447), "std": (0.247, 0.244, 0.262)}
    labels = generator.integers(10, size=length)
    return in_memory(ArrayDataset(images, labels, **about, train=True, pad=4, flip=True), images, 512)


def fashion(*_: Path) -> dict[str, Maker]:
    return in_memory(FashionMini(train=True), FashionMini(train=True, pad=0).images, 128)


def in_memory(ours: ArrayDataset, images: np.ndarray, batch_size: int) -> dict[str, Maker]:
    """Random crops of small images, mirrored and normalised: float32 batches in the end."""
    size = ours.image_shape[0]
    steps = [v2.RandomCrop(size, padding=ours.pad, padding_mode="reflect"), v2.RandomHorizontalFlip()]
    steps += [v2.ToDtype(torch.float32, scale=True), v2.Normalize(ours.mean, ours.std)]
    planes = torch.from_numpy(images.transpose(0, 3, 1, 2).copy())
    stock = Transformed(planes, ours.labels.tolist(), v2.Compose(steps))
    normalize = Normalize(ours.mean, ours.std)
    resident = ResidentLoader(ours, batch_size, shuffle=True, drop_last=True)
    made = loader_rows(ours, {"torch": stock}, batch_size, normalize)
    return made | {"resident": lambda _: Preloader(resident, "cpu", 0, normalize)}


def jpeg(root: Path, _: Path) -> dict[str, Maker]:
    return loader_rows(ImageFolder(train=True, root=root), stock_pictures(root / "train", TRAINING), 64)


def evaluation(root: Path, _: Path) -> dict[str, Maker]:
    return loader_rows(ImageFolder(train=False, root=root), stock_pictures(root / "val", EVALUATION), 16)


def packed(root: Path, scratch: Path) -> dict[str, Maker]:
    pack = scratch / "pack"
    command = [sys.executable, Path(__file__).with_name("pack_images.py"), root, pack]
    if subprocess.run(command, stdout=subprocess.DEVNULL).returncode:
        raise BenchError(f"{root} could not be packed, for the reason above")
    return loader_rows(Packed(train=True, root=pack), stock_pictures(root / "train", TRAINING), 64)


TRAINING = (v2.RandomResizedCrop(224, antialias=True), v2.RandomHorizontalFlip())
EVALUATION = (v2.Resize(256, antialias=True), v2.CenterCrop(224))


def stock_pictures(folder: Path, steps: tuple[v2.Transform, ...]) -> dict[str, Any]:
    """What is usually written: torchvision's ImageFolder, reading by Pillow or by torchvision's own decoder."""
    return {
        "torch": TorchImageFolder(str(folder), v2.Compose([*steps, v2.PILToTensor()])),
        "torch-tv": TorchImageFolder(str(folder), v2.Compose(steps), loader=decoded),
    }


def decoded(path: str) -> torch.Tensor:
    return decode_jpeg(read_file(path), mode=ImageReadMode.RGB)


def costly(kind: str) -> Workload:
    """Samples that each take a millisecond of Python, of C code that releases the GIL, or of waiting."""

    def make(*_: Path) -> dict[str, Maker]:
        dataset = Synthetic(train=True, length=6400, cost=kind, cost_ms=1.0)
        return loader_rows(dataset, {"torch": dataset}, 32)

    return make


WORKLOADS = {
    "transport": transport,
    "cifar": cifar,
    "fashion": fashion,
    "jpeg": jpeg,
    "evaluation": evaluation,
    "packed": packed,
    "overhead": overhead,
    **{kind: costly(kind) for kind in ("python", "native", "wait")},
}


def make_pictures(root: Path, count: int = 320) -> None:
    """Writes varied 500x375 JPEG files of 40 to 120 KB, that take as long to decode as photographs do."""
    generator = np.random.default_rng(0)
    for number in tqdm(range(count), desc="making pictures", leave=False, disable=None):
        picture = np.zeros((375, 500, 3))
        for cells, strength in ((4, 60), (24, 34), (120, 22), (500, 9)):  # from shades to texture
            noise = generator.normal(size=(cells * 3 // 4, cells, 3)) * strength * generator.uniform(0.8, 1.2)
            planes = [
                Image.fromarray(plane.astype(np.float32)).resize((500, 375), 3) for plane in np.rollaxis(noise, 2)
            ]
            picture += np.stack(planes, axis=2)
        folder = root / ("val" if number % 10 == 0 else "train") / f"class {number % 4}"
        folder.mkdir(parents=True, exist_ok=True)
        image = Image.fromarray((picture + 128).clip(0, 255).astype(np.uint8))
        image.save(folder / f"{number}.jpg", quality=int(generator.integers(80, 90)))


def bench(rows: dict[str, Maker], num_workers: int, seconds: float) -> list[Row]:
    """Measures the loaders in turns for `seconds` in all; the medians of their rounds."""
    measured: dict[str, list[Row]] = {name: [] for name in rows}
    with tqdm(total=ROUNDS * len(rows), unit="round", leave=False, disable=None) as bar:
        for _ in range(ROUNDS):
            for name, make in rows.items():
                bar.set_description(name)
                measured[name].append(measure_apart(name, make, num_workers, seconds / (ROUNDS * len(rows))))
                bar.update()
    medians = {name: _medians(rounds) for name, rounds in measured.items()}
    for name, row in medians.items():
        base = medians.get("torch-1" if name.endswith("-1") else "torch")
        row["ratio_to_torch"] = row["images_per_second"] / base["images_per_second"] if base else None
    return [{"loader": name, **row} for name, row in medians.items()]


def _medians(rounds: list[Row]) -> Row:
    return {key: statistics.median(one[key] for one in rounds) for key in rounds[0]}


def measure_apart(name: str, make: Maker, num_workers: int, seconds: float) -> Row:
    """One round in a process of its own, while this one looks at the memory of all. Raises BenchError."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_measure, args=(make, num_workers, seconds, theirs))
    in_shm, peak = _shm_bytes(), 0
    process.start()
    theirs.close()
    try:
        while not ours.poll(MEMORY_INTERVAL):
            peak = max(peak, _memory_bytes(in_shm))
        outcome = ours.recv()
    except EOFError:
        outcome = "its process died"
    process.join()
    if isinstance(outcome, str):
        raise BenchError(f"{name}: {outcome}")
    return {**outcome, "peak_memory_mb": peak / 1e6}


def _measure(make: Maker, num_workers: int, seconds: float, answer: Any) -> None:
    try:
        began = time.perf_counter()
        loader = make(num_workers)
        batches = _endless(loader)
        images = rows(next(batches))
        first = time.perf_counter() - began
        images += _count(batches, seconds / 4)  # warm-up: until queues have filled, and slots been made
        began = time.perf_counter()
        counted = _count(batches, seconds)
        rate = counted / (time.perf_counter() - began)
        if hasattr(loader, "close"):
            loader.close()
        del batches, loader
        gc.collect()  # ends the stock loader's workers, whose time is known from then on
        cpu = sum(os.times()[:4])
        answer.send(
            {
                "images_per_second": rate,
                "first_batch_seconds": first,
                "cpu_seconds_per_1000": 1000 * cpu / (images + counted),
            }
        )
    except Exception as error:
        answer.send(f"{type(error).__name__}: {error}")


def _endless(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def _count(batches: Iterator[Any], seconds: float) -> int:
    images, until = 0, time.perf_counter() + seconds
    while not images or time.perf_counter() < until:
        images += rows(next(batches))
    return images


def _memory_bytes(shm_before: int) -> int:
    anonymous = shared = 0
    this = psutil.Process()
    for process in [this, *this.children(recursive=True)]:
        try:
            lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()[1:]
        except (FileNotFoundError, ProcessLookupError):  # ended meanwhile
            continue
        sizes = {line.split()[0]: 1024 * int(line.split()[1]) for line in lines}
        anonymous, shared = anonymous + sizes.get("Pss_Anon:", 0), shared + sizes.get("Pss_Shmem:", 0)
    return anonymous + max(shared, _shm_bytes() - shm_before)


def _shm_bytes() -> int:
    try:
        status = os.statvfs("/dev/shm")
    except FileNotFoundError:
        return 0
    return (status.f_blocks - status.f_bfree) * status.f_frsize


def copying_rate(num_workers: int, seconds: float) -> float:
    """The images a second that processes reach which only copy them, as `transport` has them, into shared memory."""
    images = Transport().images.numpy()
    context = multiprocessing.get_context("fork")
    counts = context.Array("q", num_workers)

    def copy(worker: int) -> None:
        slots = np.frombuffer(mmap.mmap(-1, 3 * 256 * images[0].nbytes), np.uint8).reshape(-1, *images[0].shape)
        slots[:] = 0
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            for row in range(len(slots)):
                slots[row] = images[row % 64]
            counts[worker] += len(slots)

    processes = [context.Process(target=copy, args=(worker,)) for worker in range(num_workers)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return sum(counts) / seconds


def table(measured: list[Row]) -> str:
    """The rows for a terminal."""
    lines = [f"{'loader':<16}{'images/s':>10}{'ratio':>8}{'1st batch':>12}{'CPU s/1000':>12}{'memory':>10}"]
    for row in measured:
        ratio = "-" if row["ratio_to_torch"] is None else f"{row['ratio_to_torch']:.2f}"
        lines.append(
            f"{row['loader']:<16}{row['images_per_second']:>10,.0f}{ratio:>8}{row['first_batch_seconds']:>10.3f} s"
            f"{row['cpu_seconds_per_1000']:>12.3f}{row['peak_memory_mb']:>7,.0f} MB"
        )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", required=True, help=", ".join(WORKLOADS))
    parser.add_argument("--workers", type=int, default=2, help="processes or threads of each loader (2)")
    parser.add_argument("--loaders", help="rows to measure, with commas between them (all)")
    parser.add_argument("--data-root", type=Path, help=f"a folder of pictures, for {', '.join(OF_PICTURES)}")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--seconds", type=float, default=90, help="of measuring, over all rows and rounds (90)")
    given = parser.parse_args(arguments)
    check_choice("--workload", given.workload, WORKLOADS, BenchError)
    if given.workers < 1 or not 0 < given.seconds < math.inf:
        raise BenchError(f"--workers {given.workers} --seconds {given.seconds:g}: give numbers above 0")
    if given.data_root is not None and (given.workload not in OF_PICTURES or not given.data_root.is_dir()):
        kinds = ", ".join(OF_PICTURES)
        raise BenchError(f"--data-root {given.data_root}: give a folder that is there, and only to {kinds}")
    if given.json is not None and not given.json.absolute().parent.is_dir():
        raise BenchError(f"--json {given.json}: there is no folder {given.json.parent}")

    torch.set_num_threads(1)  # this process forks, and threads of an operation would not come along
    with tempfile.TemporaryDirectory() as folder:
        root = given.data_root or Path(folder, "images")
        if given.workload in OF_PICTURES and given.data_root is None:
            make_pictures(root)
        known = WORKLOADS[given.workload](root, Path(folder))
        names = given.loaders.split(",") if given.loaders else list(known)
        for name in names:
            check_choice("--loaders", name, known, BenchError)
        measured = bench({name: known[name] for name in names}, given.workers, given.seconds)
    print(f"{given.workload}, {given.workers} workers, medians of {ROUNDS} rounds in turns\n\n{table(measured)}")
    result = {"workload": given.workload, "num_workers": given.workers, "rows": measured}
    if given.workload == "transport":
        result["copying_images_per_second"] = copying = copying_rate(given.workers, given.seconds / 20)
        print(f"\n{given.workers} processes that only copy: {copying:,.0f} images/s")
    if given.json is not None:
        given.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    try:
        main()
    except (BenchError, DataError) as error:
        sys.exit(f"error: {error}")
