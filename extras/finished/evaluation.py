"""Evaluation: a table by class, the confusion matrix, and the samples with the worst predictions."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from data.batch_transform import Normalize
from training.look import INK, new_figure, png, shorten, table

MISTAKES = 25  # images in the picture of the worst mistakes
IN_A_ROW = 5
LONGEST = 26  # letters of a name in a picture
MOST_DRAWN = 2_000  # classes of a confusion matrix
SHOWN_CLASSES = 40  # if there are more, the table has those with the lowest F1, and the matrix no names
COUNTED_CLASSES = 20  # up to which the matrix has the numbers of samples


class Mistake(NamedTuple):
    """A misclassified sample, with the probabilities (0 to 1) of its true class and of the predicted one.

    sample: its place in the order in which the samples were added. image: uint8 (H, W, C); None: it has none to draw.
    """

    sample: int
    truth_probability: float
    predicted_probability: float
    truth: int
    predicted: int
    image: np.ndarray | None


class ClassCounts:
    """Counts how many samples have each class, for how many it is predicted, and for how many both."""

    def __init__(self, classes: Sequence[Any]) -> None:
        self.names = [str(name) for name in classes]
        self.counts = np.zeros((3, len(self.names)), np.int64)

    def count(self, labels: Tensor, predictions: Tensor) -> None:
        """Counts a batch: bool (B, classes)."""
        sums = [values.sum(0) for values in (labels, predictions, labels & predictions)]
        self.counts += torch.stack(sums).cpu().numpy()

    def by_class(self) -> list[dict[str, Any]]:
        """A row per class: its name, its number of samples, precision, recall and F1, which are 0 if undefined."""
        samples, predictions, right = self.counts
        totals = {"precision": predictions, "recall": samples, "f1": (samples + predictions) / 2}
        columns: dict[str, list[Any]] = {"class": self.names, "samples": samples.tolist()}
        for name, total in totals.items():
            columns[name] = (right / np.maximum(total, 0.5)).tolist()
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]

    def table(self) -> str:
        """`by_class` as text for a terminal; of many classes, those with the lowest F1."""
        rows = self.by_class()
        if len(rows) > SHOWN_CLASSES:
            rows = sorted(rows, key=lambda row: row["f1"])[:SHOWN_CLASSES]
        columns = [[key, *(str(row[key]) for row in rows)] for key in ("class", "samples")]
        columns += [[key, *(f"{row[key]:.3f}" for row in rows)] for key in ("precision", "recall", "f1")]
        return "\n".join(table(columns))


class Evaluation(ClassCounts):
    """Collects what a network predicts for samples of one class each, batch by batch.

    normalize: what has normalised the images; None: the samples have none that could be drawn.
    """

    def __init__(self, classes: Sequence[Any], normalize: Normalize | None) -> None:
        super().__init__(classes)
        self.normalize = normalize
        self.samples = 0  # that were added, also those that do not count
        self.skipped: list[Any] = []  # indices of the samples that could not be read
        self.mistakes: list[Mistake] = []  # those with the lowest probabilities of the true class, sorted
        self._pairs: list[np.ndarray] = []  # true class * number of classes + predicted class of each sample, by batch

    def add(self, batch: dict[str, Any], labels: Tensor, probabilities: Tensor, counted: Tensor | None = None) -> None:
        """Adds a batch. labels: int64 (B,). probabilities: (B, number of classes). counted: bool (B,); None: all."""
        start = self.samples
        places = torch.arange(start, start + len(labels))
        self.samples += len(labels)
        if counted is not None:
            places = places[counted.cpu()]
            labels = labels[counted]
            probabilities = probabilities[counted]
        best, predicted = probabilities.max(1)
        truth_probabilities = probabilities.gather(1, labels[:, None])[:, 0]
        self._pairs.append((labels * len(self.names) + predicted).cpu().numpy())
        numbers = torch.arange(len(self.names), device=labels.device)
        self.count(labels[:, None] == numbers, predicted[:, None] == numbers)
        wrong = (predicted != labels).nonzero()[:, 0]
        worst = truth_probabilities[wrong].argsort()[:MISTAKES]
        for row in wrong[worst].tolist():
            place = int(places[row])
            mistake = Mistake(
                sample=place,
                truth_probability=float(truth_probabilities[row]),
                predicted_probability=float(best[row]),
                truth=int(labels[row]),
                predicted=int(predicted[row]),
                image=self._pixels(batch, place - start),
            )
            self.mistakes.append(mistake)
        self.mistakes = sorted(self.mistakes, key=lambda mistake: mistake.truth_probability)[:MISTAKES]

    def draw_confusion(self) -> bytes | None:
        """A PNG: the share of each class's samples (row) that was predicted as each class (column).

        None if there are more than MOST_DRAWN classes.
        """
        number = len(self.names)
        if number > MOST_DRAWN:
            return None
        side = 4 + 0.3 * min(number, SHOWN_CLASSES)
        figure = new_figure("Confusion matrix", side + 1, side)
        axes = figure.subplots()
        counts = np.zeros((number, number), int)
        pairs = np.concatenate([np.zeros(0, int), *self._pairs])
        np.add.at(counts, np.divmod(pairs, number), 1)
        shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
        figure.colorbar(axes.imshow(shares, cmap="Blues", vmin=0, vmax=1), label="share of the true class")
        axes.set(xlabel="predicted class", ylabel="true class")
        if number <= COUNTED_CLASSES:
            for (row, column), count in np.ndenumerate(counts):
                color = "white" if shares[row, column] > 0.5 else INK
                axes.text(column, row, f"{count:,}", ha="center", va="center", fontsize=8, color=color)
        if number <= SHOWN_CLASSES:
            names = [shorten(name, LONGEST) for name in self.names]
            axes.set_xticks(range(number), names, rotation=90, parse_math=False)
            axes.set_yticks(range(number), names, parse_math=False)
        return png(figure)

    def mistakes_of(self, files: Sequence[str]) -> list[dict[str, Any]]:
        """A row per mistake, the worst first. files: the names of their samples."""
        return [
            {
                "file": file,
                "class": self.names[mistake.truth],
                "predicted": self.names[mistake.predicted],
                "probability": mistake.truth_probability,
            }
            for file, mistake in zip(files, self.mistakes, strict=True)
        ]

    def draw_mistakes(self, files: Sequence[str]) -> bytes | None:
        """A PNG with the worst mistakes: each image with its file, its true and its predicted class.

        Behind the classes are their probabilities. files: as `mistakes_of` gets them. None if there is none to draw.
        """
        images = [mistake.image for mistake in self.mistakes if mistake.image is not None]
        if not images:
            return None
        rows = math.ceil(len(images) / IN_A_ROW)
        figure = new_figure("Worst mistakes: the true class, and the one predicted", 12, 1 + 2.5 * rows)
        axes = list(figure.subplots(rows, IN_A_ROW).flat)
        for plot in axes:
            plot.axis("off")
        for plot, image, mistake, file in zip(axes, images, self.mistakes, files, strict=False):
            plot.imshow(image.squeeze(), cmap="gray", vmin=0, vmax=255)
            truth, predicted = (shorten(self.names[number], LONGEST) for number in (mistake.truth, mistake.predicted))
            lines = [
                Path(file).name[-LONGEST:],  # numbers are at the end
                f"{truth} ({mistake.truth_probability:.0%})",
                f"{predicted} ({mistake.predicted_probability:.0%})",
            ]
            plot.set_title("\n".join(filter(None, lines)), fontsize=8, parse_math=False)
        return png(figure)

    def _pixels(self, batch: dict[str, Any], row: int) -> np.ndarray | None:
        """Undoes the normalisation: from floats (C, H, W) to uint8 (H, W, C), with 1 or 3 channels for drawing."""
        if self.normalize is None:
            return None
        image = batch[self.normalize.fields[0]][row]
        pixels = self.normalize.undone(image.float().cpu()) * 255
        channels = 3 if len(pixels) > 2 else 1
        return pixels[:channels].round().clamp(0, 255).to(torch.uint8).permute(1, 2, 0).numpy()
