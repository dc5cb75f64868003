"""Evaluates the network of a run: its scores, a table by class, the confusion matrix and the worst mistakes.

    python scripts/evaluate.py outputs/2026-11-21_10-00-00_123456                 # the run's test set
    python scripts/evaluate.py RUN --split train                                  # its training set, not augmented
    python scripts/evaluate.py RUN data=image_folder data.root=DIR                # other data with the same classes

RUN is the folder of a run, whose best checkpoint is used, or a checkpoint file. Scores are those of the run's own
evaluation_step and task.metrics, in batches of the run's size. It writes confusion.png, mistakes.png and
evaluation.json into RUN/evaluation/SPLIT. No code in RUN is executed: its settings may name only what
training/trust.py allows; --trust MODULE allows another.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.command import parser, run_script
from training.checks import is_stream
from training.files import write_whole
from training.finished.evaluation import Evaluation
from training.finished.finished_run import SPLITS, FinishedRun, refused_as, with_run
from training.results import finite
from training.stopping import StopSignals
from training.trust import check_links


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Returns the content of evaluation.json."""
    options = with_run(parser(__doc__))
    options.add_argument("overrides", nargs="*", default=[], help="settings to replace, such as data.root=DIR")
    options.add_argument("--split", choices=SPLITS, default="test", help="which samples; default: test")
    options.add_argument("--out", type=Path, help="folder to write to; default: RUN/evaluation/SPLIT")
    given = options.parse_intermixed_args(arguments)

    run = FinishedRun(given.run, given.overrides, given.trust)
    check_links(run.folder, "evaluation", given.trust)
    dataset = run.dataset(given.split)
    with refused_as(f"{run} cannot be evaluated"):
        samples, scores, evaluation = evaluate(run, dataset)
    result = {"checkpoint": str(run.path), "step": run.step, "split": given.split, "samples": samples}
    result |= {"skipped": None if is_stream(dataset) else len(dataset) - samples, **scores}

    out: Path = given.out or run.folder / "evaluation" / given.split
    out.mkdir(parents=True, exist_ok=True)
    if evaluation is not None:
        result["classes"] = evaluation.by_class()
        write_whole(out / "mistakes.png", evaluation.draw_mistakes())
        if picture := evaluation.draw_confusion():
            write_whole(out / "confusion.png", picture)
        print(f"{evaluation.table()}\n\nconfusion matrix and worst mistakes: {out}")
    write_whole(out / "evaluation.json", json.dumps(finite(result), indent=2) + "\n")
    print(run)
    text = ", ".join(f"{name} {value:.4f}" for name, value in scores.items())
    print(f"{text} of {samples:,} {'images' if run.spec.images else 'samples'} ({given.split})")
    return result


def evaluate(run: FinishedRun, dataset: Any) -> tuple[int, dict[str, float], Evaluation | None]:
    """Returns the number of samples, the scores by name, and for classes what is predicted for each sample."""
    trainer = run.trainer()
    has_classes = not trainer.overrides("evaluation_step") and run.spec.mean and run.task.label_below
    label = str(run.task.label)
    evaluation = Evaluation(run.spec) if has_classes else None
    step, samples, outputs = trainer.evaluation_step, 0, list[Tensor]()
    trainer.model.register_forward_hook(lambda _, inputs, output: outputs.append(output))

    def evaluation_step(batch: dict[str, Any]) -> dict[str, Tensor]:
        nonlocal samples
        samples, scores = samples + run.task.count(batch), step(batch)
        if evaluation is not None:
            evaluation.add(batch[run.spec.images[0]], batch[label].flatten(), run.task.predictions(outputs[-1]))
        outputs.clear()
        return scores

    trainer.evaluation_step = evaluation_step  # type: ignore[method-assign]  # it also sees the network's outputs
    with run.loader(dataset) as loader:
        scores, _ = trainer.evaluate(loader, StopSignals())
    if not run.has_loss:
        scores.pop("loss", None)
    return samples, scores, evaluation


if __name__ == "__main__":
    run_script(main)
