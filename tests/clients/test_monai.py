"""MONAI: dictionaries of MetaTensors, collated and padded by its own functions, in workers."""

import pytest

pytest.importorskip("monai")

import torch
from monai.data import CacheDataset, MetaTensor, list_data_collate, pad_list_data_collate
from monai.transforms import Compose, EnsureTyped, RandFlipd
from torch.utils.data import DataLoader

from loaders import WorkerLoader

MODES = pytest.mark.parametrize("settings", [{}, {"seed": 0}], ids=["unseeded", "seeded"])


def volumes(ragged: bool) -> CacheDataset:
    data = [{"image": torch.full((1, 4, 4 + ragged * index), float(index)), "label": index} for index in range(8)]
    steps = Compose([EnsureTyped(keys="image"), RandFlipd(keys="image", prob=1.0, spatial_axis=0)])
    return CacheDataset(data, steps, progress=False)


@MODES
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("collate_fn", [list_data_collate, pad_list_data_collate])
def test_batches_of_meta_tensors_are_those_of_torchs_class(settings, num_workers, collate_fn):
    dataset, how = volumes(collate_fn is pad_list_data_collate), {"num_workers": num_workers, "collate_fn": collate_fn}
    expected = list(DataLoader(dataset, 4, **how))
    with WorkerLoader(dataset, 4, **how, **settings) as loader:
        for ours, theirs in zip(loader, expected, strict=True):
            assert type(ours["image"]) is type(theirs["image"]) is MetaTensor
            assert torch.equal(ours["image"], theirs["image"]) and torch.equal(ours["label"], theirs["label"])
            assert torch.equal(ours["image"].affine, theirs["image"].affine)
