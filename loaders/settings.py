"""What a dataset's attributes are, to be compared: persistent workers are told of a dataset that has changed."""

import gc
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from .held import VALUES, Held, items_of

SPOTS = 65_536  # items: of a larger array only FEW_SPOTS are compared, spread evenly
FEW_SPOTS = 1024


def settings_of(value: Any) -> list[Any]:
    """Returns what an object and its parts hold, to be compared with an earlier result.

    It has numbers and texts by their values, arrays and tensors by their items, and other objects by their ids.
    """
    held = Held((value,), counts=False)
    settings: list[Any] = []
    for holder in held.holders:
        if type(holder) is dict:  # Python itself adds names such as __slotnames__ to a class
            parts = [part for name, part in list(holder.items()) if type(name) is not str or name[:2] != "__"]
        else:
            parts = gc.get_referents(holder)
        settings += map(setting_of, parts)
    for container in held.long:
        items = items_of(container)
        settings += [len(items), hash(tuple(map(id, items)))]
    return settings


def spots_of(size: int) -> np.ndarray:
    return np.linspace(0, size - 1, size if size <= SPOTS else FEW_SPOTS, dtype=np.int64)


def is_private(array: np.ndarray) -> bool:
    """Whether an array's memory belongs to no other object, such as a memory map, which workers see as it is."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array.base is None


def setting_of(part: Any) -> Any:
    kind = type(part)
    if kind in VALUES:
        return kind, part
    if issubclass(kind, np.generic):
        return kind, part.tobytes()
    if kind is np.ndarray and is_private(part):
        return part.dtype, part.shape, part.flat[spots_of(part.size)].tobytes()
    if kind is torch.Tensor and part.device.type == "cpu":
        with suppress(RuntimeError):  # sparse, quantized, nested and others do not give their items
            if not part.is_shared():
                items = part.detach().take(torch.from_numpy(spots_of(part.numel())))
                return part.dtype, part.shape, items.view(torch.uint8).numpy().tobytes()
    return id(part)
