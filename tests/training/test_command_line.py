import re
import shlex
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig

from tests.configs import CONF, composed
from training.checkpoint import KEYS
from training.command_line import RESUMED, check_overrides, complete, resume_command
from training.config import ConfigError, changes, checked
from training.trust import check_config

FLAG = f"--config-name={RESUMED}"


@pytest.fixture
def earlier_run(tmp_path) -> Path:
    """The folder of a run of other settings than the defaults."""
    mine = "+callbacks.mine._target_=training.callbacks.best.Best"
    settings = composed("model=resnet18", "train.epochs=3", "optim.lr=0.5", mine)
    return save(tmp_path / "a run", asdict(checked(settings)))


def save(run: Path, settings: dict) -> Path:
    (run / "checkpoints").mkdir(parents=True)
    state = {**dict.fromkeys(KEYS), "config": settings, "step": 1}
    torch.save(state, run / "checkpoints" / "step-0000001.pt")
    return run


def resumed(*arguments: str) -> DictConfig:
    """The config that Hydra makes of a command line that resumes a run."""
    completed = complete(list(arguments))
    assert FLAG in completed
    check_overrides(completed, CONF)
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose(RESUMED, [text for text in completed if not text.startswith("-")])


def test_a_run_is_continued_in_its_folder_with_its_settings_and_those_given_on_top(earlier_run):
    resume = f"train.resume='{earlier_run}'"
    assert complete(["train.epochs=5", resume]) == [FLAG, "train.epochs=5", resume, f"hydra.run.dir='{earlier_run}'"]
    config = resumed("train.epochs=5", resume, "model.name=resnet50")
    assert (config.train.epochs, config.optim.lr, config.train.resume) == (5, 0.5, str(earlier_run))
    assert config.model._target_ == "models.resnet.resnet" and config.model.name == "resnet50"
    assert "mine" in config.callbacks


def test_another_choice_of_a_group_replaces_its_section(earlier_run):
    config = resumed("model=linear", f"train.resume='{earlier_run}'", "hydra.run.dir=new")
    assert dict(config.model) == {"_target_": "models.linear.linear", "size": 14}
    assert "hydra.run.dir=new" in complete([f"train.resume='{earlier_run}'", "hydra.run.dir=new"])[-2:]
    if (CONF / "logger" / "tensorboard.yaml").exists():  # a fork may have deleted it
        callbacks = resumed("logger=tensorboard", f"train.resume='{earlier_run}'").callbacks
        assert "tensorboard" in callbacks and "mine" not in callbacks


def test_keys_that_a_checkpoint_lacks_come_from_conf(tmp_path):
    settings = asdict(checked(composed()))
    del settings["train"]["accumulate"], settings["schedule"]
    config = resumed(f"train.resume={save(tmp_path, settings)}", "train.accumulate=2")
    assert config.train.accumulate == 2 and config.schedule._target_ == "training.schedule.cosine"


@pytest.mark.parametrize("start", ["a checkpoint file", "a sweep"])
def test_a_run_that_only_starts_from_another_gets_a_folder_of_its_own(earlier_run, start):
    file = earlier_run / "checkpoints" / "step-0000001.pt"
    given = [f"train.resume='{file}'"] if start == "a checkpoint file" else [f"train.resume='{earlier_run}'", "-m"]
    assert complete(given) == [FLAG, *given]


@pytest.mark.parametrize("resume", [[], ["train.resume=auto"], ["train.resume=null"], ["-m", "train.resume=a,b"]])
def test_without_an_earlier_run_nothing_is_added(earlier_run, monkeypatch, resume):
    monkeypatch.chdir(earlier_run)
    assert complete(resume) == resume


def test_a_run_that_does_not_exist_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"^\S+nowhere does not exist"):
        complete([f"train.resume={tmp_path}/nowhere"])


@pytest.mark.parametrize("override", ["~model.width", "experiment=fashion_fast", "debug=fast"])
def test_with_a_run_to_continue_only_settings_themselves_are_taken(earlier_run, override):
    with pytest.raises(ConfigError, match=rf"^{re.escape(override)}: with train\.resume, give the settings"):
        complete([f"train.resume='{earlier_run}'", override])


def test_a_strangers_run_is_refused_unless_train_trust_or_a_value_of_ones_own_is_given(tmp_path):
    settings = {"data": {"_target_": "fractions.Fraction"}, "train": {"trust": ["fractions"]}}
    settings |= {"defaults": ["evil"], "hydra": {"run": {"dir": "/home/you"}}}  # are ignored
    resume = f"train.resume={save(tmp_path, settings)}"
    with pytest.raises(ConfigError, match=r"add train\.trust=\[fractions\]$"):
        complete([resume])
    assert resumed(resume, "data._target_=data.cifar.CIFAR10").train.trust == []
    hidden = save(tmp_path / "hidden", {"data": {"root.x": {"_target_": "os.system"}}})
    with pytest.raises(ConfigError, match=r"has the key 'root\.x', with a dot"):
        complete([f"train.resume={hidden}", "data.root=/data"])
    config = resumed(resume, "train.trust=[fractions]")
    assert config.data._target_ == "fractions.Fraction" and config.keys() == composed().keys()
    (tmp_path / "train.log").symlink_to(Path(__file__))
    with pytest.raises(ConfigError, match=r"is a link to .*add train\.trust=\[train\.log\]"):
        complete([resume, "train.trust=[data]"])


def test_what_an_override_changes_is_named_with_both_values():
    earlier = {"train": {"epochs": 2, "resume": None, "old": 1}, "seed": 0, "timing": {"timeline": 0}}
    now = {"train": {"epochs": 3, "resume": "run", "new": [1, 2]}, "seed": 0, "timing": {"timeline": 16}}
    assert changes(now, earlier) == [
        "train.epochs is 3, was 2",
        "train.old is left out, was 1",
        "train.new is [1, 2], was left out",
    ]


def test_the_command_that_resumes_can_be_pasted_and_starts_as_many_processes(monkeypatch):
    assert resume_command(Path("/runs/1"), {}) == "python train.py train.resume=/runs/1"
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert resume_command(Path("/runs/1"), {}) == "torchrun --nproc-per-node=2 train.py train.resume=/runs/1"


@pytest.mark.parametrize("name", ["2026-11-21_10-00", "my run", "it's", "a=b,c", "[1]", "back\\slash"])
def test_the_command_that_resumes_works_whatever_the_folder_is_called(earlier_run, name):
    folder = earlier_run.rename(earlier_run.with_name(name))
    config = {"model": {"_target_": "subprocess.run"}, "task": {"loss": {"_target_": "os.path.join", "_args_": [1]}}}
    trusted = ["subprocess", "os.path", "task.loss._args_", "task.loss._target_"]
    python, script, *overrides = shlex.split(resume_command(folder, config))
    assert (python, script) == ("python", "train.py")
    arguments = [text for text in complete(overrides) if text != FLAG]
    values = [one.value() for one in OverridesParser.create().parse_overrides(arguments)]
    assert [getattr(value, "text", value) for value in values] == [str(folder), trusted, str(folder)]
    check_config(config, "", trusted)
