"""Builds the task of the section `task`."""

import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np

from data.classes import listed, numbers_in
from training.build import (
    build,
    function_of,
    named_sections,
    parameters_of,
    takes_tensors,
    target_of,
    warn_of_parameters,
)
from training.config import ConfigError, Section
from training.tasks import Task, check_weights


def build_task(section: Section, dataset: Any) -> Task:
    functions: dict[str, Any] = {}
    if section.get("loss"):
        functions["loss"] = function_of("task.loss", section["loss"])
    if scores := named_sections("task.scores", section.get("scores")):
        functions["extra_scores"] = {name: function_of(f"task.scores.{name}", scores[name]) for name in scores}
    warn_of_parameters("task", section, ("scores", "metrics"))
    options = {key: value for key, value in section.items() if key not in ("loss", "scores", "metrics")}
    task: Task = build("task", options, dataset, methods={"to_dict": ["batch"]}, **functions)
    check_weights(task)
    check_attributes(task)
    return task


def check_attributes(task: Any) -> None:
    """Raises ConfigError for attributes of the task by which it would not get what it was given.

    A module or weight by the name of anything that the class Task has is not found: Python finds that of the class. A
    value in place of a method cannot be called. A function may replace a method, and a value a value.
    """
    if not isinstance(task, Task):
        return
    hidden = {**dict(task.named_children()), **task._parameters, **task._buffers}
    values = {name: value for name, value in vars(task).items() if not callable(value)}
    for name, ours in vars(Task).items():
        attributes = hidden | values if inspect.isfunction(ours) else hidden
        if name in attributes:
            kind = type(attributes[name]).__name__
            raise ConfigError(
                f"{type(task).__name__} has set self.{name} to a {kind}, but training uses what Task has by this "
                "name: choose another name"
            )


def numbers_by_class(
    key: str, value: Any, classes: Sequence[str], own: Sequence[str], is_by_class: bool = False
) -> Any:
    """The setting `key`, with each dict of a number per class, by name, as a list in the order of `classes`.

    classes: the network's. own: the dataset's. is_by_class: whether a dict can only be such a one (`takes_numbers`);
    another one is if it has numbers alone, and a class among its names. Raises ConfigError for a list of a number per
    class if they are in another order, and for a dict of other names or of only some classes.
    """
    if isinstance(value, dict):
        places = numbers_in([*map(str, value)], classes)
        numbers = [*value.values()]
        if not is_by_class and (not are_numbers(numbers) or (places < 0).all()):
            return {
                name: numbers_by_class(f"{key}.{name}", entry, classes, own, takes_numbers(key, value, name))
                for name, entry in value.items()
            }
        if not classes:
            raise ConfigError(f"{key}={value}: the training set has no names of classes, so give a list of numbers")
        if (places < 0).any() or len(numbers) > len(classes) or not are_numbers(numbers):
            has_booleans = any(isinstance(name, bool) for name in value)
            booleans = ", which is what yaml makes of yes and no without quotes" if has_booleans else ""
            raise ConfigError(
                f"{key} has numbers for {listed([*map(str, value)])}{booleans}: give one for each of the classes, "
                f"{listed(classes)}"
            )
        return [numbers[place] for place in places]
    is_by_number = isinstance(value, list) and len(value) == len(classes) and are_numbers(value)
    if is_by_number and (np.diff(numbers_in(classes, own)) < 0).any():
        raise ConfigError(
            f"{key}={value}: the training set has the classes {listed(own)}, and the network {listed(classes)}: give "
            f"the numbers by name, {{{own[0]}: {value[0]}, ...}}"
        )
    return value


def takes_numbers(key: str, section: Section, name: str) -> bool:
    """Whether an entry of the section becomes a tensor, so that a dict there can only be of numbers by class.

    So it is for task.class_weights, and for a parameter that takes tensors alone, such as `weight` of torch's losses.
    """
    value = section[name]
    if "_target_" not in section or not isinstance(value, dict) or "_target_" in value:
        return False
    if f"{key}.{name}" == "task.class_weights":
        return True
    parameter = parameters_of(target_of(key, {"_target_": section["_target_"]}).func).get(name)
    return parameter is not None and takes_tensors(parameter)


def are_numbers(values: list[Any]) -> bool:
    return all(isinstance(value, int | float) for value in values)
