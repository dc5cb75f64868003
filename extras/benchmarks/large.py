"""Tries the sizes that people have, once a release: what comes before the first step takes how long, and which memory.

    python extras/benchmarks/large.py                        # all of it: two minutes, 2 GB of memory and of disk
    python extras/benchmarks/large.py --scale 0.01           # a hundredth of each number
    python extras/benchmarks/large.py --only classes files   # or table, tars

A line has the seconds of CPU, and the most bytes of memory that it took beyond what there was before. Files are links
to an empty one; the 14 million files are names in an array, as data=image_folder keeps them. The evaluation needs
extras/finished, the tars extras/webdataset. Bytes are read from Linux's /proc; elsewhere they are 0.
"""

import csv
import io
import os
import re
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torchvision.datasets import ImageFolder as TorchImageFolder

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from data.batch_transform import Normalize
from data.classes import with_classes
from data.image_folder import ImageFolder
from data.image_table import Rows
from data.subset import count_shared, sketch, split
from loaders import WorkerLoader
from training.checks import checksum_of_labels
from training.script import parser, run_script

CLASSES = 21_000
FILES = 14_000_000
COLUMNS = 100_000
TARS = 10_000


def main(typed: list[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument("--scale", type=float, default=1.0, help="of all numbers; default: 1")
    options.add_argument("--only", nargs="+", choices=PARTS, default=[*PARTS], help="the parts to try")
    arguments = options.parse_args(typed)
    for name in arguments.only:
        with tempfile.TemporaryDirectory() as folder:
            PARTS[name](Path(folder), arguments.scale)


def measured(what: str, function: Callable[[], Any]) -> Any:
    """Calls the function, prints what it took, and returns what it returned."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins at what is in use now
    before = memory("VmRSS")
    began = time.process_time()
    result = function()
    seconds = time.process_time() - began
    print(f"{what:<72} {seconds:8.2f} s {max(0, memory('VmHWM') - before):>15,} bytes", flush=True)
    return result


def memory(key: str) -> int:
    with suppress(OSError):
        found = re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())
        return int(found[1]) * 1024 if found else 0
    return 0


def try_classes(folder: Path, scale: float) -> None:
    count = int(CLASSES * scale)
    one = folder / "one.png"
    one.write_bytes(b"")
    for split_name in ("train", "val"):
        for number in range(count):
            of_class = folder / split_name / f"class {number:06}"
            of_class.mkdir(parents=True)
            os.symlink(one, of_class / "one.png")
    what = f"{count:,} class folders"
    measured(f"{what}: torchvision lists train", lambda: TorchImageFolder(str(folder / "train")))
    train = measured(f"{what}: data=image_folder lists train", lambda: ImageFolder(True, folder))
    measured(f"{what}: data=image_folder lists val", lambda: ImageFolder(False, folder))
    other_order = [name.upper() for name in reversed(train.classes)]
    measured(f"{what}: translated to another order", lambda: with_classes(train, other_order, "the network", "it"))

    kind = import_module("extras.finished.evaluation").Evaluation

    def evaluate() -> None:
        evaluation = kind(train.classes, Normalize([0.5], [0.5]))
        for _ in range(100):
            labels = torch.randint(count, (64,))
            evaluation.add({"image": torch.zeros(64, 1, 4, 4)}, labels, torch.rand(64, count))
        evaluation.by_class()
        evaluation.draw_confusion()

    measured(f"{what}: the table of evaluate.py for 6,400 images", evaluate)


class Names:
    """What an ImageFolder lists, made up: `count` files in a thousand classes. Samples are their labels."""

    sample_ids: Any = ImageFolder.sample_ids
    _has_links = False

    def __init__(self, count: int) -> None:
        self.classes = tuple(f"n{number:08}" for number in range(1000))
        self.labels = np.arange(count) * 1000 // count
        self.files = np.char.add(np.char.zfill(np.arange(count).astype("S"), 8), b".JPEG")

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Any:
        return self.labels[index]


def try_files(folder: Path, scale: float) -> None:
    count = int(FILES * scale)
    what = f"{count:,} files"
    dataset = measured(f"{what}: their names and labels", lambda: Names(count))
    training, validation = measured(f"{what}: data.val_fraction=0.01", lambda: split(dataset, 0.01))
    kept = measured(f"{what}: what a checkpoint keeps of the split", lambda: sketch(training))
    measured(f"{what}: comparing it in a resume", lambda: count_shared(validation, kept))
    measured(f"{what}: the checksum of the labels", lambda: checksum_of_labels(training))

    def first_batch() -> None:
        with WorkerLoader(training, 256, shuffle=True, seed=0) as loader:
            next(iter(loader))

    measured(f"{what}: the first shuffled batch", first_batch)


def try_table(folder: Path, scale: float) -> None:
    count = max(2, int(COLUMNS * scale))
    names = [f"column {number}" for number in range(count)]
    path = folder / "table.csv"
    with path.open("w") as file:
        table = csv.writer(file)
        table.writerow(["image", *names])
        for row in range(20):
            table.writerow([f"{row}.png", *(np.arange(count) % 2)])
    what = f"a table of 20 rows and {count:,} columns"
    measured(f"{what}: one label", lambda: Rows(path, ["image", names[-1]]))
    rows = measured(f"{what}: all of them are labels", lambda: Rows(path, ["image", *names]))
    measured(f"{what}: the numbers in them", lambda: rows.values(names))


def try_tars(folder: Path, scale: float) -> None:
    count = max(1, int(TARS * scale))
    for number in range(count):
        with tarfile.open(folder / f"{number:05}.tar", "w") as tar:
            for sample in range(2):
                for suffix, content in (("png", b"not read"), ("cls", b"%d" % (number % 10))):
                    member = tarfile.TarInfo(f"{number:05}{sample}.{suffix}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
    kind = import_module("extras.webdataset.webdataset").WebDataset
    urls = f"{folder}/*.tar"
    measured(f"{count:,} tars: indexed", lambda: kind(True, urls))
    dataset = measured(f"{count:,} tars: opened with the kept indices", lambda: kind(True, urls))
    measured(f"{count:,} tars: data.val_fraction=0.1", lambda: split(dataset, 0.1))


PARTS = {"classes": try_classes, "files": try_files, "table": try_table, "tars": try_tars}

if __name__ == "__main__":
    run_script(main)
