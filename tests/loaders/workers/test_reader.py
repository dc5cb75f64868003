"""One task is read: by read_batch, __getitems__ or __getitem__, seeded or not; samples that fail may be left out."""

import random

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from loaders.randomness import Random
from loaders.workers.batch_buffer import BatchBuffer
from loaders.workers.reader import Reader, Reading, batch_bytes, spec_of
from loaders.workers.tasks import Task

SPEC = {"pair": ((2,), torch.int16), "draw": ((), torch.float64)}


class Plain:
    """Sample i is i and a draw; samples from 90 on are bad."""

    def __getitem__(self, index: int) -> tuple[int, float]:
        if index == 99:
            raise StopIteration
        if index >= 90:
            raise ValueError(f"{index} is bad")
        return index, random.random()


class Written(Plain):
    """The same samples in a field of pairs, written by read_batch."""

    unwritten = -1  # this sample's pair stays as it was

    def sample_spec(self):
        return SPEC

    def read_batch(self, indices, out, random) -> None:
        assert {len(tensor) for tensor in out.values()} == {len(indices)}
        for row, index in enumerate(indices):
            self.check(int(index))
            if index != self.unwritten:
                out["pair"][row] = int(index)
        out["draw"][:] = torch.from_numpy(random.uniform(1)[:, 0])

    def check(self, index: int) -> None:
        Plain.__getitem__(self, index)


def read(dataset, indices, marks: list | None = None, buffer: BatchBuffer | None = None, **settings) -> Reading:
    settings = {"collate_fn": default_collate, "batched": True, "seed": 1, "skips": False, **settings}
    special = {key: settings.pop(key) for key in ("singly", "without") if key in settings}
    how = {key: settings.pop(key) for key in ("seeds_globals",) if key in settings}
    rows = len(indices) if settings["batched"] else 1
    task = Task(indices, 2, 0, np.arange(4, 4 + rows), **special)
    reader = Reader(dataset=dataset, spec=spec_of(dataset), **settings)
    return reader.read(task, buffer or BatchBuffer(), ([] if marks is None else marks).append, **how)


def values(reading: Reading) -> list[int]:
    """Which samples the batch has."""
    batch = reading.batch["pair"][:, 0] if isinstance(reading.batch, dict) else reading.batch[0]
    return batch.tolist()


# Which method reads


def test_a_spec_has_integers_for_shapes_and_is_its_fields_are_aligned():
    class Listed(Written):
        def sample_spec(self):
            return {"image": ([np.int64(3), 5], torch.uint8), "label": ((), torch.int64)}

    spec = spec_of(Listed())
    assert spec == {"image": ((3, 5), torch.uint8), "label": ((), torch.int64)}
    assert batch_bytes(spec, 9) == 192 + 128


@pytest.mark.parametrize("wrong", ["no spec", None, {"a": 3}, {"a": ((2,), "uint8")}, {"a": (("x",), torch.int8)}])
def test_a_spec_of_another_form_or_none_is_refused_in_words(wrong):
    class Wrong(Written):
        sample_spec = None if wrong == "no spec" else lambda self: wrong

    message = "define both, or neither$" if wrong == "no spec" else r"^Wrong\.sample_spec\(\) returned .*such as"
    with pytest.raises(ValueError, match=message) as refusal:
        spec_of(Wrong())
    assert wrong == "no spec" or repr(wrong) in str(refusal.value)


def test_read_batch_writes_into_the_buffer_and_gets_a_stream_for_each_row():
    buffer, marks = BatchBuffer(), []
    batch = read(Written(), [7, 5], marks, buffer).batch
    assert batch["pair"].tolist() == [[7, 7], [5, 5]]
    expected = Random(1, 2, np.arange(4, 6), np.array([7, 5])).uniform(1)
    assert batch["draw"].tolist() == expected[:, 0].tolist()
    assert (buffer.needed, marks) == (128, [])
    assert read(Written(), [7, 5], marks, singly=True).batch["draw"].tolist() == batch["draw"].tolist()
    assert marks == [0, 1]


# Samples that fail


@pytest.mark.parametrize("kind", [Plain, Written])
def test_a_batch_without_a_good_sample_is_an_error_that_gives_three_reasons(kind):
    with pytest.raises(RuntimeError) as error:
        read(kind(), [91, 92, 93, 94], skips=True)
    reasons = "; ".join(f"sample {index}: ValueError: {index} is bad" for index in (91, 92, 93))
    assert f"({reasons})" in str(error.value)


@pytest.mark.parametrize(("indices", "skips"), [([1, 2, 3], False), ([1, 92, 3], True)])
def test_fields_that_read_batch_adds_are_those_of_the_samples_that_are_left(indices, skips):
    class Named(Written):
        def read_batch(self, indices, out, random) -> None:
            super().read_batch(indices, out, random)
            out["names"] = [f"sample {index}" for index in indices]

    reading = read(Named(), indices, skips=skips)
    assert reading.batch["names"] == [f"sample {index}" for index in indices if index < 90]
    assert reading.batch["pair"][:, 0].tolist() == [index for index in indices if index < 90]


# Mistakes of a read_batch


def test_a_replaced_field_is_refused():
    class Replacing(Written):
        def read_batch(self, indices, out, random) -> None:
            out["pair"] = torch.zeros(len(indices), 2)

    with pytest.raises(ValueError, match=r"read_batch has replaced out\['pair'\].*fields.* are pair, draw"):
        read(Replacing(), [1])


@pytest.mark.parametrize(("unwritten", "where"), [(4, "row 1"), (-1, None)])
def test_in_debug_mode_rows_that_are_not_written_are_named(unwritten, where, monkeypatch):
    dataset = Written()
    dataset.unwritten = unwritten
    values(read(dataset, [3, 4, 5]))  # not noticed
    monkeypatch.setenv("LOADERS_DEBUG", "1")
    if where is None:
        assert values(read(dataset, [3, 4, 5])) == [3, 4, 5]
        return
    with pytest.raises(ValueError, match=rf"has not written out\['pair'\] in {where} .rows are 0 to 2.$"):
        read(dataset, [3, 4, 5])
