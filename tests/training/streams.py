"""A stream for tests of runs."""

import torch
from torch.utils.data import IterableDataset, get_worker_info


class Images(IterableDataset):
    """Random images, and their numbers modulo 10 as labels: the stream's share of `length`. `fault` is one mistake."""

    classes, mean, std = tuple(range(10)), (0.5,) * 3, (0.25,) * 3

    def __init__(self, train: bool, length: int = 203, fault: str = "", **_: object) -> None:
        self.train, self.length, self.fault = train, length if train else 50, fault
        if fault == "cannot be pickled":
            self.file = open(__file__)  # noqa: SIM115

    def __iter__(self):
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        if self.fault == "one test shard" and not self.train:
            first, step = (0 if first == 0 else self.length), 1
        for number in range(first, 0 if self.fault == "empty" else self.length, step):
            image = (200 * torch.rand(8, 8, 3) + 5 * (number % 10)).to(torch.uint8)  # augmented at random
            yield image if self.fault == "no label" else (image, number % 10)
