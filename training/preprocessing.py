"""Gives the dataset the image size, the crop and the normalisation that a pretrained network expects.

A network's `_target_` may have a function `preprocessing`, as in models/from_timm.py: it takes the keys of the section
`model`, and returns a models.pretrained.Preprocessing without building the network.
"""

from __future__ import annotations

import logging
from dataclasses import asdict
from typing import Any

from models.pretrained import Preprocessing
from training.config import Config
from training.targets import build, target

log = logging.getLogger(__name__)


def with_preprocessing(config: Config) -> tuple[dict[str, Any], Preprocessing]:
    """Returns the section `data`, with the network's values in place of null, and all that the network expects.

    Raises ConfigError if the network does not exist or its description cannot be downloaded.
    """
    if not hasattr(target(config.model), "preprocessing"):
        return config.data, Preprocessing()
    section = {**config.model, "_target_": f"{config.model['_target_']}.preprocessing"}
    preprocessing: Preprocessing = build("model", section)
    values = {key: value for key, value in asdict(preprocessing).items() if value is not None}
    data = {key: values.get(key) if value is None else value for key, value in config.data.items()}
    text = ", ".join(f"{key}={value}" for key, value in values.items())
    log.info("the network's preprocessing, used where a key of data is null: %s", text)
    return data, preprocessing


def mean_and_std(preprocessing: Preprocessing, dataset: Any, channels: int) -> tuple[Any, Any]:
    """The mean and std of each channel, by which images are normalised.

    Those of the network if it has `channels` of them, else those of the dataset; (None, None) if it has none.
    """
    if preprocessing.mean and len(preprocessing.mean) == channels:
        return preprocessing.mean, preprocessing.std
    return getattr(dataset, "mean", None), getattr(dataset, "std", None)
