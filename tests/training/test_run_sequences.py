"""Nets: a run that is stopped, killed, changed, moved and looked at ends with the bits of an undisturbed run.

A run is a sequence of starts. Each ends by a signal, an error or a full disk; settings change between them, callbacks
look at batches, and evaluate.py looks at the checkpoints.
"""

import importlib
import os
import resource
import signal
import sys
import traceback
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data.errors import DataError
from loaders import MachineFull
from tests.configs import EXTENSIONS, STOP, checkpoint, differences, metrics, train
from tests.forks import ROOT
from tests.training.extensions import Stop
from training.stopping import Stopped

BASE = (STOP, "data.length=96", "data.test_length=16", "train.log_interval=2", "train.clip_norm=1")
LOOKS = f"+callbacks.looks._target_={EXTENSIONS}.Looks"
CHANGES = {
    "nothing": [],
    "more checkpoints": ["train.checkpoint_every=1"],
    "one is kept": ["train.keep_checkpoints=1", "train.checkpoint_every=2"],
    "a worker": ["loader=workers", "loader.num_workers=1"],
    "the device keeps the data": ["loader=resident"],
    "a callback that looks at batches": [LOOKS],
}


@dataclass
class Start:
    """A start of the run: how it ends, after how many steps, with which settings, and in which folder it goes on.

    how: "KILL A FILE" is a SIGKILL before change number `at` of the run's files, such as a rename.
    """

    how: str
    at: int
    change: str
    moves: bool
    evaluates: bool = False  # afterwards

    def __repr__(self):
        where = "another folder" if self.moves else "its folder"
        return f"Start({self.how} at {self.at}, {self.change}, in {where}{', evaluate' * self.evaluates})"


@cache
def undisturbed(root):
    train(root / "undisturbed", *BASE)
    return checkpoint(root / "undisturbed")


@contextmanager
def full_disk(is_full):
    """In the block no file may become larger than a checkpoint's first part."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if is_full:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4000, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def kill_at_change(folder, number):
    """Kills this process before change `number` of the files in the folder."""

    def look(event, arguments):
        nonlocal number
        is_change = event in ("os.rename", "os.remove", "os.symlink", "os.link", "os.mkdir")
        is_change |= event == "open" and bool(set(str(arguments[1])) & set("wax"))
        if is_change and any(str(argument).startswith(str(folder)) for argument in arguments):
            number -= 1
            if number == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(look)


def train_and_be_killed(start, folder, *settings):
    """Trains in a forked child. If it is not killed, it finishes the run."""
    child = os.fork()
    if child:
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert status in (0, -signal.SIGKILL), f"the killed run has failed, see its traceback: {start}"
        return
    try:
        if start.how == "KILL A FILE":
            Stop.at = 0
            kill_at_change(folder, start.at)
        train(folder, *settings)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def check_evaluation(folder):
    """Evaluates the best checkpoint, with the scores that the run had then, if it evaluated it."""
    if not (newest(folder) and (ROOT / "extras" / "finished").exists()):
        return
    result = importlib.import_module("extras.finished.evaluate").main([str(folder)])
    for line in metrics(folder) if (folder / "metrics.jsonl").exists() else []:  # it may be killed before
        if line["step"] == result["step"] and "test_loss" in line:
            assert abs(line["test_loss"] - result["loss"]) < 1e-5


def newest(folder):
    """The step of the newest checkpoint, 0 if there is none."""
    return max((int(path.stem[5:]) for path in folder.glob("checkpoints/step-*.pt")), default=0)


def check_sequence(root, starts):
    wanted = undisturbed(root.parent)
    folder = root / "0"
    earlier = []
    lags = False  # whether last.pt may be older than the newest checkpoint, as a kill came between the two
    for number, start in enumerate(starts):
        saved = newest(folder)
        if start.moves and saved:
            earlier = [f"train.resume={folder}"]
            folder = root / str(number + 1)
            lags = False
        Stop.at, Stop.how = (0, "") if start.how == "full disk" else (start.at, start.how)
        try:
            with full_disk(start.how == "full disk"):
                if "KILL" in start.how:
                    train_and_be_killed(start, folder, *BASE, *CHANGES[start.change], *earlier)
                else:
                    train(folder, *BASE, *CHANGES[start.change], *earlier)
        except Stopped:
            assert newest(folder) == start.at, "a signal loses no step"
        except ZeroDivisionError:  # like a kill, it saves nothing
            pass
        except DataError as error:
            assert "could not be written" in str(error) and newest(folder) in (0, saved)
        except MachineFull:  # a worker needs room, too
            assert start.how == "full disk"
        Stop.at = 0
        Stop.how = ""
        lags = start.how == "KILL A FILE" or (lags and newest(folder) == saved)
        has_last = (folder / "checkpoints" / "last.pt").is_symlink()
        step = checkpoint(folder)["step"] if has_last else 0
        assert step == newest(folder) or (step < newest(folder) and lags)
        if start.evaluates:
            check_evaluation(folder)
    train(folder, *BASE, *earlier)
    ours = checkpoint(folder)
    for name in ("model", "optimizers", "loader", "step", "means"):
        assert differences(ours[name], wanted[name], name) == []


HOW = st.sampled_from(["SIGTERM", "SIGINT", "SIGKILL", "error", "evaluation"])
ENDS = st.tuples(HOW, st.integers(1, 6)) | st.tuples(st.just("KILL A FILE"), st.integers(1, 30))
FULL = st.just(("full disk", 0))


def start_that(ends, change, moves, evaluates):
    how, at = ends
    return Start(how, at, change, moves, evaluates)


STARTS = st.builds(start_that, ENDS | FULL, st.sampled_from(list(CHANGES)), st.booleans(), st.booleans())


@pytest.mark.parametrize(
    "starts",
    [
        [Start("SIGTERM", 2, "a callback that looks at batches", False), Start("error", 5, "a worker", True)],
        [Start("full disk", 1, "more checkpoints", False), Start("evaluation", 3, "one is kept", False)],
        [Start("KILL A FILE", 9, "more checkpoints", False, True), Start("SIGKILL", 4, "a worker", True, True)],
    ],
    ids=str,
)
def test_a_sequence_of_starts_ends_with_the_bits_of_the_undisturbed_run(tmp_path_factory, starts):
    check_sequence(tmp_path_factory.mktemp("sequence"), starts)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(max_examples=100, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(starts=st.lists(STARTS, min_size=1, max_size=4))
def test_any_sequence_of_starts_ends_with_the_bits_of_the_undisturbed_run(tmp_path_factory, starts):
    check_sequence(tmp_path_factory.mktemp("sequence"), starts)
