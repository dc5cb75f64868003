"""What from_timm.py and from_torchvision.py share: checks of names and downloads, and preprocessing."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Preprocessing:
    """How a network expects its images. None: as the dataset makes them."""

    image_size: int | None = None  # side in pixels
    interpolation: str | None = None  # bilinear | bicubic
    test_crop: float | None = None  # share (0 to 1) of a test image's shorter side that its sample shows
    mean: tuple[float, ...] | None = None  # of each channel, for pixels scaled to 0..1
    std: tuple[float, ...] | None = None  # likewise


def check_name(kind: str, name: str, known: Collection[str], all_names: str) -> None:
    """Raises ValueError unless `name` is known. The sentence ends in `all_names`."""
    if name not in known:
        raise ValueError(f"there is no {kind} named {name!r}: {all_names}")


@contextmanager
def downloading(name: str, without_network: str) -> Iterator[None]:
    """Turns an OSError of the block into a ValueError: a sentence with `name`, the network, and `without_network`."""
    try:
        yield
    except OSError as error:  # urllib's and the Hugging Face hub's errors are OSErrors
        reason = (str(error) or type(error).__name__).partition("\n")[0].rstrip(".")
        raise ValueError(f"{name} cannot be loaded ({reason}): {without_network}") from error


def with_channels(weight: Tensor, channels: int) -> Tensor:
    """The weights of a first convolution, (O, 3, h, w), for images of another number of channels: (O, channels, h, w).

    For one channel they are summed: a grey image gives what its copy in three channels gave. For more they are
    repeated in turn, and scaled so that their sum stays the same on average (as in timm).
    """
    if channels == 1:
        return weight.sum(1, keepdim=True)
    return weight.repeat(1, -(-channels // 3), 1, 1)[:, :channels] * (3 / channels)
