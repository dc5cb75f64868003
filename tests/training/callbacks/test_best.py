import logging

import pytest

from tests.test_train import train


@pytest.mark.parametrize("fraction, times", [(0.0, 1), (0.25, 0)])
def test_a_best_checkpoint_chosen_on_the_test_set_is_said_once(tmp_path, caplog, fraction, times):
    with caplog.at_level(logging.INFO):
        train(tmp_path, f"data.val_fraction={fraction}")
    said = [message for message in caplog.messages if "best.pt will be chosen on the test set" in message]
    assert len(said) == times and all("data.val_fraction=" in message for message in said)
    split = "val" if fraction else "test"
    assert f"best.pt is the checkpoint with the highest {split}_accuracy" in caplog.messages
