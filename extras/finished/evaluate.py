"""Evaluates the network of a run: its scores, a table by class, the confusion matrix and the worst mistakes.

    python extras/finished/evaluate.py outputs/2026-11-21_10-00-00_123456         # the run's test set
    python extras/finished/evaluate.py RUN --split train                          # its training set, not augmented
    python extras/finished/evaluate.py RUN data=image_folder data.root=DIR        # other data with the same classes

RUN is the folder of a run, whose best checkpoint is used, or a checkpoint file. Scores are those of the run's own
evaluation_step and task.metrics, in batches of the run's size, or of that of its parts (train.accumulate). It writes
evaluation.json and, for one class per sample, confusion.png into RUN/evaluation/SPLIT, and mistakes.png if the samples
are uint8 images; and brings RUN/report.html up to date. If a key of `data` is given, the folder is SPLIT-other.
"""

import json
import logging
import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from data import length_of
from extras.finished.evaluation import ClassCounts, Evaluation
from extras.finished.finished_run import SPLITS, FinishedRun, parser
from extras.finished.samples import name_of
from training.config import ROOT, ConfigError
from training.dry_run import dry_run_evaluation
from training.files import write_whole
from training.results import only_warns, plain
from training.script import run_script
from training.tasks import Multilabel

log = logging.getLogger(__name__)

OURS = ("checkpoint", "step", "split", "settings", "samples", "classes", "mistakes")  # keys of evaluation.json


def main(typed: list[str] | None = None) -> dict[str, Any]:
    """Returns the content of evaluation.json."""
    options = parser(__doc__, "folder to write to; default: RUN/evaluation/SPLIT, or SPLIT-other for other data")
    options.add_argument("--split", choices=SPLITS, default="test", help="which samples; default: test")
    arguments = options.parse_intermixed_args(typed)

    run = FinishedRun(arguments.run, arguments.others)
    dataset = run.dataset(arguments.split)
    samples, scores, evaluation = evaluate(run, dataset)
    result = {"checkpoint": str(run.path), "step": run.step, "split": arguments.split, "settings": arguments.others}
    result |= {"samples": samples, **scores}

    name = f"{arguments.split}-other" if run.replaces_data else arguments.split
    out: Path = arguments.out or run.folder / "evaluation" / name
    out.mkdir(parents=True, exist_ok=True)
    said = []  # when all is written: the terminal may be closed
    if evaluation is not None:
        result["classes"] = evaluation.by_class()
        said.append(f"{evaluation.table()}\n")
    if isinstance(evaluation, Evaluation):
        files = files_of(evaluation, dataset)
        result["mistakes"] = evaluation.mistakes_of(files)
        pictures = {"confusion.png": evaluation.draw_confusion(), "mistakes.png": evaluation.draw_mistakes(files)}
        for name, picture in pictures.items():
            (out / name).unlink(missing_ok=True)  # of an earlier evaluation
            if picture is not None:
                write_whole(out / name, picture)
        if evaluation.normalize is None:
            said.append(
                f"confusion matrix: {out}; the worst mistakes are rows of evaluation.json, as only images that the "
                "dataset gives as uint8 can be drawn"
            )
        else:
            said.append(f"confusion matrix and worst mistakes: {out}")
    write_whole(out / "evaluation.json", json.dumps(plain(result), indent=2) + "\n")
    shown = ", ".join(f"{name} {value:.4f}" for name, value in scores.items())
    said.append(f"{run}\n{shown} of {samples:,} samples ({arguments.split})")
    with only_warns("report.html"):
        update_page(run.folder)
    print(*said, sep="\n")
    return result


def files_of(evaluation: Evaluation, dataset: Any) -> list[str]:
    """The names of the samples of the mistakes; empty ones if it is not known which samples they are."""
    indices = np.setdiff1d(np.arange(length_of(dataset) or 0), evaluation.skipped)
    if len(indices) != evaluation.samples:  # such as those of a stream
        return [""] * len(evaluation.mistakes)
    return [name_of(dataset, int(indices[mistake.sample])) for mistake in evaluation.mistakes]


def update_page(folder: Path) -> None:
    """Writes the run's report.html again, if it has one: by extras/report, which may have been deleted."""
    program = ROOT / "extras" / "report" / "page.py"
    if program.exists() and (folder / "report.html").exists():
        runpy.run_path(str(program))["main"]([str(folder)])


def evaluate(run: FinishedRun, dataset: Any) -> tuple[int, dict[str, float], ClassCounts | None]:
    """Returns the number of samples, the scores by name, and what is predicted for each class.

    For samples of one class each the latter is an Evaluation. It is None with a step of the trainer's own, and with
    outputs that are not a number per class.
    """
    trainer = run.trainer
    task = run.task
    has_own_step = trainer.overrides("evaluation_step")
    evaluation: ClassCounts | None = None
    if run.data.classes and not has_own_step:
        if isinstance(task, Multilabel):
            evaluation = ClassCounts(run.data.classes)
        elif task.label_below:
            evaluation = Evaluation(run.data.classes, run.data.normalize)
    if taken := {*OURS} & {*dry_run_evaluation(trainer, run.data, dataset)}:
        raise ConfigError(
            f"{', '.join(taken)}, a score, is a key that evaluation.json has already: choose another name in "
            "task.scores or task.metrics"
        )
    step = trainer.evaluation_step
    samples = 0
    outputs = list[Tensor]()
    hook = trainer.model.register_forward_hook(lambda _, inputs, output: outputs.append(output))

    def evaluation_step(batch: dict[str, Any]) -> dict[str, Tensor]:
        nonlocal samples, evaluation
        samples += task.batch_length(batch)
        scores = step(batch)
        if evaluation is not None:
            aligned, labels = task.align_shapes(outputs[-1], batch[task.label])
            shape = getattr(aligned, "shape", ())
            if shape[1:] != (len(evaluation.names),):
                log.warning("the table by class is left out: the network's outputs are not a tensor (B, classes)")
                evaluation = None
        if isinstance(evaluation, Evaluation):
            labels = task.cast_labels(labels)
            mask = task.scored_mask(labels)
            if labels.is_floating_point():  # shares of the classes
                labels = labels.argmax(1)
            evaluation.add(batch, labels, task.predictions(aligned), mask)
        elif evaluation is not None:
            mask = task.label_mask(labels)
            evaluation.count((labels > 0) & mask, (aligned > 0) & mask)
        outputs.clear()
        return scores

    trainer.evaluation_step = evaluation_step  # type: ignore[method-assign]  # it also sees the network's outputs
    with hook, run.loader(dataset) as loader:
        scores = trainer.evaluate(loader)
        workers = loader.loader_stats.workers
    if isinstance(evaluation, Evaluation) and workers is not None:
        evaluation.skipped = [index for index, _ in workers.skipped]
    return samples, scores, evaluation


if __name__ == "__main__":
    run_script(main)
