"""What share of the device's peak a training step reaches: the operations of matrix products and convolutions.

The peaks are the makers' figures for dense matrices with 16-bit numbers, in 1e12 operations per second.
"""

from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from training.run import Run

# By words of torch's name of the device; the first whose words it has counts. Not in "Laptop" cards.
PEAKS = {
    "B200": 2250,
    "H200": 989,
    "H100 NVL": 835,
    "H100 PCIe": 756,
    "H100": 989,
    "A100": 312,
    "L40S": 362,
    "L4": 121,
    "V100": 125,
    "T4": 65,
    "4090": 165,
    "3090": 71,
    "MI300X": 1307,
}
WITHOUT_BF16 = ("V100", "T4")
DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}


def peak_of(device_name: str, dtype: torch.dtype) -> tuple[float, str] | None:
    """The device's operations per second and their name, such as (989e12, "H100's bf16 peak"); None if not known."""
    words = device_name.replace("-", " ").split()
    for name, peak in PEAKS.items():
        if "Laptop" not in words and set(name.split()) <= set(words):
            if dtype not in DTYPES or (dtype == torch.bfloat16 and name in WITHOUT_BF16):
                return None
            return 1e12 * peak, f"{name}'s {DTYPES[dtype]} peak"
    return None


def share_of_peak(run: Run, batch: Any, device_name: str | None, step_seconds: float) -> tuple[float, str] | None:
    """The share (0 to 1) that steps of this length reach, and the peak's name. Trains on the batch, to count."""
    peak = peak_of(device_name or "", run.trainer.dtype)
    if peak is None:
        return None
    with (
        torch.compiler.set_stance("force_eager"),
        FlopCounterMode(display=False) as counter,
        run.trainer.step_of(batch),
    ):
        run.trainer.train_step(batch)
    per_second, name = peak
    return counter.get_total_flops() / step_seconds / per_second, name
