import pickle

import torch

from data.synthetic import COSTS, Synthetic


def test_a_sample_depends_only_on_seed_split_and_index_and_a_hundred_million_take_almost_no_memory():
    def image(index=5, train=True, seed=0):
        return Synthetic(train=train, seed=seed)[index]["image"]

    for other in (image(index=6), image(index=15), image(train=False), image(seed=1)):
        assert not torch.equal(image(), other)
    dataset = Synthetic(train=True, length=100_000_000, num_classes=1000)
    assert dataset[99_999_999]["label"].item() == 999 and len(pickle.dumps(dataset)) < 1_000_000


def test_a_sample_spends_its_cost_once_and_a_cost_of_zero_never(monkeypatch):
    paid = []
    monkeypatch.setitem(COSTS, "wait", paid.append)
    Synthetic(train=True, cost="wait", cost_ms=0)[0]
    Synthetic(train=True, cost="wait", cost_ms=5)[0]
    assert paid == [0.005]
