"""What the network saw: a training batch after all transforms, and the values before and after each of them.

The transforms run once more, on copies, for the first samples of the dataset: neither their state nor the global
random generators change.
"""

import copy
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from data.batch_transform import Normalize
from data.classes import label_text
from data.subset import undivided
from data.transform import Transform, name_of
from loaders import Random, move, preserved_globals
from training.look import shorten, thumbnail
from training.run import Run

Row = dict[str, Any]  # a row of the table in report.html
Note = Callable[[str, Any], None]  # gets the name of a stage, and the values after it
MOST_IMAGES = 8  # that data.transform transforms once more
MOST_SAMPLES = 32  # whose values are looked at
MOST_TILES = 16
LONGEST = 60  # letters of a label
SIDE = 96  # pixels of a tile, at most
MOST_VALUES = 4096  # values of a sample, spread over it, among which the most common one is searched
STUCK = 0.5  # share of the values that a transform may make equal without a warning
LARGE = 20.0  # floats that a network gets are smaller, if they are normalised
FLAT = 0.02  # their standard deviation is larger


def seen(run: Run) -> dict[str, Any]:
    """What the page shows of run.batch; "warnings": if most values are made equal, or if their range is odd."""
    data = run.data
    batch = {name: value[:MOST_SAMPLES].cpu() for name, value in run.batch.items() if isinstance(value, Tensor)}
    names = [name for name in data.task.inputs if name in batch]
    rows = [row for name in names for row in stages(run, name)]
    last = [row_of("the batch of the step", name, batch[name]) for name in names]
    size = data.task.batch_length(run.batch)
    return {
        "text": f"The batch of step {run.progress.step}, of {size} samples, after all transforms.",
        "rows": [*rows, *last],
        "tiles": tiles(run, batch, names),
        "warnings": [text for row in last for text in warnings_of(row, rows)],
    }


def row_of(stage: str, field: str, values: Tensor) -> Row:
    """What is known about values (B, ...) after a stage.

    stuck: the share of them that equal the most common one of their sample, or the lowest or highest of all.
    """
    values = values.detach().cpu()
    flat = values.reshape(len(values), -1).float()
    low, high = flat.aminmax()
    spread = flat[:, :: 1 + flat.shape[1] // MOST_VALUES]
    common = (spread == spread.mode(1, keepdim=True).values).float().mean()
    at_ends = ((flat == low) | (flat == high)).float().mean()
    return {
        "stage": stage,
        "field": field,
        "dtype": str(values.dtype).removeprefix("torch."),
        "shape": " x ".join(map(str, values.shape)),
        "lowest": low.item(),
        "highest": high.item(),
        "mean": flat.mean().item(),
        "deviation": flat.std(correction=0).item(),
        "stuck": max(common, at_ends).item(),
    }


def stages(run: Run, name: str) -> list[Row]:
    """The values of the dataset's first samples after each transform."""
    rows = list[Row]()

    def note(stage: str, values: Any) -> None:
        if isinstance(values, Tensor):
            rows.append(row_of(stage, name, values))

    with preserved_globals():
        rows += own_stages(run.data.train, name)
        batch = run.data.task.to_dict(move(run.data.first, lambda tensor: tensor.to(run.trainer.device)))
        note("first samples of the dataset", batch[name])
        transform = copy.deepcopy(run.data.augment.transform)
        stages = [("normalised", transform)] if isinstance(transform, Normalize) else getattr(transform, "stages", [])
        for stage, function in stages:
            batch = function(batch, Random(0, 0, 0))
            note(stage, batch[name])
    return rows


def own_stages(dataset: Any, name: str) -> list[Row]:
    """The values of an image before and after each step of data.transform.

    Of the first images, it is the one with the most different values: a single crop may well have only one color.
    """
    if isinstance(dataset, IterableDataset):  # it cannot be read again
        return []
    images = [own_steps(dataset, index) for index in range(min(MOST_IMAGES, len(dataset)))]
    rows = [[row_of(stage, name, values) for stage, values in image] for image in images if image]
    return min(rows, key=lambda stages: (stages[-1]["stuck"], stages[0]["stuck"]), default=[])


def own_steps(dataset: Any, index: int) -> list[tuple[str, Tensor]]:
    """An image before and after each step of data.transform, by reading the dataset's sample."""
    notes: list[tuple[str, Tensor]] = []
    dataset = undivided(dataset)
    own = getattr(dataset, "transform", None)
    if isinstance(own, Transform) and own.functions:
        copied = copy.copy(dataset)
        copied.transform = copy.deepcopy(own)
        for stage, functions in (("the whole image", copied.transform.before), ("the crop", copied.transform.after)):
            noted = [noting(stage, notes)] if functions else []
            for function in functions:
                noted += [function, noting(f"data.transform: {name_of(function)}", notes)]
            functions[:] = noted
        copied[index]
    return notes


def noting(stage: str, notes: list[tuple[str, Tensor]]) -> Callable[[Any], Any]:
    """A step of a transform of single images, which returns the image as it is."""

    def step(image: Any) -> Any:
        notes.append((stage, torch.as_tensor(image)[None]))
        return image

    return step


def warnings_of(last: Row, rows: list[Row]) -> list[str]:
    """Sentences about what is probably wrong with the values that the network gets."""
    texts = list[str]()
    field = last["field"]
    for before, after in itertools.pairwise(row for row in [*rows, last] if row["field"] == field):
        share = before["stuck"]
        if after["stuck"] - share > STUCK * (1 - share):
            texts.append(
                f"{after['stage']}: {after['stuck']:.0%} of the values of {field!r} are equal or clipped after it, "
                f"{share:.0%} before, where they were {before['lowest']:.4g} to {before['highest']:.4g}: does it "
                "expect another range?"
            )
    low, high, deviation = last["lowest"], last["highest"], last["deviation"]
    is_image = "float" in last["dtype"] and last["shape"].count("x") == 3
    if is_image and (max(-low, high) > LARGE or deviation < FLAT):
        texts.append(
            f"The network gets {field!r} from {low:.4g} to {high:.4g}, with a standard deviation of {deviation:.2g}: "
            "networks train well on about -3 to 3, and 1; are they normalised twice, or never?"
        )
    return texts


def tiles(run: Run, batch: dict[str, Tensor], names: list[str]) -> list[dict[str, str]]:
    """The first images of the batch with their labels, as they were before they were normalised."""
    normalize = run.data.normalize
    fields = names if normalize is None else normalize.fields
    images = next((batch[name].float() for name in fields if batch[name].ndim == 4), None)
    if images is None:
        return []
    images = images[:MOST_TILES]
    if normalize is None:
        low, high = images.min(), images.max()
        images = (images - low) / (high - low).clamp(min=1e-12)
    else:
        images = normalize.undone(images)
    pixels = (255 * images.clamp(0, 1)).round().byte().permute(0, 2, 3, 1).numpy()
    labels = batch.get(run.data.task.label or "")
    classes = run.data.classes or []
    return [
        {
            "source": thumbnail(image, SIDE),
            "label": "" if labels is None else shorten(label_text(labels[place], classes), LONGEST),
        }
        for place, image in enumerate(pixels)
    ]
