"""The scores that Results compares; its files are tested with whole runs in test_train.py."""

import math

import pytest

from training.results import Results


@pytest.mark.parametrize("higher_is_better", [True, False])
def test_a_nan_is_the_worst_score_also_when_it_is_read_again(tmp_path, higher_is_better):
    results = Results(tmp_path)
    results.begin(0, "test_mine", higher_is_better)
    for step, score in enumerate((math.nan, 0.5, math.nan)):
        results.metrics(step=step, test_mine=score)
    assert [results.is_best(step) for step in range(3)] == [False, True, False]
    resumed = Results(tmp_path)
    resumed.begin(2, "test_mine", higher_is_better)
    assert resumed.scores == results.scores
