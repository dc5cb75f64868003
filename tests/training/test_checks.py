"""What is said of samples that cannot make a batch, and of values that are no numbers."""

from types import SimpleNamespace

import pytest
import torch
from PIL import Image

from tests.data.reading import refused
from training.checks import read_first
from training.metrics import Means


def test_samples_of_a_type_that_no_batch_has_are_told_what_to_return():
    dataset = [(Image.new("RGB", (8, 8)), 0)] * 2
    with refused(r"PIL.*__getitem__"):
        read_first(dataset, None)


@pytest.mark.parametrize("value", ["text", None, [[1.0], [1.0, 2.0]]])
def test_a_logged_value_that_is_no_number_is_named(value):
    processes = SimpleNamespace(device=torch.device("cpu"))
    with refused(r"mine is .*: .*numbers or tensors"):
        Means(processes).add(1, {"mine": value})
