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
    from monai.data import MetaTensor, pad_list_data_collate

    images = [MetaTensor(torch.full((1, 4, 4 + index), float(index)), affine=torch.eye(4)) for index in range(8)]
    data = [{"image": image, "label": index} for index, image in enumerate(images)]
    with WorkerLoader(data, 4, collate_fn=pad_list_data_collate, **settings) as loader:
        for ours, theirs in zip(loader, DataLoader(data, 4, collate_fn=pad_list_data_collate), strict=True):
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
            assert type(ours) is type(theirs) and ours[1].num_nodes == theirs[1].num_nodes
            assert all(torch.equal(ours[name], theirs[name]) for name in ("x", "edge_index", "y", "batch", "ptr"))


@pytest.mark.parametrize("settings", [{}, {"seed": 7, "persistent_workers": True}], ids=["unseeded", "seeded"])
@pytest.mark.parametrize("preload", [False, True], ids=["workers", "preloader"])
def test_timms_prefetch_loader_gives_the_same_batches_over_ours_as_over_a_stock_one(settings, preload):
    pytest.importorskip("timm")
    from timm.data.loader import PrefetchLoader, fast_collate

    cpu, random = torch.device("cpu"), np.random.default_rng(0)
    images = [(random.integers(0, 256, (3, 8, 8), dtype=np.uint8), index) for index in range(22)]
    expected = PrefetchLoader(DataLoader(images, 4, collate_fn=fast_collate), device=cpu)
    loader = WorkerLoader(images, 4, collate_fn=fast_collate, num_workers=2, **settings)
    with Preloader(loader, "cpu") if preload else loader as loader:
        prefetched = PrefetchLoader(loader, device=cpu)
        assert len(prefetched) == len(expected) and prefetched.dataset is images
        for _ in range(2):
            for one, other in zip(prefetched, expected, strict=True):
                torch.testing.assert_close(tuple(one), tuple(other), rtol=0, atol=0)
