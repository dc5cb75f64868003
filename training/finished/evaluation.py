"""Evaluation: which classes a network confuses, and the images that it gets most wrong."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from training.data_spec import DataSpec
from training.figure import INK, new_figure, png
from training.table import table

MISTAKES = 25  # that are drawn
SHOWN = 40  # classes in the table; of more, those with the lowest F1
NAMED = 40  # classes whose names fit beside the confusion matrix
COUNTED = 15  # classes whose counts fit into its cells
DRAWN = 2000  # classes, at most, of a matrix that is drawn


@dataclass(frozen=True)
class Mistake:
    """A misclassified image, uint8 (H, W, C); the probabilities (0..1) that the network gave to two classes."""

    image: np.ndarray
    truth: int
    predicted: int
    truth_probability: float
    probability: float


class Evaluation:
    """Collects what a network predicts for labelled images, batch by batch."""

    def __init__(self, spec: DataSpec) -> None:
        self.spec = spec
        self.mistakes: list[Mistake] = []  # those with the lowest probability of the true class, the worst first
        self._truth: list[Tensor] = []
        self._predicted: list[Tensor] = []

    def add(self, images: Tensor, labels: Tensor, probabilities: Tensor) -> None:
        """images: normalised (B, C, H, W). labels: int64 (B,). probabilities: (B, number of classes)."""
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
        """For each class its name, its number of images, and precision, recall and F1, 0 where they are undefined."""
        truth, predicted, classes = *self._both(), len(self.spec.classes)
        images, named = np.bincount(truth, minlength=classes), np.bincount(predicted, minlength=classes)
        right = np.bincount(truth[truth == predicted], minlength=classes)
        precision, recall = right / np.maximum(named, 1), right / np.maximum(images, 1)
        f1 = 2 * right / np.maximum(images + named, 1)
        columns = zip(
            self.spec.classes, images.tolist(), precision.tolist(), recall.tolist(), f1.tolist(), strict=True
        )
        return [dict(zip(("class", "images", "precision", "recall", "f1"), row, strict=True)) for row in columns]

    def table(self) -> str:
        """`by_class` for a terminal."""
        rows = self.by_class()
        shown = rows if len(rows) <= SHOWN else sorted(rows, key=lambda row: row["f1"])[:SHOWN]
        numbers = [[key, *(f"{row[key]:.3f}" for row in shown)] for key in ("precision", "recall", "f1")]
        names = ["class", *(str(row["class"]) for row in shown)]
        lines = table([names, ["images", *(f"{row['images']}" for row in shown)], *numbers])
        left_out = len(rows) - len(shown)
        return "\n".join([*lines, *([f"and {left_out} classes with a higher f1"] if left_out else [])])

    def draw_confusion(self) -> bytes | None:
        """A PNG: of the images of each class (rows), the share that was predicted as each; None for very many."""
        names = [str(name) for name in self.spec.classes]
        if len(names) > DRAWN:
            return None
        counts = np.zeros((len(names), len(names)), int)
        np.add.at(counts, self._both(), 1)
        side = 4 + 0.3 * min(len(names), NAMED)
        figure = new_figure("Confusion matrix", side + 1, side)
        axes = figure.subplots()
        shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
        figure.colorbar(axes.imshow(shares, cmap="Blues", vmin=0, vmax=1), label="share of the true class")
        axes.set(xlabel="predicted class", ylabel="true class")
        if len(names) <= NAMED:
            axes.set_xticks(range(len(names)), names, rotation=90, parse_math=False)
            axes.set_yticks(range(len(names)), names, parse_math=False)
        if len(names) <= COUNTED:
            for (row, column), count in np.ndenumerate(counts):
                colour = "white" if shares[row, column] > 0.5 else INK
                axes.text(column, row, count, ha="center", va="center", fontsize=7, color=colour)
        return png(figure)

    def draw_mistakes(self) -> bytes:
        """A PNG with the worst mistakes: the image, what it is, what was predicted, and how probable that was."""
        figure = new_figure("Worst mistakes: the true class, and the one predicted", 12, 13)
        for axes, mistake in zip(figure.subplots(5, 5).flat, [*self.mistakes, *[None] * MISTAKES], strict=False):
            axes.axis("off")
            if mistake is not None:
                truth, predicted = self.spec.classes[mistake.truth], self.spec.classes[mistake.predicted]
                axes.imshow(mistake.image.squeeze(), cmap="gray", vmin=0, vmax=255)
                title = f"{truth} ({mistake.truth_probability:.0%})\n{predicted} ({mistake.probability:.0%})"
                axes.set_title(title, fontsize=8, parse_math=False)
        return png(figure)

    def _both(self) -> tuple[np.ndarray, np.ndarray]:
        return torch.cat(self._truth).numpy(), torch.cat(self._predicted).numpy()

    def _pixels(self, image: Tensor) -> np.ndarray:
        """The image (C, H, W) as it was before it was normalised: uint8 (H, W, C), with 1 or 3 channels."""
        mean, std = (torch.tensor(values)[:, None, None] for values in (self.spec.mean, self.spec.std))
        pixels = ((image.float().cpu() * std + mean) * 255).round().clamp(0, 255).to(torch.uint8)
        return pixels[: 3 if len(pixels) > 2 else 1].permute(1, 2, 0).numpy()
