from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from training.command_line import EarlierRun, changes, complete, resume_command


@pytest.fixture
def earlier_run(tmp_path):
    """The folder of a run that was started with some overrides."""
    folder = tmp_path / "a run"
    (folder / ".hydra").mkdir(parents=True)
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / "best.pt").touch()
    overrides = ["model=resnet18", "model.width=8", "train.epochs=3", "+experiment=x", "train.resume=elsewhere"]
    (folder / ".hydra" / "overrides.yaml").write_text(yaml.safe_dump(overrides))
    (folder / ".hydra" / "config.yaml").write_text("{}")
    return folder


def test_a_run_is_continued_in_its_folder_with_its_settings_and_those_given_on_top(earlier_run):
    resume = f"train.resume='{earlier_run}'"
    kept = ["model=resnet18", "model.width=8", "+experiment=x"]
    assert complete(["train.epochs=5", resume]) == [*kept, "train.epochs=5", resume, f"hydra.run.dir='{earlier_run}'"]


def test_another_choice_of_a_group_replaces_the_groups_settings_too(earlier_run):
    arguments = complete(["model=linear", f"train.resume={earlier_run}", "hydra.run.dir=new"])
    assert arguments[:-2] == ["train.epochs=3", "+experiment=x", "model=linear"]


@pytest.mark.parametrize("start", ["a checkpoint file", "a sweep"])
def test_a_run_that_only_starts_from_another_gets_a_folder_of_its_own(earlier_run, start):
    best = earlier_run / "checkpoints" / "best.pt"
    given = [f"train.resume={best}"] if start == "a checkpoint file" else [f"train.resume={earlier_run}", "-m"]
    assert complete(given) == ["model=resnet18", "model.width=8", "train.epochs=3", "+experiment=x", *given]


@pytest.mark.parametrize("resume", [[], ["train.resume=auto"], ["train.resume=null"], ["train.resume=/no/such/run"]])
def test_without_an_earlier_run_nothing_is_added(resume):
    assert complete(resume) == resume


def test_what_an_override_changes_is_named_with_both_values():
    earlier = OmegaConf.create({"train": {"epochs": 2, "resume": None, "old": 1}, "seed": 0})
    now = OmegaConf.create({"train": {"epochs": 3, "resume": "run", "new": [1, 2]}, "seed": 0})
    assert changes(now, earlier) == [
        "train.epochs is 3, was 2",
        "train.old is left out, was 1",
        "train.new is [1, 2], was left out",
    ]


def test_a_runs_settings_are_restored_unless_a_checkpoint_was_saved_with_the_new_ones(earlier_run):
    run, settings = EarlierRun(earlier_run), earlier_run / ".hydra" / "overrides.yaml"
    before = settings.read_bytes()
    settings.write_text("- model=linear")
    run.restore()
    assert settings.read_bytes() == before
    settings.write_text("- model=linear")
    (earlier_run / "checkpoints" / "last.pt").symlink_to("step-0000001.pt")
    run.restore()
    assert settings.read_text() == "- model=linear"


def test_the_command_that_resumes_can_be_pasted_and_starts_as_many_processes(monkeypatch):
    assert resume_command(Path("/runs/a run")) == "python train.py 'train.resume=/runs/a run'"
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert resume_command(Path("/runs/1")) == "torchrun --nproc-per-node=2 train.py train.resume=/runs/1"
