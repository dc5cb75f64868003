"""Checkpoints: which are written, kept, linked, found and read."""

import errno
import os
from collections import defaultdict
from contextlib import nullcontext
from functools import partial
from math import inf
from pathlib import Path
from threading import Lock
from types import SimpleNamespace

import pytest
import torch

from tests.configs import SMALL, checkpoint, composed, metrics, train
from tests.data.fakes import flip_a_byte
from tests.data.reading import refused
from tests.training.conftest import full_disk
from training.checkpoint import KEYS, Checkpoints, read_checkpoint
from training.config import checked
from training.processes import Processes
from training.resume import changes_since, check_same_run, choose_origin


def checkpoints(folder, keep=2, interval=(inf, inf)):
    config = SimpleNamespace(keep_checkpoints=keep, checkpoint_interval=lambda: interval)
    config.process_timeout = 60.0
    return Checkpoints(folder, config, Processes("cpu", config))


def state(step):
    rest = {key: {} for key in KEYS - {"model", "step"}}
    return {"model": {"weight": torch.full((500,), 3.0)}, "step": step, **rest}


def found(folder, resume="auto", init_from=None):
    """The step of the checkpoint that a run in the folder begins with, or the name of its weights' file, or None."""
    origin = choose_origin(folder, SimpleNamespace(resume=resume, init_from=init_from))
    return origin.state["step"] if origin.state else origin.weights and origin.weights.path.name


def names(folder):
    return {path.name for path in (folder / "checkpoints").iterdir()}


def refuse(*paths):
    raise OSError(errno.EOPNOTSUPP, "Operation not supported")


@pytest.mark.parametrize(("has_links", "kept"), [(True, (2, 4, 5)), (False, (4, 5))])
def test_the_newest_and_the_best_checkpoint_are_kept_and_linked_or_copied(tmp_path, monkeypatch, has_links, kept):
    if not has_links:
        monkeypatch.setattr(Path, "symlink_to", refuse)
    ours = checkpoints(tmp_path)
    for step in range(1, 6):
        ours.save(state(step))
        if step <= 2:
            ours.mark_best(step)
            ours.mark_best(step)
    assert names(tmp_path) == {"last.pt", "best.pt", *(f"step-000000{step}.pt" for step in kept)}
    assert checkpoint(tmp_path)["step"] == 5 and checkpoint(tmp_path, "best")["step"] == 2


@pytest.mark.parametrize(
    ("interval", "due"), [((3, inf), [3, 6]), ((inf, 0.0), [1, 2, 3, 4, 5, 6]), ((inf, 3600.0), []), ((inf, inf), [])]
)
def test_checkpoints_are_saved_after_so_many_steps_or_so_many_seconds(tmp_path, interval, due):
    ours = checkpoints(tmp_path, 9, interval)
    for step in range(1, 7):
        if ours.is_late() or ours.is_due(step):
            ours.save(state(step))
    assert [path.name for path in sorted(tmp_path.glob("checkpoints/step*"))] == [f"step-{n:07}.pt" for n in due]


def test_an_interval_is_a_number_of_steps_or_of_minutes():
    for given, interval in (("500", (500, inf)), ("1.5min", (inf, 90.0)), ("null", (inf, inf))):
        assert checked(composed(*SMALL, f"train.checkpoint_every={given}")).train.checkpoint_interval() == interval


def test_what_a_killed_process_left_of_its_files_is_removed(tmp_path):
    ours = checkpoints(tmp_path)
    ours.save(state(1))
    for name in (".step-0000002.pt.4711", ".last.pt.4711"):
        (tmp_path / "checkpoints" / name).write_text("half of a checkpoint")
    ours.save(state(2))
    assert names(tmp_path) == {"last.pt", "step-0000001.pt", "step-0000002.pt"}


def test_checkpoints_of_a_run_that_was_not_continued_are_removed_and_files_that_look_like_them_kept(tmp_path):
    earlier = checkpoints(tmp_path)
    for step in (8, 9):
        earlier.save(state(step))
    earlier.mark_best(9)
    yours = {"step-0000008 (copy).pt", "step-99.pt", "step-00000012.pt", "step-.pt", "my step-0000001.pt"}
    for name in yours:
        (tmp_path / "checkpoints" / name).write_text("mine")
    afresh = checkpoints(tmp_path, keep=1)  # train.resume=null in the same folder
    for step in (1, 2):
        afresh.save(state(step))
        assert names(tmp_path) == {"last.pt", f"step-000000{step}.pt", *yours}
    assert found(tmp_path) == 2


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (defaultdict(list, a=[1]), "callbacks.mine: <class 'collections.defaultdict'>"),
        ({"inside": {"path": Path("x"), "number": 1}}, "callbacks.mine.inside.path: <class 'pathlib"),
        ([Path("x")], "callbacks.mine: <class 'list'>"),
        ({"lock": Lock(), "steps": 1}, "callbacks.mine.lock: <class '_thread.lock'>"),
    ],
)
def test_what_a_checkpoint_may_not_have_is_named_by_its_place_and_its_type(tmp_path, value, named):
    with refused(f"no checkpoint can have {named}"):
        checkpoints(tmp_path).save(state(1) | {"callbacks": {"mine": value, "other": {"a": 1}}})


@pytest.mark.parametrize("damage", [partial(os.truncate, length=1000), partial(os.truncate, length=0), flip_a_byte])
def test_a_damaged_checkpoint_is_named_and_an_earlier_one_used_but_no_run_starts_afresh(tmp_path, caplog, damage):
    for step in (1, 2):
        checkpoints(tmp_path).save(state(step))
    folder = tmp_path / "checkpoints"
    newest = folder / "step-0000002.pt"
    damage(newest)
    assert found(tmp_path) == 1 and "step-0000002.pt" in caplog.text
    (folder / "step-0000001.pt").write_bytes(b"PK\x03\x04 half a zip")
    with refused(r"can be read.*train\.resume=null"):
        found(tmp_path)


def test_a_failed_write_leaves_the_last_good_checkpoint_whole(tmp_path):
    ours = checkpoints(tmp_path)
    ours.save(state(1))
    with refused("no checkpoint can have more: <class 'list'>"):  # half of the file is written
        ours.save(state(2) | {"more": [torch.zeros(9), lambda: None]})
    assert names(tmp_path) == {"last.pt", "step-0000001.pt"} and found(tmp_path) == 1


@pytest.mark.parametrize(
    ("resume", "init_from", "alone", "with_own"),
    [
        ("auto", None, None, 6),
        (None, None, None, None),
        ("earlier", None, 4, 6),
        ("earlier/checkpoints/step-0000003.pt", None, 3, 6),
        ("earlier", "earlier", 4, 6),
        ("auto", "earlier", "step-0000004.pt", 6),
        (None, "earlier", "step-0000004.pt", "step-0000004.pt"),
        ("earlier/checkpoints", None, 4, 6),
        (None, "earlier/checkpoints", "step-0000004.pt", "step-0000004.pt"),
    ],
)
def test_a_run_begins_with_the_first_that_there_is(tmp_path, resume, init_from, alone, with_own):
    """Its own checkpoint, the one of train.resume, the weights of train.init_from, or new weights."""
    earlier = checkpoints(tmp_path / "earlier")
    for step in (3, 4):
        earlier.save(state(step))
    choices = [choice and choice.replace("earlier", f"{tmp_path}/earlier") for choice in (resume, init_from)]
    assert found(tmp_path / "run", *choices) == alone
    checkpoints(tmp_path / "run").save(state(6))
    assert found(tmp_path / "run", *choices) == with_own


def test_the_average_of_the_weights_of_an_earlier_version_is_read(tmp_path):
    ema = {"n_averaged": torch.tensor(3), "module.weight": torch.ones(1)}
    rest = {name: value for name, value in state(1).items() if name != "ema_model"}
    checkpoints(tmp_path).save(rest | {"callbacks": {"ema": ema}})
    assert choose_origin(tmp_path, SimpleNamespace(resume="auto")).state["ema_model"] == {"weight": torch.ones(1)}


@pytest.mark.parametrize(
    ("left", "words"), [({"data"}, "of a version that is not"), ({"config", "data"}, "not a checkpoint of a run")]
)
def test_what_is_no_checkpoint_or_too_old_is_said(tmp_path, left, words):
    torch.save({name: value for name, value in state(1).items() if name not in left}, tmp_path / "old.pt")
    with refused(f"old.pt is {words}.*train.init_from="):
        read_checkpoint(tmp_path / "old.pt")


def test_a_checkpoint_that_may_not_be_read_is_not_called_damaged(tmp_path, monkeypatch):
    torch.save(state(1), tmp_path / "theirs.pt")

    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(torch, "load", refuse)
    with refused(r"theirs\.pt cannot be read: Permission denied$"):
        read_checkpoint(tmp_path / "theirs.pt")


def test_weights_alone_in_place_of_a_checkpoint_are_not_called_damaged(tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"any")
    with refused(rf"is not a checkpoint of a run: for weights alone use train.init_from={file}$"):
        read_checkpoint(file)


@pytest.mark.parametrize("name", ["last.pt", "best.pt"])
def test_a_file_of_another_program_is_not_overwritten(tmp_path, name):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / name).write_text("theirs")
    with refused(f"{name} is not of this run.*hydra.run.dir"):
        checkpoints(tmp_path)


def test_a_touched_checkpoint_is_still_the_runs_and_one_with_other_weights_is_not(tmp_path):
    ours = checkpoints(tmp_path)
    ours.save(state(1))
    file = tmp_path / "checkpoints" / "last.pt"
    os.utime(file, (0, 0))
    ours.save(state(2))
    for content in (state(2) | {"model": {"weight": torch.ones(500)}}, None):
        file.write_bytes(b"theirs") if content is None else torch.save(content, file)
        with refused("something else has written into"):
            ours.save(state(3))


def changed_settings(theirs, ours):
    data = {"labels": 0, "first": [], "order": None}
    return changes_since({"config": theirs, "loader": {"samples": 0}, "data": data}, ours, {}, data)


@pytest.mark.parametrize(
    ("theirs", "ours", "samples", "is_named"),
    [(1, 2, 8, True), (1, 1, 8, False), (None, 1, 8, False), (1, 2, 0, False)],
)
def test_a_resume_within_an_epoch_names_a_sampler_that_gives_other_indices(theirs, ours, samples, is_named):
    data = {"labels": 0, "first": []}
    state = {"config": {}, "loader": {"samples": samples}, "data": {**data, "order": theirs}}
    assert ("order" in changes_since(state, {}, {}, {**data, "order": ours})) == is_named


SAME, LATER, OTHER = "same", "an unfinished one goes on", "another run"


@pytest.mark.parametrize(
    ("key", "of_job", "of_run"),
    [
        ("train.keep_checkpoints", SAME, SAME),
        ("train.epochs", OTHER, SAME),
        ("loader.name", LATER, OTHER),
        ("device", LATER, OTHER),
        ("callbacks.ema.decay", OTHER, OTHER),
        ("optim.lr", OTHER, OTHER),
    ],
)
def test_a_run_is_this_one_if_nothing_differs_that_it_reports(tmp_path, key, of_job, of_run):
    changed = changed_settings({key: 1, "train.resume": "x"}, {key: 2})
    for is_job, expected in ((True, of_job), (False, of_run)):
        for has_finished in (True, False):
            is_refused = (expected == OTHER and (is_job or has_finished)) or (expected == LATER and has_finished)
            with refused(f"{key} is 2, was 1") if is_refused else nullcontext():
                check_same_run(tmp_path, changed, is_job, has_finished)


NEW = {"_target_": "extras.parts.parts.Parts", "share": 2}


@pytest.mark.parametrize(
    ("section", "value", "count"),
    [
        ("callbacks", NEW, 0),
        ("callbacks", NEW | {"_target_": "training.callbacks.new.New"}, 0),
        ("callbacks", NEW | {"_target_": "mine.Callback"}, 2),
        ("train", 3, 0),
        ("loader", [1], 0),
        ("model", 3, 1),
    ],
)
def test_a_run_stays_this_one_when_a_setting_or_a_callback_comes_with_the_repository_or_goes(section, value, count):
    without = {section: {"best": {"keep": 1}}}
    with_it = {section: {**without[section], "new": value}}
    for theirs, ours in ((with_it, without), (without, with_it)):
        assert len(changed_settings(theirs, ours)) == count
    assert changed_settings(without, {section: {"best": None}}), "a user has left it out"


class Code:
    def __reduce__(self):
        return eval, ("__import__('os').environ.__setitem__('RAN', '1')",)


def test_code_in_what_is_no_checkpoint_is_not_run(tmp_path, monkeypatch, error):
    monkeypatch.delenv("RAN", raising=False)
    torch.save(Code(), tmp_path / "weights.pt")
    with error(r"weights\.pt"):
        train(tmp_path / "run", f"train.resume={tmp_path}/weights.pt")
    assert "RAN" not in os.environ


def test_weights_are_evaluated_with_their_running_mean_and_both_are_saved(tmp_path):
    train(tmp_path / "mean", "callbacks.ema.decay=0.9")
    train(tmp_path / "plain")
    mean, plain = (checkpoint(tmp_path / name) for name in ("mean", "plain"))
    assert torch.equal(mean["model"]["2.weight"], plain["model"]["2.weight"]), "training is the same"
    assert not torch.equal(mean["ema_model"]["2.weight"], mean["model"]["2.weight"])
    scores = [[line.get("test_loss") for line in metrics(tmp_path / name)] for name in ("mean", "plain")]
    assert scores[0] != scores[1], "evaluation is not"


def test_a_full_disk_at_a_save_is_a_sentence_and_the_checkpoint_before_stays_the_newest(tmp_path, error):
    ours = checkpoints(tmp_path)
    ours.save(state(1))
    large = state(2) | {"more": torch.zeros(1_000_000)}
    with full_disk(2_000_000), error(str(tmp_path), r"needs 4\.0 MB", "free", "step-0000002", "resume"):
        ours.save(large)
    assert names(tmp_path) == {"last.pt", "step-0000001.pt"} and found(tmp_path) == 1


def test_a_checkpoint_into_which_something_else_has_written_through_a_link_is_named(tmp_path, error):
    ours = checkpoints(tmp_path)
    ours.save(state(1))
    ours.mark_best(1)
    torch.save({"weight": torch.ones(1)}, tmp_path / "checkpoints" / "best.pt")
    with error("has written into", "step-0000001.pt"):
        ours.save(state(2))
