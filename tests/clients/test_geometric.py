"""PyTorch Geometric: graphs of different sizes, joined into one by its Collater, in workers."""

import pytest

pytest.importorskip("torch_geometric")

import torch
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.loader.dataloader import Collater

from loaders import WorkerLoader


class Graphs(torch.utils.data.Dataset):
    """Graph i is a path of i + 2 nodes."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Data:
        nodes = torch.arange(index + 2)
        return Data(x=nodes[:, None].float(), edge_index=torch.stack([nodes[:-1], nodes[1:]]), y=torch.tensor(index))


@pytest.mark.parametrize("settings", [{}, {"seed": 0}], ids=["unseeded", "seeded"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_of_graphs_are_those_of_its_own_loader(settings, num_workers):
    dataset = Graphs()
    expected = list(DataLoader(dataset, 4))
    with WorkerLoader(dataset, 4, num_workers=num_workers, collate_fn=Collater(dataset), **settings) as loader:
        for ours, theirs in zip(loader, expected, strict=True):
            assert type(ours) is type(theirs) and ours.num_graphs == theirs.num_graphs
            for name in ("x", "edge_index", "y", "batch", "ptr"):
                assert torch.equal(ours[name], theirs[name])
            assert [graph.num_nodes for graph in ours.to_data_list()] == [
                graph.num_nodes for graph in theirs.to_data_list()
            ]
