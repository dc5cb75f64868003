"""The sentence at the end of a run: for each kind of bottleneck the share of waiting, and what to try."""

import re

import pytest

from loaders import Window, available_cores
from tests.configs import LINEAR, steps, train
from training.verdict import verdict


def window(wait: float) -> Window:
    """The timed 100 steps of ten seconds, of which a share `wait` was waiting for data."""
    return Window(100, 1000, 10.0, 10 * wait)


def workers(active: int, busy: float) -> dict:
    """What loader.stats() says of workers that read for a share `busy` of the ten seconds."""
    return {"workers": {"active_workers": active, "worker_busy_seconds": 10.0 * active * busy}}


def test_a_run_that_does_not_wait_is_compute_bound_and_gets_no_advice():
    said = verdict(window(0.05), "prefetch", workers(2, 1.0))
    assert said.startswith("compute-bound") and re.search(r"\b5 %", said) and "try" not in said.lower()


@pytest.mark.parametrize(
    ("loader", "stats", "remedy"),
    [
        ("torch", {}, "loader=prefetch"),
        ("prefetch", {}, r"loader\.num_workers=auto"),
        ("prefetch", workers(2, 0.2), "idle.*(prefetch_factor|batch_size)"),
        ("prefetch", workers(max(1, available_cores() - 1), 1.0), rf"num_workers={available_cores()}|cheaper"),
        ("prefetch", workers(available_cores(), 1.0), r"cheaper|train\.num_threads=1"),
    ],
)
def test_a_run_that_waits_is_told_how_much_free_data_would_bring_and_what_to_try(loader, stats, remedy):
    said = verdict(window(0.6), loader, stats)
    assert said.startswith("data-bound") and re.search(r"\b60 %", said) and "100.0 ms" in said
    assert "2.5 times" in said, "1 / (1 - 0.6)"
    assert re.search(remedy, said), said


def test_the_verdict_of_a_run_is_that_of_its_waiting(tmp_path):
    slow = ["data.cost=wait", "data.cost_ms=5", "data.length=64", "data.test_length=8", "timing.warmup_steps=1"]
    summary = train(tmp_path, LINEAR, *slow, "train.batch_size=8", "train.epochs=1")
    assert summary["verdict"].startswith("data-bound") and summary["data_wait_fraction"] > 0.15
    assert 0 <= steps(tmp_path)[-1]["data_wait_fraction"] <= 1
