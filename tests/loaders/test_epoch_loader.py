"""The base of loaders without an engine, over batches that are just their indices."""

import pytest

from loaders.base import EpochIterator, Position
from loaders.epoch_loader import EpochLoader, TaskSource
from loaders.workers.tasks import Task


class Indices(EpochLoader):
    """Its batches are the lists of indices; notes what is called."""

    def __init__(self, *args, **settings) -> None:
        super().__init__(*args, **settings)
        self.calls: list = []
        self.error: Exception | None = None

    def _prepare(self) -> None:
        self.calls.append("prepare")
        if self.error is not None:
            raise self.error

    def _open(self, epoch: int, first: int) -> TaskSource:
        self.calls.append((epoch, first))
        return TaskSource(lambda task: task.indices, self._epochs.tasks.epoch(epoch, first))


def make(length: int = 10, **settings) -> Indices:
    return Indices(range(length), **{"batch_size": 4, **settings})


def test_the_arguments_decide_the_order_which_the_samplers_have_too():
    settings = {
        "batch_size": 2,
        "shuffle": True,
        "seed": 5,
        "drop_last": True,
        "rank": 1,
        "world_size": 2,
        "pad": False,
    }
    loader = make(11, **settings)
    assert {name: getattr(loader._epochs.order, name) for name in settings} == settings
    assert (loader.batch_size, loader.seed, loader.rank, loader.world_size) == (2, 5, 1, 2)
    assert list(loader.dataset) == list(range(11))
    epoch = list(loader)
    loader.sampler.set_epoch(0)
    assert list(loader.sampler) == [index for batch in epoch for index in batch]
    loader.batch_sampler.set_epoch(0)
    assert list(loader.batch_sampler) == epoch
    plain = EpochLoader(range(3), 1)._epochs.order
    assert (plain.shuffle, plain.seed, plain.drop_last, plain.rank, plain.world_size) == (False, 0, False, 0, 1)
    assert plain.pad is True


def test_an_epoch_that_cannot_be_prepared_has_not_begun():
    loader = make()
    loader.error = ValueError("bad sample")
    with pytest.raises(ValueError, match="bad sample"):
        iter(loader)
    loader.error = None
    assert next(iter(loader)) == [0, 1, 2, 3]
    assert loader.calls[-1] == (0, 0)


def test_a_dataset_that_changed_its_length_is_refused_with_both_lengths():
    samples = list(range(1234))
    loader = Indices(samples, batch_size=4)
    samples.pop()
    with pytest.raises(RuntimeError, match=r"list had 1,234 samples when this Indices was made, and has 1,233 now"):
        iter(loader)


@pytest.mark.parametrize("batch_size", [0, -1])
def test_a_batch_has_a_sample_at_least(batch_size):
    with pytest.raises(ValueError, match=f"batch_size={batch_size}: give a number from 1"):
        make(batch_size=batch_size)
    assert len(make(batch_size=1)) == 10


def test_a_dataset_without_a_length_is_refused():
    with pytest.raises(TypeError, match="Indices needs a map-style dataset, and list_iterator has no __len__"):
        Indices(iter([1]), 4)


# Samplers


class Reversed:
    def __init__(self, length: int) -> None:
        self.length, self.epoch = length, 0

    def __len__(self) -> int:
        return self.length

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self):
        return iter([100 * self.epoch + index for index in reversed(range(self.length))])


def test_a_sampler_gives_the_order_and_is_split_among_ranks():
    parts = [make(sampler=Reversed(10), batch_size=2, rank=rank, world_size=2) for rank in (0, 1)]
    assert [list(part) for part in parts] == [[[9, 8], [5, 4], [1]], [[7, 6], [3, 2], [0]]]
    assert [len(part) for part in parts] == [3, 3]
    assert make(sampler=Reversed(3)).batch_size == 4


def test_a_batch_sampler_gives_the_batches():
    loader = make(batch_sampler=[[3, 1], [2], [5, 6, 7]])
    assert (len(loader), list(loader), loader.batch_size) == (3, [[3, 1], [2], [5, 6, 7]], None)


def test_an_epoch_in_a_samplers_order_resumes_with_its_epoch():
    loader = make(sampler=Reversed(10))
    loader.set_epoch(2)
    iterator = iter(loader)
    assert next(iterator) == [209, 208, 207, 206]
    state = loader.state_dict()
    assert (state["order"], state["sampler_epoch"]) == ("sampler", 2)
    again = make(sampler=Reversed(10))
    again.load_state_dict(state)
    assert list(again) == list(iterator) == [[205, 204, 203, 202], [201, 200]]


def test_a_sampler_without_a_length_is_iterated_to_its_end():
    loader = make(sampler=iter([4, 2, 0, 1, 3]))
    with pytest.raises(TypeError, match="no length"):
        len(loader)
    iterator = iter(loader)
    assert list(iterator) == [[4, 2, 0, 1], [3]]
    with pytest.raises(TypeError, match="no length"):
        len(iterator)


def test_a_samplers_error_comes_after_the_batches_before_it():
    def fails():
        yield from range(4)
        raise ValueError("bad sampler")

    iterator = iter(make(sampler=fails()))
    assert next(iterator) == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="bad sampler"):
        next(iterator)
    assert list(iterator) == []


@pytest.mark.parametrize("settings", [{"shuffle": True}, {"last_batch": "rollover"}])
def test_our_own_orders_arguments_go_with_no_sampler(settings):
    with pytest.raises(ValueError, match="leave out the sampler"):
        make(sampler=[1, 2], **settings)


def test_a_sampler_and_a_batch_sampler_contradict_each_other():
    with pytest.raises(ValueError, match="sampler and batch_sampler were both given"):
        make(sampler=[1, 2], batch_sampler=[[1, 2]])


# Sources


def numbered(*numbers: int):
    return iter([Task((), 0, number) for number in numbers])


def test_a_task_source_makes_each_batch_once_and_delivers_errors_in_their_places():
    made: list[int] = []

    def make(task: Task) -> str:
        made.append(task.number)
        if task.number == 3:
            raise ValueError("bad")
        return "abcdef"[task.number]

    source, position = TaskSource(make, numbered(2, 3, 4)), Position(0, 2)
    assert source.next() is source.next()
    iterator = EpochIterator(source, position)
    assert next(iterator) == "c"
    with pytest.raises(ValueError, match="bad"):
        next(iterator)
    assert list(iterator) == ["e"]
    assert made == [2, 3, 4]


def test_a_task_source_that_is_interrupted_makes_the_batch_again():
    outcomes: list = [KeyboardInterrupt(), "a"]

    def make(task: Task) -> str:
        outcome = outcomes.pop(0)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    iterator = EpochIterator(TaskSource(make, numbered(0)), Position(0))
    with pytest.raises(KeyboardInterrupt):
        next(iterator)
    assert list(iterator) == ["a"]


def test_a_closed_source_has_no_batches_left():
    source = TaskSource(lambda task: str(task.number), numbered(0, 1))
    assert source.next().batch == "0"
    source.close()
    assert source.next() is None
