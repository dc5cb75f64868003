"""What from_timm.py and from_torchvision.py share: errors of downloads, and preprocessing."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Preprocessing:
    """How a network expects its images. None: as the dataset makes them."""

    image_size: int | None = None  # side in pixels
    interpolation: str | None = None  # bilinear | bicubic
    test_crop: float | None = None  # share (0 to 1) of a test image's shorter side that its sample shows
    mean: tuple[float, ...] | None = None  # for each channel, of pixels scaled to 0..1
    std: tuple[float, ...] | None = None  # likewise


@contextmanager
def downloading(name: str, without_network: str) -> Iterator[None]:
    """Turns an OSError of the block into a ValueError that names the network and ends with `without_network`."""
    try:
        yield
    except OSError as error:  # urllib's and the Hugging Face hub's errors are OSErrors
        reason = (str(error) or type(error).__name__).partition("\n")[0].rstrip(".")
        raise ValueError(f"{name} cannot be loaded ({reason}): {without_network}") from error


def with_channels(weight: Tensor, channels: int) -> Tensor:
    """The weights of a first convolution, (O, 3, h, w), for images of another number of channels: (O, channels, h, w).

    For one channel the weights are summed: a grey image gives the same result as its copy in three channels. For more
    channels they are repeated in turn, and scaled so that their sum stays the same on average (as in timm).
    """
    if channels == 1:
        return weight.sum(1, keepdim=True)
    return weight.repeat(1, -(-channels // 3), 1, 1)[:, :channels] * (3 / channels)
