import pytest
import torch

from tests.configs import CONF, composed
from tests.training.test_sets import train
from training.command_line import check_overrides
from training.config import ConfigError, checked
from training.trainer import Trainer


def test_the_running_mean_of_the_weights_is_evaluated_and_resumed(tmp_path, monkeypatch):
    assert train(tmp_path / "whole", "train.ema=0.5")["test_accuracy"] == 1.0
    step = Trainer.train_step
    with monkeypatch.context() as patch:
        patch.setattr(
            "train.Trainer.train_step", lambda trainer, batch: step(trainer, batch) if trainer.step < 5 else 1 / 0
        )
        with pytest.raises(ZeroDivisionError):
            train(tmp_path, "train.ema=0.5", "train.checkpoint_every=1")
    train(tmp_path, "train.ema=0.5", "train.checkpoint_every=1")
    folders = tmp_path, tmp_path / "whole"
    one, other = (torch.load(folder / "checkpoints" / "last.pt", weights_only=True) for folder in folders)
    for name, tensor in one["ema"].items():
        assert torch.equal(tensor, other["ema"][name])
    assert any(not torch.equal(tensor, one["ema"][f"module.{name}"]) for name, tensor in one["model"].items())


def test_a_decay_that_is_no_share_is_refused():
    with pytest.raises(ConfigError, match=r"^train\.ema=1\.0: give a decay between 0 and 1"):
        checked(composed("train.ema=1.0"))


def test_its_key_is_checked_by_type_before_the_run():
    check_overrides(["train.ema=0.9"], CONF)
    with pytest.raises(ConfigError, match=r"train\.ema=much: .*could not be converted to Float"):
        check_overrides(["train.ema=much"], CONF)
