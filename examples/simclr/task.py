"""SimCLR (Chen et al., arXiv:2002.05709): each view should be nearest to the other view of its image."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from training.tasks import Task


class Encoder(nn.Module):
    """Takes two views (B, in_channels, H, W); returns their projections (B, 2, num_classes), of length 1."""

    def __init__(self, num_classes: int, in_channels: int, width: int = 32) -> None:
        super().__init__()
        convolutions: list[nn.Module] = []
        for channels, out in ((in_channels, width), (width, 2 * width), (2 * width, 4 * width)):
            convolutions += [nn.Conv2d(channels, out, 3, 2, 1), nn.BatchNorm2d(out), nn.ReLU()]
        self.features = nn.Sequential(*convolutions, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.projection = nn.Sequential(nn.Linear(4 * width, 4 * width), nn.ReLU(), nn.Linear(4 * width, num_classes))

    def forward(self, view1: Tensor, view2: Tensor) -> Tensor:
        projections = self.projection(self.features(torch.cat([view1, view2])))
        return functional.normalize(projections, dim=1).view(2, len(view1), -1).transpose(0, 1)


class SimCLR(Task):
    """Outputs are projections (B, 2, D); there are no labels. Score: nearest, whether a view's nearest is its partner.

    size: D. temperature: of the similarities. The loss is over pairs, so train.accumulate would change it.
    """

    metric = "nearest"
    higher_is_better = True

    def __init__(self, dataset: Any, size: int = 64, temperature: float = 0.5, **options: Any) -> None:
        super().__init__(dataset, **options)
        self.num_outputs, self.temperature = size, temperature

    def _similarities(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Of each view to all others (2B, 2B), and the place of its partner (2B,)."""
        views = outputs.transpose(0, 1).flatten(0, 1)
        similarities = views @ views.T / self.temperature
        partners = torch.arange(len(views), device=views.device).roll(len(outputs))
        return similarities.fill_diagonal_(-1e9), partners

    def _loss(self, outputs: Tensor, labels: Any) -> Tensor:
        return functional.cross_entropy(*self._similarities(outputs))

    def _scores(self, outputs: Tensor, labels: Any) -> dict[str, Tensor]:
        similarities, partners = self._similarities(outputs)
        nearest = (similarities.argmax(1) == partners).float()
        return {"nearest": nearest.view(2, -1).mean(0)}
