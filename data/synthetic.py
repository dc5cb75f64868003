"""Synthetic: any number of learnable images in almost no memory, each of which takes a given time to read.

It stands in for a real dataset when loaders are compared: `cost` is the kind of work per sample, `cost_ms` its time.
"""

import hashlib
import time
from typing import Any

import numpy as np
import torch

from data.array_dataset import resized_middle
from data.errors import Range, check_choice, check_count, check_range

BANDS = 8  # of colour, side by side in an image
OFFSETS = 65_536  # of one long array of noise, at which the noise of an image may begin
PRIME = 2_654_435_761  # spreads neighbouring indices over the offsets (Knuth's multiplicative hash)
CHUNK = bytes(32_768)  # hashing it releases the GIL, and takes so little (20 to 100 us) that `cost_ms` is kept


class Synthetic:
    """`length` training or `test_length` test images: coloured bands that depend on the class, plus noise.

    A sample depends only on (seed, train, index). Images are uint8 (image_size, image_size, channels).
    Reading one takes `cost_ms` milliseconds of
    - cost="python": Python code, which holds the GIL, as most augmentations do;
    - cost="native": C code that releases the GIL, as decoding a JPEG does;
    - cost="wait": sleep, like waiting for a disk or a network.
    The first two are measured as CPU time of the calling thread, so they are as much work on a busy machine.
    """

    def __init__(
        self,
        train: bool,
        length: int = 50_000,
        test_length: int = 2_000,
        image_size: int = 32,
        channels: int = 3,
        num_classes: int = 10,
        cost: str = "native",
        cost_ms: float = 0.0,
        seed: int = 0,
    ) -> None:
        check_count("data.length", length)
        check_range("data.cost_ms", cost_ms, Range(0))
        check_choice("data.cost", cost, COSTS)
        self.length = length if train else test_length
        self.cost = cost
        self.cost_ms = cost_ms
        self.image_shape = (image_size, image_size, channels)
        self.classes = tuple(f"class {label}" for label in range(num_classes))
        # Bands and noise are each uniform over half of uint8's range, so their sum never overflows.
        self.mean = (0.5,) * channels
        self.std = (0.2,) * channels
        bands = np.random.default_rng(seed).integers(128, size=(num_classes, BANDS, channels), dtype=np.uint8)
        # (num_classes, W * C): the row of pixels that a class's images repeat. Adding whole rows is 20 times as fast.
        band_of_column = np.arange(image_size) * BANDS // image_size
        self._rows = bands[:, band_of_column].reshape(num_classes, -1)
        generator = np.random.default_rng((seed, 1 if train else 2))
        size = image_size**2 * channels + OFFSETS
        self._noise = generator.integers(128, size=size, dtype=np.uint8)

    def __len__(self) -> int:
        return self.length

    def sample_spec(self) -> dict[str, Any]:
        return {"image": (self.image_shape, torch.uint8), "label": ((), torch.int64)}

    def prepare(self, image: np.ndarray) -> np.ndarray:
        return resized_middle(image, *self.image_shape[:2])

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        image = np.empty(self.image_shape, np.uint8)
        label = self._write(index, image)
        return {"image": torch.from_numpy(self.prepare(image)), "label": torch.tensor(label)}

    def read_batch(self, indices: np.ndarray, out: dict[str, torch.Tensor], random: Any) -> None:
        """Writes the samples at `indices` (B,) into `out`. Draws nothing: a sample depends only on its index."""
        images = out["image"].numpy()
        labels = out["label"].numpy()
        for row, index in enumerate(indices.tolist()):
            labels[row] = self._write(index, images[row])

    def _write(self, index: int, image: np.ndarray) -> int:
        """Spends the time that a sample takes, writes its image, and returns its label."""
        index = range(self.length)[index]  # raises IndexError past the end
        if self.cost_ms:
            COSTS[self.cost](self.cost_ms / 1000)
        label = index % len(self.classes)
        offset = index * PRIME % OFFSETS
        row = self._rows[label]
        noise = self._noise[offset : offset + image.size].reshape(-1, row.size)
        np.add(row, noise, out=image.reshape(-1, row.size))
        return label


def run_python(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        for _ in range(100):  # because reading the clock is a system call, not Python code
            pass


def run_native(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        hashlib.sha256(CHUNK)


COSTS = {"python": run_python, "native": run_native, "wait": time.sleep}
