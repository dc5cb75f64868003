"""The verdict on a loop: its word, the gain that loading can explain, and what to try, which is never set already."""

import math
import multiprocessing
import time
from dataclasses import replace

import pytest
import torch
from example_datasets import Numbers
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from loaders import (
    CoreSeconds,
    Evidence,
    LoaderStats,
    Measured,
    Preloader,
    PreloaderStats,
    ResidentLoader,
    Setting,
    StepTimer,
    TorchLoader,
    WorkerLoader,
    WorkerStats,
    available_cores,
    core_seconds,
)
from loaders.verdict import CODE, COSTS, GAINS, MOST_PREFETCHED

CORES = available_cores()
WORKERS = Setting("workers", num_workers=2, prefetch_factor=4, num_threads=CORES)
IDLE_MACHINE = CoreSeconds(10.0, idle=5.0 * CORES, own=5.0 * CORES)
BUSY_MACHINE = CoreSeconds(10.0, own=5.0 * CORES)


def stats(busy=0.0, cpu=None, queued=0.0, transform=0.0):
    """The figures of a loader whose workers read a batch in `busy` seconds."""
    cpu = busy if cpu is None else cpu
    workers = WorkerStats(
        read_batches=10, worker_busy_seconds=10 * busy, worker_cpu_seconds=10 * cpu, worker_queued_seconds=10 * queued
    )
    return LoaderStats(workers, PreloaderStats(batches=10, transform_seconds=10 * transform))


def evidence(waits=0.05, setting=WORKERS, figures=None, cores=IDLE_MACHINE, is_ahead=False):
    """A hundred steps of 100 ms, of which they wait for a share."""
    return Evidence(100, 0.1, 0.1 * waits, setting, figures or stats(), cores, is_ahead)


HEAVY = stats(busy=0.05)  # a batch costs half of a step's time
SLOWED = stats(0.2, cpu=0.1, queued=0.1)  # workers wait for cores
GPU = WORKERS._replace(on_cpu=False, depth=2)
RESIDENT = Setting("resident", depth=2)
SAME = Measured(free=[0.095] * 8, loaded=[0.095] * 8)
FASTER = Measured(free=[0.06] * 8, loaded=[0.09] * 8)  # without loading
MIXED = Measured(free=[0.06, 0.09] * 4, loaded=[0.09] * 8)


WORDS = {  # the evidence, and what was measured after the run
    "data-bound": [
        (evidence(0.3),),
        (evidence(0.3), FASTER),
        (evidence(0.3, figures=stats(busy=0.2, cpu=0.01), cores=BUSY_MACHINE),),
        (evidence(0.3, Setting("workers", num_workers=0), cores=BUSY_MACHINE),),
        (evidence(0.3, GPU), replace(SAME, queueing=0.09)),
    ],
    "compute-bound": [
        (evidence(),),
        (evidence(), FASTER),  # loading computes nothing, so it cannot slow the steps
        (evidence(0.04, figures=stats(busy=0.0036)), FASTER),
        (evidence(figures=HEAVY), SAME),
        (evidence(figures=stats(busy=0.05, cpu=0.001)), FASTER),  # its workers wait for a disk
        (evidence(figures=HEAVY), replace(FASTER, callbacks=0.09)),  # callbacks take the time
        (evidence(figures=LoaderStats()),),  # its workers are known by their clocks
        (evidence(cores=CoreSeconds(10.0, idle=10.0)), SAME),  # another program works, but a core is idle
        (evidence(setting=GPU, is_ahead=True, cores=BUSY_MACHINE),),
        (evidence(0.05, GPU, HEAVY, is_ahead=True),),
        (evidence(setting=GPU), replace(SAME, queueing=0.02)),
    ],
    "loader-bound": [(evidence(figures=HEAVY), FASTER), (evidence(setting=GPU), FASTER)],
    "host-bound": [
        (evidence(setting=GPU), replace(SAME, queueing=0.09)),
        (evidence(setting=GPU), replace(SAME, queueing=0.09, synchronizes=True)),
    ],
    "not measured": [
        (evidence(figures=HEAVY),),
        (evidence(figures=HEAVY), MIXED),
        (evidence(figures=LoaderStats(), cores=IDLE_MACHINE._replace(workers=5.0)),),
        (evidence(figures=LoaderStats(), cores=IDLE_MACHINE._replace(workers=math.nan)),),
        (evidence(setting=Setting("other")),),  # it may have threads
        (evidence(0.05, WORKERS._replace(kind="threads"), LoaderStats()),),  # it was closed
        (evidence(0.05, RESIDENT, stats(transform=0.05)),),
        (evidence(setting=GPU),),
        # Another program works:
        (evidence(cores=BUSY_MACHINE), SAME),
        (evidence(cores=BUSY_MACHINE), FASTER),
        (evidence(0.3, cores=BUSY_MACHINE),),
        (evidence(0.3, figures=stats(busy=0.2, queued=0.19), cores=BUSY_MACHINE),),
        # Too little:
        (replace(evidence(0.3), steps=4),),
        (replace(evidence(0.3), step=0.001, waiting=0.0003),),
    ],
}


@pytest.mark.parametrize("word", WORDS)
def test_the_word_is_said_only_if_the_figures_support_it(word):
    for known, *measured in WORDS[word]:
        assert known.verdict(*measured).word == word, (known, measured)


@pytest.mark.parametrize(
    ("known", "measured", "said"),
    [
        (
            evidence(0.5),
            None,
            "50 % of its 100.0 ms per step; instant loading, which takes no cores, would make it 2.00 times as fast",
        ),
        (evidence(0.04), None, "training waits 4 % of its 100.0 ms per step"),
        (evidence(0.5, GPU), None, "would make it 2.00 or more times as fast"),
        (evidence(0.05, figures=stats(busy=0.07)), None, "would make it 1.05 or more times as fast"),  # at most 13
        (evidence(0.0), FASTER, "after the run steps were 1.7 times as fast, which loading cannot explain"),
        (evidence(0.05, cores=BUSY_MACHINE), None, "other programs used 50% of the cores"),
        (
            evidence(0.05, GPU),
            replace(SAME, queueing=0.01, peak=(0.314, "H100's bf16 peak")),
            "compute-bound, at 31% of the H100's bf16 peak: training waits",
        ),
    ],
)
def test_the_sentence_has_the_figures(known, measured, said):
    assert said in str(known.verdict(measured))


def waiting(figures=None, **changes):
    return evidence(0.6, WORKERS._replace(**changes), figures)


@pytest.mark.parametrize(
    ("known", "measured", "what", "value"),
    [
        (waiting(kind="torch"), None, "workers", None),
        (waiting(kind="torch", num_workers=0), None, "num_workers", CORES),
        (waiting(kind="resident"), None, "transform", None),
        (waiting(stats(0.05)), None, "prefetch_factor", MOST_PREFETCHED),
        (waiting(stats(0.05), prefetch_factor=16), None, "samples", None),
        (waiting(stats(0.05, transform=0.09)), None, "transform", None),
        (waiting(SLOWED, num_threads=2), None, "num_threads", 1),
        (waiting(SLOWED, num_threads=1), None, "samples", None),
        (waiting(SLOWED, num_workers=99), None, "num_workers", CORES),
        (waiting(stats(99.0), num_workers=CORES), None, "samples", None),
        (waiting(stats(99.0, 1.0), num_workers=CORES), None, "num_workers", 2 * CORES),
        (evidence(0.05, WORKERS._replace(num_workers=16), HEAVY), FASTER, "num_workers", 1),
        (evidence(0.05, WORKERS._replace(num_workers=1), HEAVY), FASTER, "resident", None),
        (evidence(0.05, WORKERS._replace(kind="threads"), HEAVY), FASTER, "workers", None),
        (evidence(0.05, RESIDENT, stats(transform=0.05)), FASTER, "depth", 0),
        (evidence(setting=GPU), replace(SAME, queueing=0.09), "compile", None),
        (evidence(setting=GPU), replace(SAME, queueing=0.09, compiles=True), "batch", None),
    ],
)
def test_one_thing_is_advised(known, measured, what, value):
    advice = known.verdict(measured).advice
    assert (advice.what, advice.value) == (what, value)


seconds = st.floats(0, 10)
settings_drawn = st.builds(
    Setting,
    kind=st.sampled_from(["workers", "threads", "torch", "resident", "cached", "other"]),
    num_workers=st.integers(0, 2 * CORES + 1),
    prefetch_factor=st.sampled_from([2, 4, MOST_PREFETCHED]),
    depth=st.integers(0, 2),
    num_threads=st.integers(1, CORES),
    on_cpu=st.booleans(),
)
turns = st.lists(st.tuples(st.floats(1e-3, 10), st.floats(1e-3, 10)), min_size=1, max_size=9)
measured_drawn = st.builds(
    lambda turns, **others: Measured([free for free, _ in turns], [loaded for _, loaded in turns], **others),
    turns,
    queueing=st.none() | seconds,
    synchronizes=st.booleans(),
    callbacks=st.floats(0, 1),
    compiles=st.booleans(),
)
evidence_drawn = st.builds(
    lambda waits, step, **others: Evidence(step=step, waiting=waits * step, **others),
    waits=st.floats(0, 0.99),
    step=st.floats(1e-3, 10),
    steps=st.integers(0, 1000),
    setting=settings_drawn,
    stats=st.builds(
        LoaderStats,
        st.none()
        | st.builds(
            WorkerStats,
            read_batches=st.integers(0, 100),
            worker_busy_seconds=seconds,
            worker_cpu_seconds=seconds,
            worker_queued_seconds=seconds,
        ),
        st.none()
        | st.builds(PreloaderStats, batches=st.integers(0, 9), transform_seconds=seconds, loader_wait_seconds=seconds),
    ),
    cores=st.builds(CoreSeconds, seconds, seconds, seconds, seconds | st.just(math.nan)),
    is_ahead=st.booleans(),
)


@given(evidence_drawn, st.none() | measured_drawn)
def test_no_gain_exceeds_what_loading_can_cost(known, measured):
    verdict = known.verdict(measured)
    slower, faster = verdict.gains or (1.0, 1.0)
    assert 1 - 1e-9 <= slower <= faster * (1 + 1e-9)
    if known.setting.on_cpu and not (math.isnan(known.processes) or known.is_ahead):
        cost = known.waiting + COSTS * (known.processes + known.threads)
        assert cost >= known.step or faster <= known.step / (known.step - cost) * (1 + 1e-9)
    if verdict.word == "compute-bound":
        assert faster <= GAINS
    if verdict.word in ("data-bound", "loader-bound"):
        assert slower >= GAINS * (1 - 1e-9)


@given(evidence_drawn, st.none() | measured_drawn)
def test_what_is_set_is_never_advised(known, measured):
    verdict = known.verdict(measured)
    advice = verdict.advice
    assert (advice is not None) == (verdict.word in ("data-bound", "loader-bound", "host-bound"))
    if advice is None:
        return
    assert str(verdict).count("ry ") <= 1, "one advice"
    if advice.value is not None:
        assert advice.value != getattr(known.setting, advice.what) == advice.now
    if advice.what in ("workers", "resident"):
        assert advice.what != known.setting.kind


@pytest.mark.parametrize(
    ("kind", "settings", "expected"),
    [
        (DataLoader, {"num_workers": 1}, ("torch", 1)),
        (TorchLoader, {"num_workers": 1, "seed": 0}, ("torch", 1)),
        (WorkerLoader, {"num_workers": 1}, ("workers", 1)),
        (WorkerLoader, {"num_workers": 1, "worker_method": "thread", "seed": 0}, ("threads", 1)),
        (ResidentLoader, {"device": "cpu"}, ("resident", 0)),
        (lambda *_: [torch.zeros(8, 3)], {}, ("other", 0)),
    ],
)
def test_the_setting_of_a_loader_is_that_of_the_one_inside(kind, settings, expected, closed_later):
    inner = kind(Numbers(64), 8, **settings)
    for loader, depth in ((inner, 0), (closed_later(Preloader(inner, "cpu", 3)), 3)):
        found = Setting.of(loader, on_cpu=True)
        assert (found.kind, found.num_workers, found.depth) == (*expected, depth)


@pytest.mark.parametrize("kind", [DataLoader, WorkerLoader])
def test_a_bare_loop_over_slow_samples_is_data_bound(kind, clock):
    class Slow(Numbers):
        def __getitem__(self, index):
            clock.now += 1.0
            return index

    loader = kind(Slow(64), 8)
    timer = StepTimer(torch.device("cpu"), warmup_steps=1)
    for _ in timer.batches(loader):
        clock.now += 1.0
    verdict = timer.verdict(loader)
    assert verdict.word == "data-bound" and "waits 89 % of its 9000.0 ms" in str(verdict), str(verdict)


def compute(computed, released):
    while time.process_time() < 0.4:
        pass
    computed.set()
    released.wait(60)


def test_what_a_child_computes_is_counted_while_it_runs_and_once_it_has_exited(bound):
    fork = multiprocessing.get_context("fork")
    computed = fork.Event()
    released = fork.Event()
    child = fork.Process(target=compute, args=(computed, released), daemon=True)
    before = core_seconds()
    child.start()
    assert computed.wait(bound)
    running = core_seconds()
    released.set()
    child.join(bound)
    exited = core_seconds()
    assert running.workers - before.workers >= 0.3 and exited.workers - before.workers >= 0.3


def test_every_name_of_what_is_advised_can_be_written_with_a_number():
    assert all(text.format(1) for text in CODE.values())
