"""In which precision the network computes, and the random numbers of a training step."""

from __future__ import annotations

from hashlib import blake2b

import torch


def choose_dtype(precision: str, device: torch.device) -> torch.dtype:
    """The dtype in which the network computes on the device; `precision` is train.precision."""
    gpu_has_bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    if precision == "auto":
        return torch.bfloat16 if gpu_has_bf16 else torch.float32
    return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[precision]


def seed_step(device: torch.device, seed: int, step: int, rank: int) -> None:
    """Seeds torch's generators for one step, so that dropout draws the same numbers in a resumed run."""
    number = int.from_bytes(blake2b(f"{seed} {step} {rank}".encode(), digest_size=8).digest(), "little")
    torch.default_generator.manual_seed(number)  # torch.manual_seed takes 0.1 ms, because it seeds all devices
    if device.type == "cuda":
        torch.cuda.manual_seed(number)
