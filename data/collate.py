"""pad: a collate function for samples of different lengths: data.collate={_target_: data.collate.pad}."""

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import default_collate

from data.errors import DataError, explained


def pad(samples: Sequence[Mapping[str, Any]], value: float = 0.0) -> dict[str, Any]:
    """Makes a batch of samples that have the same fields.

    Tensors, arrays and lists of numbers (length, ...) are padded at their end with `value` to the longest one:
    (B, longest, ...), in a dtype that holds all of them. A new field NAME_length, int64 (B,), has their lengths. Dicts
    in samples become dicts of batches. torch's default_collate stacks the other fields, such as numbers.
    Raises DataError with the name of a field that only some samples have, or that cannot be stacked.
    """
    if not all(isinstance(sample, Mapping) for sample in samples):
        raise DataError("data.collate.pad needs the names of fields: return dicts from the dataset, not tuples")
    names = samples[0].keys()
    for sample in samples:
        for name in names ^ sample.keys():
            raise DataError(
                f"data.collate.pad: some samples have the field {name!r}, and others do not: return it for all, such "
                "as an empty tensor"
            )
    batch: dict[str, Any] = {}
    for name in names:
        with explained(
            f"data.collate.pad: the field {name!r} cannot be padded or stacked",
            "return for each sample a number, a text, or numbers in a tensor or a list, whose dimensions after the "
            "first are equal; no None",
        ):
            batch |= padded(name, [sample[name] for sample in samples], value)
    return batch


def padded(name: str, values: list[Any], value: float) -> dict[str, Any]:
    """The field of a batch with these values, and the field of their lengths if they have any."""
    if isinstance(values[0], Mapping):
        return {name: pad(values, value)}
    values = [torch.as_tensor(item) if isinstance(item, list | np.ndarray) else item for item in values]
    if not isinstance(values[0], torch.Tensor) or not values[0].ndim:
        return {name: default_collate(values)}
    kinds = [tensor.dtype for tensor in values if tensor.numel()] or [values[0].dtype]
    dtype = reduce(torch.promote_types, kinds)  # as default_collate has for 1 and 0.5
    rows = pad_sequence([tensor.to(dtype) for tensor in values], batch_first=True, padding_value=value)
    return {name: rows, f"{name}_length": torch.tensor([len(tensor) for tensor in values])}
