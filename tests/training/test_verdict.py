"""The sentence at the end of a run: for each kind of bottleneck its word, the figures, and what to try."""

import re

import pytest

from loaders import LoaderStats, PreloaderStats, Window, WorkerStats, available_cores
from tests.configs import steps, train
from training.verdict import Measured, verdict


def window(wait):
    """The timed 100 steps of ten seconds, of which a share `wait` was waiting for data."""
    return Window(100, 1000, 10.0, 10 * wait)


def workers(active, busy, queued=0.0, transform=0.0):
    """The figures of workers that read for a share `busy` of the ten seconds.

    queued: the share of the reading in which they wait for a core. transform: the seconds of a batch's transform.
    """
    seconds = 10.0 * active * busy
    of_workers = WorkerStats(
        active_workers=active, worker_busy_seconds=seconds, worker_queued_seconds=queued * seconds
    )
    return LoaderStats(of_workers, PreloaderStats(batches=50, copy_seconds=0.5, transform_seconds=50 * transform))


@pytest.mark.parametrize(
    ("wait", "measured", "said"),
    [  # a step takes 100 ms
        (0.05, None, "compute-bound: .* 5 % .*not measured"),
        (0.14, Measured([0.094, 0.099]), r"compute-bound: .*1\.01 to 1\.06 times"),
        (0.05, Measured([0.096, 0.099]), r"compute-bound: [^;]*$"),  # at most 1.04 times: no gain to speak of
        (0.05, Measured([0.164, 0.200]), r"compute-bound: [^;]*$"),  # other programs slowed what was measured after it
        (0.05, Measured([0.050, 0.200]), r"compute-bound: .*1\.00 to 2\.00 times"),  # it makes nothing slower
        (0.05, Measured([0.050, 0.088]), r"compute-bound: .*1\.14 to 2\.00 times"),  # the lower end is not enough
        (
            0.05,
            Measured([0.050, 0.086]),
            r"loader-bound: .*1\.16 to 2\.00 times.*: loading takes.*num_threads=1.*a pack",
        ),
        (0.05, Measured([0.050, 0.080], others=0.5), r"loader-bound: .*loading or other programs take"),
        (0.05, Measured([0.050, 0.080], callbacks=0.02), "compute-bound: "),  # it is the callbacks that take time
        (0.05, Measured([0.050, 0.080], queueing=0.08), "loader-bound: "),
        (0.05, Measured([0.090, 0.092], queueing=0.02), "compute-bound: "),
        (
            0.05,
            Measured([0.090, 0.092], queueing=0.09),
            r"host-bound: .*90\.0 ms, and it runs in 91\.0 ms.*reduce-overhead or a larger",
        ),
        (0.05, Measured([0.090, 0.092], 0.09, synchronizes=True), r"host-bound: .*waits for the device, as \.item"),
        (0.05, Measured([0.090, 0.092], 0.02, synchronizes=True), "compute-bound: "),
        (0.60, None, r"data-bound: .*\b60 % of its 100\.0 ms.*: 2\.5 times as fast without"),  # 1 / (1 - 0.6)
        (0.20, Measured([0.050, 0.080]), "data-bound: "),
        (0.60, Measured([0.025, 0.040], queueing=0.025), r"data-bound: .*2\.50 to 4\.00 times"),
    ],
)
def test_the_word_is_that_of_the_measured_figures_and_nothing_more_is_claimed(wait, measured, said):
    sentence = verdict(window(wait), "prefetch", workers(2, 1.0), measured)
    assert re.match(said, sentence) and "cannot" not in sentence
    assert ("try" in sentence.lower()) == (
        not sentence.startswith("compute") and "waits for the device" not in sentence
    )


@pytest.mark.parametrize(
    ("loader", "stats", "remedy"),
    [
        ("prefetch", workers(available_cores() + 1, 1.0), rf"num_workers={available_cores()},.*loader=resident"),
        ("prefetch", workers(16, 0.01), r"num_workers=1,"),  # one reads what the sixteen read
        ("prefetch", workers(1, 1.0), r"Try train\.num_threads=1, loader=resident, or a pack"),
        ("resident", LoaderStats(), r"loader\.preload_depth=0$"),
    ],
)
def test_a_run_whose_loader_takes_cores_is_told_what_takes_fewer(loader, stats, remedy):
    assert re.search(remedy, verdict(window(0.05), loader, stats, Measured([0.05])))


@pytest.mark.parametrize(
    ("loader", "stats", "remedy"),
    [
        ("torch", LoaderStats(), "loader=prefetch"),
        ("resident", LoaderStats(), r"from memory: try train\.num_threads=1(?!.*prefetch)"),
        ("prefetch", LoaderStats(), r"loader\.num_workers=auto"),
        ("prefetch", workers(2, 0.2), "idle.*(prefetch_factor|batch_size)"),
        ("prefetch", workers(2, 0.2, queued=0.5), r"cores are busy.* 50 % .*: try train\.num_threads=1(?!.*prefetch)"),
        ("prefetch", workers(1, 0.9, queued=0.5), r"cores are busy.* 50 % .*: try train\.num_threads=1"),
        ("prefetch", workers(99, 0.9, queued=0.5), rf"cores are busy.*num_workers={available_cores()},"),
        ("prefetch", workers(2, 0.2, transform=0.08), r"transforming batches takes 90 % .*augment(?!.*prefetch)"),
        ("prefetch", workers(max(1, available_cores() - 1), 1.0), rf"num_workers={available_cores()}|cheaper"),
        ("prefetch", workers(available_cores(), 1.0), r"cheaper|train\.num_threads=1"),
    ],
)
def test_a_run_that_waits_is_told_what_to_try(loader, stats, remedy):
    said = verdict(window(0.6), loader, stats)
    assert said.startswith("data-bound") and re.search(remedy, said), said


def test_the_verdict_of_a_run_is_that_of_its_waiting(tmp_path):
    slow = "data.cost=wait data.cost_ms=5 data.length=64 data.test_length=8 timing.warmup_steps=1"
    summary = train(tmp_path, slow, "train.batch_size=8 train.epochs=1")
    assert summary["verdict"].startswith("data-bound") and summary["data_wait_fraction"] > 0.15
    assert 0 <= steps(tmp_path)[-1]["data_wait_fraction"] <= 1
