"""train.py as a program: what it refuses, how it ends, and with which settings it goes on with an earlier run."""

import json
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.configs import CONF, DOORS, checkpoint, composed, metrics

ROOT = CONF.parent
STOP = f"+callbacks.stop._target_={DOORS}.Stop"


# What is refused


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["trian.epochs=1"], "trian"),
        (["laoder=torch"], "laoder"),
        (["loader=prefech"], "prefech"),
        (["experiment=fashion_fst"], "fashion_fst"),
        (["debug=fst"], "fst"),
        (["callbacks=mine"], "mine"),
        (["train.epochs=two"], r"train\.epochs(.|\n)*two|two(.|\n)*train\.epochs"),
        (["train.precision=fp8"], "fp8"),
        (["train.epochs=["], r"train\.epochs=\["),
        (["epochs"], "epochs"),
        ([""], "''|empty|override"),
        (["~callbacks.mine"], "mine"),
        (["data.rot=x"], "rot"),
        (["data=image_folder", "data.root=/no/such/folder"], "/no/such/folder"),
        (["train.resume=nowhere"], "nowhere"),
        (["-m", "train.resume=one,two"], r"train\.resume"),
        (["device=gpu"], "gpu"),
    ],
    ids=str,
)
def test_a_wrong_setting_exits_with_1_without_a_traceback_and_is_named(command, tmp_path, arguments, named):
    done = command(*arguments, "callbacks/standard=[best]", "hydra.run.dir=out")
    assert done.code == 1 and "Traceback" not in done.shown, done.shown
    assert re.search(named, done.shown), done.shown
    assert len(done.shown) < 2500, "short enough to be read"
    assert not (tmp_path / "outputs").exists() and not (tmp_path / "out" / "metrics.jsonl").exists()


def test_an_error_in_the_code_of_a_fork_has_a_traceback(command, fast):
    done = command(*fast, STOP, "+callbacks.stop.at=2", "+callbacks.stop.how=mine", "hydra.run.dir=out")
    assert done.code == 1 and "ZeroDivisionError: mine" in done.shown and "door_callbacks.py" in done.shown


# How it ends


def test_a_run_writes_its_files_and_the_log_ends_with_the_verdict(python, fast, tmp_path):
    """The one that is a program."""
    done = python.run(ROOT / "train.py", *fast, "hydra.run.dir=out", cwd=tmp_path, timeout=100)
    assert done.returncode == 0, done.stderr
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"train.log", "metrics.jsonl", "summary.json", "checkpoints", ".hydra"} <= names
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["verdict"] in done.stdout


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 75), ("SIGINT", 130)])
def test_after_a_signal_the_command_that_is_shown_goes_on_whatever_the_folder_is_called(
    command, fast, tmp_path, name, code
):
    folder = tmp_path / "it's a=b, [1] é $HOME `ls`"
    quoted = str(folder).replace("'", r"\'")
    stop = [STOP, "+callbacks.stop.at=2", f"+callbacks.stop.how={name}"]
    done = command(*fast, *stop, "optim.lr=0.125", f"hydra.run.dir='{quoted}'")
    assert done.code == code, done.shown
    assert checkpoint(folder)["step"] == 2 and name in done.output
    (arguments,) = re.findall(r"python train\.py (.*)", done.output)
    pasted = subprocess.run(["sh", "-c", f"printf '%s\\0' {arguments}"], capture_output=True, text=True, check=True)
    again = command(*pasted.stdout.split("\0")[:-1], "train.epochs=2")
    assert again.code == 0, again.shown
    assert checkpoint(folder)["step"] == 4 and checkpoint(folder)["config"]["optim"]["lr"] == 0.125
    assert [line["step"] for line in metrics(folder) if "lr" in line] == [1, 2, 3, 4]


def test_when_a_job_of_a_sweep_fails_the_others_go_on(command, fast, tmp_path):
    done = command("-m", *fast, "train.max_steps=1", "train.batch_size=32,1000,16", "hydra.sweep.dir=sweep")
    assert done.code == 1 and "Traceback" not in done.shown and "batch_size=1000" in done.output
    assert {path.parent.name for path in (tmp_path / "sweep").glob("*/summary.json")} == {"0", "2"}


def test_a_signal_ends_a_sweep_and_not_only_its_job(command, fast, tmp_path):
    stop = [STOP, "+callbacks.stop.at=1", "+callbacks.stop.how=SIGTERM"]
    done = command("-m", *fast, *stop, "seed=0,1", "hydra.sweep.dir=sweep")
    assert done.code == 75 and not (tmp_path / "sweep" / "1" / "metrics.jsonl").exists()


# Going on with an earlier run


@pytest.fixture
def earlier(command, fast, tmp_path) -> Path:
    """The folder of a run of one epoch, with settings that are not the defaults."""
    assert command(*fast, "model.size=7", "optim.lr=0.125", "hydra.run.dir=earlier").code == 0
    return tmp_path / "earlier"


def settings_of(folder: Path) -> tuple:
    config = checkpoint(folder)["config"]
    return config["model"]["size"], config["optim"]["lr"], config["data"]["length"], config["loader"]["name"]


@pytest.mark.parametrize("name", ["", "checkpoints/step-0000002.pt", "checkpoints/last.pt"])
def test_a_run_is_continued_by_its_folder_or_a_file_with_its_settings(command, tmp_path, earlier, name):
    done = command(f"train.resume={earlier / name}", "train.epochs=2", "hydra.run.dir=new")
    assert done.code == 0, done.shown
    assert settings_of(tmp_path / "new") == (7, 0.125, 64, "torch")
    assert checkpoint(tmp_path / "new")["step"] == 4
    assert re.search(r"train\.epochs.* 2\b.* 1\b", done.output), "the changed setting is logged"


def test_each_job_of_a_sweep_goes_on_with_the_settings_of_the_run(command, tmp_path, earlier):
    given = [f"train.resume={earlier}", "train.epochs=2", "optim.weight_decay=0,0.1", "hydra.sweep.dir=sweep"]
    done = command("-m", *given)
    assert done.code == 0, done.shown
    for job in ("0", "1"):
        assert settings_of(tmp_path / "sweep" / job) == (7, 0.125, 64, "torch")
        assert checkpoint(tmp_path / "sweep" / job)["step"] == 4


def test_a_run_without_its_overrides_is_refused(command, fast, tmp_path):
    """Else it would go on with the default settings."""
    assert command(*fast, "hydra.run.dir=out", "hydra.output_subdir=null").code == 0
    done = command("train.resume=out", "train.epochs=2")
    shown = done.shown
    assert done.code == 1 and "Traceback" not in shown and "out" in shown and "overrides" in shown


def test_a_run_of_another_config_goes_on_with_it(command, fast, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "short.yaml").write_text(
        "defaults: [config, _self_]\noptim: {lr: 0.0625}\nmodel: {size: 7}\n"
    )
    named = ["--config-dir=mine", "--config-name=short"]
    assert command(*named, *fast, "hydra.run.dir=out").code == 0
    done = command("train.resume=out", "train.epochs=2")
    assert done.code == 0, done.shown
    assert settings_of(tmp_path / "out") == (7, 0.0625, 64, "torch") and checkpoint(tmp_path / "out")["step"] == 4
    (tmp_path / "mine" / "short.yaml").unlink()  # no other config is taken silently
    done = command("train.resume=out", "train.epochs=3")
    assert done.code == 1 and "Traceback" not in done.shown and "short" in done.shown


@pytest.mark.parametrize(
    ("override", "patterns"),
    [
        ("model=small_cnn", [r"model\.size"]),
        ("seed=1", ["seed", r"\b0\b", r"\b1\b"]),
        ("data.length=32", [r"\b64\b", r"\b32\b"]),
    ],
)
def test_a_run_that_does_not_fit_the_checkpoint_ends_in_a_sentence(command, earlier, override, patterns):
    done = command(f"train.resume={earlier}", "train.epochs=2", override, "hydra.run.dir=new")
    shown = done.shown
    assert done.code == 1 and "Traceback" not in shown, shown
    assert all(re.search(pattern, shown) for pattern in patterns), shown


# Configs


def test_every_choice_of_every_group_composes_and_loaders_have_the_same_keys():
    groups = [path for path in CONF.iterdir() if path.is_dir() and path.name not in ("callbacks", "hydra")]
    for group in groups:
        for file in group.glob("*.yaml"):
            assert composed(f"{group.name}={file.stem}", "callbacks/standard=[best]")
    assert len({frozenset(yaml.safe_load(path.read_text())) for path in (CONF / "loader").glob("*.yaml")}) == 1


def test_an_inline_section_of_an_experiment_says_which_keys_are_the_defaults(command, fast, tmp_path):
    """Or it has none of them."""
    (tmp_path / "mine" / "experiment").mkdir(parents=True)
    recipe = f"# @package _global_\ndata: {{_target_: {DOORS}.Strict, train_length: 64}}\n"
    (tmp_path / "mine" / "experiment" / "own.yaml").write_text(recipe)
    done = command(
        "--config-dir=mine",
        "experiment=own",
        "callbacks/standard=[best]",
        "model=linear",
        "train.max_steps=1",
        "hydra.run.dir=out",
    )
    shown = done.shown
    assert done.code == 0 or ("Traceback" not in shown and re.search(r"conf/data|data=", shown)), shown
