"""Evaluates the network of a run: its scores, a table by class, the confusion matrix and the worst mistakes.

    python scripts/evaluate.py outputs/2026-11-21_10-00-00_123456                 # the run's test set
    python scripts/evaluate.py RUN --split train                                  # its training set, not augmented
    python scripts/evaluate.py RUN data=image_folder data.root=DIR                # other data with the same classes

RUN is the folder of a run, whose best checkpoint is used, or a checkpoint file. It writes confusion.png, mistakes.png
and evaluation.json into RUN/evaluation/SPLIT. No code in RUN is executed: its settings may name only what
data/, models/ and training/tasks.py define, and classes of torch, torchvision and timm; --trust MODULE allows another.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from training.files import write_whole
from training.finished.evaluation import Evaluation
from training.finished.finished_run import FinishedRun, parser, run_script
from training.metrics import EpochMetrics
from training.processes import Processes
from training.trust import check_links


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Returns the content of evaluation.json."""
    options = parser(__doc__)
    options.add_argument(
        "overrides", nargs="*", default=[], help="settings to replace, such as data.root=DIR or device=cpu"
    )
    options.add_argument(
        "--split", choices=("test", "val", "train"), default="test", help="which images; default: test"
    )
    options.add_argument("--out", type=Path, help="folder to write to; default: RUN/evaluation/SPLIT")
    given = options.parse_intermixed_args(arguments)

    run = FinishedRun(given.run, given.overrides, given.trust)
    check_links(run.folder, "evaluation", given.trust)
    dataset = run.dataset(given.split)
    evaluation = Evaluation(run.spec) if run.spec.mean and run.task.label_below else None
    metrics = EpochMetrics(run.config.task.get("metrics"), Processes(run.device))
    sums: dict[str, float] = {}
    images = 0
    with run.loader(dataset) as loader:
        for batch in tqdm(loader, desc="evaluating", unit="batch", leave=False, disable=None):
            outputs, labels = run.outputs(batch), batch.get(run.task.label)
            images += len(outputs)
            metrics.update(outputs, labels)
            for name, values in run.task.scores(outputs, labels).items():
                sums[name] = sums.get(name, 0.0) + values.sum().item()
            if evaluation is not None:
                evaluation.add(batch["image"], labels, run.task.predictions(outputs))
    scores = {name: total / max(images, 1) for name, total in sums.items()} | metrics.compute()
    result: dict[str, Any] = {
        "checkpoint": str(run.path),
        "step": run.step,
        "split": given.split,
        "images": images,
        "skipped": len(dataset) - images,
        **scores,
    }
    if evaluation is not None:
        result["classes"] = evaluation.by_class()

    out: Path = given.out or run.folder / "evaluation" / given.split
    write(out, result, evaluation)
    if evaluation is not None:
        print(f"{evaluation.table()}\n\nconfusion matrix and worst mistakes: {out}")
    print(run)
    print(
        ", ".join(f"{name} {value:.4f}" for name, value in scores.items()),
        f"of {images:,} images ({given.split})",
    )
    return result


def write(folder: Path, result: dict[str, Any], evaluation: Evaluation | None) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / "evaluation.json", json.dumps(result, indent=2) + "\n")
    if evaluation is None:
        return
    write_whole(folder / "mistakes.png", evaluation.draw_mistakes())
    if picture := evaluation.draw_confusion():
        write_whole(folder / "confusion.png", picture)


if __name__ == "__main__":
    run_script(main)
