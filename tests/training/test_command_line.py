import shlex
from pathlib import Path

import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser

from training.command_line import EarlierRun, check_folder, complete, resume_command
from training.config import ConfigError, changes


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


def test_a_run_that_is_started_in_the_folder_of_another_does_not_continue_that(earlier_run, monkeypatch):
    monkeypatch.chdir(earlier_run)
    assert complete(["seed=1"]) == ["seed=1"]
    assert "model=resnet18" in complete(["train.resume=."])


def test_what_an_override_changes_is_named_with_both_values():
    earlier = {"train": {"epochs": 2, "resume": None, "old": 1}, "seed": 0}
    now = {"train": {"epochs": 3, "resume": "run", "new": [1, 2]}, "seed": 0}
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
    assert resume_command(Path("/runs/1")) == "python train.py train.resume=/runs/1"
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert resume_command(Path("/runs/1")) == "torchrun --nproc-per-node=2 train.py train.resume=/runs/1"


@pytest.mark.parametrize("name", ["2026-11-21_10-00", "my run", "it's", "a=b,c", "[1]", "back\\slash"])
def test_the_command_that_resumes_works_whatever_the_folder_is_called(earlier_run, name):
    folder = earlier_run.rename(earlier_run.with_name(name))
    python, script, override = shlex.split(resume_command(folder))
    assert (python, script) == ("python", "train.py")
    arguments = complete([override])
    assert arguments[0] == "model=resnet18", "the run's own settings are found"
    parsed = OverridesParser.create().parse_overrides(arguments)
    values = [one.value() for one in parsed if one.key_or_group in ("train.resume", "hydra.run.dir")]
    assert [getattr(value, "text", value) for value in values] == [str(folder)] * 2


def test_only_the_process_that_writes_needs_a_folder(monkeypatch):
    for name, value in {"LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("RANK", "1")
    nowhere = "hydra.run.dir=/proc/nowhere"  # even root cannot make it
    check_folder(complete([nowhere]))
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ConfigError, match=r"^/proc cannot be written to: hydra\.run\.dir=FOLDER"):
        check_folder(complete([nowhere]))


def test_a_folder_inside_a_file_is_refused_with_the_key_that_chooses_another(tmp_path):
    (tmp_path / "file").touch()
    for key, sweep in (("hydra.run.dir", []), ("hydra.sweep.dir", ["-m"])):
        with pytest.raises(ConfigError, match=rf"/file cannot be written to: {key}=FOLDER chooses another folder"):
            check_folder([*sweep, f"{key}={tmp_path}/file/out"])


def test_if_a_runs_settings_are_lost_the_sentence_says_what_to_do(earlier_run):
    (earlier_run / ".hydra" / "overrides.yaml").unlink()
    with pytest.raises(ConfigError, match=r"settings cannot be read .*overrides.yaml: give them all, with hydra.run"):
        complete([f"train.resume={earlier_run}"])
