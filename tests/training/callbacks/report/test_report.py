"""The report's clock and its tables; what bounded a run is tested in test_verdict.py, whole runs in test_train.py."""

import math
import re
from resource import RUSAGE_SELF, getrusage
from types import SimpleNamespace

import pytest
import torch
from psutil import Process

from loaders.timing import StepTimer, Window
from tests.test_train import compose_small
from training.callbacks.report import report as module
from training.callbacks.report.measured import Interval
from training.callbacks.report.report import Report, peak_memory
from training.callbacks.report.verdict import Verdict
from training.clock import Clock
from training.config import checked


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=100.0, cpu=5.0)
    stand_in = SimpleNamespace(perf_counter=lambda: clock.now, process_time=lambda: clock.cpu)
    monkeypatch.setattr("training.clock.time", stand_in)
    return clock


def report_of(*overrides: str) -> Report:
    """A report of a run that has not begun to train."""
    config, device = checked(compose_small(*overrides)), torch.device("cpu")
    report = Report()
    report.on_start(SimpleNamespace(config=config, clock=Clock(), timer=StepTimer(device, 0)))
    return report


TEN = Interval.of([10.0])


@pytest.fixture
def finished(monkeypatch):
    """Finishes a run of ten steps of 0.1 s, in which `changes` are tried: seconds a step, by override."""
    found, closed = [], []
    monkeypatch.setattr(module, "diagnose", lambda run: found.append(run) or Verdict("reading", "found", TEN))
    monkeypatch.setattr(module, "candidates", lambda *_: [("a=1",), ("b=2",), ("c=3",)])
    monkeypatch.setattr(Report, "_text", lambda *_: "the report")
    spent = {f"{what}_seconds": 0.0 for what in ("loader_wait", "copy", "transform")}
    loader = SimpleNamespace(device=torch.device("cpu"), depth=0, close=lambda: closed.append(True), dataset=[])
    loader.stats = lambda: {"preloader": spent, "workers": {"active_workers": 3}}

    def finish(changes: dict | None) -> dict:
        report = report_of()
        trials = changes and SimpleNamespace(
            keep_batch=lambda of: (3, 4) if of is loader and not closed else pytest.fail("the loader is closed"),
            free=lambda step: Interval.of([step / 2]),
            change=lambda keys, _: seconds if (seconds := changes[keys[0]]) is None else Interval.of([seconds]),
        )
        report.finish(Window(10, 100, 1.0, 0.9), loader, trials)
        assert closed and report.text == "the report" and report.summary()["memory_bytes"] > 0
        assert (found[-1].step, found[-1].waiting, found[-1].num_workers) == pytest.approx((0.1, 0.09, 3))
        assert found[-1].free == (Interval.of([0.05]) if changes else None)
        assert found[-1].sizes == ((3, 4) if changes else (1, 1))
        return report.summary()

    return finish


@pytest.mark.parametrize(
    ("changes", "tried", "gain"),
    [
        ({"a=1": 0.1 / 1.04, "b=2": 0.1 / 1.06, "c=3": 0.01}, ["b=2"], 1.06),  # the first that is worth it
        ({"a=1": None}, ["a=1"], 10.0),  # it takes too long to be tried
        ({"a=1": 0.1, "b=2": 0.2, "c=3": math.inf}, [], 10.0),
        (None, [], 10.0),  # the run was stopped
    ],
)
def test_a_change_is_suggested_if_it_was_clearly_faster_or_could_not_be_tried(finished, changes, tried, gain):
    summary = finished(changes)
    assert (summary["try"], summary["gain"]) == (tried, pytest.approx(gain))
    assert (summary["bottleneck"], summary["active_workers"]) == ("reading", 3)


def test_the_peak_of_memory_counts_what_is_in_use_now():
    before, past = peak_memory(), 1024 * getrusage(RUSAGE_SELF).ru_maxrss - Process().memory_info().rss
    held = torch.ones((past + (256 << 20)) // 4)
    assert peak_memory() > before + (200 << 20)
    del held


class Timer:
    """A timer of 100 steps of 0.1 s, of which 0.03 s were waited for; the first batch took 2 s more."""

    first_batch_seconds = 2.0

    def whole(self) -> Window:
        return Window(100, 3200, 12.0, 5.0)

    def step_ms(self, *percentiles: int, part: str) -> list[float]:
        return [{"step": 0.0, "waiting": 1000.0, "computing": 2000.0}[part] + percentile for percentile in percentiles]


def finish(clock, depth: int) -> Report:
    """A report of the run above, with the preloader at `depth`."""
    report = report_of("loader=prefetch", "loader.num_workers=3")
    report.run.timer = Timer()
    with report.run.clock.phase("training"):
        clock.now, clock.cpu = clock.now + 12.0, clock.cpu + 6.0
    workers = {"read_batches": 100, "active_workers": 3, "worker_busy_seconds": 5.0, "worker_cpu_seconds": 4.0}
    seconds = {"loader_wait_seconds": 2.0, "copy_seconds": 0.25, "transform_seconds": 0.5}
    loader = SimpleNamespace(device=torch.device("cpu"), depth=depth, close=lambda: None, dataset=[])
    loader.stats = lambda: {"workers": workers, "preloader": seconds}
    measure = {"free": lambda step: Interval.of([0.05]), "change": lambda *_: Interval.of([math.inf])}
    trials = SimpleNamespace(keep_batch=lambda _: (1, 1), **measure)
    report.finish(Window(100, 3200, 10.0, 3.0), loader, trials)
    return report


def test_waiting_transforming_and_computing_add_up_to_the_step(clock, monkeypatch):
    kept = []
    monkeypatch.setattr(module, "diagnose", lambda measured: kept.append(measured) or Verdict("step", "said"))
    finish(clock, depth=0)
    (measured,) = kept
    assert measured.step == 0.1 and measured.transform == pytest.approx(0.0075)  # on a CPU a copy is a part of it
    assert measured.copy == 0.0 and measured.waiting == pytest.approx(0.03 - 0.0075)
    assert measured.waiting + measured.transform + measured.computing == pytest.approx(measured.step)
    assert (measured.num_workers, measured.free.middle) == (3, 0.05)
    assert measured.ahead == (0.0, 0.0, 0.0) and measured.num_threads == torch.get_num_threads()


def test_what_a_preloaders_thread_does_is_no_part_of_the_step(clock, monkeypatch):
    kept = []
    monkeypatch.setattr(module, "diagnose", lambda measured: kept.append(measured) or Verdict("step", "said"))
    finish(clock, depth=2)
    (measured,) = kept
    assert measured.waiting == pytest.approx(0.03) and measured.transform == 0.0
    assert measured.ahead == pytest.approx((0.02, 0.0, 0.0075))


def test_the_table_adds_up_to_the_run(clock, monkeypatch):
    monkeypatch.setattr(module, "diagnose", lambda measured: Verdict("step", "the verdict's sentence"))
    monkeypatch.setattr(module, "peak_memory", lambda: 3 * 2**29)
    report = finish(clock, depth=0)
    rows = dict(re.findall(r"^(\D+?) +([\d.]+) ", report.text.partition("milliseconds")[0], flags=re.MULTILINE))
    said = {name: float(seconds) for name, seconds in rows.items()}
    assert (
        said["waiting for the loader"] == 2.2 and said["waiting for the transform"] == 0.8 and said["computing"] == 7.0
    )
    assert said["dataset and first batch"] == 2.0 and said["the whole run, without imports"] == 12.0
    assert said["the rest"] == 0.0 and "waiting for the copy" not in said
    parts = ("waiting for the loader", "waiting for the transform", "computing", "dataset and first batch", "the rest")
    assert sum(said[part] for part in parts) == pytest.approx(12.0, abs=0.11)  # rounded to tenths
    for figures in ("50.0", "95.0", "100.0", "1050.0", "2100.0", "waited 2.00 s", "1.50 GiB", "Workers: 3, busy"):
        assert figures in report.text
    assert "50.0 ms for a batch: 40.0 ms of CPU time" in report.text
    assert report.text.endswith("\nthe verdict's sentence")
    assert report.summary()["memory_bytes"] == 3 * 2**29 and report.summary()["active_workers"] == 3
