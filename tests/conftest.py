"""Tests marked `cuda` run where there is a CUDA device and are skipped elsewhere."""

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("cuda"):
            item.add_marker(pytest.mark.skip(reason="torch finds no CUDA device here"))
