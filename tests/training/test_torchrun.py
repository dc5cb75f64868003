"""Runs of two processes against the same run in one, as torchrun starts and restarts them. Most of these are slow."""

import os
import time
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
from PIL import Image

from data.images.cache import END, RECORD
from tests.configs import (
    CONF,
    EXTENSIONS,
    MIXTURE,
    SMALL,
    TWO_PARTS,
    checkpoint,
    complete,
    differing_weights,
    metrics,
    separate,
    stop,
    train,
    untimed,
)

LONG = 100  # seconds within which every run has to end
OURS = (
    "train.batch_size=16 data.length=320 data.test_length=65 optim.lr=0.01 loader=workers "
    f"task.metrics={{worst: {{_target_: {EXTENSIONS}.Worst}}}} task.metric=worst"
)
NO_DROPOUT = f"{TWO_PARTS} +model.dropout=0.0"
LEAVES = f"+callbacks.leaves._target_={EXTENSIONS}.Leaves"
UNUSED = f"{NO_DROPOUT} +model.sums=false"
# What torchrun does, but that its processes are forked: interpreters would take seconds to import torch.
TORCHRUN = """
import runpy, signal, sys
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

def rank(*arguments):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # torchrun's own handler is inherited here
    sys.argv = list(arguments)
    runpy.run_path(arguments[0], run_name="__main__")

about = {"nproc_per_node": 2, "max_restarts": int(sys.argv[1]), "run_id": sys.argv[2], "start_method": "fork"}
about |= {"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0", "monitor_interval": 0.1}
elastic_launch(LaunchConfig(min_nodes=1, max_nodes=1, **about), rank)(*sys.argv[3:])
"""


class Run:
    """A run in `folder`/out, of one process or of two."""

    def __init__(self, python, folder, *overrides, processes=2, restarts=0, id="1"):
        folder.mkdir(parents=True, exist_ok=True)
        self.out = folder / "out"
        self.text = ""
        given = complete(separate(*SMALL, OURS), separate(f"hydra.run.dir={self.out}", *overrides))
        command = [CONF.parent / "train.py", *(text for text in given if text != "hydra.run.dir=")]
        torchrun = ["-c", TORCHRUN, restarts, id] if processes == 2 else []
        environment = {**os.environ, "PYTHONPATH": str(CONF.parent)}
        self.program = python.start(*torchrun, *command, env=environment, cwd=folder)

    def rank(self, number):
        return sorted(psutil.Process(self.program.pid).children(), key=psutil.Process.create_time)[number]

    def wait_for_step(self, step):
        """Waits until the checkpoint of a step from `step` on is there."""
        end = time.monotonic() + LONG
        while not any(int(path.stem[5:]) >= step for path in self.out.glob("checkpoints/step-*.pt")):
            assert time.monotonic() < end and self.program.poll() is None, self.finish().text
            time.sleep(0.005)

    def finish(self, *ranks_said):
        """Waits for the end. ranks_said: what the output has if the processes fail, which they then must."""
        with self.program:
            self.text = "".join(self.program.communicate(LONG))
        assert bool(self.program.returncode) == bool(ranks_said), self.text
        assert all(said in self.text for said in ranks_said), self.text
        return self


def alone_and_in_two(python, folder, *settings):
    """The same run in one process and in two."""
    return [Run(python, folder / f"{count}", *settings, processes=count).finish() for count in (1, 2)]


def assert_close(one, other):
    torch.testing.assert_close(checkpoint(one.out)["model"], checkpoint(other.out)["model"], rtol=0, atol=1e-6)
    for mine, theirs in zip(metrics(one.out), metrics(other.out), strict=True):
        assert (mine["step"], mine["epoch"]) == (theirs["step"], theirs["epoch"])
        for name in mine.keys() & {"loss", "accuracy", "test_loss", "test_accuracy", "test_worst"}:
            assert mine[name] == pytest.approx(theirs[name], abs=1e-6), "each of the 65 test samples counts once"


def assert_same(one, other):
    assert differing_weights(one.out, other.out) == []
    assert untimed(one.out) == untimed(other.out)


@pytest.fixture(scope="module")
def undisturbed(python, tmp_path_factory):
    """A run of two processes that nothing interrupts."""
    return Run(python, tmp_path_factory.mktemp("undisturbed"), LEAVES).finish()


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """A run of this process."""
    folder = tmp_path_factory.mktemp("single")
    train(folder, OURS)
    return SimpleNamespace(out=folder)


def test_two_processes_train_as_one_does_and_write_one_folder_and_one_log(undisturbed, single):
    assert_close(undisturbed, single)
    assert {path.name for path in undisturbed.out.parent.iterdir()} == {"out"}
    log = (undisturbed.out / "train.log").read_text()
    assert log.count("epoch 2: test_loss") == 1 == undisturbed.text.count("epoch 2: test_loss")


@pytest.mark.parametrize(("step", "rank"), [(20, 1), pytest.param(10, 0, marks=pytest.mark.slow)])
def test_after_a_rank_was_killed_the_run_is_restarted_and_ends_with_the_same_bits(
    python, tmp_path, undisturbed, step, rank
):
    run = Run(python, tmp_path, "train.checkpoint_every=5", restarts=3)
    run.wait_for_step(step)
    run.rank(rank).kill()
    assert "resum" in run.finish().text
    assert_same(run, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        f"{NO_DROPOUT} trainer._target_={EXTENSIONS}.Alternating",  # two optimizers
        f"{UNUSED} train.max_steps=3 train.find_unused_parameters=true",
        "train.accumulate=2 task.loss={_target_: torch.nn.CrossEntropyLoss, ignore_index: 3}",
        "train.accumulate=2 task.loss={_target_: torch.nn.CrossEntropyLoss, reduction: sum} optim.lr=0.001",
    ],
)
def test_other_steps_are_the_same_in_two_processes_too(python, tmp_path, settings):
    assert_close(*alone_and_in_two(python, tmp_path, settings))


@pytest.mark.slow
def test_a_rank_without_a_test_sample_changes_no_score(python, tmp_path):
    pytest.importorskip("torchmetrics")
    curve = (
        "{_target_: torchmetrics.AveragePrecision, task: multiclass, num_classes: 10}"  # keeps what it gets in lists
    )
    several = f"{{_target_: torchmetrics.MetricCollection, metrics: [{curve}]}}"
    metrics = f"task.metrics={{worst: {{_target_: {EXTENSIONS}.Worst}}, curve: {curve}, several: {several}}}"
    settings = f"{NO_DROPOUT} data.test_length=1 {metrics} train.max_steps=4"
    assert_close(*alone_and_in_two(python, tmp_path, settings))


@pytest.mark.slow
def test_batches_of_a_batch_sampler_are_shared(python, tmp_path):
    pairs = f"batch_sampler._target_={EXTENSIONS}.Pairs train.last_batch=keep train.batch_size=2"
    run = Run(python, tmp_path, pairs).finish()
    assert checkpoint(run.out)["step"] == 2 * 320 // 2 // 2


@pytest.mark.slow
def test_a_run_stopped_by_sigterm_goes_on_with_another_number_of_processes(python, tmp_path, single):
    run = Run(python, tmp_path, *stop(12)).finish("exitcode  : 75", "SIGTERM")
    assert checkpoint(run.out)["step"] in (12, 13)
    assert f"to continue: torchrun --nproc-per-node=2 {CONF.parent}/train.py train.resume={run.out}" in run.text
    again = Run(python, tmp_path, processes=1).finish()
    assert "resum" in again.text
    torch.testing.assert_close(checkpoint(again.out)["model"], checkpoint(single.out)["model"], rtol=0, atol=1e-6)


def write_table(folder):
    """Writes 96 training and 17 test images and their table. Returns the settings that read them."""
    rows = ["image,label,part"]
    for number in range(113):
        pixels = np.random.default_rng(number).integers(25, size=(10, 12, 3), dtype=np.uint8) + 25 * (number % 10)
        Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{number}.png")
        rows.append(f"{number}.png,{number % 10},{'train' if number < 96 else 'test'}")
    (folder / "table.csv").write_text("\n".join(rows))
    return f"data=image_table data.table={folder}/table.csv data.split=part data.image_size=8"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["image_table", "mix", "ram", "disk"])
def test_two_processes_read_a_table_a_mixture_and_a_cache_as_one_does_and_resume(python, tmp_path, kind):
    data = MIXTURE if kind == "mix" else write_table(tmp_path)
    if kind in ("ram", "disk"):
        data += f" data.cache={kind} data.cache_dir={tmp_path}/cache"
    whole = Run(python, tmp_path / "whole", data).finish()
    for file in tmp_path.glob("cache/*.disk"):
        with file.open("rb") as cache:
            (end,) = END.unpack(cache.read(END.size))
        stored = (end - END.size) / (RECORD.size + 9 * 10 * 3)
        # Both processes check the first two images. If they store one at the same instant, both write it.
        assert any(0 <= stored - count <= 2 for count in (96, 17)), "each image is stored by one of the processes"
    data = data.replace(f"{tmp_path}/cache", f"{tmp_path}/other")
    assert_close(Run(python, tmp_path / "single", data, processes=1).finish(), whole)
    Run(python, tmp_path / "stopped", data, *stop(8)).finish("SIGTERM")
    assert_same(Run(python, tmp_path / "stopped", data).finish(), whole)


@pytest.mark.slow
def test_processes_save_the_places_of_all_streams_and_go_on_there_with_other_workers(python, tmp_path):
    stream = f"data._target_={EXTENSIONS}.Stream {NO_DROPOUT} train.steps_per_epoch=12 loader.streams=4"
    whole = Run(python, tmp_path / "whole", stream).finish()
    Run(python, tmp_path / "stopped", stream, *stop(14), "loader.num_workers=1").finish("SIGTERM")
    assert_same(Run(python, tmp_path / "stopped", stream).finish(), whole)


@pytest.mark.slow
def test_processes_train_the_jobs_of_a_sweep_one_after_the_other_in_one_folder(python, tmp_path):
    sweep = ["-m", "seed=0,1", LEAVES, "hydra.run.dir=", "data.length=32", "train.epochs=1"]
    Run(python, tmp_path, *sweep, id="none").finish()
    (folder,) = (tmp_path / "multirun").iterdir()
    assert [checkpoint(folder / job)["config"]["seed"] for job in "01"] == [0, 1]


@pytest.mark.slow
def test_a_program_may_train_several_runs_one_after_the_other(python, tmp_path):
    (tmp_path / "program.py").write_text(
        "import pathlib, sys\nfrom tests.configs import train\n"
        "for seed in ('0', '1'):\n    train(pathlib.Path(sys.argv[1]) / seed, 'train.max_steps=2', f'seed={seed}')\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(CONF.parent)}
    command = ["-c", TORCHRUN, 0, "1", tmp_path / "program.py", tmp_path]
    with python.start(*command, env=environment, cwd=tmp_path) as program:
        text = "".join(program.communicate(LONG))
    assert program.returncode == 0 and all(checkpoint(tmp_path / seed)["step"] == 2 for seed in "01"), text


@pytest.mark.slow
@pytest.mark.parametrize(
    "thaws",
    [
        f"+callbacks.thaws._target_={EXTENSIONS}.Thaws",
        "train.freeze=first train.unfreeze_after=1 optim.layer_decay=0.5",
    ],
)
def test_processes_stop_together_and_average_the_gradients_of_weights_that_are_unfrozen_later(python, tmp_path, thaws):
    budget = f"+callbacks.budget._target_={EXTENSIONS}.Budget train.epochs=4 train.process_timeout=30"
    settings = (budget, NO_DROPOUT, thaws)
    runs = alone_and_in_two(python, tmp_path, *settings)
    assert_close(*runs)
    assert metrics(runs[1].out)[-1]["epoch"] == 2
    Run(python, tmp_path / "stopped", *settings, *stop(30)).finish("SIGTERM")
    assert_same(Run(python, tmp_path / "stopped", *settings).finish(), runs[1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "at", "named"),
    [
        ("lr", "on_epoch_end", "optimizers.0.0.lr"),
        ("weight_decay", "on_step", "optimizers.0.0.weight_decay"),
        ("trained", "on_start", "model.first.1.bias.requires_grad"),
        ("trained", "on_step", "requires_grad of weights in some of the processes"),
        ("trained", "on_epoch_end", "model.first.1.bias.requires_grad"),
    ],
)
def test_a_change_in_one_process_alone_ends_all_in_a_sentence_that_names_it(python, tmp_path, what, at, named):
    one = f"{NO_DROPOUT} +callbacks.one={{_target_: {EXTENSIONS}.OneRank, what: {what}, at: {at}}}"
    Run(python, tmp_path, one, "schedule=constant").finish(named)


@pytest.mark.slow
def test_a_number_of_a_module_that_differs_between_processes_is_warned_of_once(python, tmp_path):
    one = f"{TWO_PARTS} +callbacks.one={{_target_: {EXTENSIONS}.OneRank, what: dropout, at: on_step}}"
    run = Run(python, tmp_path, one).finish()
    assert (run.out / "train.log").read_text().count("model.second.0.p, [0.5, 0.7]") == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "remedy"),
    [
        (f"trainer._target_={EXTENSIONS}.Unaveraged", "a train_step of your own calls"),
        (f"+callbacks.noisy._target_={EXTENSIONS}.Noisy", "the global generators draw other numbers in each"),
        (f"trainer._target_={EXTENSIONS}.Alternating", ""),
    ],
)
def test_processes_that_train_different_weights_are_warned_of_once(python, tmp_path, setting, remedy):
    lines = (Run(python, tmp_path, TWO_PARTS, setting).finish().out / "train.log").read_text().splitlines()
    said = [line for line in lines if "the processes train different weights" in line]
    assert len(said) == bool(remedy) and all(remedy in line for line in said)


@pytest.mark.slow
def test_a_rank_that_hangs_ends_the_run_with_a_sentence(python, tmp_path):
    run = Run(python, tmp_path, "train.process_timeout=3", "train.checkpoint_every=10", "train.epochs=100")
    run.wait_for_step(10)
    run.rank(1).suspend()
    run.finish("train.process_timeout=3 seconds")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "named"),
    [("train.batch_size=15", "train.batch_size=15"), (UNUSED, "train.find_unused_parameters=true, or")],
)
def test_what_processes_cannot_share_ends_the_run(python, tmp_path, settings, named):
    Run(python, tmp_path, settings).finish("exitcode  : 1", named)


@pytest.mark.slow
def test_runs_without_a_name_do_not_take_over_an_earlier_one(python, tmp_path):
    for number in (1, 2):  # what torchrun --master-addr calls every run
        run = Run(python, tmp_path, "train.max_steps=2", "hydra.run.dir=", "train.resume=auto", id="none").finish()
        assert len(list((tmp_path / "outputs").iterdir())) == number and "resum" not in run.text


@pytest.mark.slow
@pytest.mark.parametrize(("number", "expected"), [(1, True), (0, True), (1, False), (0, False)])
def test_of_a_process_that_fails_the_others_name_it_without_a_traceback(python, tmp_path, number, expected):
    fails = f"+callbacks.fails={{_target_: {EXTENSIONS}.Fails, rank: {number}, expected: {expected}}}"
    text = Run(python, tmp_path, fails).finish("the images are gone").text
    assert f"error: process {number} failed: its output says why" in text, text
    assert (f"process {number} failed; if the error below is about a connection" in text) != expected, text
    assert text.count("run.call_on_step()") == (not expected), text
