"""Muon for the matrices inside a network, and AdamW for all its other weights: optim=muon."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.optim import AdamW, Optimizer

WITH_MATRICES = (nn.Linear, nn.MultiheadAttention, _ConvNd)
COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the iteration in `orthogonal`, by Keller Jordan
ITERATIONS = 5


def muon_with_adamw(
    groups: Iterable[dict[str, Any]],
    model: nn.Module,
    lr: float,
    weight_decay: float = 0.05,
    momentum: float = 0.95,
    betas: Sequence[float] = (0.9, 0.95),
) -> list[Optimizer]:
    """AdamW, and Muon for the `matrices` of the network, if it has any. Both have the same rates and decays."""
    ids = {id(weight) for weight in matrices(model)}
    ours: list[dict[str, Any]] = []
    others: list[dict[str, Any]] = []
    for group in groups:
        for chosen, is_muon in ((ours, True), (others, False)):
            weights = [weight for weight in group["params"] if (id(weight) in ids) == is_muon]
            if weights:
                chosen.append({**group, "params": weights})
    adamw = AdamW(others, lr=lr, betas=(betas[0], betas[1]), weight_decay=weight_decay)
    return [adamw, Muon(ours, lr, weight_decay, momentum)] if ours else [adamw]


def matrices(model: nn.Module) -> list[nn.Parameter]:
    """The weights of linear layers, attention and convolutions, without those of the first and of the last such layer.

    So embeddings, norms and biases are not among them, nor what reads the images and what gives the scores.
    """
    layers = [module for module in model.modules() if isinstance(module, WITH_MATRICES)]
    return [weight for layer in layers[1:-1] for weight in layer.parameters(recurse=False) if weight.ndim > 1]


class Muon(Optimizer):
    """Momentum whose steps have singular values of about 1 (kellerjordan.github.io/posts/muon).

    As torch.optim.Muon with adjust_lr_fn=match_rms_adamw: a step is about as large as one of AdamW, so that the rates
    and decays of AdamW fit (arXiv:2502.16982). It also takes the weights of convolutions (O, I, h, w), as matrices
    (O, I * h * w), which torch's refuses.
    """

    def __init__(self, params: Any, lr: float, weight_decay: float = 0.05, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # no closure: no loss to return
        for group in self.param_groups:
            lr = group["lr"]
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(weight.grad)
                mean = state["momentum_buffer"].lerp_(weight.grad, 1 - group["momentum"])
                update = weight.grad.lerp(mean, group["momentum"]).flatten(1)  # Nesterov's
                size = 0.2 * math.sqrt(max(update.shape))
                weight.mul_(1 - lr * group["weight_decay"])
                weight.add_(orthogonal(update).reshape(weight.shape), alpha=-lr * size)


def iterated_in(device: torch.device) -> torch.dtype:
    """The dtype of the iteration: bfloat16 is exact enough, but very slow on a CPU that cannot compute in it."""
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def orthogonal(matrix: Tensor) -> Tensor:
    """About the nearest matrix (N, M) with orthonormal rows or columns, by a Newton-Schulz iteration."""
    a, b, c = COEFFICIENTS
    is_tall = matrix.shape[0] > matrix.shape[1]
    result = matrix.to(iterated_in(matrix.device))
    if is_tall:
        result = result.T
    result = result / result.norm().clamp(min=1e-7)
    for _ in range(ITERATIONS):
        gram = result @ result.T
        polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        result = torch.addmm(result, polynomial, result, beta=a)
    return result.T if is_tall else result
