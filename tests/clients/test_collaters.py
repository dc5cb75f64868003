"""Batches that a library's own functions collate in workers: those of MONAI, PyTorch Geometric and timm."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from loaders import Preloader, WorkerLoader

SETTINGS = pytest.mark.parametrize("settings", [{"num_workers": 2}, {"seed": 0}], ids=["workers", "seeded"])


@SETTINGS
def test_padded_batches_of_monai_are_those_of_torchs_class(settings):
    pytest.importorskip("monai")
    from monai.data import CacheDataset, MetaTensor, pad_list_data_collate
    from monai.transforms import Compose, EnsureTyped, RandFlipd

    data = [{"image": torch.full((1, 4, 4 + index), float(index)), "label": index} for index in range(8)]
    steps = Compose([EnsureTyped(keys="image"), RandFlipd(keys="image", prob=1.0, spatial_axis=0)])
    dataset = CacheDataset(data, steps, progress=False)
    with WorkerLoader(dataset, 4, collate_fn=pad_list_data_collate, **settings) as loader:
        for ours, theirs in zip(loader, DataLoader(dataset, 4, collate_fn=pad_list_data_collate), strict=True):
            assert type(ours["image"]) is type(theirs["image"]) is MetaTensor
            assert torch.equal(ours["image"], theirs["image"]) and torch.equal(ours["label"], theirs["label"])
            assert torch.equal(ours["image"].affine, theirs["image"].affine)


@SETTINGS
def test_graphs_of_different_sizes_are_joined_as_by_geometrics_own_loader(settings):
    pytest.importorskip("torch_geometric")
    from torch_geometric.data import Data
    from torch_geometric.loader import DataLoader
    from torch_geometric.loader.dataloader import Collater

    graphs = []
    for index in range(10):  # a path of index + 2 nodes
        nodes = torch.arange(index + 2)
        edges = torch.stack([nodes[:-1], nodes[1:]])
        graphs.append(Data(x=nodes[:, None].float(), edge_index=edges, y=torch.tensor(index)))
    with WorkerLoader(graphs, 4, collate_fn=Collater(graphs), **settings) as loader:
        for ours, theirs in zip(loader, DataLoader(graphs, 4), strict=True):
            assert type(ours) is type(theirs)
            assert all(torch.equal(ours[name], theirs[name]) for name in ("x", "edge_index", "y", "batch", "ptr"))
            assert ours[3].num_nodes == theirs[3].num_nodes if ours.num_graphs == 4 else ours.num_graphs == 2


class Images:
    """Sample i is (a noisy uint8 CHW array, i)."""

    def __len__(self) -> int:
        return 22

    def __getitem__(self, index: int):
        return np.random.default_rng(index).integers(0, 256, (3, 8, 8), dtype=np.uint8), index


def same(found, expected) -> None:
    """The batches are equal in values and dtypes."""
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(tuple(one), tuple(other), rtol=0, atol=0)


@pytest.mark.parametrize("settings", [{}, {"seed": 7, "persistent_workers": True}], ids=["unseeded", "seeded"])
@pytest.mark.parametrize("preload", [False, True], ids=["workers", "preloader"])
def test_timms_prefetch_loader_gives_the_same_batches_over_ours_as_over_a_stock_one(settings, preload):
    pytest.importorskip("timm")
    from timm.data.loader import PrefetchLoader, fast_collate

    images, cpu = Images(), torch.device("cpu")
    expected = PrefetchLoader(DataLoader(images, 4, collate_fn=fast_collate), device=cpu)
    loader = WorkerLoader(images, 4, collate_fn=fast_collate, num_workers=2, **settings)
    with Preloader(loader, "cpu") if preload else loader as loader:
        prefetched = PrefetchLoader(loader, device=cpu)
        assert len(prefetched) == len(expected) and prefetched.dataset is images
        for _ in range(2):
            same(prefetched, expected)
