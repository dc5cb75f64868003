"""Iterable datasets with a seed: logical streams are the same, whatever reads, kills, interrupts or resumes them."""

import multiprocessing
import random
from itertools import chain, cycle, islice

import pytest
import torch
from every_loader import saved
from example_datasets import Stream
from example_streams import Failing, Numbers, Refilled, Rewinding, Stateful, loader_of, numbers, seen
from strikes import Interrupted, moments_of, struck
from torch.utils.data import IterableDataset, get_worker_info

from loaders import Preloader, WorkerLoader, merge_states


def with_a_draw(samples):
    return torch.stack(samples) + 1000 * torch.randint(1000, ())


VARIANTS = [
    (Numbers, {"steps_per_epoch": 9, "drop_last": True, "batch_size": 4}),
    (Failing, {"steps_per_epoch": 9, "shuffle_buffer": 5}),
    (Stateful, {"shuffle_buffer": 5, "collate_fn": with_a_draw}),
    (Refilled, {"steps_per_epoch": 9}),
    (Rewinding, {"shuffle_buffer": 4}),
]


@pytest.mark.parametrize(("kind", "settings"), VARIANTS)
def test_kills_resumes_and_other_numbers_of_workers_change_no_byte(kind, settings):
    with loader_of(kind(), 0, **settings) as loader:
        epochs = [seen(loader) for _ in range(2)]
    assert epochs[0] != epochs[1], "each has its own random numbers"
    assert "drop_last" not in settings or {len(batch) for batch in chain(*epochs)} == {4}
    draw = random.Random(kind.__name__)
    state = None
    epoch = 0
    got = []
    while epoch < 2:
        with loader_of(kind(), draw.choice((0, 1, 2, 3)), **settings) as loader:
            if state is not None:
                loader.load_state_dict(state)
            iterator = iter(loader)
            for _ in range(draw.randrange(1, 10)):
                if iterator._workers and draw.random() < 0.3:
                    draw.choice(iterator._workers).kill()
                try:
                    got.append(next(iterator).tolist())
                except KeyError as error:
                    got.append(str(error).split()[-1])
                except StopIteration:
                    break
            state = saved(loader)
            if state["epoch"] > epoch:
                assert got == epochs[epoch]
                epoch += 1
                got = []


@pytest.mark.parametrize(("prefetch_factor", "persistent"), [(1, True), (3, False)])
def test_an_epoch_that_was_left_takes_no_sample_from_the_next_one(prefetch_factor, persistent):
    with loader_of(Numbers(), 0) as loader:
        expected = [numbers(loader) for _ in range(4)]
    with loader_of(Numbers(), 2, prefetch_factor=prefetch_factor, persistent_workers=persistent) as loader:
        for epoch, left_after in enumerate((0, 1, 5, 9)):
            batches = iter(loader)
            for _ in range(left_after):
                next(batches)
            loader.set_epoch(epoch)
            assert numbers(loader) == expected[epoch]


def test_ranks_share_the_streams_and_a_merged_state_resumes_on_any_number_of_them():
    with loader_of(Numbers(), 0, batch_size=4) as loader:
        iterator = iter(loader)
        alone = numbers(next(iterator) for _ in range(8))
        rest = numbers(iterator)
    loaders = [loader_of(Numbers(), rank, batch_size=4, rank=rank, world_size=2) for rank in range(2)]
    iterators = list(map(iter, loaders))
    together = [numbers([next(iterator)])[0] for _ in range(4) for iterator in iterators]
    assert together == alone, "the batches of a step are those of two steps of one rank"
    states = [saved(loader) for loader in loaders]
    for ranks in (1, 4):
        got = []
        for rank in range(ranks):
            with loader_of(Numbers(), ranks - 1, batch_size=8 // ranks, rank=rank, world_size=ranks) as loader:
                loader.load_state_dict(merge_states(states))
                got += numbers(loader)
        assert sorted(chain(*got)) == sorted(chain(*rest))
    with (
        loader_of(Numbers(), 0, batch_size=8) as loader,
        pytest.raises(ValueError, match=r"lacks the streams 1, 3 .*merge_states"),
    ):
        loader.load_state_dict(states[0])
    for loader in loaders:
        loader.close()


class Uneven(IterableDataset):
    """The first stream is empty, the others have three samples."""

    def __iter__(self):
        stream = get_worker_info().id
        yield from range(10 * stream, 10 * stream + 3 * (stream > 0))


@pytest.mark.parametrize("received", [1, 2, 3])
def test_a_merged_state_keeps_each_ranks_place_in_its_turns(received):
    def ranks():
        return [WorkerLoader(Uneven(), 1, seed=0, streams=4, rank=rank, world_size=2) for rank in range(2)]

    loaders = ranks()
    iterators = list(map(iter, loaders))
    for iterator in iterators:
        list(islice(iterator, received))
    merged = merge_states([loader.state_dict() for loader in loaders])
    for loader, iterator in zip(ranks(), iterators, strict=True):
        loader.load_state_dict(merged)
        assert list(map(int, loader)) == list(map(int, iterator))


def test_streams_go_on_where_the_preloaders_consumer_was_after_a_break_and_after_a_resume():
    settings = {"steps_per_epoch": 9, "shuffle_buffer": 4}
    with loader_of(Numbers(), 0, **settings) as loader:
        expected = seen(loader) + seen(loader)
    with Preloader(loader_of(Numbers(), 2, **settings), "cpu", 2) as loader:
        got = [batch.tolist() for count in (2, 4, 1, 4) for _, batch in zip(range(count), loader, strict=False)]
        state = loader.state_dict()
    with Preloader(loader_of(Numbers(), 1, **settings), "cpu", 0) as loader:
        loader.load_state_dict(state)
        assert got + [next(loader).tolist() for _ in range(4)] == expected[:15]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # an interrupt inside a __del__
@pytest.mark.parametrize("settings", [{"shuffle_buffer": 7}, {"steps_per_epoch": 90, "on_error": "skip"}])
def test_an_interrupt_inside_next_loses_no_sample(settings):
    with loader_of(Stateful(150), 0, **settings) as loader:
        expected = seen(loader)
        loader.set_epoch(0)
        most = moments_of(lambda: next(loader))
    with loader_of(Stateful(150), 0, **settings) as loader:
        iterator = iter(loader)
        got = []
        for number, error in enumerate(islice(cycle((Interrupted, TimeoutError)), 2 * len(expected))):
            try:
                with struck(1 + 7 * number % most, error):
                    for batch in iterator:  # not next(): the strike may come after its return, when it is the test's
                        got.append(batch.tolist())
                        break
            except error:
                pass
        assert got + seen(iterator) == expected


def test_worker_init_fn_is_called_in_each_worker_process_and_for_each_stream_that_is_opened():
    calls = multiprocessing.SimpleQueue()

    def init_fn(number):
        info = get_worker_info()
        info.dataset.length = 1 + number
        calls.put((number, info.num_workers))

    with WorkerLoader(Stream(8), 4, seed=0, num_workers=1, streams=3, worker_init_fn=init_fn) as loader:
        lengths = [len(batch) for batch in loader]
    assert [calls.get() for _ in range(4)] == [(0, 1), (0, 3), (1, 3), (2, 3)]
    while not calls.empty():  # the next epoch's streams, which are read ahead
        assert calls.get()[1] == 3
    calls.close()
    assert lengths == [1, 2, 3], "a stream reads the copy that the call for it has changed"


class Announced(Numbers):
    """Counts how often it is opened."""

    opened = multiprocessing.Semaphore(0)

    def __iter__(self):
        self.opened.release()
        return super().__iter__()


def test_the_first_batches_of_the_next_epoch_are_loaded_ahead(bound):
    with loader_of(Numbers(), 0, streams=1) as loader:
        expected = [numbers(loader) for _ in range(3)]
    with loader_of(Announced(), 1, streams=1) as loader:
        for epoch in range(3):
            assert numbers(loader) == expected[epoch]
            for _ in range(2 if epoch == 0 else 1):  # this epoch, and the one after it
                assert loader.dataset.opened.acquire(timeout=bound), "the next epoch's stream is not opened"
