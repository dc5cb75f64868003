"""Predicts the classes or values of images with the network of a run, and writes RUN/predictions.csv.

    python scripts/predict.py RUN photos/ one.jpg list.txt          # folders and what is below them, images, lists
    python scripts/predict.py RUN data=image_folder data.root=DIR   # a dataset's test images, or --split train

RUN is the folder of a run, whose best checkpoint is used, or a checkpoint file. predictions.csv has a row for each
image, in order: the file, and the five most probable classes with their probabilities. predictions_failed.csv lists
the images that cannot be read. A task with `columns` and write_prediction(prediction, name, folder), such as that of
examples/segmentation, writes files instead, into predictions/, and names them. predictions_about.json names the
checkpoint and the data. After an interruption the same command continues. Files are prepared by the dataset's own
`prepare(image)`; without one they are refused. No code in RUN is executed: see scripts/evaluate.py.
"""

from __future__ import annotations

import sys
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from extras.finished.image_files import BlackIfDamaged, ImageFiles, image_files
from data.subset import Subset
from scripts.command import parser, run_script
from training.checks import is_stream
from training.config import ConfigError
from training.finished.finished_run import SPLITS, FinishedRun, refused_as, with_run
from training.finished.predictions import Predictions
from training.finished.prepare import Prepare
from training.trust import check_links

CRASHED = "reading it crashes the process that reads it"


def main(arguments: list[str] | None = None) -> None:
    options = with_run(parser(__doc__))
    inputs_help = "images, folders, .txt files with a path per line; KEY=VALUE replaces a setting of the run"
    options.add_argument("inputs", nargs="*", default=[], help=inputs_help)
    options.add_argument("--split", choices=SPLITS, default="test", help="of a dataset; default: test")
    options.add_argument("--out", type=Path, help="file to write; default: RUN/predictions.csv")
    given = options.parse_intermixed_args(arguments)
    overrides = [text for text in given.inputs if "=" in text and not Path(text).exists()]
    inputs = [text for text in given.inputs if text not in overrides]

    run = FinishedRun(given.run, overrides, given.trust)
    shape = run.image_shape("predict.py")
    check_links(run.folder, "predictions*", given.trust)
    out: Path = given.out or run.folder / "predictions.csv"
    if inputs:
        names = image_files(inputs)
        dataset: Any = ImageFiles(names, Prepare(run.spec.dataset), channels=shape[2])
    else:
        dataset = run.dataset(given.split)
        if is_stream(dataset):
            name = type(dataset).__name__
            raise ConfigError(
                f"predict.py numbers samples, and {name} is a stream: give a folder, or data.streaming=false"
            )
        names = [name_of(dataset, index) for index in range(len(dataset))]
    digest = blake2b(run.path.read_bytes(), digest_size=16).hexdigest()
    images = "files" if inputs else {"split": given.split, **run.config.data}
    about = {"checkpoint": str(run.path.resolve()), "step": run.step, "digest": digest, "images": images}
    predictions = Predictions(out, header(run), about)
    todo = np.array([index for index, name in enumerate(names) if name not in predictions.done], dtype=int)
    if done := len(names) - len(todo):
        print(
            f"{done:,} of {len(names):,} images are in {out} already: delete it, or give --out, to predict them again"
        )
    failed = predict(run, BlackIfDamaged(dataset, shape), names, todo, predictions) if len(todo) else 0
    print(f"{len(todo) - failed:,} predictions of {run}: {out}")
    if failed:
        print(f"{failed:,} images could not be read: {out.with_name(f'{out.stem}_failed.csv')}")


def predict(
    run: FinishedRun, images: BlackIfDamaged, names: list[str], todo: np.ndarray, predictions: Predictions
) -> int:
    """Writes the predictions for the images at the indices `todo`. Returns how many could not be read."""
    failed, size = 0, run.batch_size
    write, folder = getattr(run.task, "write_prediction", None), predictions.path.with_suffix("")
    with run.loader(Subset(images, todo), name="prefetch", on_error="skip") as loader:
        bar = tqdm(loader, desc="predicting", unit="batch", leave=False, disable=None)
        for number, batch in enumerate(bar):
            with refused_as(f"{run} cannot be used for predictions"):
                predicted = run.task.predictions(run.outputs(batch))
                rows = predicted if write else cells(run, predicted)
            # An image that is missing from the batch has crashed its worker: on_error=skip leaves it out.
            good, bad = [], dict.fromkeys(todo[number * size : (number + 1) * size].tolist(), CRASHED)
            for index, reason, row in zip(batch["index"].tolist(), batch["reason"], rows, strict=True):
                bad.pop(index)
                if reason:
                    bad[index] = reason
                else:
                    good.append([names[index], *(write(row, names[index], folder) if write else row)])
            predictions.append(good, [[names[index], bad[index]] for index in sorted(bad)])
            failed += len(bad)
    return failed


def name_of(dataset: Any, index: int) -> str:
    """The name that the dataset gives the sample, such as its file; else the sample's index in the whole dataset."""
    if isinstance(dataset, Subset):
        return name_of(dataset.dataset, int(dataset.indices[index]))
    return str(dataset.path(index) if hasattr(dataset, "path") else index)


def header(run: FinishedRun) -> list[str]:
    if columns := getattr(run.task, "columns", ()):
        return ["file", *columns]
    if not run.spec.classes:
        numbers = run.task.num_outputs
        return ["file", *(["value"] if numbers == 1 else [f"value_{number}" for number in range(1, numbers + 1)])]
    top = range(2, min(5, len(run.spec.classes)) + 1)
    return ["file", "class", "probability", *(f"{name}_{place}" for place in top for name in ("class", "probability"))]


def cells(run: FinishedRun, probabilities: Tensor) -> list[list[str | float]]:
    """The cells after "file", for each row of `probabilities` (B, number of outputs).

    They are the best classes and their probabilities; in a run without classes, the values as they are. Raises
    ConfigError for predictions of another shape.
    """
    wanted = len(run.spec.classes) or run.task.num_outputs
    if probabilities.ndim != 2 or probabilities.shape[1] != wanted:
        raise ConfigError(
            f"{run} returns outputs of shape {tuple(probabilities.shape)}, and {type(run.task).__name__} needs "
            f"{wanted} for each image: its predictions would mean nothing; a task with `columns` and "
            "write_prediction, as in examples/segmentation, may return others"
        )
    if not run.spec.classes:
        return probabilities.tolist()
    best = probabilities.topk(min(5, probabilities.shape[1]))
    rows = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [
        [cell for place in zip(*row, strict=True) for cell in (run.spec.classes[place[0]], round(place[1], 6))]
        for row in rows
    ]


if __name__ == "__main__":
    run_script(main)
