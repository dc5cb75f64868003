"""Batches that a library's own class collates in workers: those of PyTorch Geometric."""

import pytest
import torch

from loaders import WorkerLoader


@pytest.mark.parametrize("settings", [{"num_workers": 2}, {"seed": 0}], ids=["workers", "seeded"])
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
