"""Tasks: the loss, the scores and the number of outputs that fit the labels. `task=` chooses one of conf/task/.

A task is a class with the methods of Task. Its constructor gets the training set and the keys of its yaml file. Only
tasks know what outputs and labels mean: a new task needs no change in train.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from data.errors import DataError
from loaders import rows

TOP5_CLASSES = 20  # with at least this many classes there is a score top5
Function = Callable[[Tensor, Tensor], Tensor]  # from outputs and labels to a loss or a score
# In the name of a score, such as logloss or error_rate.
LOWER_IS_BETTER = re.compile(r"(loss|error|mae|mse|mape|nll|perplexity|\b(err|wer|cer|fid))\b")


class Task:
    """The base class of tasks.

    dataset: the training set, or for a finished run its DataSpec: anything with the same `classes`.
    inputs: the names of the batch's fields that the network gets, in this order.
    label: the name of the field that the network learns to predict; None if it learns without one: the loss and the
        scores then get None as labels.
    loss: a function that returns the loss of a batch; it replaces the task's default loss.
    scores: more scores by name, functions that return a number for each sample (B,).
    metric: the score that chooses the best checkpoint; it replaces the task's default metric.
    higher_is_better: whether a higher value of that score is better; None: as the metric itself says, as torchmetrics'
        do, else by its name.
    A loss and scores get the outputs (B, ...) in float32, and the labels with the dtype and shape that the task says.
    This class itself serves trainers that compute the loss: it has no scores but the loss.
    """

    metric = "loss"
    higher_is_better = False
    num_outputs = 1
    needs_label = False  # if True, outputs are (B, num_outputs)
    label_below: int | None = None  # labels are integers from 0 to below this number; None if they are not integers

    def __init__(
        self,
        dataset: Any,
        inputs: str | list[str] = "image",
        label: str | None = "label",
        loss: Function | None = None,
        scores: dict[str, Function] | None = None,
        metric: str | None = None,
        higher_is_better: bool | None = None,
    ) -> None:
        self.dataset_name = type(dataset).__name__
        self.inputs = [inputs] if isinstance(inputs, str) else list(inputs)
        self.label = label
        self._given_loss, self._given_scores = loss, scores or {}
        if "loss" in self._given_scores:
            raise DataError("task.scores.loss: the loss itself has this name: give the score another one")
        self.metric = metric or self.metric
        if higher_is_better is None and self.metric != type(self).metric:
            higher_is_better = not LOWER_IS_BETTER.search(re.sub("[^a-z]", " ", self.metric.lower()))
        if higher_is_better is not None:
            self.higher_is_better = higher_is_better

    def loss(self, outputs: Tensor, labels: Any) -> Tensor:
        """Returns the mean loss of a batch, a float32 scalar."""
        return (self._given_loss or self._loss)(outputs.float(), self._prepared(labels)).mean()

    def scores(self, outputs: Tensor, labels: Any) -> dict[str, Tensor]:
        """Returns the scores by name, with a number for each sample (B,). Reports show their means."""
        outputs, labels = outputs.float(), self._prepared(labels)
        given = {name: function(outputs, labels) for name, function in self._given_scores.items()}
        scores = self._scores(outputs, labels) | given
        return {name: _by_sample(name, score, len(outputs)) for name, score in scores.items()}

    def predictions(self, outputs: Tensor) -> Tensor:
        """Returns the probabilities of the classes (B, classes), or the predicted values (B, numbers)."""
        raise DataError(f"{type(self).__name__} has no predictions(outputs): define it, it says what outputs mean")

    def count(self, batch: Any) -> int:
        """The number of samples in a batch: the length of its labels, or else of an input, or of its first tensor."""
        for name in (self.label, *self.inputs):
            field = batch.get(name)
            if isinstance(field, list) or (isinstance(field, Tensor) and field.ndim):
                return len(field)
        return rows(batch)

    def modules(self) -> dict[str, nn.Module]:
        """The modules with weights or buffers among its attributes, its loss and its scores, by name."""
        scores = {f"scores.{name}": score for name, score in self._given_scores.items()}
        found = {**vars(self), **scores}.items()
        return {name: one for name, one in found if isinstance(one, nn.Module) and one.state_dict()}

    def check(self, outputs: Any, labels: Any) -> None:
        """Raises DataError if outputs and labels do not fit the task, or each other."""
        if not self.needs_label:  # what outputs and labels mean is up to the task
            return
        if labels is None:
            raise DataError(f"task.label=null: {type(self).__name__} needs labels: name their field, or use task=own")
        wanted = (len(labels), self.num_outputs)
        if not isinstance(outputs, Tensor) or outputs.shape != wanted:
            found = f"shape {tuple(outputs.shape)}" if isinstance(outputs, Tensor) else type(outputs).__name__
            raise DataError(
                f"the network returned outputs of {found}, and {type(self).__name__} needs a tensor {wanted}: give "
                f"its last layer {self.num_outputs} outputs"
            )

    def _prepared(self, labels: Tensor) -> Tensor:
        """The labels with the dtype and shape that the loss and the scores take."""
        return labels

    def _loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        raise DataError(f"{type(self).__name__} has no loss: set task.loss, or a trainer= with its own training_step")

    def _scores(self, outputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {}


def _classes(dataset: Any) -> tuple[Any, ...]:
    """The names of the dataset's classes. Raises DataError if it has none."""
    if not getattr(dataset, "classes", ()):
        raise DataError(
            f"{type(dataset).__name__} has no `classes`: give it a list of their names, or choose task=regression"
        )
    return tuple(dataset.classes)


def _by_sample(name: str, score: Tensor, samples: int) -> Tensor:
    """The score as one number for each sample (B,): the mean of several. Raises DataError for any other shape."""
    if score.ndim == 0 or len(score) != samples:
        raise DataError(
            f"task.scores.{name} returned a tensor of shape {tuple(score.shape)} for {samples} samples: return a "
            "number for each sample, not their mean"
        )
    return score if score.ndim == 1 else score.float().flatten(1).mean(dim=1)


class Classification(Task):
    """Each sample has one class: outputs are logits (B, classes), labels int64 (B,), or float shares (B, classes).

    label_smoothing: share (0 to below 1) of each target that is spread over all classes (arXiv:1512.00567).
    class_weights: a factor per class for the loss of its samples, or "balanced": one over the class's frequency in
        the dataset's `labels`.
    Scores: accuracy, and with many classes top5. Raises DataError for a dataset without `classes` or bad arguments.
    """

    metric = "accuracy"
    higher_is_better = True
    needs_label = True

    def __init__(
        self,
        dataset: Any,
        label_smoothing: float = 0.0,
        class_weights: str | list[float] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(dataset, **options)
        self.classes = _classes(dataset)
        self.num_outputs = self.label_below = len(self.classes)
        if class_weights is not None and self._given_loss is not None:
            raise DataError(
                f"task.class_weights={class_weights} is for the default loss only: leave out task.loss or this"
            )
        self._smoothing, self._weights = label_smoothing, self._class_weights(dataset, class_weights)

    def _class_weights(self, dataset: Any, weights: Any) -> Tensor | None:
        if weights is None:
            return None
        if weights != "balanced":
            if isinstance(weights, str) or len(weights) != self.num_outputs or min(weights) < 0:
                raise DataError(
                    f"task.class_weights={weights}: give balanced, or a number from 0 for each of the "
                    f"{self.num_outputs} classes"
                )
            return torch.tensor([float(weight) for weight in weights])
        labels = getattr(dataset, "labels", None)
        if labels is None:
            raise DataError(f"task.class_weights=balanced: {self.dataset_name} has no array `labels` to count")
        counts = torch.bincount(torch.as_tensor(labels), minlength=self.num_outputs)
        return len(labels) / (self.num_outputs * counts.clamp(min=1).float())

    def predictions(self, outputs: Tensor) -> Tensor:
        return outputs.float().softmax(dim=1)

    def _prepared(self, labels: Tensor) -> Tensor:
        return labels if labels.is_floating_point() else labels.long().flatten()

    def check(self, outputs: Any, labels: Tensor) -> None:
        super().check(outputs, labels)
        self._check_range(self._prepared(labels))

    def _check_range(self, labels: Tensor) -> None:
        wrong = [] if labels.is_floating_point() else labels[(labels < 0) | (labels >= self.num_outputs)].tolist()
        if wrong:
            raise DataError(
                f"{self.dataset_name} has the label {wrong[0]}: labels go from 0 to {self.num_outputs - 1}, as there "
                f"are {self.num_outputs} classes"
            )

    def _loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        if self._weights is not None:
            self._weights = self._weights.to(outputs.device)
        # The mean divides by the number of samples, not by their weights, so that the parts of a batch add up.
        options: dict[str, Any] = {"label_smoothing": self._smoothing, "reduction": "none"}
        try:
            return functional.cross_entropy(outputs, labels, self._weights, **options)
        except IndexError:  # torch checks labels on the CPU
            self._check_range(labels)
            raise

    def _scores(self, outputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        labels = labels.argmax(dim=1) if labels.is_floating_point() else labels  # floats are shares, of mixed images
        scores = {"accuracy": outputs.argmax(dim=1) == labels}
        if self.num_outputs >= TOP5_CLASSES:
            scores["top5"] = (outputs.topk(5).indices == labels[:, None]).any(dim=1)
        return scores


class Multilabel(Task):
    """Each sample has any number of classes: outputs are logits (B, classes), labels 0 or 1 (B, classes).

    Scores: f1, of a sample's classes; exact, whether all classes of a sample are right. Raises DataError for a dataset
    without `classes`.
    """

    metric = "f1"
    higher_is_better = True
    needs_label = True

    def __init__(self, dataset: Any, **options: Any) -> None:
        super().__init__(dataset, **options)
        self.classes = _classes(dataset)
        self.num_outputs = len(self.classes)

    def predictions(self, outputs: Tensor) -> Tensor:
        return outputs.float().sigmoid()

    def check(self, outputs: Any, labels: Tensor) -> None:
        super().check(outputs, labels)
        if labels.shape != outputs.shape:
            raise DataError(
                f"{self.dataset_name} has labels of shape {tuple(labels.shape[1:])}: task=multilabel needs "
                f"({self.num_outputs},), 1 for each class that a sample has and else 0"
            )

    def _prepared(self, labels: Tensor) -> Tensor:
        return labels.float()

    def _loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return functional.binary_cross_entropy_with_logits(outputs, labels)

    def _scores(self, outputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        predicted, true = outputs > 0, labels > 0
        both = (predicted & true).sum(dim=1)
        counts = predicted.sum(dim=1) + true.sum(dim=1)
        f1 = torch.where(counts > 0, 2 * both / counts.clamp(min=1), 1.0)  # 1 if neither has a class
        return {"f1": f1, "exact": (predicted == true).all(dim=1)}


class Regression(Task):
    """Each sample has a number, or several: outputs are (B, numbers), labels (B,) or (B, numbers), on any scale.

    numbers: how many a label has. Scores: mae and mse, a sample's mean absolute and mean squared error. The default
    loss is the squared error. Given losses and scores get labels (B, numbers).
    """

    metric = "mae"
    needs_label = True

    def __init__(self, dataset: Any, numbers: int = 1, **options: Any) -> None:
        super().__init__(dataset, **options)
        self.num_outputs = numbers

    def predictions(self, outputs: Tensor) -> Tensor:
        return outputs.float()

    def check(self, outputs: Any, labels: Tensor) -> None:
        super().check(outputs, labels)
        if labels[:1].numel() != self.num_outputs:
            raise DataError(
                f"{self.dataset_name} has labels of shape {tuple(labels.shape[1:])}, which are not "
                f"task.numbers={self.num_outputs} numbers: set it to {labels[:1].numel()}"
            )

    def _prepared(self, labels: Tensor) -> Tensor:
        return labels.float().view(len(labels), -1)

    def _loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return functional.mse_loss(outputs, labels)

    def _scores(self, outputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        error = outputs - labels
        return {"mae": error.abs().mean(dim=1), "mse": error.square().mean(dim=1)}
