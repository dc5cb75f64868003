"""pad: a collate function for samples of different lengths: data.collate={_target_: data.collate.pad}."""

from functools import reduce
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import default_collate

from data.errors import DataError, explained


def pad(samples: list[dict[str, Any]], value: float = 0.0) -> dict[str, Any]:
    """Makes a batch of samples that have the same fields.

    Tensors, arrays and lists of numbers (length, ...) are padded at their end with `value` to the longest one:
    (B, longest, ...), in a dtype that holds all of them. A new field NAME_length, int64 (B,), has their lengths. Dicts
    in samples become dicts of batches. torch's default_collate stacks the other fields, such as numbers.
    """
    if not isinstance(samples[0], dict):
        raise DataError("data.collate.pad needs the names of fields: return dicts from the dataset, not tuples")
    batch: dict[str, Any] = {}
    for name in samples[0]:
        values = [sample[name] for sample in samples]
        if isinstance(values[0], list):
            with explained(
                f"data.collate.pad: the field {name!r} is a list", "return a tensor, or numbers in the list"
            ):
                values = [torch.as_tensor(item) for item in values]
        values = [torch.from_numpy(item) if isinstance(item, np.ndarray) else item for item in values]
        if isinstance(values[0], dict):
            batch[name] = pad(values, value)
        elif isinstance(values[0], torch.Tensor) and values[0].ndim:
            kinds = [tensor.dtype for tensor in values if tensor.numel()] or [values[0].dtype]
            dtype = reduce(torch.promote_types, kinds)  # as default_collate has for 1 and 0.5
            values = [tensor.to(dtype) for tensor in values]
            batch[name] = pad_sequence(values, batch_first=True, padding_value=value)
            batch[f"{name}_length"] = torch.tensor([len(tensor) for tensor in values])
        else:
            batch[name] = default_collate(values)
    return batch
