"""Sweeps of real jobs, whatever their folders are called, and reports of jobs with given figures."""

import atexit
import csv
import itertools
import json
import os
import shlex
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
from hydra.core.utils import JobReturn, JobStatus
from omegaconf import OmegaConf

from extras.sweep import sweep
from extras.sweep.report import NOTES, Sweep, write_report
from tests.configs import CONF, FAST, separate
from training.files import write_whole

SWEEP = separate(
    "callbacks/standard=[best,sweep] train.max_steps=2 loader.num_workers=0,-1 optim.lr=0.1 hydra.sweep.dir=there "
    "hydra.sweep.subdir=${hydra.job.override_dirname} hydra.job.chdir=true hydra.output_subdir=null"
)


@pytest.mark.parametrize(
    ("asked", "lines", "added"), [(["-m"], "", []), ([], "hydra: {mode: MULTIRUN}\n", ["hydra.mode=RUN"])]
)
def test_a_sweeps_jobs_are_known_whatever_their_folders_are_called(tmp_path, python, bound, asked, lines, added):
    (tmp_path / "my conf").mkdir()
    (tmp_path / "my conf" / "mine.yaml").write_text(f"defaults: [config, _self_]\n{lines}")
    flags = f"--config-dir={tmp_path}/my conf", "--config-name=mine"
    done = python.run(CONF.parent / "train.py", *asked, *flags, *FAST, *SWEEP, cwd=tmp_path, timeout=bound)
    assert done.returncode == 1, "a job failed"
    rows = list(csv.DictReader((tmp_path / "there" / "sweep.csv").read_text().splitlines()))
    assert [(row["loader.num_workers"], row["status"]) for row in rows] == [("0", "done"), ("-1", "failed")]
    summary = json.loads(Path(rows[0]["folder"], "summary.json").read_text())
    assert float(rows[0]["images_per_second"]) == summary["images_per_second"]
    assert "loader.num_workers=-1: give an integer from 0" in rows[1]["error"]
    assert (tmp_path / "there" / "sweep.png").read_bytes().startswith(b"\x89PNG")
    report = Sweep(tmp_path / "there").text()
    assert report in (tmp_path / "there" / "sweep.md").read_text()
    assert done.stdout.rstrip().endswith(report), "the report comes last, also of a sweep that failed"
    assert f"Fastest: job 0, {summary['images_per_second']:,.0f} images/s" in report
    command = report.partition("Use it by\n  python train.py ")[2].splitlines()[0]
    assert "loader.num_workers=0" in command and command.startswith(shlex.join([*flags, *added]))
    assert ("hydra.mode=RUN" in command) == bool(added), "the command starts one run"


def test_the_report_takes_a_small_share_of_the_time_of_a_sweep_of_many_jobs(tmp_path, monkeypatch):
    seconds = itertools.count(step=0.5)
    written = []
    monkeypatch.setattr(sweep, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    monkeypatch.setattr(sweep, "write_report", written.append)
    hydra = {"mode": "RUN", "runtime": {"cwd": str(tmp_path)}, "sweep": {"dir": "."}}
    (tmp_path / NOTES).mkdir()
    reports = sweep.SweepTable()
    for _ in range(100):
        reports.on_job_end(OmegaConf.create({"hydra": hydra}), JobReturn(status=JobStatus.COMPLETED))
    assert len(written) == 2, "each takes half a second of 50 seconds"


class Stopped:
    """A callback that fails, in a process that torchrun then stops."""

    def __init__(self):
        atexit.register(os.kill, os.getpid(), signal.SIGTERM)
        raise ValueError("no reading")


FAILING = [
    ("loader.num_workers=-1", "give an integer from 0"),
    ("+callbacks.bad._target_=extras.sweep.tests.test_sweep.Stopped", "no reading"),
]


@pytest.mark.parametrize(("override", "error"), FAILING)
def test_a_job_that_fails_under_torchrun_is_listed_with_its_error(tmp_path, python, bound, override, error):
    environment = {**os.environ, "WORLD_SIZE": "2", "RANK": "0"}
    settings = [*(text for text in SWEEP if "num_workers" not in text), "seed=0,1", override]
    done = python.run(CONF.parent / "train.py", "-m", *FAST, *settings, cwd=tmp_path, env=environment, timeout=bound)
    (row,) = csv.DictReader((tmp_path / "there" / "sweep.csv").read_text().splitlines())
    assert row["status"] == "failed" and error in row["error"]
    assert done.returncode == 1 and "1 failed" in done.stdout


def add_job(folder, number, overrides, outcome=None):
    """A job: done with a speed or a summary (bytes: its file), failed with an error, unfinished with neither."""
    job = folder / f"job {number}"
    error = outcome if isinstance(outcome, str) else ""
    status = "failed" if error else "unfinished" if outcome is None else "done"
    job.mkdir(parents=True, exist_ok=True)
    if isinstance(outcome, bytes):
        (job / "summary.json").write_bytes(outcome)
    elif status == "done":
        loader = next((o.partition("=")[2] for o in overrides.split() if o.startswith("loader=")), "torch")
        summary = {"loader": loader, "data_wait_fraction": 0.25, "test_accuracy": 0.9}
        summary |= outcome if isinstance(outcome, dict) else {"images_per_second": outcome}
        (job / "summary.json").write_text(json.dumps(summary))
    note = {"number": number, "folder": str(job), "overrides": overrides.split(), "status": status, "error": error}
    (folder / NOTES).mkdir(exist_ok=True)
    write_whole(folder / NOTES / f"{number}.json", json.dumps(note))


MIXED = [
    ("loader=torch loader.num_workers=0 train.epochs=1", 1234.5),
    ("loader=torch loader.num_workers=2 train.epochs=1", "no memory is left"),
    ("loader=prefetch loader.num_workers=0 train.epochs=1", 9876.5),
    ("loader=prefetch loader.num_workers=2 train.epochs=1", None),
]
SPEEDS = {"torch": (300, 310, 290), "workers": (1000, 1200, 1100), "prefetch": (1150, 990, 1230)}
REPEATS = [(f"loader={name} seed={seed}", speed) for name, all_ in SPEEDS.items() for seed, speed in enumerate(all_)]
FASTER = {"images_per_second": 1010, "images_per_second_quartiles": [1000, 1010, 1020]}
SIMPLER = {"images_per_second": 995, "images_per_second_quartiles": [980, 995, 1005]}
LOWER = {"score": "test_mae", "lower_is_better": True, "test_mae": 0.3}
ERRORS = [("optim.lr=1", FASTER | LOWER), ("optim.lr=2", {"images_per_second": 9, "test_mae": 0.2})]
VALIDATED = {"score": "val_accuracy", "val_accuracy": 0.1}
FOLDS = [
    (f"data.folds=3 data.fold={fold} optim.lr={lr}", VALIDATED | {"images_per_second": 9, "best_score": score})
    for lr, scores in {0.1: (0.7, 0.8, 0.9), 0.2: (0.5, 0.5, None)}.items()
    for fold, score in enumerate(scores)
]
WIDE = [(f"optim.lr={lr} seed={seed}", {"test_accuracy": 0.1 * lr + 0.5 * seed}) for lr in (1, 2) for seed in (0, 1)]
SWEEPS = [  # jobs, what the report says, what it does not say
    (MIXED, "\n  python train.py loader=prefetch loader.num_workers=0 train.epochs=1\n", "Best score"),
    (MIXED, "\nFailed: job 1 (loader=torch num_workers=2): no memory is left\n", ""),
    (MIXED, "Jobs: 2 done, 1 failed, 1 unfinished\n", ""),
    ([("loader=torch", 1000), ("loader=threads", b"")], "Damaged: job 1 (loader=threads): ", ""),
    ([("loader=torch", 1000), ("loader=threads", b"[1]")], "Jobs: 1 done, 1 damaged\n", ""),
    (REPEATS, "Fastest, and equal within their ranges: 3 runs (loader=workers); 3 runs (loader=prefetch).\n", "seed="),
    (REPEATS, "The simplest of them: job 3, 4, 5, 1,100 images/s (1,000 to 1,200)", ""),
    (REPEATS, "\n  python train.py loader=workers", ""),
    ([("loader=prefetch", FASTER), ("loader=torch", SIMPLER)], "The simplest of them: job 1, 995 images/s", ""),
    ([("data.root='/a/$HOME'", 1.0)], "\n  python train.py 'data.root='\"'\"'/a/", ""),
    (ERRORS, "\n>   1         2  0.2000         9 ", "images/s ("),
    (FOLDS, "\n> 0, 1, 2       0.1           0.8000 +- 0.1000 ", "data.fold "),
    (FOLDS, "\n  3, 4, 5       0.2  0.5000 +- 0.0000 (2 of 3)", ""),
    (FOLDS, "Best score: job 0, 1, 2, val_accuracy 0.8000 +- 0.1000. Use it by\n  python train.py optim.lr=0.1\n", ""),
    (FOLDS[:3], "\nBest score: job 0, 1, 2, val_accuracy 0.8000 +- 0.1000.", ""),
    (WIDE, "Best score, and equal within their ranges: 2 runs (lr=2); 2 runs (lr=1).\n", ""),
    (WIDE, "\nThe first of them: job 2, 3, test_accuracy 0.4500 +- 0.3536. Use it by\n", ""),
    (ERRORS, "Best score: job 1, test_mae 0.2000. Use it by\n  python train.py optim.lr=2", ""),
    ([("loader=torch", 1101), ("loader=workers", FASTER | {"test_accuracy": 0.95})], "Fastest: job 0", "Best score"),
    ([("callbacks.ema.decay=0.9", 9), ("callbacks.ema.decay=0.99", 10)], "Best score", "Fastest"),
    ([("loader=prefetch", 910), ("loader=torch", 455), ("loader=cached", 1000)], "instant loading: 1,000 im", ""),
]


def made(folder, jobs):
    for number, (overrides, outcome) in enumerate(jobs):
        add_job(folder, number, overrides, outcome)
    return folder


@pytest.mark.parametrize(("jobs", "said", "unsaid"), SWEEPS)
def test_the_report_names_the_setting_to_use_and_what_is_not_done(tmp_path, jobs, said, unsaid):
    report = f"{Sweep(made(tmp_path, jobs)).text()}\n"
    assert said in report and (not unsaid or unsaid not in report)


def test_the_table_has_columns_only_for_what_varies_and_its_columns_line_up(tmp_path):
    heading, *rows = Sweep(made(tmp_path, MIXED)).text().splitlines()[3:8]
    assert heading.split() == ["job", "loader", "loader.num_workers", "images/s", "waiting", "accuracy", "status"]
    assert rows[0].split() == ["0", "torch", "0", "1,234", "25.0%", "0.9000", "done"]
    assert rows[2].startswith("> ") and "9,876" in rows[2]
    end = heading.index("waiting") + len("waiting") - 1
    assert {row.index("%") for row in rows if "%" in row} == {end}


def test_the_page_has_the_table_escaped_the_picture_and_links_to_the_pages_of_the_jobs(tmp_path):
    jobs = made(tmp_path, [("loader=<b>", 1000.0), ("loader=workers", "it broke & failed")])
    (jobs / "job 0" / "report.html").write_text("a page")
    write_report(jobs)
    text = (jobs / "sweep.html").read_text()
    assert "<td>&lt;b&gt;</td>" in text and "it broke &amp; failed" in text and "<b>" not in text
    assert '<td class="number">1,000</td>' in text and '<th class="number">images/s</th>' in text
    assert '<tr class="best">' in text and text.count('src="data:image/png;base64,') == 1
    assert '<a href="job%200/report.html">job 0</a>' in text and "job%201" not in text


def test_a_job_that_ends_while_another_writes_the_report_is_in_it(tmp_path, monkeypatch):
    def draw(*_):
        add_job(tmp_path, 1, "seed=1", 1000.0)
        return b"a picture"

    monkeypatch.setattr("extras.sweep.report.draw_scores", draw)
    write_report(made(tmp_path, [("seed=0", 1000.0), ("seed=1", None)]))
    rows = csv.DictReader((tmp_path / "sweep.csv").read_text().splitlines())
    assert [(row["job"], row["status"]) for row in rows] == [("0", "done"), ("1", "done")]


def test_the_tables_of_an_earlier_sweep_stay_until_a_job_of_the_next_one_is_done(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(atexit, "register", lambda *_: None)
    config = OmegaConf.create({"hydra": {"runtime": {"cwd": str(tmp_path)}, "sweep": {"dir": "."}}})
    write_report(made(tmp_path, [("seed=0", 1000.0), ("seed=1", 1000.0)]))
    earlier = (tmp_path / "sweep.csv").read_text()
    for _ in range(2):
        reports = sweep.SweepTable()
        reports.on_multirun_start(config)
        add_job(tmp_path, 0, "seed=2", "no such key")
        write_report(tmp_path)
        reports._end(tmp_path)
        assert (tmp_path / "sweep.csv").read_text() == earlier
        assert "no such key" in capsys.readouterr().out
    add_job(tmp_path, 1, "seed=3", 1000.0)
    reports._end(tmp_path)
    rows = csv.DictReader((tmp_path / "sweep.csv").read_text().splitlines())
    assert [(row["job"], row["status"]) for row in rows] == [("0", "failed"), ("1", "done")]
