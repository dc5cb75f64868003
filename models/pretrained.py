"""What the networks of other packages share: names, downloads, first layers, and how their images were prepared."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches

from torch import Tensor


@dataclass(frozen=True)
class Preprocessing:
    """How a network expects its images. None: as the dataset has them."""

    image_size: int | None = None  # side in pixels
    interpolation: str | None = None  # bilinear | bicubic
    test_crop: float | None = None  # share (0 to 1) of a test image's shorter side that is shown
    mean: tuple[float, ...] | None = None  # of each channel, for pixels scaled to 0..1
    std: tuple[float, ...] | None = None  # likewise


def check_name(kind: str, name: str, known: Collection[str], others: str) -> None:
    """Raises ValueError unless `name` is known: a sentence with the nearest name, and with how to find `others`."""
    if name not in known:
        close = get_close_matches(name, known, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise ValueError(f"there is no {kind} named {name!r}: {hint}{others}")


@contextmanager
def downloading(name: str, without_network: str) -> Iterator[None]:
    """Raises ValueError if the block cannot get the network `name`: a sentence that ends in `without_network`."""
    try:
        yield
    except OSError as error:  # urllib's errors and those of the Hugging Face hub are kinds of it
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
