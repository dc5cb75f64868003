"""A run that resumes at the end of an epoch begins with an evaluation, not with a step."""

import json

from tests.configs import FAST, train


def test_the_page_of_a_resumed_run_says_what_is_about_which_part(tmp_path, caplog):
    settings = [*FAST, "callbacks/standard=[report]", "callbacks.report.seconds=0"]
    train(tmp_path, *settings)
    earlier = json.loads((tmp_path / "report.json").read_text())
    (tmp_path / "report.json").write_text(json.dumps(earlier | {"began": "2026-01-01 00:00"}))
    train(tmp_path, *settings, "train.epochs=2")
    facts = json.loads((tmp_path / "report.json").read_text())
    assert "The batch of step 3" in facts["first_batch"]["text"] and "failed, but not the run" not in caplog.text
    assert facts["began"] == "2026-01-01 00:00", "of the first part"
    assert facts["earlier_seconds"] == sum(earlier["phase_seconds"].values())
    text = (tmp_path / "report.html").read_text()
    assert "Where the time went, since it resumed after step 2" in text and "Began 2026-01-01 00:00; " in text
