import errno
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from training import checkpoint
from training.checkpoint import CheckpointError, Checkpoints, find_checkpoint, load_others, read_checkpoint
from training.config import ConfigError
from training.processes import Processes
from training.stopping import StopSignals


def state(step, model=None):
    return {**dict.fromkeys(checkpoint.KEYS), "model": (model or nn.Linear(2, 3)).state_dict(), "step": step}


def checkpoints(folder, keep=2, interval=(None, None)):
    config = SimpleNamespace(keep_checkpoints=keep, checkpoint_interval=lambda: interval)
    return Checkpoints(folder, config, Processes(torch.device("cpu")), StopSignals())


def names(folder):
    return {path.name for path in (folder / "checkpoints").iterdir()}


def test_a_checkpoint_is_read_from_its_file_or_from_its_runs_folder(tmp_path):
    model = nn.Linear(2, 3)
    checkpoints(tmp_path).save(state(3, model))
    file = tmp_path / "checkpoints" / "step-0000003.pt"
    for resume in (file, file.parent, tmp_path):
        path, loaded = find_checkpoint(resume)
        assert path == file and loaded["step"] == 3
        assert torch.equal(loaded["model"]["weight"], model.weight)
    assert names(tmp_path) == {"last.pt", "step-0000003.pt"}


def test_checkpoints_of_an_earlier_run_that_was_not_continued_do_not_outlive_the_new_ones(tmp_path):
    earlier = checkpoints(tmp_path, keep=2)
    for step in (8, 9):
        earlier.save(state(step))
    earlier.mark_best(9)
    afresh = checkpoints(tmp_path, keep=1)  # train.resume=null in the same folder
    for step in (1, 2):
        afresh.save(state(step))
        assert names(tmp_path) == {"last.pt", f"step-000000{step}.pt"}
    assert checkpoints(tmp_path).find("auto")[1]["step"] == 2


def test_what_a_killed_process_left_of_a_checkpoint_is_removed(tmp_path):
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    for name in (".step-0000003.pt.5f0c", ".last.pt.123", ".nfs0001"):
        (folder / name).touch()
    checkpoints(tmp_path).save(state(4))
    assert names(tmp_path) == {"last.pt", "step-0000004.pt", ".nfs0001"}


def test_on_a_file_system_without_links_last_and_best_are_copies(tmp_path, monkeypatch):
    def symlink_to(path, target):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(Path, "symlink_to", symlink_to)
    ours = checkpoints(tmp_path, keep=1)
    ours.save(state(1))
    ours.mark_best(1)
    ours.save(state(2))
    assert names(tmp_path) == {"last.pt", "best.pt", "step-0000002.pt"}
    for name, step in (("last.pt", 2), ("best.pt", 1)):
        assert read_checkpoint(tmp_path / "checkpoints" / name)["step"] == step


@pytest.mark.parametrize(
    ("interval", "due"), [((3, None), [3, 6]), ((None, 0.0), [1, 2, 3, 4, 5, 6]), ((None, 3600), [])]
)
def test_checkpoints_are_saved_after_so_many_steps_or_so_many_seconds(tmp_path, interval, due):
    ours = checkpoints(tmp_path, keep=9, interval=interval)
    for step in range(1, 7):
        ours.after_step(step, lambda step=step: state(step))
    assert [path.name for path in sorted(tmp_path.glob("checkpoints/step*"))] == [f"step-{n:07}.pt" for n in due]


def flip_a_bit(content):
    place = content.index(torch.full((500,), 3.0).numpy().tobytes()) + 1000  # inside a weight
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


@pytest.mark.parametrize("damage", [lambda content: content[:-100], lambda content: b"", flip_a_bit])
def test_a_damaged_checkpoint_is_named_and_an_earlier_one_used_but_no_run_starts_afresh(tmp_path, caplog, damage):
    model = nn.Linear(500, 1)
    nn.init.constant_(model.weight, 3.0)
    for step in (1, 2):
        checkpoints(tmp_path).save(state(step, model))
    newest = tmp_path / "checkpoints" / "step-0000002.pt"
    newest.write_bytes(damage(newest.read_bytes()))
    path, loaded = find_checkpoint(tmp_path)
    assert loaded["step"] == 1 and path.name == "step-0000001.pt"
    assert "step-0000002.pt cannot be read as a checkpoint: it is damaged" in caplog.text

    path.write_bytes(b"PK\x03\x04 half a zip")
    with pytest.raises(ConfigError, match=r"none of the 2 checkpoints in .* can be read: train\.resume=null starts"):
        checkpoints(tmp_path).find("auto")


def test_a_full_disk_ends_in_a_sentence_and_the_last_good_checkpoint_is_whole(tmp_path, monkeypatch):
    ours = checkpoints(tmp_path)
    ours.save(state(1))

    def fill_the_disk(state, file):
        file.write(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint.torch, "save", fill_the_disk)
    sentence = r"step 2 could not be written to \S+2\.pt: No space left on device; \S+step-0000001\.pt is whole"
    with pytest.raises(CheckpointError, match=sentence):
        ours.save(state(2))
    assert names(tmp_path) == {"last.pt", "step-0000001.pt"}
    assert find_checkpoint(tmp_path)[1]["step"] == 1


def test_an_interrupted_run_goes_on_from_its_own_checkpoint_not_from_where_it_began(tmp_path):
    assert checkpoints(tmp_path / "first").find("auto") is None
    checkpoints(tmp_path / "first").save(state(4))
    assert checkpoints(tmp_path / "first").find(None) is None
    assert checkpoints(tmp_path / "second").find(str(tmp_path / "first"))[1]["step"] == 4
    checkpoints(tmp_path / "second").save(state(6))
    assert checkpoints(tmp_path / "second").find(str(tmp_path / "first"))[1]["step"] == 6


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ("weights.pt", "has no training state"),
        ("nowhere", r"nowhere does not exist"),
        (".", r"has no checkpoints/step"),
    ],
)
def test_what_is_no_checkpoint_is_refused_with_the_reason(tmp_path, given, sentence):
    torch.save(nn.Linear(1, 1).state_dict(), tmp_path / "weights.pt")
    with pytest.raises(ConfigError, match=sentence):
        find_checkpoint(tmp_path / given)


OTHER = r"does not fit this run's Linear: \S+ is .* in the checkpoint and .* in the model"


@pytest.mark.parametrize(
    ("saved", "sentence"),
    [
        ({"head": nn.Linear(2, 4)}, OTHER),
        ({"head": nn.Sequential(nn.Linear(2, 3))}, OTHER),
        ({}, "has no modules beside the network, and this run's trainer head: make the same"),
    ],
)
def test_modules_of_another_run_are_refused_with_the_first_difference(saved, sentence):
    weights = {name: module.state_dict() for name, module in saved.items()}
    with pytest.raises(ConfigError, match=rf"^x\.pt {sentence}"):
        load_others({"head": nn.Linear(2, 3)}, weights, Path("x.pt"))
