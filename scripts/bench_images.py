"""Measures how fast the images of a folder can be decoded, and how many cores feed a given training speed.

    python scripts/bench_images.py DIR                                           # every image in DIR and below
    python scripts/bench_images.py DIR --batch-size 256 --steps-per-second 8     # cores that feed such a run

It reads some of the images into memory and then, on one core, makes training and evaluation samples of them with each
decoder that is installed (data.decoder). The decoders take turns. Reading from the disk is not measured.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from data.errors import DataError
from data.image_files import image_files
from data.images.crops import CroppedDataset
from data.images.decoders import DECODERS, choose
from data.images.decoding import decode, image_errors
from scripts.bench_harness import ROUNDS, BenchError, Columns, Row, in_turns, parsed, report, run


class InMemory(CroppedDataset):
    """Samples of image files in memory."""

    def __init__(self, train: bool, files: list[bytes], image_size: int, decoder: str) -> None:
        super().__init__(train, image_size)
        self.files, self.labels, self._decoders = files, np.zeros(len(files), np.int64), choose(decoder)

    def encoded(self, index: int) -> tuple[bytes, str]:
        return self.files[index], f"image {index}"


def readable(paths: list[str]) -> tuple[list[bytes], list[str]]:
    """Returns the content of the images that can be decoded, and for each other one a sentence that says why not."""
    files, errors = [], []
    for path in paths:
        try:
            with image_errors(path):
                data = Path(path).read_bytes()
                decode(data, lambda size: (0, 0, 1, 1), decoders=choose("auto"))
            files.append(data)
        except DataError as error:
            errors.append(str(error))
    if not files:
        raise BenchError(f"none of {len(paths)} images can be read; the first: {errors[0]}")
    return files, errors


def images_per_second(dataset: CroppedDataset, seconds: float) -> float:
    """Makes samples for `seconds` of CPU time. Returns how many one core makes per second."""
    torch.manual_seed(0)  # the same boxes for every decoder
    done, start = 0, time.process_time()
    while done == 0 or time.process_time() - start < seconds:
        dataset[done % len(dataset)]
        done += 1
    return done / (time.process_time() - start)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder with images in it or below it")
    parser.add_argument("--images", type=int, default=200, help="how many are tried, drawn at random (200)")
    parser.add_argument("--image-size", type=int, default=224, help="side of a sample in pixels (224)")
    parser.add_argument("--batch-size", type=int, default=64, help="images per step (64)")
    parser.add_argument("--steps-per-second", type=float, default=20, help="of the training to be fed (20)")
    parser.add_argument("--seconds", type=float, default=45, help="CPU time of all measurements together (45)")
    positive = ("images", "image_size", "batch_size", "steps_per_second", "seconds")
    given = parsed(parser, arguments, positive)
    torch.set_num_threads(1)
    paths = image_files([str(given.folder)])
    some = np.random.default_rng(0).permutation(len(paths))[: given.images].tolist()
    files, errors = readable([paths[index] for index in some])

    decoders = []
    for name in (*DECODERS, "pillow"):
        try:
            choose(name)
            decoders.append(name)
        except DataError as error:  # it is not installed
            errors.append(str(error))
    seconds = given.seconds / (2 * ROUNDS * len(decoders))

    def measure(name: str) -> Row:
        training, evaluation = (InMemory(train, files, given.image_size, name) for train in (True, False))
        return {"training": images_per_second(training, seconds), "evaluation": images_per_second(evaluation, seconds)}

    rows = in_turns(decoders, measure)
    needed = given.batch_size * given.steps_per_second
    for row in rows:
        row["cores"] = needed / row["training"]
    columns: Columns = (
        ("loader", "decoder", str),
        ("training", "training", "{:,.0f}/s".format),
        ("evaluation", "evaluation", "{:,.0f}/s".format),
        ("cores", f"cores for {needed:,.0f}/s", "{:.1f}".format),
    )
    title = (
        f"{given.folder}: {len(files)} of {len(paths):,} images, {np.mean([*map(len, files)]) / 1000:,.0f} kB each\n"
        f"images per second and core; training needs {needed:,.0f} per second "
        f"({given.steps_per_second:g} steps of {given.batch_size})"
    )
    report("\n".join([title, *errors]), columns, {"images": len(paths), "errors": errors, "rows": rows}, given.json)


if __name__ == "__main__":
    run(main)
