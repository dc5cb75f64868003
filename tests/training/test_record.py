"""The scores that a Record compares; its files are tested with whole runs in test_train.py."""

import math

import pytest

from training.record import Record


@pytest.mark.parametrize("higher_is_better", [True, False])
def test_a_nan_is_the_worst_score(tmp_path, higher_is_better):
    record = Record(tmp_path)
    record.begin(0, "test_mine", higher_is_better)
    for step, score in enumerate((math.nan, 0.5, math.nan)):
        record.metrics(step=step, test_mine=score)
    assert [record.is_best(step) for step in range(3)] == [False, True, False]
