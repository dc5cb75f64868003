import math

import pytest

from tests.configs import composed
from tests.training.test_sets import train
from training.callbacks.early_stop import has_stalled
from training.config import ConfigError, checked


def test_a_run_that_no_longer_improves_stops_early_and_is_finished(tmp_path, caplog):
    caplog.set_level("INFO")
    summary = train(tmp_path, "train.epochs=50", "train.early_stop=2")
    assert caplog.text.count("stops early: the best score is older than the last 2 evaluations") == 1
    assert summary["stopped_early"] and summary["epochs"] < 50
    assert train(tmp_path, "train.epochs=50", "train.early_stop=2") == summary


@pytest.mark.parametrize("sign", [1, -1])
def test_a_nan_is_no_improvement(sign):
    scores = {0: -sign * math.inf, 1: 0.5, 2: -sign * math.inf}
    assert not has_stalled(scores, sign, 2) and has_stalled(scores, sign, 1)
    assert not has_stalled(scores, sign, None) and not has_stalled({}, sign, 1)


def test_a_number_of_evaluations_below_one_is_refused():
    with pytest.raises(ConfigError, match=r"^train\.early_stop=0: give a number from 1"):
        checked(composed("train.early_stop=0"))
