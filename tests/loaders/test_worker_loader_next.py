"""Which iterator next(loader) continues, and lengths that are not known, without a worker."""

import pytest
from example_datasets import Numbers

from loaders import WorkerLoader


class Endless:
    """A sampler without a length."""

    def __iter__(self):
        return iter(range(4))


@pytest.mark.parametrize("seed", [None, 0])
def test_next_continues_the_newest_iterator(seed):
    with WorkerLoader(Numbers(6), 2, seed=seed) as loader:
        assert next(loader).tolist() == [0, 1]
        iterator = iter(loader)
        assert next(loader).tolist() == [0, 1]
        assert next(iterator).tolist() == [2, 3]
        assert next(loader).tolist() == [4, 5]
        with pytest.raises(StopIteration):
            next(loader)
        assert next(loader).tolist() == [0, 1], "a new one"


@pytest.mark.parametrize("seed", [None, 0])
def test_next_begins_an_iterator_where_the_newest_is_gone(seed):
    with WorkerLoader(Numbers(6), 2, seed=seed) as loader:
        next(iter(loader))
        assert next(loader).tolist() == [0, 1]
        assert next(loader).tolist() == [2, 3]


def test_a_sampler_without_a_length_leaves_its_loader_without_one():
    loader = WorkerLoader(Numbers(4), 2, seed=0, sampler=Endless())
    with pytest.raises(TypeError, match="the sampler has no length, so the loader has none either"):
        len(loader)
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3]]
