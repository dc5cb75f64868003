"""train.py on a simulated GPU: its figures, and the timeline's copy lane. test_simulated_gpu runs it."""

import json
import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import simulated_gpu as sim  # noqa: E402

pytest.importorskip("training.callbacks.report", reason="a fork has deleted it")
pytest.importorskip("training.callbacks.timeline", reason="a fork has deleted it")
STEPS, SHOWN = 30, 16
SETTINGS = ("model=linear", "loader=prefetch", "loader.num_workers=1", f"train.max_steps={STEPS}")


def test_a_run_reports_the_device_and_its_copies_lie_under_its_steps(tmp_path, monkeypatch, caplog):
    sim.page_lock_with(monkeypatch)
    sim.copy_seconds, sim.kernel_seconds = 0.0002, 0.001
    settings = ["device=sim:0", *SETTINGS, f"timing.timeline={SHOWN}", f"hydra.run.dir={tmp_path}"]
    monkeypatch.setattr(sys, "argv", ["train.py", *settings])
    try:
        runpy.run_path(str(ROOT / "train.py"), run_name="__main__")
    except SystemExit as end:
        assert not end.code, (tmp_path / "train.log").read_text()
    assert sim.errors == []
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["device"] == "sim:0"
    assert summary["device_memory_bytes"] is None
    log = (tmp_path / "train.log").read_text()
    assert "torch has for sim:0 no memory figures: the report leaves them out" in log
    assert all(row in (tmp_path / "report.md").read_text() for row in ("waiting for the loader", "computing"))
    assert (tmp_path / "timeline.png").stat().st_size

    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    lanes = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    assert list(lanes.values()) == ["worker 0", "preloader", "copy stream", "GPU", "training loop"]
    spans = [(lanes[event["tid"]], event["name"], event) for event in events if event["ph"] == "X"]
    copies = [event for lane, name, event in spans if (lane, name) == ("copy stream", "copy")]
    steps = [event for lane, name, event in spans if (lane, name) == ("GPU", "compute")]
    assert len(steps) > SHOWN / 2  # the device may be some steps behind when they are noted

    def hidden(copy) -> bool:
        """Whether a step was computing when the copy ended."""
        end = copy["ts"] + copy["dur"]
        return any(step["ts"] <= end <= step["ts"] + step["dur"] for step in steps)

    assert any(map(hidden, copies))
