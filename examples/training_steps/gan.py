"""A GAN (Goodfellow et al., arXiv:1406.2661): two networks, two optimizers, and a step that uses them itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Adam, Optimizer

from training.trainer import Trainer

NOISE = 32  # numbers from which an image is made


class GANNetwork(nn.Module):
    """generator: noise (B, NOISE) -> images. discriminator: images -> logits (B, 1), above 0 for real ones."""

    def __init__(self, in_channels: int, image_size: int, width: int = 64) -> None:
        super().__init__()
        shape = (in_channels, image_size, image_size)
        pixels = in_channels * image_size**2
        self.generator = nn.Sequential(
            nn.Linear(NOISE, width), nn.ReLU(), nn.Linear(width, pixels), nn.Unflatten(1, shape)
        )
        self.discriminator = nn.Sequential(
            nn.Flatten(), nn.Linear(pixels, width), nn.LeakyReLU(0.2), nn.Linear(width, 1)
        )


class GAN(Trainer):
    """Each step trains the discriminator, and then the generator. The score is how often a fake is taken for one."""

    def configure_optimizers(self) -> list[Optimizer]:
        networks = self.model.generator, self.model.discriminator
        return [Adam(network.parameters(), lr=2e-4, betas=(0.5, 0.999)) for network in networks]

    def training_step(self, batch: dict[str, Any]) -> None:
        (real,), _ = self.inputs_and_labels(batch)
        generator, discriminator = self.optimizers
        fake = self.model.generator(torch.randn(len(real), NOISE, device=self.device))

        loss = self.judged(real, 1.0) + self.judged(fake.detach(), 0.0)
        self.backward(loss)
        self.optimizer_step(discriminator)

        deceit = self.judged(fake, 1.0)
        self.backward(deceit)
        self.optimizer_step(generator)
        discriminator.zero_grad()  # what `deceit` added
        self.log(discriminator_loss=loss, generator_loss=deceit)

    def evaluation_step(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        (real,), _ = self.inputs_and_labels(batch)
        fake = self.model.generator(torch.randn(len(real), NOISE, device=self.device))
        return {"loss": self.judged(real, 1.0), "found": (self.model.discriminator(fake) < 0).float().flatten()}

    def judged(self, images: Tensor, truth: float) -> Tensor:
        logits = self.model.discriminator(images).float()
        return functional.binary_cross_entropy_with_logits(logits, torch.full_like(logits, truth))
