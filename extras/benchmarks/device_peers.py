"""The peers of bench_device.py: what other programs do so that batches reach a GPU early.

Each takes batches of the stock DataLoader, and is a context that ends its threads.
"""

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch

from loaders import Accelerator, move


class PreDataLoader:
    """The idea of PreDataLoader: a thread copies batches on a side stream and puts them into a bounded queue.

    As there, the consumer's stream does not wait for a copy, so a step may read a batch too early: this is for
    measuring only. The transform runs in the consumer's thread.
    """

    def __init__(self, loader: Iterable[Any], device: torch.device, transform: Callable[[Any, Any], Any]) -> None:
        self._loader = loader
        self._transform = transform
        self._accelerator = Accelerator(device)
        self._stream = self._accelerator.new_stream() if self._accelerator.has_streams else None
        self._queue: queue.Queue[Any] = queue.Queue(2)
        self._is_closed = False

    def __enter__(self) -> "PreDataLoader":
        batches = iter(self._loader)  # in this thread, where the others fork: filelock refuses two forks at once
        threading.Thread(target=self._fill, args=(batches,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_closed = True

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield self._transform(self._queue.get(), None)

    def _fill(self, batches: Iterator[Any]) -> None:
        accelerator = self._accelerator
        with accelerator.using(self._stream):
            for batch in batches:
                copied = move(batch, lambda field: field.to(accelerator.device, non_blocking=accelerator.has_streams))
                if not self._put(copied):
                    return

    def _put(self, batch: Any) -> bool:
        """Waits until there is room. Returns False if the loader was closed meanwhile."""
        while not self._is_closed:
            try:
                self._queue.put(batch, timeout=0.2)
                return True
            except queue.Full:
                continue
        return False


class Pairs:
    """A dataset as timm reads it: an image (channels, height, width) and its label."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        sample = self.dataset[index]
        return sample["image"].numpy().transpose(2, 0, 1), int(sample["label"])


def timm_batches(loader: Any, dataset: Any, device: torch.device, dtype: torch.dtype) -> Iterator[dict[str, Any]]:
    """timm's PrefetchLoader: the next batch is copied and normalised on a side stream while a step runs."""
    from timm.data.loader import PrefetchLoader

    mean = tuple(dataset.mean)
    std = tuple(dataset.std)
    for image, label in PrefetchLoader(loader, mean, std, len(mean), device, dtype):
        yield {"image": image.contiguous(memory_format=torch.channels_last), "label": label}
