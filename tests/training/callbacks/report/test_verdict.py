from dataclasses import replace

import pytest

from loaders import LoaderConfig
from training.callbacks.report.measured import Interval, Measured
from training.callbacks.report.verdict import CACHED, HINTS, OBSTACLES, SENTENCES, Verdict, candidates, diagnose

STEP = 0.1


def measured(
    name="prefetch",
    *,
    num_threads=1,
    waiting=0.0,
    free=None,
    step=STEP,
    phases=None,
    workers=None,
    num_workers=2,
    **other,
):
    """A run of 1,000 steps; `workers` are (seconds for a batch, of which computing, collating).

    free: seconds of a step with free data, or of several repetitions.
    """
    busy, cpu, collate = workers or (0.01, 0.01, 0.0)
    stats = {"read_batches": 1000, "worker_busy_squares": 1000 * busy**2, "wait_seconds": 1000 * waiting}
    stats |= {"worker_busy_seconds": 1000 * busy, "worker_cpu_seconds": 1000 * cpu}
    stats |= {"worker_collate_seconds": 1000 * collate, **other.pop("stats", {})}
    return Measured(
        loader=LoaderConfig(name=name, num_workers=num_workers),
        cores=4,
        num_threads=num_threads,
        steps=1000,
        phases={"training": 1000 * step, **(phases or {})},
        step=step,
        waiting=waiting,
        free=None if free is None else Interval.of([free] if isinstance(free, float) else free),
        num_workers=num_workers,
        workers=stats,
        **other,
    )


CASES = {
    "step": measured(free=0.095),
    "cores": measured(free=0.06, workers=(0.05, 0.03, 0.0)),
    "too many workers": measured(waiting=0.06, free=0.04, workers=(0.75, 0.7, 0.0), num_workers=8),
    "decoding": measured(waiting=0.06, free=0.04, workers=(0.19, 0.18, 0.01)),
    "reading": measured(waiting=0.06, free=0.04, workers=(0.19, 0.02, 0.01)),
    "collate": measured(waiting=0.06, free=0.04, workers=(0.19, 0.18, 0.15)),
    "uneven": measured(waiting=0.06, free=0.04, workers=(0.05, 0.05, 0), stats={"worker_busy_squares": 1000 * 0.1**2}),
    "loader": measured("torch", waiting=0.06, free=0.04, workers=(0.05, 0.05, 0.0)),
    "gil": measured("threads", waiting=0.06, free=0.04, workers=(0.19, 0.05, 0.0), cpu=0.1),
    "disk in threads": measured("threads", waiting=0.06, free=0.04, workers=(0.19, 0.01, 0.0), cpu=0.03),
    "transform": measured(transform=0.05, free=0.05),
    "transform ahead": measured(waiting=0.06, free=0.04, ahead=(0.01, 0.01, 0.08)),
    "copy": measured(waiting=0.06, free=0.04, ahead=(0.01, 0.08, 0.01)),
    "restarts": measured(waiting=0.06, free=0.04, stats={"retry_wait_seconds": 50.0, "deaths": 20}),
    "a few restarts": measured(waiting=0.06, free=0.04, stats={"retry_wait_seconds": 20.0, "deaths": 8}),
    "somewhat uneven": measured(
        waiting=0.03, free=0.07, workers=(0.05, 0.05, 0), stats={"worker_busy_squares": 1000 * (0.05**2 + 0.04**2)}
    ),
    "threads on two cores": measured("threads", waiting=0.06, free=0.04, workers=(0.19, 0.05, 0.0), cpu=0.2),
    "evaluation": measured(free=0.095, phases={"evaluation": 90.0}),
    "start-up": measured(free=0.095, phases={"start-up": 90.0}),
    "checkpoint": measured(free=0.095, phases={"checkpoint": 30.0}),
    "slower evaluation": measured(waiting=0.06, free=0.04, workers=(0.19, 0.18, 0.01), phases={"evaluation": 200.0}),
    "slow data and evaluation": measured(
        waiting=0.06, free=0.04, workers=(0.19, 0.18, 0.01), phases={"evaluation": 45.0}
    ),
}
TRUTHS = {
    "too many workers": "cores",
    "disk in threads": "reading",
    "transform ahead": "transform",
    "slower evaluation": "evaluation",
    "a few restarts": "loader",
    "somewhat uneven": "uneven",
    "threads on two cores": "reading",
    "slow data and evaluation": "decoding",
}


@pytest.mark.parametrize("case", CASES)
def test_the_verdict_names_the_bottleneck(case):
    verdict = diagnose(CASES[case])
    assert verdict.bottleneck == TRUTHS.get(case, case)
    assert "{" not in verdict.sentence


@pytest.mark.parametrize(
    ("case", "figures"),
    [
        ("copy", "takes 80.0 ms per step"),
        ("transform", "takes 50.0 ms per step. "),
        ("transform", "2.0 times as fast. This transform normalises images: use smaller ones"),
        ("transform ahead", "takes 80.0 ms per step"),
        ("restarts", "20 workers died"),
        ("start-up", "took 47% of the run: 90.0 s"),
        ("step", "a step takes 100.0 ms, and 95.0 ms with free data"),
    ],
)
def test_the_finding_has_the_figures_that_were_measured(case, figures):
    sentence = diagnose(CASES[case]).sentence
    assert figures in sentence or sentence.endswith(figures), sentence


def test_a_steps_parts_and_a_batchs_seconds_are_told_apart():
    run = measured(waiting=0.01, copy=0.02, transform=0.03, workers=(0.05, 0.04, 0.0))
    run.workers.update(worker_busy_squares=1000 * 0.1**2, worker_queued_seconds=10.0)
    assert run.computing == pytest.approx(0.04)
    assert run.deviation == pytest.approx((0.1**2 - 0.04**2) ** 0.5)
    one = replace(run, workers={"read_batches": 1, "worker_busy_seconds": 3.0, "worker_busy_squares": 25.0})
    assert (one.of_batch("busy"), one.of_batch("cpu"), one.deviation) == (3.0, 0.0, 4.0)
    none = replace(run, workers={})
    assert (none.of_batch("busy"), none.deviation) == (0.0, 0.0)


def test_a_cached_run_is_no_verdict_on_a_loader():
    assert diagnose(measured("cached", waiting=0.06, free=0.04)) == Verdict("step", CACHED, Interval.of([1.0]))
    assert candidates("loader", measured("cached")) == []


def test_the_gain_is_at_most_what_free_data_would_give():
    assert diagnose(CASES["decoding"]).gain == pytest.approx(STEP / 0.04)
    assert diagnose(CASES["cores"]).gain == pytest.approx(STEP / 0.06)
    assert diagnose(CASES["evaluation"]).gain == pytest.approx(190 / 100)


def test_queueing_for_a_core_is_no_waiting_for_a_disk():
    busy = measured(waiting=0.06, free=0.04, workers=(0.19, 0.05, 0.0), stats={"worker_queued_seconds": 130.0})
    assert diagnose(busy).bottleneck == "cores"


def test_workers_that_compute_next_to_nothing_are_not_blamed_for_a_slow_step():
    verdict = diagnose(measured(free=0.05, workers=(0.002, 0.001, 0.0)))
    assert (verdict.bottleneck, verdict.gain) == ("step", pytest.approx(1 / 0.98))
    assert "slowed down by something else than its data" in verdict.sentence
    assert candidates("step", measured(free=0.04, num_threads=4)) == [("train.num_threads=1",)]


def test_a_resident_set_has_no_workers_to_blame_and_its_figures_agree():
    run = replace(measured("resident", waiting=0.05, transform=0.001, free=0.049), workers={})
    verdict = diagnose(run)
    assert verdict.bottleneck == "resident"
    assert "a batch in 50.0 ms per step. With free data, training would be 2.0 times as fast" in verdict.sentence


def test_samples_that_the_training_thread_reads_are_the_limit_though_it_does_other_things_too():
    inline = measured(num_workers=0, waiting=0.06, free=0.04, workers=(0.055, 0.05, 0.0))
    assert diagnose(replace(inline, num_workers=1)).bottleneck == "decoding"
    one = measured(num_workers=1, waiting=0.06, free=0.04, workers=(0.03, 0.03, 0.0))
    assert diagnose(one).bottleneck == "loader"


def test_without_a_measurement_of_free_data_waiting_counts():
    assert diagnose(measured(waiting=0.02, workers=(0.19, 0.18, 0.0))).gain == pytest.approx(1 / 0.8)
    assert diagnose(measured(waiting=0.001)).bottleneck == "step"


NOT_MEASURABLE = {
    "others": (measured(waiting=0.06, free=0.04, others=0.3), "other programs kept 30% of the cores busy"),
    "others, not tried": (measured(others=0.3), "other programs kept 30% of the cores busy"),
    "sizes": (measured(waiting=0.06, free=0.04, sizes=(1000, 2500)), "batches vary in size (1,000 to 2,500 numbers)"),
    "repetitions": (
        measured(waiting=0.06, free=(0.03, 0.04, 0.05)),
        "of a step with free data disagree, 30.0 to 50.0 ms",
    ),
    "free": (
        measured(waiting=0.06, free=0.099),
        "takes 99.0 ms with free data, which is not faster, although it waits",
    ),
}


@pytest.mark.parametrize("case", NOT_MEASURABLE)
def test_what_cannot_be_measured_is_said_with_its_reason_and_no_change_is_advised(case):
    run, reason = NOT_MEASURABLE[case]
    verdict = diagnose(run)
    assert verdict.bottleneck == "not measurable" and verdict.sentence.startswith("not measurable: ")
    assert reason in verdict.sentence and "A step takes 100.0 ms, " in verdict.sentence
    assert "times as fast" not in verdict.sentence and "Try" not in verdict.sentence
    assert verdict.gain is None and candidates(verdict.bottleneck, run) == []


@pytest.mark.parametrize("case", CASES)
def test_a_little_noise_leaves_every_case_measurable(case):
    run = replace(CASES[case], others=0.1, sizes=(1000, 1050))
    run = replace(run, free=Interval.of([0.95 * run.free.low, run.free.low, 1.1 * run.free.low]) if run.free else None)
    assert diagnose(run).bottleneck == TRUTHS.get(case, case)


def test_a_phase_that_took_most_of_the_run_is_the_bottleneck_though_free_data_say_nothing():
    for seconds, bottleneck in ((150.0, "evaluation"), (80.0, "not measurable")):
        run = measured(waiting=0.06, free=0.099, phases={"evaluation": seconds})
        assert diagnose(run).bottleneck == bottleneck


def in_contention(one_thread=0.015, **run):
    return replace(measured(num_threads=2, **run), one_thread=Interval.of([0.9 * one_thread, one_thread]))


def test_threads_in_contention_are_recognised():
    run = in_contention(free=(0.08, 0.09))
    verdict = diagnose(run)
    assert verdict.bottleneck == "threads" and candidates("threads", run) == [("train.num_threads=1",)]
    assert verdict.finding.startswith(
        "threads in contention: with free data a step takes 80.0 to 90.0 ms with 2 threads"
    )
    assert verdict.finding.endswith("and 13.5 to 15.0 ms with one") and "free data, training" not in verdict.sentence


def test_threads_in_contention_are_recognised_even_on_a_busy_machine():
    run = in_contention(free=(0.04, 0.09), waiting=0.005, others=0.5)
    verdict = diagnose(run)
    assert verdict.bottleneck == "not measurable"
    assert "kept 50% of the cores busy" in verdict.finding and ". Threads in contention: with free" in verdict.finding
    assert candidates(verdict.bottleneck, run) == [("train.num_threads=1",)]
    tried = replace(verdict, changes=("train.num_threads=1",), measured_gain=Interval(5.5, 6.0, 6.2))
    assert tried.sentence.endswith("Try train.num_threads=1: 5.50 to 6.20 times as fast, measured after this run")
    assert tried.gain == 6.0


def test_threads_are_not_blamed_if_one_is_slower_or_its_repetitions_overlap_or_the_data_cost_more():
    assert diagnose(in_contention(0.15, free=0.095)).bottleneck == "step"
    assert diagnose(in_contention(0.07, free=(0.068, 0.085))).bottleneck != "threads"
    run = in_contention(0.01, waiting=0.07, free=0.03, workers=(0.19, 0.18, 0.0))
    assert diagnose(run).bottleneck == "decoding"


def test_repetitions_give_an_interval():
    verdict = diagnose(measured(waiting=0.06, free=(0.04, 0.041, 0.05), workers=(0.19, 0.18, 0.0)))
    assert "a step takes 40.0 to 50.0 ms with free data" in verdict.sentence
    assert "With free data, training would be 2.0 to 2.5 times as fast" in verdict.sentence
    assert verdict.gain == pytest.approx(0.1 / 0.041)
    assert "and 92.0 to 97.0 ms with free data" in diagnose(measured(free=(0.092, 0.097))).sentence
    assert f"{Interval(1.0, 1.001, 1.002):.1f}" == "1.0"


def test_less_augmentation_is_advised_only_if_there_is_some():
    assert "augment" not in diagnose(CASES["transform"]).sentence
    assert diagnose(replace(CASES["transform"], augments=True)).sentence.endswith("or less of augment.*")


def test_read_batch_is_not_advised_where_batches_are_collated():
    assert "read_batch" in diagnose(CASES["collate"]).sentence
    collated = diagnose(replace(CASES["collate"], collates=True)).sentence
    assert "read_batch" not in collated and collated.endswith("Make data.collate cheaper")


def test_a_resident_set_is_tried_only_where_the_dataset_can_be_one():
    assert candidates("cores", CASES["cores"]) == [("loader.num_workers=1",)]
    assert candidates("cores", replace(CASES["cores"], in_memory=True))[-1] == ("loader=resident",)
    assert "resident" not in diagnose(CASES["cores"]).sentence


@pytest.mark.parametrize(
    ("case", "first"),
    [
        ("loader", ("loader=prefetch",)),
        ("gil", ("loader=prefetch",)),
        ("decoding", ("loader.num_workers=4",)),
        ("reading", ("loader.num_workers=8",)),
        ("uneven", ("loader.prefetch_factor=16",)),
        ("collate", ("loader.num_workers=4",)),
        ("too many workers", ("loader.num_workers=7",)),
    ],
)
def test_a_change_is_proposed_that_fits_the_bottleneck(case, first):
    assert candidates(diagnose(CASES[case]).bottleneck, CASES[case])[0] == first


def test_a_step_of_several_threads_is_tried_with_one_where_cores_are_short():
    for case, fewer in (("cores", 1), ("too many workers", 7)):
        changes = [("train.num_threads=1",), (f"loader.num_workers={fewer}",)]
        assert candidates("cores", replace(CASES[case], num_threads=2)) == changes
    for one in (measured(num_workers=1), replace(CASES["cores"], loader=LoaderConfig(num_workers="auto"))):
        assert candidates("cores", one) == []
    assert candidates("cores", measured(num_workers=2)) == [("loader.num_workers=1",)]
    full = replace(CASES["decoding"], num_workers=4, num_threads=4)
    assert candidates("decoding", full) == [("train.num_threads=1",)]


def test_no_change_of_the_loader_is_proposed_where_it_cannot_help():
    for case in ("step", "evaluation", "start-up", "checkpoint", "transform"):
        assert candidates(diagnose(CASES[case]).bottleneck, CASES[case]) == []
    for bottleneck in ("decoding", "collate"):
        assert candidates(bottleneck, replace(CASES[bottleneck], num_workers=4)) == []
        auto = replace(CASES[bottleneck], loader=LoaderConfig(num_workers="auto"))
        assert candidates(bottleneck, auto) == []


def test_a_change_that_was_tried_is_a_command_with_its_gain():
    verdict = replace(diagnose(CASES["loader"]), changes=("loader=prefetch",), measured_gain=Interval(1.7, 1.75, 1.8))
    assert verdict.sentence.endswith(
        "2.5 times as fast. Try loader=prefetch: 1.70 to 1.80 times as fast, measured after this run"
    )
    assert verdict.gain == 1.75
    assert "free data" not in replace(verdict, measured_gain=Interval.of([3.0])).sentence


def test_a_change_that_was_not_tried_is_proposed_without_a_figure():
    verdict = replace(diagnose(CASES["gil"]), changes=("loader=prefetch",))
    assert verdict.sentence.endswith("Try loader=prefetch")
    assert verdict.gain == diagnose(CASES["gil"]).gain


def test_every_hint_belongs_to_a_bottleneck():
    assert HINTS.keys() <= {*SENTENCES, "collate_fn", "augment"}
    assert {case.partition(",")[0] for case in NOT_MEASURABLE} == OBSTACLES.keys()


def test_a_change_that_was_not_tried_gives_no_more_than_all_cores_kept_busy_with_the_same_work():
    threads = diagnose(measured("threads", waiting=0.09, free=0.005, workers=(0.19, 0.05, 0.0), cpu=0.1))
    assert threads.gain == pytest.approx(20.0)  # of free data
    assert replace(threads, changes=("loader=prefetch",)).gain == pytest.approx(4.0)  # one of four cores was busy
    processes = diagnose(measured(waiting=0.09, free=0.005, workers=(0.19, 0.15, 0.0), cpu=0.05))
    assert replace(processes, changes=("loader.num_workers=4",)).gain == pytest.approx(2.0)
    assert replace(processes, changes=("loader.num_workers=4",), measured_gain=Interval.of([3.0])).gain == 3.0
