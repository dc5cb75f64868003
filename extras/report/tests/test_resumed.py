"""A run that resumes at the end of an epoch begins with an evaluation, not with a step."""

from tests.configs import FAST, train


def test_the_first_batch_of_a_resumed_run_is_that_of_its_first_step(tmp_path, caplog):
    settings = [*FAST, "callbacks/standard=[report]", "callbacks.report.seconds=0"]
    train(tmp_path, *settings)
    (tmp_path / "first_batch.json").unlink()
    train(tmp_path, *settings, "train.epochs=2")
    assert (tmp_path / "first_batch.json").exists() and "failed, but not the run" not in caplog.text
