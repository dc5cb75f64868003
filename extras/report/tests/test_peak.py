"""The share of a device's peak that a step reaches: by its name and dtype, with operations counted in a step."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from extras.report import peak


@pytest.mark.parametrize(
    ("name", "dtype", "known"),
    [
        ("NVIDIA H100 80GB HBM3", torch.bfloat16, (989e12, "H100's bf16 peak")),
        ("NVIDIA H100 PCIe", torch.float16, (756e12, "H100 PCIe's fp16 peak")),
        ("NVIDIA A100-SXM4-80GB", torch.bfloat16, (312e12, "A100's bf16 peak")),
        ("Tesla T4", torch.float16, (65e12, "T4's fp16 peak")),
        ("Tesla T4", torch.bfloat16, None),
        ("NVIDIA H100 80GB HBM3", torch.float32, None),
        ("NVIDIA L40", torch.bfloat16, None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", torch.bfloat16, None),
        ("", torch.bfloat16, None),
    ],
)
def test_a_peak_is_known_by_the_words_of_the_devices_name(name, dtype, known):
    assert peak.peak_of(name, dtype) == known


def test_the_operations_of_a_step_are_counted_forward_and_backward():
    weight = torch.zeros(5, 6, requires_grad=True)
    trainer = SimpleNamespace(
        dtype=torch.bfloat16, step_of=nullcontext, train_step=lambda batch: (batch @ weight).sum().backward()
    )
    run = SimpleNamespace(trainer=trainer)
    share, name = peak.share_of_peak(run, torch.zeros(4, 5), "NVIDIA L4", step_seconds=1e-9)
    assert share == pytest.approx(2 * (2 * 4 * 5 * 6) / 1e-9 / 121e12) and name == "L4's bf16 peak"
    assert peak.share_of_peak(run, torch.zeros(4, 5), None, step_seconds=1e-9) is None
