"""Batches that a library's own functions collate in workers: MONAI's MetaTensors, PyTorch Geometric's graphs."""

import pytest
import torch
from torch.utils.data import DataLoader

from loaders import WorkerLoader

SETTINGS = pytest.mark.parametrize("settings", [{}, {"seed": 0}], ids=["unseeded", "seeded"])
NUM_WORKERS = pytest.mark.parametrize("num_workers", [0, 2])


@SETTINGS
@NUM_WORKERS
@pytest.mark.parametrize("ragged", [False, True])
def test_batches_of_monai_are_those_of_torchs_class(settings, num_workers, ragged):
    pytest.importorskip("monai")
    from monai.data import CacheDataset, MetaTensor, list_data_collate, pad_list_data_collate
    from monai.transforms import Compose, EnsureTyped, RandFlipd

    data = [{"image": torch.full((1, 4, 4 + ragged * index), float(index)), "label": index} for index in range(8)]
    steps = Compose([EnsureTyped(keys="image"), RandFlipd(keys="image", prob=1.0, spatial_axis=0)])
    dataset = CacheDataset(data, steps, progress=False)
    how = {"num_workers": num_workers, "collate_fn": pad_list_data_collate if ragged else list_data_collate}
    with WorkerLoader(dataset, 4, **how, **settings) as loader:
        for ours, theirs in zip(loader, DataLoader(dataset, 4, **how), strict=True):
            assert type(ours["image"]) is type(theirs["image"]) is MetaTensor
            assert torch.equal(ours["image"], theirs["image"]) and torch.equal(ours["label"], theirs["label"])
            assert torch.equal(ours["image"].affine, theirs["image"].affine)


@SETTINGS
@NUM_WORKERS
def test_graphs_of_different_sizes_are_joined_as_by_geometrics_own_loader(settings, num_workers):
    pytest.importorskip("torch_geometric")
    from torch_geometric.data import Data
    from torch_geometric.loader import DataLoader
    from torch_geometric.loader.dataloader import Collater

    graphs = []
    for index in range(10):  # a path of index + 2 nodes
        nodes = torch.arange(index + 2)
        edges = torch.stack([nodes[:-1], nodes[1:]])
        graphs.append(Data(x=nodes[:, None].float(), edge_index=edges, y=torch.tensor(index)))
    with WorkerLoader(graphs, 4, num_workers=num_workers, collate_fn=Collater(graphs), **settings) as loader:
        for ours, theirs in zip(loader, DataLoader(graphs, 4), strict=True):
            assert type(ours) is type(theirs) and ours.num_graphs == theirs.num_graphs
            for name in ("x", "edge_index", "y", "batch", "ptr"):
                assert torch.equal(ours[name], theirs[name])
            sizes = [[graph.num_nodes for graph in batch.to_data_list()] for batch in (ours, theirs)]
            assert sizes[0] == sizes[1]
