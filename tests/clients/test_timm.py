"""timm's fast_collate, its mixing collate, and its PrefetchLoader, which normalises on the device: here the CPU."""

import pytest

pytest.importorskip("timm")

import random

import numpy as np
import torch
from timm.data.loader import PrefetchLoader, fast_collate
from timm.data.mixup import FastCollateMixup
from torch.utils.data import DataLoader

from loaders import Preloader, WorkerLoader

LENGTH, BATCH_SIZE, SEED = 22, 4, 7
CPU = torch.device("cpu")


class Images:
    """Sample i is (a noisy uint8 CHW image, i), the image as an array or a tensor."""

    def __init__(self, convert=np.asarray) -> None:
        self.convert = convert

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int):
        image = np.random.default_rng(index).integers(0, 256, (3, 8, 8), dtype=np.uint8)
        return self.convert(image), index


def same(found, expected) -> None:
    """The batches are equal in values and dtypes."""
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(tuple(one), tuple(other), rtol=0, atol=0)


CONVERT = pytest.mark.parametrize("convert", [np.asarray, torch.from_numpy], ids=["array", "tensor"])


@CONVERT
@pytest.mark.parametrize("seed", [None, SEED])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_fast_collate_gives_the_batches_of_a_stock_loader(convert, seed, num_workers):
    images = Images(convert)
    with WorkerLoader(images, BATCH_SIZE, num_workers=num_workers, seed=seed, collate_fn=fast_collate) as loader:
        for _ in range(2):
            same(loader, DataLoader(images, BATCH_SIZE, collate_fn=fast_collate))


@CONVERT
@pytest.mark.parametrize("seed", [None, SEED])
@pytest.mark.parametrize(
    "wrap", [lambda loader: loader, lambda loader: Preloader(loader, "cpu")], ids=["", "preloader"]
)
def test_a_prefetch_loader_gives_the_same_batches_over_ours_as_over_a_stock_one(convert, seed, wrap):
    images = Images(convert)
    workers = {"num_workers": 2, "persistent_workers": True}
    expected = PrefetchLoader(DataLoader(images, BATCH_SIZE, collate_fn=fast_collate), device=CPU)
    with wrap(WorkerLoader(images, BATCH_SIZE, seed=seed, collate_fn=fast_collate, **workers)) as loader:
        prefetched = PrefetchLoader(loader, device=CPU)
        assert len(prefetched) == len(expected)
        assert prefetched.dataset is images
        for _ in range(2):
            same(prefetched, expected)


def test_random_erasing_of_a_prefetch_loader_draws_as_over_a_stock_loader():
    def batches(loader) -> list:
        random.seed(1)  # which pixels
        torch.manual_seed(1)  # their values
        return list(PrefetchLoader(loader, device=CPU, re_prob=0.5, re_mode="pixel"))

    with WorkerLoader(Images(), BATCH_SIZE, num_workers=2, collate_fn=fast_collate) as loader:
        same(batches(loader), batches(DataLoader(Images(), BATCH_SIZE, num_workers=2, collate_fn=fast_collate)))


def test_a_mixing_collate_can_be_switched_off_between_epochs_through_the_prefetch_loader():
    mixing = FastCollateMixup(mixup_alpha=1.0, num_classes=LENGTH)
    plain = FastCollateMixup(mixup_alpha=1.0, num_classes=LENGTH)
    plain.mixup_enabled = False
    settings = {"drop_last": True, "num_workers": 2}
    with WorkerLoader(Images(), BATCH_SIZE, collate_fn=mixing, **settings) as loader:
        prefetched = PrefetchLoader(loader, device=CPU)
        assert prefetched.mixup_enabled
        prefetched.mixup_enabled = False
        expected = DataLoader(Images(), BATCH_SIZE, collate_fn=plain, **settings)
        same(prefetched, PrefetchLoader(expected, device=CPU))


def test_a_mixing_collate_draws_the_same_whatever_the_number_of_workers():
    def batches(num_workers: int) -> list:
        mixing = FastCollateMixup(mixup_alpha=1.0, cutmix_alpha=1.0, num_classes=LENGTH)
        settings = {"shuffle": True, "drop_last": True, "num_workers": num_workers, "seed": SEED}
        with WorkerLoader(Images(), BATCH_SIZE, collate_fn=mixing, **settings) as loader:
            return [batch for _ in range(2) for batch in loader]

    same(batches(1), batches(2))
    same(batches(0), batches(2))
