"""train.py on a simulated GPU: its figures, and the timeline's copy lane. test_simulated_gpu runs it."""

import json
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

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


def test_a_decoder_that_writes_on_its_own_stream_changes_no_image_that_is_not_resized_yet(monkeypatch):
    part = pytest.importorskip("data.images.decode_on_device", reason="a fork has deleted it")
    monkeypatch.setattr(part, "GROUP", 4)
    sim.kernel_seconds = 0.01
    stream, size = sim.Stream("sim:0"), 64

    def decode(files, orientations, device):
        images = [torch.empty(3, size, size, dtype=torch.uint8, device=device) for _ in files]
        with sim.stream(stream):
            for image, file in zip(images, files, strict=True):
                image.fill_(int(file[0]))
        stream.synchronize()
        return images

    def write(read, out, draws):
        out.copy_(read.args[0].amax((1, 2), keepdim=True)[None])

    transform = part.DecodeOnDevice(SimpleNamespace(shape=(1, 1, 3), write=write), lambda batch, _: batch, decode)
    count = 16
    files = part.EncodedImages(
        torch.arange(count).byte(), torch.zeros(count, 1), [1] * count, [""] * count, [1] * count
    )
    batch = transform({"image": files, "label": torch.zeros(count, device="sim:0")})
    assert batch["image"].cpu()[:, 0, 0, 0].tolist() == list(range(count))
