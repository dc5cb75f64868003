"""The report's clock and its tables; what bounded a run is tested in test_verdict.py, whole runs in test_train.py."""

from resource import RUSAGE_SELF, getrusage
from types import SimpleNamespace

import pytest
import torch
from psutil import Process

from tests.test_train import compose_small
from training import report as module
from training.config import TRIAL_TIMEOUT, changed_loader, checked
from training.report import Report, peak_memory


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=100.0, cpu=5.0)
    stand_in = SimpleNamespace(perf_counter=lambda: clock.now, process_time=lambda: clock.cpu)
    monkeypatch.setattr(module, "time", stand_in)
    return clock


def report_of(*overrides: str) -> Report:
    return Report(checked(compose_small(*overrides)), torch.device("cpu"))


def test_phases_add_up_to_the_run_and_one_inside_another_interrupts_it(clock):
    report = report_of()
    clock.now += 1.0
    with report.phase("start-up"):
        clock.now += 2.0
    report.begin_training()
    with report.phase("training"):
        clock.now += 4.0
        with report.phase("checkpoint"):
            clock.now += 8.0
        clock.now += 16.0
    with report.phase("evaluation"):
        clock.now += 32.0
    clock.now += 64.0
    assert report.phases() == {
        "set-up": 1.0,
        "start-up": 2.0,
        "training": 20.0,
        "evaluation": 32.0,
        "checkpoint": 8.0,
        "the rest": 64.0,
    }
    assert sum(report.phases().values()) == clock.now - 100.0


def test_files_that_a_dataset_makes_once_are_no_part_of_the_start_up(clock):
    report = report_of()
    with report.phase("start-up"):
        clock.now += 8.0
    report.leave_out_of_start_up(5.0)
    assert report.phases()["start-up"] == 3.0 and report.phases()[module.MADE] == 5.0
    assert sum(report.phases().values()) == 8.0


def test_a_phase_ends_with_an_error_too(clock):
    report = report_of()
    with pytest.raises(ValueError, match="bad"), report.phase("evaluation"):
        clock.now += 1.0
        raise ValueError("bad")
    clock.now += 2.0
    assert (report.phases()["evaluation"], report.phases()["set-up"]) == (1.0, 2.0)


def test_a_timeline_shows_evaluations_and_checkpoints(clock):
    report = report_of("timing.timeline=5")
    for phase in ("evaluation", "training", "checkpoint"):
        with report.phase(phase):
            clock.now += 1.0
    assert [span.activity for span in report.timeline.spans()] == ["evaluation", "checkpoint"]
    assert report_of("timing.timeline=0").timeline is None


def test_the_peak_of_memory_counts_what_is_in_use_now():
    before, past = peak_memory(), 1024 * getrusage(RUSAGE_SELF).ru_maxrss - Process().memory_info().rss
    held = torch.ones((past + (256 << 20)) // 4)
    assert peak_memory() > before + (200 << 20)
    del held


def test_a_changed_loader_is_that_of_its_preset_with_the_runs_workers():
    config = checked(compose_small("loader=torch", "loader.num_workers=3", "loader.timeout=9")).loader
    changed = changed_loader(config, ["loader=prefetch", "loader.prefetch_factor=5"])
    assert (changed.name, changed.num_workers, changed.prefetch_factor, changed.preload_depth) == ("prefetch", 3, 5, 2)
    assert changed_loader(config, ["loader=resident"]).num_workers == 0
    assert changed_loader(config, ["loader.num_workers=8"]).timeout == TRIAL_TIMEOUT
