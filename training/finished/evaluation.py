"""Evaluation: a table by class, the confusion matrix, and the images with the worst predictions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from training.data_spec import DataSpec
from training.figure import INK, new_figure, png
from training.table import table

MISTAKES = 25  # images in the picture of the worst mistakes
TABLE_CLASSES = 40  # of more classes, the table has those with the lowest F1
NAMED_CLASSES = 40  # with more classes, the confusion matrix has no names
COUNTED_CLASSES = 15  # with more classes, its cells have no numbers
DRAWN_CLASSES = 2000  # with more classes, it is not drawn


@dataclass(frozen=True)
class Mistake:
    """A misclassified image, with the probabilities (0 to 1) of its true class and of the predicted one."""

    image: np.ndarray  # uint8 (H, W, C)
    truth: int
    predicted: int
    truth_probability: float
    predicted_probability: float


class Evaluation:
    """Collects what a network predicts for labelled images, batch by batch."""

    def __init__(self, spec: DataSpec) -> None:
        self.spec = spec
        self.mistakes: list[Mistake] = []  # the lowest probabilities of the true class, sorted
        self._truth: list[Tensor] = []
        self._predicted: list[Tensor] = []

    def add(self, images: Tensor, labels: Tensor, probabilities: Tensor) -> None:
        """Adds a batch. images: normalised (B, C, H, W). labels: int64 (B,). probabilities: (B, number of classes)."""
        best, predicted = probabilities.max(1)
        of_truth = probabilities.gather(1, labels[:, None])[:, 0]
        self._truth.append(labels.cpu())
        self._predicted.append(predicted.cpu())
        wrong = (predicted != labels).nonzero()[:, 0]
        for row in wrong[of_truth[wrong].argsort()[:MISTAKES]].tolist():
            classes = int(labels[row]), int(predicted[row])
            self.mistakes.append(Mistake(self._pixels(images[row]), *classes, float(of_truth[row]), float(best[row])))
        self.mistakes = sorted(self.mistakes, key=lambda mistake: mistake.truth_probability)[:MISTAKES]

    def by_class(self) -> list[dict[str, Any]]:
        """A row per class: its name, its number of images, precision, recall and F1, which are 0 if undefined."""
        (truth, predicted), classes = self._truth_and_predicted(), len(self.spec.classes)
        images, predictions = np.bincount(truth, minlength=classes), np.bincount(predicted, minlength=classes)
        right = np.bincount(truth[truth == predicted], minlength=classes)
        precision, recall = right / np.maximum(predictions, 1), right / np.maximum(images, 1)
        f1 = 2 * right / np.maximum(images + predictions, 1)
        columns = zip(
            self.spec.classes, images.tolist(), precision.tolist(), recall.tolist(), f1.tolist(), strict=True
        )
        return [dict(zip(("class", "images", "precision", "recall", "f1"), row, strict=True)) for row in columns]

    def table(self) -> str:
        """`by_class` as text for a terminal."""
        rows = self.by_class()
        shown = rows if len(rows) <= TABLE_CLASSES else sorted(rows, key=lambda row: row["f1"])[:TABLE_CLASSES]
        numbers = [[key, *(f"{row[key]:.3f}" for row in shown)] for key in ("precision", "recall", "f1")]
        names = ["class", *(str(row["class"]) for row in shown)]
        lines = table([names, ["images", *(f"{row['images']}" for row in shown)], *numbers])
        left_out = len(rows) - len(shown)
        return "\n".join([*lines, *([f"and {left_out} classes with a higher f1"] if left_out else [])])

    def draw_confusion(self) -> bytes | None:
        """A PNG: of each class (row), the share that was predicted as each (column). None for too many classes."""
        names = [str(name) for name in self.spec.classes]
        if len(names) > DRAWN_CLASSES:
            return None
        counts = np.zeros((len(names), len(names)), int)
        np.add.at(counts, self._truth_and_predicted(), 1)
        side = 4 + 0.3 * min(len(names), NAMED_CLASSES)
        figure = new_figure("Confusion matrix", side + 1, side)
        axes = figure.subplots()
        shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
        figure.colorbar(axes.imshow(shares, cmap="Blues", vmin=0, vmax=1), label="share of the true class")
        axes.set(xlabel="predicted class", ylabel="true class")
        if len(names) <= NAMED_CLASSES:
            axes.set_xticks(range(len(names)), names, rotation=90, parse_math=False)
            axes.set_yticks(range(len(names)), names, parse_math=False)
        if len(names) <= COUNTED_CLASSES:
            for (row, column), count in np.ndenumerate(counts):
                colour = "white" if shares[row, column] > 0.5 else INK
                axes.text(column, row, count, ha="center", va="center", fontsize=7, color=colour)
        return png(figure)

    def draw_mistakes(self) -> bytes:
        """A PNG with the worst mistakes: each image with its true and its predicted class, and their probabilities."""
        figure = new_figure("Worst mistakes: the true class, and the one predicted", 12, 13)
        for axes, mistake in zip(figure.subplots(5, 5).flat, [*self.mistakes, *[None] * MISTAKES], strict=False):
            axes.axis("off")
            if mistake is not None:
                truth, predicted = self.spec.classes[mistake.truth], self.spec.classes[mistake.predicted]
                axes.imshow(mistake.image.squeeze(), cmap="gray", vmin=0, vmax=255)
                title = f"{truth} ({mistake.truth_probability:.0%})\n{predicted} ({mistake.predicted_probability:.0%})"
                axes.set_title(title, fontsize=8, parse_math=False)
        return png(figure)

    def _truth_and_predicted(self) -> tuple[np.ndarray, np.ndarray]:
        return torch.cat(self._truth).numpy(), torch.cat(self._predicted).numpy()

    def _pixels(self, image: Tensor) -> np.ndarray:
        """Undoes the normalisation: from floats (C, H, W) to uint8 (H, W, C), with 1 or 3 channels for drawing."""
        mean, std = (torch.tensor(values)[:, None, None] for values in (self.spec.mean, self.spec.std))
        pixels = ((image.float().cpu() * std + mean) * 255).round().clamp(0, 255).to(torch.uint8)
        return pixels[: 3 if len(pixels) > 2 else 1].permute(1, 2, 0).numpy()
