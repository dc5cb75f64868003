"""No test of this folder needs a network."""

from urllib.error import URLError

import pytest


@pytest.fixture
def no_network(monkeypatch):
    def refuse(*_, **__):
        raise URLError("no network in tests")

    monkeypatch.setattr("torchvision.datasets.mnist.download_and_extract_archive", refuse)
    monkeypatch.setattr("torchvision.datasets.cifar.download_and_extract_archive", refuse)


@pytest.fixture
def any_cifar(monkeypatch):
    """Switches off torchvision's checksums, so that it accepts the small files."""
    from torchvision.datasets import CIFAR10

    for attribute in ("train_list", "test_list"):
        monkeypatch.setattr(CIFAR10, attribute, [[name, None] for name, _ in getattr(CIFAR10, attribute)])
    monkeypatch.setitem(CIFAR10.meta, "md5", None)
