"""Interrupts of a Preloader whose transform works in place, at every depth; test_interrupts.py has all loaders."""

import random

import pytest
import torch
from example_datasets import Numbers, contents
from strikes import moments_of, struck

from loaders import Preloader, WorkerLoader

BATCHES = 6
KINDS = (KeyboardInterrupt, TimeoutError)

# An interrupt that comes inside a finaliser is printed by Python, and goes no further.
pytestmark = [
    pytest.mark.timeout(120),  # a lost batch may be waited for for ever
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


def doubled(batch: torch.Tensor, random) -> torch.Tensor:
    """In place: done twice, it would give other numbers."""
    return batch.mul_(2).add_(int(1000 * random.uniform(1)[0]))


def loader(depth: int, num_workers: int) -> Preloader:
    settings = {"num_workers": num_workers, "persistent_workers": num_workers > 0, "seed": 3, "shuffle": True}
    return Preloader(WorkerLoader(Numbers(4 * BATCHES), 4, **settings), "cpu", depth, doubled)


def epoch_of(loader: Preloader, moment: int, kind: type[BaseException]) -> list:
    """The batches of an epoch that is struck once; the consumer asks again for what was interrupted."""
    seen: list = []
    iterator = None
    with struck(moment, kind):
        while True:
            try:
                iterator = iterator or iter(loader)
                # Not next(): the strike may come after its return, when the batch is the test's.
                for batch in iterator:
                    seen.append(batch.tolist())
                return seen
            except kind:
                pass


@pytest.mark.parametrize("count", [8, pytest.param(200, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_interrupt_at_any_moment_of_an_epoch_loses_no_batch_and_changes_none(num_workers, depth, count):
    with loader(0, 0) as calm:
        expected = [contents(calm) for _ in range(count + 1)]
    with loader(depth, num_workers) as tried:
        most = moments_of(lambda: list(tried))
        draw = random.Random(depth)
        for epoch in range(count):
            moment = 1 + int((epoch + draw.random()) * most / count)
            assert epoch_of(tried, moment, KINDS[epoch % 2]) == expected[epoch + 1], f"struck at moment {moment}"
