"""Prepare: calls the `prepare(image)` of a run's dataset, for predict.py and export.py, without the dataset's data."""

from __future__ import annotations

import inspect
import re
from functools import partial
from typing import Any, NoReturn

import numpy as np
from hydra.utils import get_class

from data.errors import DataError
from loaders import offers
from training.config import ConfigError, one_line


class Prepare:
    """The method `prepare(image)` of the dataset that `stored`, a DataSpec's `dataset`, describes.

    It is called on an object of the dataset's class that has only the attributes that the checkpoint stores. What the
    method takes and returns: see data/__init__.py. Raises ConfigError if the class has no such method, or one that its
    `__getitem__` does not use; the call raises DataError if the method needs an attribute that is not stored.
    """

    def __init__(self, stored: dict[str, Any]) -> None:
        self._stored, self.name = stored, f"{stored['_target_']}.prepare"
        class_name = stored["_target_"].rpartition(".")[2]
        try:
            kind = get_class(stored["_target_"])
        except Exception as error:
            raise ConfigError(f"{self.name} cannot be imported: {one_line(error)}") from error
        # Properties, because a default of the class must not stand in for an attribute that is not stored.
        others = {name: property(partial(refuse, class_name, name)) for name in stored["others"]}
        dataset: Any = object.__new__(type(kind)(class_name, (kind,), others))
        vars(dataset).update(stored["attributes"])
        if not callable(method := getattr(kind, "prepare", None)):
            raise ConfigError(
                f"{class_name} has no prepare(image), so it is not known what it does to an image: add this method, "
                "and call it in __getitem__ (data/__init__.py says what it takes and returns)"
            )
        if not offers(dataset, "prepare"):
            raise ConfigError(
                f"{class_name} has its own __getitem__, and inherits prepare(image), which may do something else: "
                f"define prepare in {class_name} too, and call it in __getitem__"
            )
        self.source, self._method = inspect.getsource(method), dataset.prepare
        used = {key: value for key, value in stored["attributes"].items() if re.search(rf"\b{key}\b", self.source)}
        self.values = ", ".join(f"{key}={value}" for key, value in used.items())

    def __call__(self, image: np.ndarray) -> Any:
        return self._method(image)

    def __reduce__(self) -> tuple[type, tuple[dict[str, Any]]]:
        return Prepare, (self._stored,)  # the class of the dataset above cannot be imported


def refuse(dataset: str, name: str, _: Any) -> NoReturn:
    raise DataError(
        f"{dataset}.prepare uses the attribute {name}, which a checkpoint does not store: compute it in prepare, from "
        "numbers, texts, or short lists of them"
    )
