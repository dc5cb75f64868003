"""CroppedStream: crops of images that come in the order of their files, instead of a random one."""

import inspect
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch.utils.data import IterableDataset

from data.errors import DataError
from data.images.crops import CroppedDataset


class CroppedStream(IterableDataset[dict[str, torch.Tensor]]):
    """The samples of the class `like`, whose arguments it takes, without their indices and labels.

    A subclass opens the files in `open`, and reads them in `encoded`. A label is one of the classes, or the number of
    one. Raises DataError if the classes are not known.
    """

    like: ClassVar[type[CroppedDataset]]
    _loaded: dict[str, Any] | None = None  # where the next iterator begins
    mean, std = CroppedDataset.mean, CroppedDataset.std

    def __init__(self, *arguments: Any, **keys: Any) -> None:
        given = inspect.signature(self.like).bind(*arguments, **keys)
        given.apply_defaults()
        options = SimpleNamespace(**given.arguments)
        self.train, self.dataset = options.train, CroppedDataset(options.train, **options.crops)
        if self.dataset.decode_on == "device":
            raise DataError("data.decode_on=device: workers decode the samples of a stream: set it to workers")
        self.classes = tuple(map(str, self.open(options) or ()))
        if not self.classes:
            raise DataError(
                "data.classes is not set: a stream does not look for the classes; set it to all their names"
            )

    def open(self, options: SimpleNamespace) -> Sequence[str] | None:
        """Opens the files that the arguments of `like` name. Returns the classes, or None if they are not known."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """Where the newest iterator is."""
        raise NotImplementedError

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Sets where the next iterator begins."""
        self._loaded = dict(state)

    def encoded(self, state: dict[str, Any] | None) -> Iterator[tuple[bytes, str, Any]]:
        """Yields the bytes of an image file, its name for errors, and its label: the share of torch's worker.

        state: where it begins, as `state_dict` said it; None: at the start.
        """
        raise NotImplementedError

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        known = {name: number for number, name in enumerate(self.classes)}
        known |= {str(number): number for number in known.values()}
        state, self._loaded = self._loaded, None
        for data, name, label in self.encoded(state):
            if str(label) not in known:
                raise DataError(f"{name} has the label {label}, which is not one of the {len(self.classes)} classes")
            yield self.dataset.sample((data, name), known[str(label)])
