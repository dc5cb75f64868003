"""In which precision and memory layout the network computes, and the random numbers of a training step."""

from __future__ import annotations

import random
from hashlib import blake2b

import numpy as np
import torch
from torch import nn

from loaders import Accelerator


def choose_dtype(precision: str, device: torch.device) -> torch.dtype:
    """The dtype in which the network computes on the device; `precision` is train.precision."""
    if precision == "auto":
        return torch.bfloat16 if Accelerator(device).has_bf16() else torch.float32
    return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[precision]


def memory_format(channels_last: str, device: torch.device) -> torch.memory_format:
    """The memory layout of weights and images on the device; `channels_last` is train.channels_last."""
    is_last = channels_last == "true" or (channels_last == "auto" and device.type in ("cuda", "xpu"))
    return torch.channels_last if is_last else torch.contiguous_format


def in_format(model: nn.Module, layout: torch.memory_format) -> nn.Module:
    """Gives the layout to the weights of 2-d convolutions, the only ones that channels_last is for."""
    for weight in (*model.parameters(), *model.buffers()):
        if weight.ndim == 4:
            weight.data = weight.data.contiguous(memory_format=layout)
    return model


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def seed_step(device: torch.device, seed: int, step: int, rank: int) -> None:
    """Seeds the global generators for one step, so that dropout and mixup draw the same numbers in a resumed run."""
    number = int.from_bytes(blake2b(f"{seed} {step} {rank}".encode(), digest_size=8).digest(), "little")
    torch.default_generator.manual_seed(number)  # torch.manual_seed takes 0.1 ms, because it seeds all devices
    Accelerator(device).seed(number)
    random.seed(number)
    np.random.seed(number % 2**32)
