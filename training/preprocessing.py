"""What the data and the network tell each other: the network, which images it expects; the data, how large theirs are.

A network's target may have a function `preprocessing`, as in models/from_timm.py: it takes the keys of the section
`model`, and returns a models.pretrained.Preprocessing without building the network.
"""

from __future__ import annotations

import logging
from dataclasses import asdict
from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import instantiate

from models.pretrained import Preprocessing
from training.config import Config, build

log = logging.getLogger(__name__)


def with_preprocessing(config: Config) -> tuple[dict[str, Any], Preprocessing]:
    """The section `data` in which the network's values have replaced null, and all that the network expects.

    Raises ConfigError for a network that does not exist or whose description cannot be downloaded.
    """
    if not hasattr(target(config.model), "preprocessing"):
        return config.data, Preprocessing()
    section = {**config.model, "_target_": f"{config.model['_target_']}.preprocessing"}
    preprocessing: Preprocessing = build("model", section)
    values = {key: value for key, value in asdict(preprocessing).items() if value is not None}
    data = {key: values.get(key) if value is None else value for key, value in config.data.items()}
    told = ", ".join(f"{key}={value}" for key, value in values.items())
    log.info("the network's preprocessing, used where a key of data is null: %s", told)
    return data, preprocessing


def mean_and_std(preprocessing: Preprocessing, dataset: Any, channels: int) -> tuple[Any, Any]:
    """What images are normalised with: the network's numbers, if it has one for each channel, else the dataset's.

    None, None if the dataset has none either.
    """
    if preprocessing.mean and len(preprocessing.mean) == channels:
        return preprocessing.mean, preprocessing.std
    return getattr(dataset, "mean", None), getattr(dataset, "std", None)


def target(section: dict[str, Any]) -> Any:
    """The function or class that the section's `_target_` names; None if there is none."""
    try:
        return getattr(instantiate(section, _partial_=True), "func", None)
    except InstantiationException:
        return None
