"""Which class WorkerLoader(...) makes if it gets a seed.

WorkerLoader cannot import this, because these classes derive from it: loaders/__init__.py hands it over.
"""

from typing import Any

from torch.utils.data import IterableDataset

from .seeded_loader import SeededLoader
from .streams.loader import StreamLoader


def class_with_seed(dataset: Any) -> type[SeededLoader[Any]]:
    """Returns the class for the dataset."""
    return StreamLoader if isinstance(dataset, IterableDataset) else SeededLoader
