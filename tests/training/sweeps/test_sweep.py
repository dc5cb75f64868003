import csv
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from training.sweeps.sweep import Sweep, main, write_report

CUT_SHORT = '{"loader": "torch", "images_per_'


def add_job(sweep, number, overrides, speed=None, error=None, summary_text=None, **summary):
    """A job's folder: done with a speed, failed with an error, unfinished with neither."""
    job = sweep / str(number)
    (job / ".hydra").mkdir(parents=True)
    (job / ".hydra" / "overrides.yaml").write_text(yaml.safe_dump(overrides.split()))
    if speed is not None:
        loader = next((o.partition("=")[2] for o in overrides.split() if o.startswith("loader=")), "torch")
        metrics = {"images_per_second": speed, "data_wait_fraction": 0.25, "test_accuracy": 0.9}
        summary_text = json.dumps({"loader": loader} | metrics | summary)
    if summary_text is not None:
        (job / "summary.json").write_text(summary_text)
    if error is not None:
        (job / "error.txt").write_text(error)


@pytest.fixture
def sweep(tmp_path):
    """Two loaders, each with two worker counts. One job failed, and one is unfinished."""
    folder = tmp_path / "2026-11-21_10-00-00"
    add_job(folder, 0, "loader=torch loader.num_workers=0 train.epochs=1", speed=1234.5)
    add_job(folder, 1, "loader=torch loader.num_workers=2 train.epochs=1", error="no memory is left\n")
    add_job(folder, 2, "loader=prefetch loader.num_workers=0 train.epochs=1", speed=9876.5)
    add_job(folder, 3, "loader=prefetch loader.num_workers=2 train.epochs=1")
    return folder


@pytest.fixture
def undrawn(monkeypatch):
    """Skips the drawing, which takes most of a report's time, in tests of the other files."""
    monkeypatch.setattr("training.sweeps.sweep.draw_bars", lambda *_: b"a picture")


def labels_of(axis):
    return [label.get_text() for label in axis.get_ticklabels()]


# Reading the jobs


@pytest.mark.parametrize("text", ["", CUT_SHORT, "[1, 2]", "\x00"])
def test_a_damaged_summary_counts_as_a_failed_job(sweep, text):
    (sweep / "0" / "summary.json").write_text(text)
    assert Sweep(sweep).jobs[0].status == "failed"
    assert "Failed: job 0 (loader=torch num_workers=0): its summary.json" in Sweep(sweep).text()


# Recommending a setting


def test_the_line_to_copy_runs_the_fastest_job_with_the_constant_overrides_too(sweep):
    assert "\n  python train.py loader=prefetch loader.num_workers=0 train.epochs=1\n" in Sweep(sweep).text()


def test_the_most_accurate_job_is_named_if_the_sweep_can_change_accuracy(tmp_path):
    add_job(tmp_path, 0, "optim.lr=0.1", speed=1001, test_accuracy=0.88)
    add_job(tmp_path, 1, "optim.lr=0.01", speed=1000, test_accuracy=0.91)
    report = Sweep(tmp_path).text()
    assert "Fastest: job 0" in report
    assert "Most accurate: job 1, test accuracy 0.9100.\n  python train.py optim.lr=0.01" in report
    for number, loader in enumerate(("torch", "prefetch")):
        add_job(tmp_path / "loaders", number, f"loader={loader}", speed=1000 - number, test_accuracy=0.88 + number)
    assert "Most accurate" not in Sweep(tmp_path / "loaders").text(), "loaders change no accuracy"


def test_a_cached_job_is_the_ceiling_and_never_the_recommended_setting(tmp_path, drawn):
    add_job(tmp_path, 0, "loader=prefetch", speed=910)
    add_job(tmp_path, 1, "loader=torch", speed=455)
    add_job(tmp_path, 2, "loader=cached", speed=1000)
    write_report(tmp_path)
    assert "Fastest: job 0" in Sweep(tmp_path).text()
    assert "91% of the speed with free data" in Sweep(tmp_path).text()
    speed, _ = drawn[0].axes
    assert labels_of(speed.yaxis) == ["job 0 (loader=prefetch)", "job 1 (loader=torch)"]
    assert [list(line.get_xdata()) for line in speed.lines] == [[1000, 1000]]
    add_job(tmp_path, 3, "loader=torch train.batch_size=8", speed=500)
    assert "free data" not in Sweep(tmp_path).text(), "the ceiling is another one with another batch size"


# Repeats, and settings that cannot be told apart


@pytest.fixture
def noisy(tmp_path):
    """Two loaders with three seeds each, whose speeds overlap, and a slower one, in Hydra's order."""
    speeds = {"torch": (300, 310, 290), "workers": (1000, 1200, 1100), "prefetch": (1150, 990, 1230)}
    jobs = [(loader, seed) for loader in speeds for seed in range(3)]
    for number, (loader, seed) in enumerate(jobs):
        accuracy = 0.9 + 0.01 * seed
        add_job(tmp_path, number, f"loader={loader} seed={seed}", speed=speeds[loader][seed], test_accuracy=accuracy)
    return tmp_path


def test_jobs_that_differ_in_the_seed_only_are_one_setting_with_the_median_of_its_repeats(noisy):
    heading, *rows = Sweep(noisy).text().splitlines()[3:7]
    assert heading.split() == ["job", "loader", "images/s", "spread", "waiting", "accuracy"]
    assert " 300 " in rows[0] and " 1,100 " in rows[1] and " 1,150 " in rows[2]
    assert "±10" in rows[0]
    assert all("0.9100 ±0.0100" in row for row in rows), "the mean accuracy and its standard deviation"


def test_the_simplest_of_settings_that_overlap_is_recommended_without_a_seed(noisy):
    report = Sweep(noisy).text()
    assert "Fastest, and equal within their spread: 3 runs (loader=workers); 3 runs (loader=prefetch).\n" in report
    assert "The simplest of them: jobs 3, 4, 5, 1,100 images/s" in report
    assert report.endswith("\n  python train.py loader=workers")


def test_single_jobs_are_told_apart_by_the_quartiles_of_their_windows(tmp_path):
    add_job(tmp_path, 0, "loader=prefetch", speed=1010, images_per_second_quartiles=[1000, 1010, 1020])
    add_job(tmp_path, 1, "loader=torch", speed=995, images_per_second_quartiles=[980, 995, 1005])
    assert "The simplest of them: job 1, 995 images/s" in Sweep(tmp_path).text()
    add_job(tmp_path, 2, "loader=threads", speed=1100, images_per_second_quartiles=[1090, 1100, 1110])
    assert "Fastest: job 2, 1,100 images/s" in Sweep(tmp_path).text()


def test_the_fewest_workers_are_the_simplest_of_equal_settings(tmp_path):
    for number, workers in enumerate((8, 2, 4)):
        wide = {"num_workers": workers, "images_per_second_quartiles": [900, 1000, 1100]}
        add_job(tmp_path, number, f"loader.num_workers={workers}", speed=1000 + number, **wide)
    assert "The simplest of them: job 1, 1,001 images/s" in Sweep(tmp_path).text()


def test_a_setting_with_failed_repeats_counts_those_that_are_done(noisy):
    (noisy / "3" / "error.txt").write_text("no memory is left")
    report = Sweep(noisy).text()
    assert "2 of 3 done" in report and "Failed: job 3 (loader=workers): no memory is left" in report
    assert Sweep(noisy).settings[1].figure("images_per_second") == (1150, 1100, 1200)


def test_a_sweep_over_seeds_alone_is_one_setting(tmp_path, drawn):
    for seed in range(3):
        add_job(tmp_path, seed, f"loader=torch seed={seed}", speed=1000 + seed)
    write_report(tmp_path)
    assert Sweep(tmp_path).text().endswith("\n  python train.py loader=torch")
    assert labels_of(drawn[0].axes[0].yaxis) == ["3 runs"]
    rows = list(csv.DictReader(io.StringIO((tmp_path / "sweep.csv").read_text())))
    assert [row["seed"] for row in rows] == ["0", "1", "2"], "a row a job"


# Writing the report


def test_the_table_has_columns_only_for_what_varies_and_its_columns_line_up(sweep):
    lines = Sweep(sweep).text().splitlines()
    heading, *rows = lines[3:8]
    assert heading.split() == ["job", "loader", "num_workers", "images/s", "waiting", "accuracy", "status"]
    assert rows[0].split() == ["0", "torch", "0", "1,234", "25.0%", "0.9000", "done"]
    assert rows[2].startswith("> ") and "9,876" in rows[2]
    assert {row.index("%") for row in rows if "%" in row} == {heading.index("waiting") + len("waiting") - 1}


def test_a_usual_sweep_fits_a_terminal_of_100_columns(tmp_path):
    times = {"first_batch_seconds": 0.1234, "step_ms_p50": 123.4, "step_ms_p95": 234.5}
    add_job(tmp_path, 0, "loader=prefetch loader.num_workers=16", speed=123456.7, **times)
    add_job(tmp_path, 1, "loader=torch loader.num_workers=2")
    table = Sweep(tmp_path).text().splitlines()[2:6]
    assert "unfinished" in table[3]
    assert max(map(len, table)) <= 100


def test_the_csv_has_one_row_per_job_with_full_key_names_and_plain_numbers(sweep, undrawn):
    write_report(sweep)
    rows = list(csv.DictReader(io.StringIO((sweep / "sweep.csv").read_text())))
    assert [row["job"] for row in rows] == ["0", "1", "2", "3"]
    assert [row["loader.num_workers"] for row in rows] == ["0", "2", "0", "2"]
    assert float(rows[0]["images_per_second"]) == 1234.5
    assert [row["status"] for row in rows] == ["done", "failed", "done", "unfinished"]
    assert rows[1]["error"] == "no memory is left" and rows[1]["images_per_second"] == ""


def test_the_page_has_the_report_and_the_picture(sweep, undrawn):
    write_report(sweep)
    page = (sweep / "sweep.md").read_text()
    assert page.startswith("# Sweep 2026-11-21_10-00-00\n")
    assert f"```\n{Sweep(sweep).text()}\n```" in page
    assert "\n>   2  prefetch            0     9,876 " in page
    assert "\n    0  torch               0     1,234 " in page
    assert "\nFailed: job 1 (loader=torch num_workers=2): no memory is left\n" in page
    assert "\nUnfinished: job 3 (loader=prefetch num_workers=2): it was interrupted" in page
    assert "(sweep.png)" in page


def test_the_report_follows_the_jobs_and_leaves_no_other_files_behind(sweep, undrawn):
    before = {path.name for path in sweep.iterdir()}
    write_report(sweep)
    (sweep / "3" / "summary.json").write_text(json.dumps({"images_per_second": 20000.0}))
    paths = write_report(sweep)
    assert "Fastest: job 3, 20,000 images/s" in (sweep / "sweep.md").read_text()
    assert {path.name for path in sweep.iterdir()} - before == {path.name for path in paths}
    assert [path.name for path in paths] == ["sweep.csv", "sweep.md", "sweep.png"]


def test_a_failed_write_keeps_the_earlier_report(sweep, undrawn, monkeypatch):
    write_report(sweep)
    before = {path.name: path.read_bytes() for path in sweep.glob("*.*")}

    def full(file):
        raise OSError("No space left on device")

    monkeypatch.setattr("training.files.os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_report(sweep)
    assert {path.name: path.read_bytes() for path in sweep.glob("*.*")} == before


# Drawing the picture


def test_every_job_of_a_sweep_of_one_key_has_a_labelled_bar_in_the_order_of_the_table(tmp_path, drawn):
    add_job(tmp_path, 0, "optim.lr=3", speed=1234.5)
    add_job(tmp_path, 1, "optim.lr=1", error="no memory is left")
    add_job(tmp_path, 2, "optim.lr=2", speed=9876.5)
    write_report(tmp_path)
    speed, wait = drawn[0].axes
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")
    assert labels_of(speed.yaxis) == ["job 0 (lr=3)", "job 1 (lr=1)", "job 2 (lr=2)"]
    assert speed.yaxis_inverted() and wait.yaxis_inverted(), "from the top down"
    assert [bar.get_width() for bar in speed.patches] == [1234.5, 0, 9876.5]
    assert [text.get_text() for text in speed.texts] == ["1,234", "failed", "9,876"]
    assert drawn[0].get_suptitle() == "Fastest: job 2 (lr=2)"


@pytest.mark.parametrize(
    "overrides",
    [
        ["loader=torch"],
        [f"loader={loader} loader.num_workers={n}" for loader in "abcd" for n in range(4)],
        [f"optim.lr={lr}" for lr in range(40)],
        ["data.root=$HOME/$a$b", "data.root=/a/very/long/path/to/images/of/cats/and/dogs"],
        ["loader=torch", "loader=prefetch +loader.depth=2"],
    ],
    ids=["one", "four by four", "forty", "odd names", "not all keys"],
)
def test_the_numbers_in_the_picture_of_any_sweep_do_not_overlap(tmp_path, drawn, overrides):
    for number, override in enumerate(overrides):
        add_job(tmp_path, number, override, speed=8000 + number)
    write_report(tmp_path)
    for axes in drawn[0].axes:
        boxes = [text.get_window_extent() for text in axes.texts]
        assert len(boxes) == len(overrides)
        pairs = [(a, b) for i, a in enumerate(boxes) for b in boxes[:i]]
        assert not any(a.overlaps(b) for a, b in pairs)


def test_a_sweep_in_which_every_job_failed_still_has_a_report(tmp_path, drawn):
    add_job(tmp_path, 0, "loader=torch", error="device=cuda needs a CUDA device")
    add_job(tmp_path, 1, "loader=prefetch", error="device=cuda needs a CUDA device")
    write_report(tmp_path)
    assert drawn[0].get_suptitle() == "No job measured its speed"
    assert "Fastest" not in Sweep(tmp_path).text()


def test_matplotlib_is_imported_only_for_drawing_and_pyplot_never(sweep):
    code = """
import sys
from training.sweeps.sweep import Sweep, main, write_report
assert "matplotlib" not in sys.modules
write_report(sys.argv[1])
assert "matplotlib" in sys.modules and "matplotlib.pyplot" not in sys.modules
"""
    root = Path(__file__).parents[3]
    subprocess.run([sys.executable, "-c", code, sweep], cwd=root, check=True, timeout=60)


def test_the_command_writes_the_report_again_and_prints_it(sweep, capsys):
    main([str(sweep)])
    assert capsys.readouterr().out == Sweep(sweep).text() + "\n"


@pytest.mark.parametrize("kind", ["missing", "empty", "a single run"])
def test_a_folder_that_is_not_a_sweep_is_refused_in_a_sentence(tmp_path, kind):
    folder = tmp_path / "run"
    if kind != "missing":
        folder.mkdir()
    if kind == "a single run":
        (folder / ".hydra").mkdir()
        (folder / ".hydra" / "overrides.yaml").write_text("[]")
    with pytest.raises(SystemExit, match="is not a sweep's folder") as error:
        main([str(folder)])
    assert isinstance(error.value.code, str)  # Python prints it to stderr and exits with 1


def test_a_sweep_ends_with_its_table_and_the_line_to_copy(python, tmp_path):
    small = ["data=synthetic", "data.length=64", "data.test_length=16", "data.image_size=8", "train.batch_size=16"]
    short = ["train.epochs=1", "loader.num_workers=0", "hydra.sweep.dir=sweep"]
    command = [Path(__file__).resolve().parents[3] / "train.py", "-m", "loader=torch,prefetch", *small, *short]
    done = python.run(*command, cwd=tmp_path, timeout=100, quick_exit=True)
    assert done.returncode == 0, done.stderr
    assert {"sweep.csv", "sweep.md", "sweep.png"} < {path.name for path in (tmp_path / "sweep").iterdir()}
    assert "Jobs: 2 done" in done.stdout and "python train.py" in done.stdout
