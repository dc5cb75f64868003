"""Sweeps of real jobs, whatever their folders are called, and reports of jobs with given figures."""

import csv
import json
import multiprocessing
from pathlib import Path

import pytest

from extras.sweep.report import NOTES, Sweep, write_report
from training.files import write_whole

ROOT = Path(__file__).resolve().parents[3]
SMALL = ["data=synthetic", "data.length=64", "data.test_length=16", "data.image_size=8", "model=linear"]
SMALL += ["train.batch_size=16", "train.epochs=1", "loader=torch", "callbacks/standard=[best,sweep]"]
THERE = ["hydra.sweep.dir=there", "hydra.sweep.subdir=${hydra.job.override_dirname}", "hydra.job.chdir=true"]


def test_a_sweeps_jobs_are_known_whatever_their_folders_are_called(tmp_path, python, bound):
    settings = [*SMALL, "loader.num_workers=0,-1", "optim.lr=0.1", *THERE, "hydra.output_subdir=null"]
    done = python.run(ROOT / "train.py", "-m", *settings, cwd=tmp_path, timeout=bound)
    assert done.returncode == 1, "a job failed"
    rows = list(csv.DictReader((tmp_path / "there" / "sweep.csv").open()))
    assert [(row["loader.num_workers"], row["status"]) for row in rows] == [("0", "done"), ("-1", "failed")]
    summary = json.loads(Path(rows[0]["folder"], "summary.json").read_text())
    assert float(rows[0]["images_per_second"]) == summary["images_per_second"]
    assert "loader.num_workers=-1: give a number from 0" in rows[1]["error"]
    assert (tmp_path / "there" / "sweep.png").read_bytes().startswith(b"\x89PNG")
    report = Sweep(tmp_path / "there").text()
    assert done.stdout.rstrip().endswith(report), "the report comes last, also of a sweep that failed"
    assert f"Fastest: job 0, {summary['images_per_second']:,.0f} images/s" in report
    assert "loader.num_workers=0" in report.partition("Use it by\n  python train.py ")[2].splitlines()[0]


def add_job(folder: Path, number: int, overrides: str, outcome=None) -> None:
    """A job: done with a speed or a summary (bytes: its file), failed with an error, unfinished with neither."""
    job, error = folder / f"job {number}", outcome if isinstance(outcome, str) else ""
    status = "failed" if error else "unfinished" if outcome is None else "done"
    job.mkdir(parents=True, exist_ok=True)
    if status == "done":
        loader = next((o.partition("=")[2] for o in overrides.split() if o.startswith("loader=")), "torch")
        summary = {"loader": loader, "data_wait_fraction": 0.25, "test_accuracy": 0.9}
        damaged = isinstance(outcome, bytes)
        summary |= outcome if isinstance(outcome, dict) else {"images_per_second": outcome}
        (job / "summary.json").write_bytes(outcome if damaged else json.dumps(summary).encode())
    note = {"number": number, "folder": str(job), "overrides": overrides.split(), "status": status, "error": error}
    (folder / NOTES).mkdir(exist_ok=True)
    write_whole(folder / NOTES / f"{number}.json", json.dumps(note))


def measured(speed, low=None, high=None, **summary):
    quartiles = {"images_per_second_quartiles": [low, speed, high]} if low else {}
    return {"images_per_second": speed, **quartiles, **summary}


MIXED = [
    ("loader=torch loader.num_workers=0 train.epochs=1", 1234.5),
    ("loader=torch loader.num_workers=2 train.epochs=1", "no memory is left"),
    ("loader=prefetch loader.num_workers=0 train.epochs=1", 9876.5),
    ("loader=prefetch loader.num_workers=2 train.epochs=1", None),
]
SPEEDS = {"torch": (300, 310, 290), "workers": (1000, 1200, 1100), "prefetch": (1150, 990, 1230)}
NOISY = [
    (f"loader={loader} seed={seed}", float(speed))
    for loader, speeds in SPEEDS.items()
    for seed, speed in enumerate(speeds)
]
LOWER = {"score": "test_mae", "lower_is_better": True}
SWEEPS = {  # jobs, what the report says, what it does not say
    "jobs that failed or are unfinished": (
        MIXED,
        [
            "\n  python train.py loader=prefetch loader.num_workers=0 train.epochs=1\n",
            "\nFailed: job 1 (loader=torch num_workers=2): no memory is left\n",
            "Jobs: 2 done, 1 failed, 1 unfinished\n",
        ],
        ["Best score"],
    ),
    "a summary that is damaged": (
        [("loader=torch", 1000), ("loader=threads", b""), ("loader=workers", b"[1]")],
        [
            "Jobs: 1 done, 2 damaged",
            "Damaged: job 1 (loader=threads): ",
            "job 1/summary.json cannot be read (Expecting",
            "job 2/summary.json cannot be read",
        ],
        [],
    ),
    "repeats that overlap": (
        NOISY,
        [
            "Fastest, and equal within their ranges: 3 runs (loader=workers); 3 runs (loader=prefetch).\n",
            "The simplest of them: job 3, 4, 5, 1,100 images/s (1,000 to 1,200)",
            "\n  python train.py loader=workers",
        ],
        ["seed="],
    ),
    "quartiles that overlap": (
        [("loader=prefetch", measured(1010, 1000, 1020)), ("loader=torch", measured(995, 980, 1005))],
        ["The simplest of them: job 1, 995 images/s"],
        [],
    ),
    "a command for a shell": ([("data.root='/a/$HOME'", 1.0)], ["\n  python train.py 'data.root='\"'\"'/a/"], []),
    "a score that is better if lower": (
        [("optim.lr=1", measured(1001, test_mae=0.3, **LOWER)), ("optim.lr=2", measured(1000, test_mae=0.2, **LOWER))],
        ["Fastest: job 0", "Best score: job 1, test_mae 0.2000. Use it by\n  python train.py optim.lr=2"],
        [],
    ),
    "a score that loaders do not change": (
        [("loader=torch", measured(1001, test_accuracy=0.88)), ("loader=workers", measured(1000, test_accuracy=0.9))],
        [],
        ["Best score"],
    ),
    "free data": (
        [("loader=prefetch", 910), ("loader=torch", 455), ("loader=cached", 1000)],
        ["Fastest: job 0", "free data: 1,000 images/s"],
        [],
    ),
}


def made(folder: Path, jobs: list) -> Path:
    for number, (overrides, outcome) in enumerate(jobs):
        add_job(folder, number, overrides, outcome)
    return folder


@pytest.mark.parametrize("case", SWEEPS)
def test_the_report_names_the_setting_to_use_and_what_is_not_done(tmp_path, case):
    jobs, said, unsaid = SWEEPS[case]
    report = f"{Sweep(made(tmp_path, jobs)).text()}\n"
    assert [text for text in said if text not in report] == []
    assert [text for text in unsaid if text in report] == []


def test_the_table_has_columns_only_for_what_varies_and_its_columns_line_up(tmp_path):
    heading, *rows = Sweep(made(tmp_path, MIXED)).text().splitlines()[3:8]
    assert heading.split() == ["job", "loader", "loader.num_workers", "images/s", "waiting", "accuracy", "status"]
    assert rows[0].split() == ["0", "torch", "0", "1,234", "25.0%", "0.9000", "done"]
    assert rows[2].startswith("> ") and "9,876" in rows[2]
    assert {row.index("%") for row in rows if "%" in row} == {heading.index("waiting") + len("waiting") - 1}


def end_at_once(folder: Path, number: int, start) -> None:
    start.wait(60)
    add_job(folder, number, f"seed={number}", 1000.0)
    write_report(folder)


def test_every_job_is_in_the_report_once_when_many_processes_end_at_the_same_moment(tmp_path, monkeypatch, bound):
    monkeypatch.setattr("extras.sweep.report.draw_bars", lambda *_: b"a picture")  # takes most of the time
    fork, count = multiprocessing.get_context("fork"), 8
    made(tmp_path, [(f"seed={number}", None) for number in range(count)])
    start = fork.Barrier(count)
    writers = [fork.Process(target=end_at_once, args=(tmp_path, number, start)) for number in range(count)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(bound)
        assert writer.exitcode == 0
    rows = csv.DictReader((tmp_path / "sweep.csv").open())
    assert [(row["job"], row["status"]) for row in rows] == [(str(number), "done") for number in range(count)]
