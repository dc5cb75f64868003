"""The reports of whole runs, and that measuring free data changes nothing that a run keeps."""

import re
import time
import warnings
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from extras.report import free_data
from loaders import Measured
from tests.configs import EXTENSIONS, checkpoint, differences, stop, summary_of, train
from training.stopping import Stopped

HERE = __name__.rpartition(".")[2]
REPORT = "+callbacks.report={_target_: extras.report.report.Report, seconds: %s}"


@pytest.fixture(autouse=True)
def measures_however_slow_steps_are(monkeypatch):
    monkeypatch.setattr("extras.report.free_data.LONGEST", 1e9)


class Witness:
    """Keeps the weights that a run has after the callbacks before it in the config."""

    weights: dict

    def on_end(self, run, summary):
        Witness.weights = {name: value.clone() for name, value in run.trainer.model.state_dict().items()}


def test_a_report_begins_with_the_verdict_and_gives_the_range_also_where_others_are_busy(tmp_path, monkeypatch):
    monkeypatch.setattr("loaders.cores.CoreSeconds.others", 0.5)
    threads = "loader=threads loader.num_workers=1"
    summary = train(tmp_path, REPORT % 0.5, threads, "timing.warmup_steps=0")
    text = (tmp_path / "report.md").read_text()
    assert text.splitlines()[3] == summary["verdict"]
    assert all(f"\n{row} " in text for row in ("computing", "the whole run, without imports", "step", "waiting"))
    low, high = summary["free_step_ms"]
    slower, faster = summary["free_data_gain"]
    assert 0 < low <= high and 1 <= slower <= faster
    assert f"a step takes {low:.1f} to {high:.1f} ms" in text
    assert re.search(r"^Reading a batch takes .* ms \(computing .* ms, .*\); workers: 1\.$", text, re.MULTILINE)
    assert summary["memory_bytes"] > 0 and summary["others_cpu_fraction"] == 0.5
    assert summary_of(tmp_path) == summary


def test_the_measured_verdict_is_in_the_summary_in_the_report_and_in_the_last_line_that_is_printed(
    tmp_path, monkeypatch, caplog
):
    caplog.set_level("INFO")
    measured = Measured(free=[1e-6, 2e-6], loaded=[1e-6, 2e-6], queueing=1.5e-6)
    monkeypatch.setattr("extras.report.report.measure_free_steps", lambda *_: measured)
    monkeypatch.setattr("loaders.verdict.LEAST_SECONDS", 0.0)
    monkeypatch.setattr("loaders.verdict.WAITS", 1.0)
    monkeypatch.setattr("loaders.verdict.GAINS", 1e9)
    monkeypatch.setattr("loaders.cores.CoreSeconds.others", 0.0)
    summary = train(tmp_path, REPORT % 0.5, "timing.warmup_steps=0")
    assert summary["verdict"].startswith("host-bound") and summary["queueing_ms"] == pytest.approx(0.0015)
    assert (tmp_path / "report.md").read_text().splitlines()[3] == summary["verdict"]
    assert caplog.messages[-1].splitlines()[-1] == summary["verdict"]
    assert str(tmp_path / "report.html") in caplog.messages[-2], "who reads the terminal finds the page"


class Device:
    """A run on a device that computes for 70 ms a step; Python takes the next of `host` seconds to queue it."""

    def __init__(self, *host):
        self.now, self._busy_until, self._host = 0.0, 0.0, iter(host)
        self.trainer = SimpleNamespace(device=torch.device("cuda"), train_step=self._train_step)
        self.trainer.step_of = nullcontext
        self.processes = SimpleNamespace(gather=lambda seconds: [seconds, seconds / 2])

    def _train_step(self, batch):
        self.now += next(self._host)
        self._busy_until = max(self.now, self._busy_until) + 0.07

    def synchronize(self):
        self.now = max(self.now, self._busy_until)


def test_queueing_a_step_is_timed_on_an_idle_device_without_what_the_device_does(monkeypatch):
    device = Device(0.5, 0.03, 0.02)
    monkeypatch.setattr(free_data, "Accelerator", lambda _: device)
    monkeypatch.setattr(free_data, "time", SimpleNamespace(perf_counter=lambda: device.now))
    assert free_data.queueing_seconds(device, 1, steps=3) == pytest.approx(0.03), "the median, of the slowest process"
    device.trainer.device = torch.device("cpu")
    assert free_data.queueing_seconds(device, 1, steps=3) is None and not free_data.synchronizes(device, 1)


@pytest.mark.parametrize(("text", "waits"), [("called a synchronizing CUDA operation", True), ("another", False)])
def test_a_step_that_waits_for_the_device_itself_is_noticed_and_torchs_setting_is_put_back(monkeypatch, text, waits):
    modes = ["default"]
    monkeypatch.setattr("torch.cuda.set_sync_debug_mode", modes.append)
    monkeypatch.setattr("torch.cuda.get_sync_debug_mode", lambda: modes[-1])
    run = Device()
    run.trainer.train_step = lambda _: warnings.warn(f"{text} in mode {modes[-1]}", stacklevel=1)
    assert free_data.synchronizes(run, 1) is waits and modes == ["default", "warn", "default"]


def test_steps_with_loading_and_steps_on_a_kept_batch_take_turns(monkeypatch):
    done = []
    monkeypatch.setattr(free_data, "computing_seconds", lambda run, batches: done.append([*batches]) or len(done))
    monkeypatch.setattr(free_data, "wait_until_idle", lambda: done.append("idle"))
    processes = SimpleNamespace(gather=lambda value: [value])
    run = SimpleNamespace(train_loader=range(5), processes=processes, signals=SimpleNamespace(received=0))
    loaded, free, batch = free_data.take_turns(run, steps=2)
    assert done[:6] == [[0, 1], "idle", [2, 2], [3, 4], "idle", [0, 0]] and batch == done[-1][0]
    assert len(loaded) == len(free) == free_data.TURNS and (loaded[1], free[1]) == (4, 6)
    run.signals.received = 15
    assert free_data.take_turns(run, steps=2) is None


def test_each_moment_of_the_run_counts_for_one_phase(tmp_path):
    began = time.perf_counter()
    summary = train(tmp_path, REPORT % 0, "data.cost=wait data.cost_ms=0.2")
    seconds = summary["phase_seconds"]
    assert sum(seconds.values()) < time.perf_counter() - began
    assert seconds["first batch"] > 0.005 and seconds["waiting for data"] > 0.05 and min(seconds.values()) >= 0


def test_measuring_changes_neither_checkpoints_nor_weights_nor_scores(tmp_path):
    plain = train(tmp_path / "plain")
    witness = f"+callbacks.witness._target_={HERE}.Witness"
    measured = train(tmp_path / "measured", REPORT % 0.2, witness)
    one, other = (checkpoint(tmp_path / name) | {"config": None} for name in ("plain", "measured"))
    assert differences(one, other) == []
    assert measured["test_loss"] == plain["test_loss"] and measured["free_step_ms"]
    assert differences(Witness.weights, other["model"]) == []


def test_free_data_are_measured_with_a_train_step_that_does_not_always_step_under_fp16(tmp_path):
    every_other = f"trainer._target_={EXTENSIONS}.EveryOther"
    assert train(tmp_path, REPORT % 0.2, every_other, "train.precision=fp16")["free_step_ms"]


def test_after_a_signal_the_report_says_where_time_went_until_then(tmp_path):
    with pytest.raises(Stopped):
        train(tmp_path, REPORT % 2.0, *stop(3))
    text = (tmp_path / "report.md").read_text()
    assert re.search(r"^step +\d", text, re.MULTILINE) and "instant loading was not measured" in text
    assert text.splitlines()[3].startswith("not measured")


def test_a_measurement_that_fails_leaves_the_run_complete_and_one_without_steps_has_a_report(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr("extras.report.free_data.endless", lambda _: iter([]))
    summary = train(tmp_path / "run", REPORT % 2.0)
    assert "could not be measured: " in caplog.text and summary["free_step_ms"] is None
    resumed = train(tmp_path / "again", REPORT % 2.0, f"train.resume={tmp_path / 'run'}")
    assert resumed["free_step_ms"] is None and (tmp_path / "again" / "report.md").exists()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_built_in_bottleneck_is_named_and_the_range_fits_it(tmp_path):
    settings = (REPORT % 2.0, "data.length=1600", "timing.warmup_steps=5", "loader=workers", "loader.num_workers=1")
    waits = train(tmp_path / "waits", *settings, "data.cost=wait data.cost_ms=1")
    assert waits["verdict"].startswith("data-bound") and waits["free_data_gain"][0] > 2
    computes = train(tmp_path / "computes", *settings, "model=small_cnn data.image_size=48")
    assert computes["verdict"].startswith(("compute-bound", "not measured")) and computes["free_data_gain"][0] < 1.5
