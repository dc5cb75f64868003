"""Augmentation policies: torchvision's TrivialAugment and RandAugment, with random numbers from the caller.

torchvision's own classes draw from torch's default generator. Threads share it, so the result would depend on their
timing. Here only the random numbers come from elsewhere: torchvision's classes have and apply the operations.
"""

from collections.abc import Sequence

import torch

from data.errors import check_choice

POLICIES = ("trivial", "rand")


class Policy:
    """A policy. Raises DataError if there is none named `name`.

    `trivial`: one operation of random strength (Müller and Hutter, arXiv:2103.10158, "wide");
    `rand`: two operations of strength 9 out of 31 (Cubuk et al., arXiv:1909.13719).
    """

    def __init__(self, name: str) -> None:
        check_choice("data.policy", name, POLICIES)
        # Imported here, because it takes a second in every worker that is spawned.
        from torchvision.transforms import InterpolationMode, v2

        kind = {"trivial": v2.TrivialAugmentWide, "rand": v2.RandAugment}[name]
        self._policy = kind(interpolation=InterpolationMode.BILINEAR)
        self._strength = getattr(self._policy, "magnitude", None)
        self.draws = 3 * getattr(self._policy, "num_ops", 1)  # random numbers that an image needs

    def __call__(self, image: torch.Tensor, draws: Sequence[float]) -> torch.Tensor:
        """Augments a uint8 image (C, H, W), with C 1 or 3. `draws` are `self.draws` numbers in [0, 1)."""
        height, width = image.shape[1:]
        # Not kept in an attribute, because functions in it cannot be pickled.
        operations = list(self._policy._AUGMENTATION_SPACE.items())
        for start in range(0, self.draws, 3):
            which, strength, sign = draws[start : start + 3]
            name, (strengths_of, signed) = operations[int(which * len(operations))]
            strengths = strengths_of(self._policy.num_magnitude_bins, height, width)
            magnitude = 0.0
            if strengths is not None:
                chosen = int(strength * len(strengths)) if self._strength is None else self._strength
                magnitude = float(strengths[chosen]) * (-1 if signed and sign < 0.5 else 1)
            image = self._policy._apply_image_or_video_transform(
                image, name, magnitude, self._policy.interpolation, self._policy._fill
            )
        return image
