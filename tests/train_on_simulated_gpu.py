"""train.py on a simulated GPU. test_simulated_gpu runs it."""

import json
import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests import simulated_gpu as sim  # noqa: E402

SETTINGS = ("model=linear", "loader=prefetch", "loader.num_workers=1", "train.max_steps=30")


def test_a_run_trains_on_the_device(tmp_path, monkeypatch):
    sim.copy_seconds, sim.kernel_seconds = 0.0002, 0.001
    monkeypatch.setattr(sys, "argv", ["train.py", "device=sim:0", *SETTINGS, f"hydra.run.dir={tmp_path}"])
    try:
        runpy.run_path(str(ROOT / "train.py"), run_name="__main__")
    except SystemExit as end:
        assert not end.code, (tmp_path / "train.log").read_text()
    assert sim.errors == []
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["device"], summary["loader"]) == ("sim:0", "prefetch")
    assert 0 <= summary["data_wait_fraction"] <= 1
    losses = [json.loads(line)["loss"] for line in (tmp_path / "metrics.jsonl").open() if '"loss"' in line]
    assert losses[-1] < losses[0]
