from dataclasses import replace

import pytest

from loaders import LoaderConfig
from training.callbacks.report.measured import Interval, Measured
from training.callbacks.report.verdict import CACHED, Verdict, candidates, diagnose

STEP = 0.1


def measured(name="prefetch", *, free=None, phases=None, workers=(0.01, 0.01), num_workers=2, stats=(), **other):
    """A run of 1,000 steps of STEP seconds; `workers` are (seconds for a batch, of which computing).

    free: seconds of a step with free data, or of several repetitions.
    """
    busy, cpu = workers
    found = {"read_batches": 1000, "worker_busy_seconds": 1000 * busy, "worker_cpu_seconds": 1000 * cpu}
    found |= {"wait_seconds": 1000 * other.get("waiting", 0.0), **dict(stats)}
    return Measured(
        loader=LoaderConfig(name=name, num_workers=num_workers),
        cores=4,
        num_threads=other.pop("num_threads", 1),
        steps=1000,
        phases={"training": 1000 * STEP, **(phases or {})},
        step=STEP,
        free=None if free is None else Interval.of([free] if isinstance(free, float) else free),
        num_workers=num_workers,
        workers=found,
        **other,
    )


SLOW = {"waiting": 0.06, "free": 0.04}  # training waits for most of a step
CASES = {  # the measurements; what the sentence says; the first change that is tried
    "step": (measured(free=0.095), "a step takes 100.0 ms, and 95.0 ms with free data", ""),
    "cores": (measured(free=0.06, workers=(0.05, 0.03)), "computing takes 100.0 ms per step, and 60.0 ms while", "="),
    "cores: many workers": (measured(**SLOW, workers=(0.75, 0.7), num_workers=8), "(4 for", "loader.num_workers=7"),
    "cores: queues": (
        measured(**SLOW, workers=(0.19, 0.05), stats={"worker_queued_seconds": 130.0}),
        "a worker waits 130.0 ms for a core",
        "loader.num_workers=1",
    ),
    "reading": (measured(**SLOW, workers=(0.19, 0.18)), "190.0 ms, in 180.0 of which it", "loader.num_workers=4"),
    "reading: a disk": (measured(**SLOW, workers=(0.19, 0.02)), "in 20.0 of which", "loader.num_workers=8"),
    "reading: threads in turns": (measured("threads", **SLOW, workers=(0.19, 0.05)), "data-bound", "loader=prefetch"),
    "reading: workers died": (
        measured(**SLOW, stats={"retry_wait_seconds": 50.0, "deaths": 20}),
        "; 20 workers died (see the log)",
        "=",
    ),
    "reading: in the training process": (
        replace(measured(**SLOW, num_workers=0, workers=(0.055, 0.05)), num_workers=1),
        "takes a worker 55.0 ms",
        "loader.num_workers=4",
    ),
    "loader": (measured("torch", **SLOW, workers=(0.05, 0.05)), "workers are idle 75% of the", "loader=prefetch"),
    "loader: a few died": (measured(**SLOW, stats={"retry_wait_seconds": 20.0, "deaths": 8}), "passing a batch", "="),
    "loader: one worker": (
        measured(**SLOW, num_workers=1, workers=(0.03, 0.03)),
        "training waits for them for 60.0 ms per step",
        "loader.prefetch_factor=16",
    ),
    "transform": (
        measured(waiting=0.05, transform=0.05, free=0.05),
        "takes 50.0 ms per step, 0.0 of which for copies",
        "",
    ),
    "transform: ahead": (
        measured(**SLOW, ahead=0.01, copy=0.01, transform=0.08),
        "takes 90.0 ms per step, 10.0 of which",
        "",
    ),
    "transform: copies": (
        measured(**SLOW, ahead=0.01, copy=0.08, transform=0.01),
        "90.0 ms per step, 80.0 of which for",
        "",
    ),
    "transform: resident": (
        replace(measured("resident", waiting=0.05, free=0.05), workers={}),
        "takes 50.0 ms per step",
        "loader=prefetch",
    ),
    "evaluation": (measured(free=0.095, phases={"evaluation": 90.0}), "took 47% of the run, 90.0 s", ""),
    "evaluation: slower than the data": (
        measured(**SLOW, workers=(0.19, 0.18), phases={"evaluation": 200.0}),
        "67% of the run",
        "",
    ),
    "reading: slower than evaluation": (
        measured(**SLOW, workers=(0.19, 0.18), phases={"evaluation": 45.0}),
        "data-bound",
        "loader.num_workers=4",
    ),
    "start-up": (measured(free=0.095, phases={"start-up": 90.0}), "47% of the run: 90.0 s until the first batch", ""),
    "checkpoint": (measured(free=0.095, phases={"checkpoint": 30.0}), "took 23% of the run, 30.0 s. Save less", ""),
}


@pytest.mark.parametrize("case", CASES)
def test_the_verdict_names_the_bottleneck_with_its_figures_and_the_first_change_to_try(case):
    run, figures, first = CASES[case]
    verdict, bottleneck = diagnose(run), case.partition(":")[0]
    assert verdict.bottleneck == bottleneck and figures in verdict.sentence
    if first != "=":  # not said here
        assert candidates(bottleneck, run)[:1] == ([(first,)] if first else [])
    free = Interval.of([0.95 * run.free.low, run.free.low, 1.1 * run.free.low])
    noisy = replace(run, others=0.1, sizes=(1000, *[1050] * 20, 2000), free=free)
    assert diagnose(noisy).bottleneck == bottleneck, "a little noise changes nothing"


RUNS = {name: run for name, (run, *_) in CASES.items()}


def test_a_cached_run_is_no_verdict_on_a_loader():
    assert diagnose(measured("cached", **SLOW)) == Verdict("step", CACHED, Interval.of([1.0]))
    assert candidates("loader", measured("cached")) == candidates("step", measured("cached", num_threads=2)) == []


def test_the_gain_is_at_most_what_free_data_would_give():
    assert diagnose(RUNS["reading"]).gain == pytest.approx(STEP / 0.04)
    assert diagnose(RUNS["cores"]).gain == pytest.approx(STEP / 0.06)
    assert diagnose(RUNS["evaluation"]).gain == pytest.approx(190 / 100)


def test_workers_that_compute_next_to_nothing_are_not_blamed_for_a_slow_step():
    verdict = diagnose(measured(free=0.05, workers=(0.002, 0.001)))
    assert (verdict.bottleneck, verdict.gain) == ("step", pytest.approx(1 / 0.98))
    assert "slowed down by something else than its data" in verdict.sentence


def test_without_a_measurement_of_free_data_waiting_counts():
    assert diagnose(measured(waiting=0.02, workers=(0.19, 0.18))).gain == pytest.approx(1 / 0.8)
    assert diagnose(measured(waiting=0.001)).bottleneck == "step"


NOT_MEASURABLE = {
    "workers": (replace(measured("torch", **SLOW), workers={}), "does not measure how long its workers read a stream"),
    "others": (measured(**SLOW, others=0.3), "other programs kept 30% of the cores busy"),
    "others, not tried": (measured(others=0.3), "other programs kept 30% of the cores busy"),
    "sizes": (measured(**SLOW, sizes=(1000, *[1000] * 18, 3500), others=0.3), "batches vary in size (1,000 to 3,500"),
    "repetitions": (measured(waiting=0.06, free=(0.02, 0.03, 0.05)), "with free data disagree, 20.0 to 50.0 ms"),
    "repetitions, near": (measured(waiting=0.06, free=(0.06, 0.07, 0.09)), "with free data disagree, 60.0 to 90.0 ms"),
    "free": (measured(waiting=0.06, free=0.099), "takes 99.0 ms with free data, which is not faster, although"),
}


@pytest.mark.parametrize("case", NOT_MEASURABLE)
def test_what_cannot_be_measured_is_said_with_its_reason_and_no_change_is_advised(case):
    run, reason = NOT_MEASURABLE[case]
    verdict = diagnose(run)
    assert verdict.bottleneck == "not measurable" and verdict.sentence.startswith("not measurable: ")
    assert reason in verdict.sentence and "A step takes 100.0 ms, " in verdict.sentence
    assert "times as fast" not in verdict.sentence and "Try" not in verdict.sentence
    assert verdict.gain is None and candidates(verdict.bottleneck, run) == []


def test_a_phase_that_took_most_of_the_run_is_the_bottleneck_though_free_data_say_nothing():
    for seconds, bottleneck in ((150.0, "evaluation"), (80.0, "not measurable")):
        run = measured(waiting=0.06, free=0.099, phases={"evaluation": seconds})
        assert diagnose(run).bottleneck == bottleneck


def test_repetitions_give_an_interval():
    verdict = diagnose(measured(waiting=0.06, free=(0.04, 0.041, 0.05), workers=(0.19, 0.18)))
    assert "a step takes 40.0 to 50.0 ms with free data" in verdict.sentence
    assert "With free data, training would be 2.0 to 2.5 times as fast" in verdict.sentence
    assert verdict.gain == pytest.approx(0.1 / 0.041)
    assert f"{Interval(1.0, 1.001, 1.002):.1f}" == "1.0"
    verdict = diagnose(measured(waiting=0.06, free=(0.03, 0.04, 0.05), workers=(0.19, 0.18)))
    assert "With free data, training would be 2.0 to 3.3 times as fast" in verdict.sentence


ONE_THREAD, FEWER = ("train.num_threads=1",), ("loader.num_workers=1",)
AUTO = LoaderConfig(num_workers="auto")  # the number is found during training
CHANGES = [  # a bottleneck, what is other than in its case above, and all changes to try
    ("step", {"num_threads": 2}, [ONE_THREAD]),
    ("cores", {"num_threads": 2}, [ONE_THREAD, FEWER]),
    ("cores", {"in_memory": True}, [FEWER, ("loader=resident",)]),
    ("cores", {}, [FEWER]),
    ("cores", {"loader": AUTO}, []),
    ("cores", {"num_workers": 1}, []),
    ("reading", {"loader": AUTO}, []),
    ("reading", {"num_workers": 4}, []),  # as many as cores
    ("reading", {"num_workers": 4, "num_threads": 4}, [ONE_THREAD]),
]


@pytest.mark.parametrize(("bottleneck", "other", "changes"), CHANGES)
def test_only_changes_that_the_run_can_make_and_that_may_help_are_tried(bottleneck, other, changes):
    assert candidates(bottleneck, replace(RUNS[bottleneck], **other)) == changes


def test_a_change_that_was_tried_is_a_command_with_its_gain():
    verdict = replace(diagnose(RUNS["loader"]), changes=("loader=prefetch",))
    assert verdict.sentence.endswith("2.5 times as fast. Try loader=prefetch"), "it was not tried"
    verdict = replace(verdict, measured_gain=Interval(1.7, 1.75, 1.8))
    assert verdict.sentence.endswith(
        "2.5 times as fast. Try loader=prefetch: 1.70 to 1.80 times as fast, measured after this run"
    )
    assert verdict.gain == 1.75
    assert "free data" not in replace(verdict, measured_gain=Interval.of([3.0])).sentence
