"""Builds the task of the section `task`."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from data.classes import listed, numbers_in
from training.build import build, function_of, named_sections
from training.config import ConfigError
from training.tasks import Task


def build_task(section: dict[str, Any], dataset: Any) -> Task:
    functions: dict[str, Any] = {}
    if section.get("loss"):
        functions["loss"] = function_of("task.loss", section["loss"])
    if scores := named_sections("task.scores", section.get("scores")):
        functions["extra_scores"] = {name: function_of(f"task.scores.{name}", scores[name]) for name in scores}
    options = {key: value for key, value in section.items() if key not in ("loss", "scores", "metrics")}
    return build("task", options, dataset, methods=["to_dict"], **functions)


def numbers_by_class(key: str, value: Any, classes: Sequence[str], own: Sequence[str]) -> Any:
    """The setting `key`, with each dict of a number per class, by name, as a list in the order of `classes`.

    classes: the network's. own: the dataset's. Raises ConfigError for a list of a number per class if they are in
    another order, and for a dict of only some classes.
    """
    if isinstance(value, dict):
        places = numbers_in([*map(str, value)], classes)
        numbers = [*value.values()]
        if not are_numbers(numbers) or (places < 0).all():
            return {name: numbers_by_class(f"{key}.{name}", entry, classes, own) for name, entry in value.items()}
        if (places < 0).any() or len(numbers) > len(classes):
            raise ConfigError(f"{key}={value}: give a number for each of {listed(classes)}")
        return [numbers[place] for place in places]
    is_by_number = isinstance(value, list) and len(value) == len(classes) and are_numbers(value)
    if is_by_number and (np.diff(numbers_in(classes, own)) < 0).any():
        raise ConfigError(
            f"{key}={value}: the training set has the classes {listed(own)}, and the network {listed(classes)}: give "
            f"the numbers by name, {{{own[0]}: {value[0]}, ...}}"
        )
    return value


def are_numbers(values: list[Any]) -> bool:
    return all(isinstance(value, int | float) for value in values)
