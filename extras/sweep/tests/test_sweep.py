"""The report of a sweep, made of folders such as Hydra's jobs leave; test_launch.py runs one."""

import csv
import io
import json

import pytest
import yaml

from training.sweeps.sweep import Sweep, write_report


def add_job(sweep, number, overrides, outcome=None):
    """A job's folder: done with a speed or a summary, failed with an error, unfinished with neither."""
    job = sweep / str(number)
    (job / ".hydra").mkdir(parents=True)
    (job / ".hydra" / "overrides.yaml").write_text(yaml.safe_dump(overrides.split()))
    if isinstance(outcome, str):
        (job / "error.txt").write_text(outcome)
    elif outcome is not None:
        loader = next((o.partition("=")[2] for o in overrides.split() if o.startswith("loader=")), "torch")
        summary = {"loader": loader, "data_wait_fraction": 0.25, "test_accuracy": 0.9}
        summary |= outcome if isinstance(outcome, dict) else {"images_per_second": outcome}
        (job / "summary.json").write_text(json.dumps(summary))


def measured(speed, low=None, high=None, **summary):
    quartiles = {"images_per_second_quartiles": [low, speed, high]} if low else {}
    return {"images_per_second": speed, **quartiles, **summary}


MIXED = [
    ("loader=torch loader.num_workers=0 train.epochs=1", 1234.5),
    ("loader=torch loader.num_workers=2 train.epochs=1", "no memory\nis left\n"),
    ("loader=prefetch loader.num_workers=0 train.epochs=1", 9876.5),
    ("loader=prefetch loader.num_workers=2 train.epochs=1", None),
]
NOISY = [
    (f"loader={loader} seed={seed}", measured(speed, test_accuracy=0.9 + 0.01 * seed))
    for loader, speeds in {
        "torch": (300, 310, 290),
        "workers": (1000, 1200, 1100),
        "prefetch": (1150, 990, 1230),
    }.items()
    for seed, speed in enumerate(speeds)
]
RATES = [("optim.lr=0.1", measured(1001, test_accuracy=0.88)), ("optim.lr=0.01", measured(1000, test_accuracy=0.91))]
LOWER = {"score": "test_mae", "lower_is_better": True}
SWEEPS = {  # jobs, what the report says, what it does not say
    "jobs that failed or are unfinished": (
        MIXED,
        [
            "Jobs: 2 done, 1 failed, 1 unfinished; all with train.epochs=1\n",
            "\n  python train.py loader=prefetch loader.num_workers=0 train.epochs=1\n",
            "\nFailed: job 1 (loader=torch num_workers=2): no memory is left\n",
            "\nUnfinished: job 3 (loader=prefetch num_workers=2): it was interrupted",
        ],
        ["Most accurate"],
    ),
    "every job failed": ([("loader=torch", "no GPU"), ("loader=workers", "no GPU")], ["Failed: job 1"], ["Fastest"]),
    "repeats that overlap": (
        NOISY,
        [
            "Fastest, and equal within their spread: 3 runs (loader=workers); 3 runs (loader=prefetch).\n",
            "The simplest of them: jobs 3, 4, 5, 1,100 images/s",
            "\n  python train.py loader=workers",
        ],
        ["seed="],
    ),
    "a repeat that failed": (
        [*NOISY[:3], (NOISY[3][0], "no memory is left"), *NOISY[4:]],
        ["2 of 3 done", "Failed: job 3 (loader=workers): no memory is left"],
        [],
    ),
    "seeds alone": (
        [(f"loader=torch seed={seed}", 1000 + seed) for seed in range(3)],
        ["\n  python train.py loader=torch"],
        [],
    ),
    "quartiles that overlap": (
        [("loader=prefetch", measured(1010, 1000, 1020)), ("loader=torch", measured(995, 980, 1005))],
        ["The simplest of them: job 1, 995 images/s"],
        [],
    ),
    "quartiles that do not": (
        [("loader=torch", measured(995, 980, 1005)), ("loader=threads", measured(1100, 1090, 1110))],
        ["Fastest: job 1, 1,100 images/s"],
        [],
    ),
    "the fewest workers": (
        [(f"loader.num_workers={n}", measured(1000 + n, 900, 1100, num_workers=n)) for n in (8, 2, 4)],
        ["The simplest of them: job 1, 1,002 images/s"],
        [],
    ),
    "accuracy": (
        RATES,
        ["Fastest: job 0", "Most accurate: job 1, test accuracy 0.9100.\n  python train.py optim.lr=0.01"],
        [],
    ),
    "a score that is better if lower": (
        [("optim.lr=1", measured(1001, test_mae=0.3, **LOWER)), ("optim.lr=2", measured(1000, test_mae=0.2, **LOWER))],
        ["Most accurate: job 1, test mae 0.2000."],
        [],
    ),
    "accuracy, which loaders do not change": (
        [("loader=torch", measured(1001, test_accuracy=0.88)), ("loader=workers", measured(1000, test_accuracy=0.9))],
        [],
        ["Most accurate"],
    ),
    "free data": (
        [("loader=prefetch", 910), ("loader=torch", 455), ("loader=cached", 1000)],
        ["Fastest: job 0", "91% of the speed with free data"],
        [],
    ),
    "free data of other batches": (
        [("loader=prefetch", 910), ("loader=cached train.batch_size=8", 1000)],
        ["Fastest: job 0"],
        ["free data"],
    ),
}


def made(folder, jobs):
    for number, (overrides, outcome) in enumerate(jobs):
        add_job(folder, number, overrides, outcome)
    return folder


@pytest.mark.parametrize("case", SWEEPS)
def test_the_report_names_the_setting_to_use_and_what_is_not_done(tmp_path, case):
    jobs, said, unsaid = SWEEPS[case]
    report = Sweep(made(tmp_path, jobs)).text()
    assert [text for text in said if f"{text}" not in f"{report}\n"] == []
    assert [text for text in unsaid if text in report] == []


def test_the_table_has_columns_only_for_what_varies_and_its_columns_line_up(tmp_path):
    lines = Sweep(made(tmp_path / "mixed", MIXED)).text().splitlines()
    heading, *rows = lines[3:8]
    assert heading.split() == ["job", "loader", "num_workers", "images/s", "waiting", "accuracy", "status"]
    assert rows[0].split() == ["0", "torch", "0", "1,234", "25.0%", "0.9000", "done"]
    assert rows[2].startswith("> ") and "9,876" in rows[2]
    assert {row.index("%") for row in rows if "%" in row} == {heading.index("waiting") + len("waiting") - 1}
    heading, *rows = Sweep(made(tmp_path / "noisy", NOISY)).text().splitlines()[3:7]
    assert heading.split() == ["job", "loader", "images/s", "spread", "waiting", "accuracy"]
    assert " 300 " in rows[0] and "±10" in rows[0] and " 1,100 " in rows[1] and " 1,150 " in rows[2]
    assert all("0.9100 ±0.0100" in row for row in rows), "the mean accuracy and its spread"
    times = {"first_batch_seconds": 0.1234, "step_ms_p50": 123.4, "step_ms_p95": 234.5}
    wide = [("loader=prefetch loader.num_workers=16", measured(123456.7, **times)), ("loader=torch seed=1", None)]
    assert max(map(len, Sweep(made(tmp_path / "wide", wide)).text().splitlines()[2:6])) <= 100


def test_the_files_follow_the_jobs_and_a_failed_write_keeps_the_earlier_ones(tmp_path, monkeypatch):
    monkeypatch.setattr("training.sweeps.sweep.draw_bars", lambda *_: b"a picture")  # takes most of the time
    before = {path.name for path in made(tmp_path, MIXED).iterdir()}
    write_report(tmp_path)
    rows = list(csv.DictReader(io.StringIO((tmp_path / "sweep.csv").read_text())))
    assert [row["job"] + row["loader.num_workers"] for row in rows] == ["00", "12", "20", "32"]
    assert [row["status"] for row in rows] == ["done", "failed", "done", "unfinished"]
    assert float(rows[0]["images_per_second"]) == 1234.5 and rows[1]["images_per_second"] == ""
    page = (tmp_path / "sweep.md").read_text()
    assert page.startswith(f"# Sweep {tmp_path.name}\n") and f"```\n{Sweep(tmp_path).text()}\n```" in page
    assert "(sweep.png)" in page

    (tmp_path / "3" / "summary.json").write_text(json.dumps({"images_per_second": 20000.0}))
    assert {path.name for path in tmp_path.iterdir()} - before == {path.name for path in write_report(tmp_path)}
    written = {path.name: path.read_bytes() for path in tmp_path.glob("*.*")}
    assert b"Fastest: job 3, 20,000 images/s" in written["sweep.md"]

    def full(file):
        raise OSError("No space left on device")

    monkeypatch.setattr("training.files.os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_report(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.glob("*.*")} == written


def labels_of(axis):
    return [label.get_text() for label in axis.get_ticklabels()]


def test_every_setting_has_a_labelled_bar_in_the_order_of_the_table(tmp_path, drawn):
    jobs = [("optim.lr=3", 1234.5), ("optim.lr=1", "no memory is left"), ("optim.lr=2", 9876.5)]
    write_report(made(tmp_path / "rates", jobs))
    speed, wait = drawn[0].axes
    assert (tmp_path / "rates" / "sweep.png").read_bytes().startswith(b"\x89PNG")
    assert labels_of(speed.yaxis) == ["job 0 (lr=3)", "job 1 (lr=1)", "job 2 (lr=2)"]
    assert speed.yaxis_inverted() and wait.yaxis_inverted(), "from the top down"
    assert [bar.get_width() for bar in speed.patches] == [1234.5, 0, 9876.5]
    assert [text.get_text() for text in speed.texts] == ["1,234", "failed", "9,876"]
    assert drawn[0].get_suptitle() == "Fastest: job 2 (lr=2)"
    write_report(made(tmp_path / "free", SWEEPS["free data"][0]))
    assert labels_of(drawn[1].axes[0].yaxis) == ["job 0 (loader=prefetch)", "job 1 (loader=torch)"]
    assert [list(line.get_xdata()) for line in drawn[1].axes[0].lines] == [[1000, 1000]]
    write_report(made(tmp_path / "failed", SWEEPS["every job failed"][0]))
    assert drawn[2].get_suptitle() == "No job measured its speed"
    write_report(made(tmp_path / "seeds", SWEEPS["seeds alone"][0]))
    assert labels_of(drawn[3].axes[0].yaxis) == ["3 runs"]


@pytest.mark.parametrize(
    "overrides",
    [
        [f"optim.lr={lr}" for lr in range(40)],
        ["data.root=$HOME/$a$b", "data.root=/a/very/long/path/to/images/of/dogs"],
    ],
    ids=["forty", "odd names"],
)
def test_the_numbers_in_the_picture_of_any_sweep_do_not_overlap(tmp_path, drawn, overrides):
    write_report(made(tmp_path, [(override, 8000 + number) for number, override in enumerate(overrides)]))
    for axes in drawn[0].axes:
        boxes = [text.get_window_extent() for text in axes.texts]
        assert len(boxes) == len(overrides)
        assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])


def test_a_folder_without_jobs_is_refused(tmp_path):
    add_job(tmp_path, "run", "")
    for folder in (tmp_path / "missing", tmp_path):
        with pytest.raises(ValueError, match="has no job of a sweep"):
            write_report(folder)
