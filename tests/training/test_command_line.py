"""train.py as a program: what it shows, how it ends, and with which settings it goes on with an earlier run."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from itertools import zip_longest
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hydra.experimental.callback import Callback
from hypothesis import example, given
from hypothesis import strategies as st

from tests.configs import CONF, FAST, checkpoint, composed, differing_weights, logged, steps, stop, summary_of
from tests.data.reading import refused
from training.command_line import COMMAND, complete, parsed, remedy_of
from training.config import ConfigError, checked

ROOT = CONF.parent


def test_an_error_in_the_code_of_a_fork_has_a_traceback(command):
    shown = command(*FAST, *stop(2, "mine"), "hydra.run.dir=out", ends_with=1, has_traceback=True)
    assert "ZeroDivisionError: mine" in shown and "extensions.py" in shown


# What it shows


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ("--help", "Use --hydra-help to view"),
        ("--hydra-help", "train.py -sc install=bash"),
        ("-sc install=bash", "hydra_bash_completion()"),
        ("-sc query=bash", " loader=threads "),
    ],
)
def test_the_help_and_the_completion_of_hydra_are_shown(command, monkeypatch, arguments, part):
    monkeypatch.setenv("COMP_LINE", "python train.py loader=")
    monkeypatch.setenv("COMP_POINT", str(len("python train.py loader=")))
    assert part in command(*arguments.split())


# How it ends


def test_after_a_signal_the_command_that_is_shown_goes_on_whatever_the_folder_is_called(command, tmp_path):
    folder = tmp_path / "it's a=b, [1] é $HOME `ls`"
    quoted = str(folder).replace("'", r"\'")
    shown = command(*FAST, *stop(2, "SIGINT"), "optim.lr=0.125", f"hydra.run.dir='{quoted}'", ends_with=130)
    assert checkpoint(folder)["step"] == 2 and "SIGINT" in shown
    (arguments,) = re.findall(r"python \S*train\.py (.*)", shown)
    pasted = subprocess.run(["sh", "-c", f"printf '%s\\0' {arguments}"], capture_output=True, text=True, check=True)
    command(*pasted.stdout.split("\0")[:-1], "train.epochs=2")
    assert checkpoint(folder)["step"] == 4 and checkpoint(folder)["config"]["optim"]["lr"] == 0.125
    assert logged(folder, "step", "lr") == [1, 2, 3, 4]
    assert "train.epochs=2" in (folder / COMMAND).read_text()


def program(python, folder, before, *settings):
    """Runs train.py as a program, in which the statements `before` come first."""
    code = f"import os, runpy, sys\n{before}\nrunpy.run_path('{ROOT}/train.py', run_name='__main__')"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return python.run("-c", code, *FAST, "hydra.run.dir=out", *settings, cwd=folder, env=environment, timeout=100)


SCRIPT = "from training.script import run_script; run_script(lambda: print('a'))"
FULL = "os.dup2(os.open('/dev/full', os.O_WRONLY), 1)"
HELP = f"sys.argv[1:] = ['--help']; runpy.run_path('{ROOT}/train.py', run_name='__main__')"
BUFFERED = "sys.stdout = open(1, 'w', buffering=1 << 20)"  # longer than the help
NO_READER = "read, write = os.pipe(); os.close(read); os.dup2(write, 1)"


@pytest.mark.parametrize(
    "before",
    [
        "os.closerange(1, 3); sys.stdout = sys.stderr = None",  # >&- 2>&-
        NO_READER,  # as `| head` does when it has enough
    ],
)
def test_a_program_ends_well_whatever_its_terminal(python, tmp_path, before):
    done = program(python, tmp_path, before, "callbacks/standard=[best,progress_bar]")
    assert done.returncode == 0 and not done.stderr, done.stderr
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"metrics.jsonl", "summary.json", "checkpoints", ".hydra"} <= names and "error.txt" not in names
    assert len(steps(tmp_path / "out")) == 2
    assert checkpoint(tmp_path / "out")["step"] == 2, "no output was written into a file"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has it")
def test_a_full_disk_under_the_output_is_said_once_and_the_run_goes_on(python, tmp_path):
    done = program(python, tmp_path, FULL)
    assert done.returncode == 0 and len(steps(tmp_path / "out")) == 2
    assert done.stderr.count("stdout cannot be written (No space left on device)") == 1
    assert "Traceback" not in done.stderr
    assert "test_accuracy" in (tmp_path / "out" / "train.log").read_text()


def test_a_link_to_train_py_has_the_same_log_and_a_command_that_continues(python, tmp_path):
    link = tmp_path / "run.py"
    link.symlink_to(ROOT / "train.py")
    code = f"import runpy, sys\nsys.argv[0] = '{link}'\nrunpy.run_path('{link}', run_name='__main__')"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = python.run("-c", code, *FAST, *stop(1), "hydra.run.dir=out", cwd=tmp_path, env=environment, timeout=100)
    assert done.returncode == 75, done.stderr
    assert f"python {link} train.resume=" in (tmp_path / "out" / "train.log").read_text()


@pytest.mark.parametrize("script", [HELP, f"{BUFFERED}; {HELP}", SCRIPT])
def test_no_error_is_shown_if_the_reader_of_the_output_has_exited(python, tmp_path, script):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    code = f"import os, runpy, sys\n{NO_READER}\n{script}"
    done = python.run("-c", code, cwd=tmp_path, env=environment, timeout=100)
    assert done.returncode == 1 and not done.stderr, done.stderr


CLOSES = """
import pty
child, terminal = pty.fork()
if child:
    text = b""
    while b"step 1:" not in text:
        text += os.read(terminal, 65536)
    os.close(terminal)
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_run_whose_terminal_closes_saves_a_checkpoint_and_says_so_in_its_log(python, tmp_path):
    try:
        both_ends = os.openpty()
    except OSError as error:
        pytest.skip(f"no terminal can be made here, as in a chroot without /dev/pts: {error}")
    for end in both_ends:
        os.close(end)
    endless = ("train.epochs=100000", "train.checkpoint_every=null", "callbacks/standard=[best,progress_bar]")
    done = program(python, tmp_path, CLOSES, "loader=workers", *endless)
    log = (tmp_path / "out" / "train.log").read_text()
    assert done.returncode == 75, done.stderr + log
    assert f"stopped by SIGHUP; saved the checkpoint of step {checkpoint(tmp_path / 'out')['step']}" in log
    assert "Restarting" not in log


TEXTS = st.text("ab ,:=()'\"\\\\é{}[]1.-", min_size=1)
VALUES = st.recursive(st.integers() | st.booleans() | st.none() | TEXTS, lambda inner: st.dictionaries(TEXTS, inner))


@given(
    st.dictionaries(TEXTS, VALUES)
    | st.lists(VALUES)
    | TEXTS.filter(lambda text: text[0] not in "{[" and text[-1] != ",")  # such a comma is to be removed
)
@example({"tench, Tinca tinca": 2, "owl": 1})
def test_what_one_is_told_to_type_in_place_of_a_value_gives_this_value(value):
    text = value if isinstance(value, str) else json.dumps(value)
    remedy = remedy_of(f"task.class_weights={text}")
    if "yaml" not in remedy or value == {"tench, Tinca tinca": 2, "owl": 1}:
        (typed,) = shlex.split(remedy.partition(" type ")[2])
        assert parsed([typed])["task.class_weights"].value() == value


# The libraries are imported first: some choose compiled parts for the platform.
MACOS = """
import hydra, multiprocessing.util, numpy, psutil, torch, torch._dynamo, torch.utils.data, tqdm
sys.platform = "darwin"
for name in ("memfd_create", "pidfd_open", "posix_fallocate", "eventfd", "sched_getaffinity"):
    vars(os).pop(name, None)
"""


def test_without_linux_train_py_reads_in_threads_and_says_so_once(python, tmp_path):
    done = program(python, tmp_path, MACOS, "loader=prefetch", "loader.num_workers=2")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "train.log").read_text().count("samples are read in a thread") == 1
    assert summary_of(tmp_path / "out")["num_workers"] == 2


def test_train_py_starts_where_python_leaves_out_its_folder(tmp_path):
    command = [sys.executable, CONF.parent / "train.py", "--cfg", "job"]
    done = subprocess.run(command, cwd=tmp_path, env={**os.environ, "PYTHONSAFEPATH": "1"}, capture_output=True)
    assert done.returncode == 0, done.stderr


# Sweeps


class Returned(Callback):
    """Keeps what a sweeper, such as hydra-optuna-sweeper, gets from each job."""

    jobs: ClassVar[list[Any]] = []

    def on_job_end(self, job_return, **_):
        Returned.jobs.append(job_return)


def test_when_a_job_of_a_sweep_fails_the_others_go_on_and_the_sweeper_gets_their_scores(command, tmp_path):
    Returned.jobs.clear()
    returned = f"+hydra.callbacks.returned._target_={__name__}.Returned"
    sweep = ["train.batch_size=1000,16", "model=glob(linear*)", "hydra.sweep.dir=sweep"]
    shown = command("-m", *FAST, "train.max_steps=1", *sweep, returned, ends_with=1)
    assert "batch_size=1000" in shown
    summary = summary_of(tmp_path / "sweep" / "1")
    assert not (tmp_path / "sweep" / "0" / "summary.json").exists()
    assert Returned.jobs[1].return_value == summary[summary["score"]]


def test_a_folder_of_a_sweep_of_too_long_a_name_is_refused_with_how_to_choose_another(command):
    sweep = ["hydra.sweep.dir=sweep", "hydra.sweep.subdir=${hydra.job.override_dirname}", f"device={'a' * 300}"]
    shown = command("-m", *FAST, *sweep, ends_with=1)
    assert "hydra.sweep.subdir='${hydra.job.num}'" in shown


def test_a_sweep_whose_settings_are_asked_for_is_refused(command):
    for flag in ("--cfg=job", "--info=config"):
        assert "leave out -m" in command("-m", flag, "seed=0,1", ends_with=1)


def test_a_signal_ends_a_sweep_and_not_only_its_job(command, tmp_path):
    command("-m", *FAST, *stop(1), "seed=0,1", "hydra.sweep.dir=sweep", ends_with=75)
    assert not (tmp_path / "sweep" / "1" / "metrics.jsonl").exists()


@pytest.mark.parametrize("spaced", ["train.epochs= 3", "train.epochs = 3", "train.epochs 3", "--epochs 3"])
def test_a_setting_with_spaces_is_refused_with_how_to_write_it(command, spaced):
    assert "KEY=VALUE" in command(*FAST, *spaced.split(), ends_with=1)


def test_processes_without_torchrun_are_told_of_it(command, monkeypatch):
    assert "start the processes with torchrun" in command("--local-rank=0", ends_with=1)
    for name, value in {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "localhost", "MASTER_PORT": 0}.items():
        monkeypatch.setenv(name, str(value))
    shown = command(*FAST, "train.process_timeout=1", ends_with=1)
    assert "process 0 of 2 waits for the others" in shown and "or unset RANK and WORLD_SIZE" in shown


@pytest.mark.parametrize(
    ("choice", "plugin"),
    [
        ("hydra/sweeper=ax", "hydra-ax-sweeper"),
        ("hydra/launcher=ray_aws", "hydra-ray-launcher"),
        ("hydra/launcher=a", ""),
    ],
)
def test_a_plugin_of_hydra_that_is_not_installed_is_named(command, choice, plugin):
    _, _, named = command(choice, ends_with=1).partition("pip install --pre ")
    assert named.partition("\n")[0] == plugin


# Going on with an earlier run


def settings_of(folder):
    config = checkpoint(folder)["config"]
    return config["model"]["size"], config["optim"]["lr"], config["data"]["length"], checkpoint(folder)["step"]


@pytest.mark.parametrize(
    ("name", "more"),
    [("~/earlier", "hydra.run.dir=~/new"), ("earlier/checkpoints/step-0000002.pt", "hydra.job.chdir=true")],
)
def test_a_run_is_continued_by_its_folder_or_a_file_with_its_settings(
    command, tmp_path, monkeypatch, earlier, name, more
):
    (tmp_path / "earlier").symlink_to(earlier)
    monkeypatch.setenv("HOME", str(tmp_path))
    shown = command(f"train.resume={name}", "train.epochs=2", "hydra.run.dir=new", more)
    assert settings_of(tmp_path / "new") == (7, 0.125, 64, 4)
    assert re.search(r"train\.epochs.* 2\b.* 1\b", shown), "the changed setting is logged"
    verdict = summary_of(tmp_path / "new")["verdict"]
    assert verdict in shown and verdict in (tmp_path / "new" / "train.log").read_text()


@pytest.mark.parametrize(("folder", "flags"), [("conf", []), ("mine", ["--config-path=/moved/mine"])])
def test_a_run_of_before_command_yaml_goes_on_where_the_project_has_moved(tmp_path, folder, flags):
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "overrides.yaml").write_text("[train.epochs=3]")
    sources = [{"provider": "main", "path": f"/moved/{folder}"}]
    runtime = {"config_sources": sources, "cwd": "/moved"}
    hydra = {"runtime": runtime, "job": {"config_name": "config"}, "overrides": {"hydra": []}}
    (tmp_path / ".hydra" / "hydra.yaml").write_text(json.dumps({"hydra": hydra}))
    completed = complete([f"train.resume={tmp_path}"])
    assert completed[:-3] == [*flags, "--config-name=config", "train.epochs=3"]


@pytest.mark.parametrize(
    ("override", "is_kept"),
    [("a.b=2", True), ("~a.b", True), ("+a.b=2", False), ("++a.b=2", False), ("a.c=2", True), ("model=linear", True)],
)
@pytest.mark.parametrize("added", ["+a.b=1", "++a.b=1"])
def test_a_key_that_a_run_has_added_is_changed_and_removed_by_a_resume(tmp_path, added, override, is_kept):
    command_yaml = json.dumps({"flags": [], "overrides": [added, "+model=small_cnn", "seed=3"]})
    (tmp_path / COMMAND).write_text(command_yaml)
    completed = complete([f"train.resume={tmp_path}", override])
    assert (added in completed) == is_kept and completed.index("seed=3") < completed.index(override)
    assert ("+model=small_cnn" in completed) == (override != "model=linear")


def test_a_job_of_a_sweep_that_a_yaml_file_asks_for_goes_on_alone(tmp_path):
    (tmp_path / COMMAND).write_text(json.dumps({"flags": [], "overrides": ["experiment=with_hydra_mode"]}))
    assert "hydra.mode=RUN" in complete([f"train.resume={tmp_path}"])
    assert "hydra.mode=RUN" not in complete(["-m", f"train.resume={tmp_path}"])


def test_a_restart_by_torchrun_goes_on_in_the_folder_that_began_with_a_file(monkeypatch, earlier):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "mine")
    assert "hydra.run.dir=outputs/mine" in complete([f"train.resume={earlier}/checkpoints/last.pt"])


def test_a_restart_of_the_only_process_of_torchrun_goes_on_in_its_folder(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "mine")
    assert {"hydra.run.dir=outputs/mine", "hydra.sweep.dir=multirun/mine"} <= {*complete([])}


def test_processes_share_the_folder_of_a_sweep_that_a_yaml_file_asks_for(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "mine")
    for number in "01":
        monkeypatch.setenv("RANK", number)
        assert "hydra.sweep.dir=multirun/mine" in complete(["experiment=with_hydra_mode"])


def test_the_config_that_hydra_saved_of_a_run_starts_another_run(command, tmp_path):
    command(*FAST, "model.size=7", "+mine=0.125", "optim.lr=${mine}", f"hydra.run.dir={tmp_path}/out")
    command(f"--config-path={tmp_path}/out/.hydra", "--config-name=config", f"hydra.run.dir={tmp_path}/again")
    assert settings_of(tmp_path / "again") == settings_of(tmp_path / "out") == (7, 0.125, 64, 2)
    assert not differing_weights(tmp_path / "again", tmp_path / "out")
    command(f"train.resume={tmp_path}/again", "train.epochs=2")
    assert settings_of(tmp_path / "again") == (7, 0.125, 64, 4)


def test_a_job_of_a_sweep_goes_on_with_the_settings_of_the_run(command, tmp_path, earlier):
    command("-m", f"train.resume={earlier}", "train.epochs=2", "optim.weight_decay=0.1", "hydra.sweep.dir=sweep")
    assert settings_of(tmp_path / "sweep" / "0") == (7, 0.125, 64, 4)
    (optimizer,) = checkpoint(tmp_path / "sweep" / "0")["optimizers"]
    assert optimizer["param_groups"][0]["weight_decay"] == 0.1


class Seen:
    """Notes the settings that Hydra itself made."""

    def on_start(self, run):
        with Path(os.environ["SEEN"]).open("a") as file:
            lr = run.config.optim["lr"]
            file.write(f"{os.environ.get('CACHE')} {Path.cwd() == run.folder.absolute()} {lr}\n")


@pytest.mark.parametrize("place", ["hydra.searchpath", "--config-path"])
def test_a_resumed_run_keeps_the_settings_of_hydra_itself_and_where_its_configs_are(
    command, tmp_path, monkeypatch, place
):
    monkeypatch.setenv("SEEN", str(tmp_path / "seen.txt"))
    site = tmp_path / "it's a=site"
    where = str(site)
    if place == "--config-path":
        shutil.copytree(CONF, site)
    else:
        where = "['file://" + where.replace("'", r"\'") + "']"
    (site / "experiment").mkdir(parents=True, exist_ok=True)
    (site / "experiment" / "site.yaml").write_text("# @package _global_\noptim: {lr: 0.0625}\n")
    settings = [f"{place}={where}", "experiment=site", "hydra.job.chdir=true"]
    settings += ["+hydra.job.env_set.CACHE=mine", f"+callbacks.seen._target_={__name__}.Seen"]
    command(*FAST, *settings, f"hydra.run.dir={tmp_path}/out")
    monkeypatch.delenv("CACHE", raising=False)
    command(f"train.resume={tmp_path}/out", "train.epochs=2")
    assert (tmp_path / "seen.txt").read_text() == "mine True 0.0625\n" * 2


@pytest.fixture
def out(tmp_path, earlier):
    """A copy of the earlier run in the folder out."""
    return shutil.copytree(earlier, tmp_path / "out", symlinks=True)


def test_a_resume_that_only_says_that_the_run_has_finished_changes_no_setting_of_it(command, out):
    assert "has finished" in command("train.resume=out", "train.max_steps=1")
    command("train.resume=out", "train.epochs=2")
    assert checkpoint(out)["step"] == 4


def test_a_finished_run_with_other_settings_is_trained_again_as_the_refusal_says(command, out):
    again = f"hydra.run.dir={out}"
    refusal = command("train.resume=out", "optim.lr=0.5", ends_with=1)
    assert "set train.resume=null" in refusal and f"in this folder again {again}, too" in refusal
    command(*FAST, "optim.lr=0.5", "train.resume=null", again)
    assert checkpoint(out)["config"]["optim"]["lr"] == 0.5


def test_a_second_run_in_a_folder_ends_in_a_sentence_with_the_first_ones_process(command, python, out):
    hold = f"""
import signal, sys
sys.path.insert(0, "{ROOT}")
from pathlib import Path
from training.results import Results
ours = Results(Path("{out}"), True)
print("locked", flush=True)
signal.pause()
"""
    with python.start("-c", hold) as other:
        other.stdout.readline()
        shown = command("train.resume=out", "train.epochs=2", "optim.lr=0.5", ends_with=1)
        other.send_signal(signal.SIGKILL)  # a crash frees the folder
        other.wait()
    assert f"process {other.pid} on" in shown and "hydra.run.dir" in shown
    command("train.resume=out", "train.epochs=2")
    assert settings_of(out) == (7, 0.125, 64, 4), "the refused settings are not the run's"


@pytest.mark.parametrize("content", [None, "", "[["])
@pytest.mark.parametrize("name", [COMMAND, ".hydra/overrides.yaml"])
def test_a_run_whose_overrides_cannot_be_read_is_refused(command, out, name, content):
    """Else it would go on with the default settings."""
    (out / COMMAND).unlink()
    if content is None:
        shutil.rmtree(out / ".hydra")
    else:
        (out / name).write_text(content)
    shown = command("train.resume=out", "train.epochs=2", ends_with=1)
    assert f"out/{'.hydra/overrides.yaml' if content is None else name}" in shown


def test_a_run_of_before_there_was_a_command_yaml_keeps_its_settings_after_a_refused_resume(command, out):
    (out / COMMAND).unlink()
    command("train.resume=out", "train.epochs=2", "optim=adamw", ends_with=1)
    command("train.resume=out", "train.epochs=2")
    assert settings_of(out) == (7, 0.125, 64, 4)


def test_a_finished_run_is_not_taken_for_one_of_other_settings(command, tmp_path, earlier):
    shutil.copytree(earlier, tmp_path / "sweep" / "0", symlinks=True)
    sweep = ["-m", *FAST, "model.size=7", "optim.lr=0.25,0.5", "hydra.sweep.dir=sweep"]
    shown = command(*sweep, ends_with=1)
    assert "optim.lr is 0.25, was 0.125" in shown and "train.resume=null" in shown
    assert checkpoint(tmp_path / "sweep" / "1")["config"]["optim"]["lr"] == 0.5
    shown = command(*sweep[:-2], "optim.lr=0.125", "train.epochs=2", sweep[-1], ends_with=1)
    assert "train.epochs is 2, was 1" in shown and "hydra.sweep.dir" in shown
    command(*sweep, "train.resume=null")
    assert checkpoint(tmp_path / "sweep" / "0")["config"]["optim"]["lr"] == 0.25


def test_a_run_of_another_config_goes_on_with_it(command, tmp_path):
    (tmp_path / "mine").mkdir()
    settings = "defaults: [config, _self_]\noptim: {lr: 0.0625}\nmodel: {size: 7}\n"
    (tmp_path / "mine" / "short.yaml").write_text(settings)
    command("--config-dir=mine", "--config-name=short", *FAST, "hydra.run.dir=out")
    command("train.resume=out", "train.epochs=2")
    assert settings_of(tmp_path / "out") == (7, 0.0625, 64, 4)
    (tmp_path / "mine" / "short.yaml").unlink()  # no other config is taken silently
    shown = command("train.resume=out", "train.epochs=3", ends_with=1)
    assert "short" in shown


@pytest.mark.parametrize(
    ("override", "patterns"),
    [
        ("model=small_cnn", [r"model\.size=7 does not fit .*remove it from command.yaml in its folder"]),
        ("model.size=3", [r"model\.size is 3, was 7", "weight"]),
        ("optim=adamw", ["another optimizer", r"optim\._target_"]),
        ("seed=1", ["seed", r"\b0\b", r"\b1\b"]),
    ],
)
def test_a_run_that_does_not_fit_the_checkpoint_ends_in_a_sentence_and_keeps_its_settings(
    command, earlier, out, override, patterns
):
    shown = command("train.resume=out", "train.epochs=2", override, ends_with=1)
    assert all(re.search(pattern, shown) for pattern in patterns), shown
    assert (out / COMMAND).read_text() == (earlier / COMMAND).read_text()


# Configs


@pytest.mark.parametrize(
    ("key", "sentence"),
    [
        ("train.lr", r"train.lr: nothing reads this key \(is optim.lr meant\?\)"),
        ("timing.epochs", "timing.epochs: nothing reads this key; one of your own needs a field in TimingConfig"),
        ("loader.batch", "loader.batch: nothing reads this key; one of your own needs a field in LoaderConfig"),
    ],
)
def test_a_key_that_was_appended_to_a_section_whose_keys_are_fixed_is_refused(key, sentence):
    with refused(sentence):
        checked(composed(f"+{key}=0.1"))


@pytest.mark.parametrize(
    ("settings", "is_said"),
    [(["+epochs=3"], True), (["+mine=3"], False), (["+epochs=3", "train.epochs=${epochs}"], False)],
)
def test_a_key_outside_of_all_sections_that_has_the_name_of_one_inside_is_warned_of(caplog, settings, is_said):
    checked(composed(*settings))
    assert ("epochs=3: nothing reads this key: is train.epochs meant?" in caplog.text) == is_said


def test_every_choice_of_every_group_composes():
    groups = [path for path in CONF.iterdir() if path.is_dir() and path.name not in ("callbacks", "hydra")]
    choices = [[f"{group.name}={file.stem}" for file in sorted(group.glob("*.yaml"))] for group in groups]
    for several in zip_longest(*choices):
        assert composed(*filter(None, several), "callbacks/standard=[best]")


def test_an_inline_section_of_an_experiment_says_which_keys_are_the_defaults(command, tmp_path):
    (tmp_path / "mine" / "experiment").mkdir(parents=True)
    recipe = "# @package _global_\ndata: {_target_: data.synthetic.Synthetic, length: 64}\n"
    (tmp_path / "mine" / "experiment" / "own.yaml").write_text(recipe)
    small = ["callbacks/standard=[best]", "model=linear", "train.max_steps=1", "hydra.run.dir=out"]
    shown = command("--config-dir=mine", "experiment=own", *small, ends_with=1)
    assert re.search(r"conf/data|data=", shown), shown


@pytest.mark.parametrize(
    ("used", "unused"),
    [("conf", "mine"), ("extras/a/conf", "mine"), ("conf", "extras/a/conf"), ("extras/a/conf", "extras/b/conf")],
)
def test_a_config_file_that_hydra_would_not_take_is_refused(tmp_path, monkeypatch, used, unused):
    monkeypatch.setattr("training.command_line.ROOT", tmp_path)
    (tmp_path / "mine").mkdir()
    for folder in (used, unused):
        file = tmp_path / folder / "model" / "linear.yaml"
        file.parent.mkdir(parents=True)
        complete([f"--config-dir={tmp_path}/mine", "--info"])
        file.write_text(f"_target_: {folder}\n")
    with pytest.raises(ConfigError, match=rf"{unused}/model/linear\.yaml is not used, as .*/{used}/model"):
        complete([f"--config-dir={tmp_path}/mine", "--info"])
    shutil.copy(tmp_path / used / "model" / "linear.yaml", file)
    complete([f"--config-dir={tmp_path}/mine", "--info"])
