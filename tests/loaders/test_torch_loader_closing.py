"""How TorchLoader ends torch's workers, on a stand-in for torch's DataLoader."""

import weakref
from types import SimpleNamespace

import pytest
from example_datasets import Numbers

from loaders import TorchLoader
from loaders import torch_loader as module
from loaders.timeline import Work


class Stock:
    """Torch's DataLoader and its iterator: gives (number, batch, worker, work), and notes what is done to workers."""

    def __init__(self, *_, **__) -> None:
        self.calls: list[str] = []
        self.script: list = [(0, "first", 0, Work()), (1, "second", 0, Work())]
        self._workers = [SimpleNamespace(terminate=lambda: self.calls.append("terminate"))]
        self._iterator = self

    def __iter__(self):
        return self

    def __next__(self):
        step = self.script.pop(0)
        return step() if callable(step) else step

    def _shutdown_workers(self) -> None:
        self.calls.append("shut down")


@pytest.fixture
def loader(monkeypatch):
    monkeypatch.setattr(module, "DataLoader", Stock)
    loader = TorchLoader(Numbers(4), 2)
    yield loader
    loader.close()


def test_workers_are_asked_to_exit_if_nobody_waits_for_them(loader):
    stock = loader._loader
    loader.close()
    assert stock.calls == ["shut down"], "before an epoch"
    loader.close()
    assert stock.calls == ["shut down"]


def test_workers_are_asked_to_exit_after_a_batch(loader):
    stock, iterator = loader._loader, iter(loader)
    assert next(iterator) == "first"
    loader.close()
    assert stock.calls == ["shut down"]


def test_workers_that_a_thread_waits_for_are_killed_and_that_thread_ends_the_rest(loader):
    stock, iterator = loader._loader, iter(loader)

    def killed_meanwhile():
        loader.close()
        assert stock.calls == ["terminate"]
        raise RuntimeError("a worker was killed")

    stock.script = [killed_meanwhile]
    with pytest.raises(RuntimeError, match="a worker was killed"):
        next(iterator)
    assert stock.calls == ["terminate", "shut down"]


def test_a_closed_loader_lets_go_of_torchs(loader):
    stock = weakref.ref(loader._loader)
    stock()._iterator = stock()._workers = None  # these refer to it
    loader.close()
    assert stock() is None
