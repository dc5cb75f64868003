import pytest
import torch


@pytest.fixture(autouse=True)
def as_many_threads_as_before():
    """Benches set the number of torch's threads."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
