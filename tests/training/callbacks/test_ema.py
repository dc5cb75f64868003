import pytest
import torch

from tests.configs import CONF, composed
from tests.training.test_sets import train
from training.command_line import check_overrides
from training.config import ConfigError, checked


def test_the_running_mean_of_the_weights_is_evaluated_and_saved(tmp_path):
    assert train(tmp_path, "train.ema=0.5")["test_accuracy"] == 1.0
    saved = torch.load(tmp_path / "checkpoints" / "last.pt", weights_only=True)
    assert any(not torch.equal(tensor, saved["ema"][f"module.{name}"]) for name, tensor in saved["model"].items())


def test_a_decay_that_is_no_share_is_refused():
    with pytest.raises(ConfigError, match=r"^train\.ema=1\.0: give a decay between 0 and 1"):
        checked(composed("train.ema=1.0"))


def test_its_key_is_checked_by_type_before_the_run():
    check_overrides(["train.ema=0.9"], CONF)
    with pytest.raises(ConfigError, match=r"train\.ema=much: .*could not be converted to Float"):
        check_overrides(["train.ema=much"], CONF)
