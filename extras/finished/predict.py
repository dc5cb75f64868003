"""Predicts with the network of a run, and writes RUN/predictions.csv, or .jsonl.

    python extras/finished/predict.py RUN photos/ one.jpg list.txt          # folders, images, lists of paths
    python extras/finished/predict.py RUN data=image_folder data.root=DIR   # a dataset's test samples; --split train

RUN is the folder of a run, whose best checkpoint is used, or a checkpoint file. The table is new each time,
with a row for each sample, in order: its file or index, the five most probable classes with their probabilities (the
values, if the task has no classes; task=multilabel: the probability of each class, in a column with its name), and an
error if it cannot be read; if none can be, the exit code is 1. If a network returns anything but a tensor (B, values),
such as boxes, each row is a line of JSON. A task with `columns` and write_prediction(prediction, name, folder), such
as that of examples/segmentation, writes files into predictions/, and the rows name them. The dataset's own
`prepare(image)` prepares images. data.collate is not used.
"""

import codecs
import csv
import json
import logging
import sys
from collections.abc import Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from torch import Tensor
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from extras.finished.finished_run import SPLITS, FinishedRun, parser
from extras.finished.samples import ImageFiles, Samples, batches_of, image_files, name_of, read_inputs
from loaders import WorkerLoader, move, tensors
from training.checks import is_stream
from training.config import ConfigError
from training.files import replacing
from training.module_state import not_finite
from training.script import run_script
from training.tasks import Multilabel

log = logging.getLogger(__name__)

TOP = 5  # classes of a row

Row = dict[str, Any]  # of the table: its cells by column


def main(typed: list[str] | None = None) -> Path:
    """Returns the path of the table."""
    options = parser(
        __doc__,
        "file to write; .csv or .jsonl is added; default: RUN/predictions",
        ("INPUT", "images, folders, .txt files with a path per line; KEY=VALUE replaces a setting of the run"),
    )
    options.add_argument("--split", choices=SPLITS, default="test", help="of a dataset; default: test")
    arguments = options.parse_intermixed_args(typed)
    overrides = [text for text in arguments.others if "=" in text and not Path(text).exists()]
    inputs = [text for text in arguments.others if text not in overrides]

    run = FinishedRun(arguments.run, overrides, for_new_images=bool(inputs))
    if inputs:
        names = image_files(inputs)
        samples = Samples(names, ImageFiles(run, names))
    else:
        dataset = run.dataset(arguments.split)
        if is_stream(dataset):
            other = ", or data.streaming=false" if run.config.data.get("streaming") else " of images"
            raise ConfigError(f"{type(dataset).__name__} is a stream, whose samples have no order: give files{other}")
        names = [name_of(dataset, index) for index in range(len(dataset))]
        samples = Samples(names, partial(read_inputs, run.task.inputs, dataset))
    if not len(samples):
        raise ConfigError("there are no samples to predict: give other files, folders or settings")
    stem: Path = arguments.out or run.folder / "predictions"
    stem = stem.with_suffix("") if stem.suffix in (".csv", ".jsonl") else stem
    path, failed = write_table(stem, records(run, samples, stem))
    print(f"{path}: predictions of {run}: {len(samples) - failed:,}; samples that could not be read: {failed:,}")
    if failed == len(samples):
        _, _, reason = samples[0]
        raise ConfigError(f"{path}: no sample could be read or prepared; the first: {reason}")
    return path


def records(run: FinishedRun, samples: Samples, folder: Path) -> Iterator[Row]:
    """A row of the table for each sample, by column; one that cannot be read has only "file" and "error"."""
    names = Names()
    broken = list[str]()  # the files whose predictions are not finite
    size = run.config.train.part_size
    workers = run.config.loader.num_workers
    with WorkerLoader[Any](samples, size, num_workers=workers, collate_fn=list, seed=0) as loader:
        for read in tqdm(loader, desc="predicting", unit="batch", leave=False, disable=None):
            predictions: dict[int, Row] = {}  # by row
            for rows, batch in batches_of(read):
                on_device = move(batch, lambda tensor: tensor.to(run.device))
                outputs = run.task.predictions(run.outputs(run.data.transform(on_device)))
                by_row = dict(zip(rows, per_sample(outputs, len(rows)), strict=True))
                broken += not_finite((read[row][0], value) for row in rows for value in tensors(by_row[row]))
                for row, predicted in by_row.items():
                    name = names.unused(read[row][0])
                    predictions[row] = cells(run, predicted, name, folder)
                    if taken := {"file", "error"} & predictions[row].keys():
                        raise ConfigError(
                            f"a prediction has {', '.join(sorted(taken))}, a column that the table has already: let "
                            "the network, or the task's `columns`, call it otherwise"
                        )
            for row, (name, _, reason) in enumerate(read):
                yield {"file": name, **predictions.get(row, {"error": reason})}
    if broken:
        log.warning(
            "%s gives NaN or infinity for %d samples, first for %s: look at its values, or try train.precision=fp32",
            type(run.trainer.model).__name__,
            len(broken),
            broken[0],
        )


class Names:
    """The names of the files that a task writes: the samples' names, with a number if a stem repeats."""

    def __init__(self) -> None:
        self._used = set[str]()

    def unused(self, name: str) -> str:
        path = Path(name)
        number = 1
        while path.stem in self._used:
            number += 1
            path = path.with_name(f"{Path(name).stem}_{number}{path.suffix}")
        self._used.add(path.stem)
        return str(path)


def per_sample(outputs: Any, count: int) -> list[Any]:
    """The prediction for each sample: the rows of a tensor or of a dict's tensors, or the items of a list."""
    if isinstance(outputs, dict):
        rows = {name: per_sample(value, count) for name, value in outputs.items()}
        return [{name: values[row] for name, values in rows.items()} for row in range(count)]
    return list(outputs)


def cells(run: FinishedRun, predicted: Any, name: str, folder: Path) -> Row:
    """A sample's cells by column: the best classes and their probabilities, or the values; lists for other shapes."""
    if hasattr(run.task, "write_prediction"):
        return dict(zip(run.task.columns, run.task.write_prediction(predicted, name, folder), strict=True))
    values = move(predicted, Tensor.tolist)
    if not isinstance(predicted, Tensor) or predicted.ndim > 1:
        return values if isinstance(values, dict) else {"prediction": values}
    if isinstance(run.task, Multilabel) and run.data.classes:
        names = [f"probability_{name}" for name in run.data.classes]
        return dict(zip(names, (round(value, 6) for value in values), strict=True))
    if not (run.task.label_below and run.data.classes):
        numbers = values if isinstance(values, list) else [values]
        if len(numbers) == 1:
            return {"value": numbers[0]}
        return {f"value_{place}": value for place, value in enumerate(numbers, 1)}
    row: Row = {}
    probabilities, indices = predicted.topk(min(TOP, len(predicted)))
    for place, index in enumerate(indices.tolist()):
        suffix = f"_{place + 1}" if place else ""
        row[f"class{suffix}"] = run.data.classes[index]
        row[f"probability{suffix}"] = round(probabilities[place].item(), 6)
    return row


def write_table(stem: Path, rows: Iterator[Row]) -> tuple[Path, int]:
    """Writes the table, as .csv if cells are numbers or texts. Returns its path, and how many rows are errors."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    begin = list[Row]()  # up to the first row without an error, which has all columns
    for row in rows:
        begin.append(row)
        if "error" not in row:
            break
    columns = [key for key in begin[-1] if key != "error"]
    is_csv = not any(isinstance(value, list | dict) for value in begin[-1].values())
    csv_path = stem.with_name(f"{stem.name}.csv")
    jsonl_path = stem.with_name(f"{stem.name}.jsonl")
    path, other = (csv_path, jsonl_path) if is_csv else (jsonl_path, csv_path)
    failed = 0
    with replacing(path) as file:
        text = codecs.getwriter("utf-8")(file, "surrogateescape")
        table = csv.DictWriter(text, [*columns, "error"], quoting=csv.QUOTE_NONNUMERIC, lineterminator="\n")
        if is_csv:
            table.writeheader()
        for row in chain(begin, rows):
            if "error" in row:
                failed += 1
            if is_csv:
                table.writerow(row)
            else:
                text.write(json.dumps(row) + "\n")
    other.unlink(missing_ok=True)  # from an earlier network
    return path, failed


if __name__ == "__main__":
    run_script(main)
