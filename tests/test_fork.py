"""A fork that adds files and deletes what it does not use trains and sweeps, and the repository's tests pass in it."""

import json
import os
import subprocess
import sys

import pytest

from tests.configs import checkpoint
from tests.infrastructure.forks import IS_OURS, PYTEST, ROOT, call, copy, snippets

pytestmark = pytest.mark.skipif(not IS_OURS, reason="a fork's pages have other snippets")
FILES = {
    **snippets(ROOT / "docs" / "data.md", ROOT / "docs" / "extending.md"),
    "conf/data/points.yaml": "_target_: my.moons.Moons\nlength: ???\n",  # as a beginner writes it
    "conf/callbacks/points.yaml": "patience: {_target_: my.callbacks.Patience}\n",
    "conf/experiment/points.yaml": """# @package _global_
defaults:
  - override /data: points
  - override /model: perceptron
  - override /callbacks: points
task: {inputs: point}
""",
}
SHORT = ["train.batch_size=16", "train.epochs=1", "loader=workers", "loader.num_workers=1"]
# One program, as starting three would take seconds: a run, a sweep, and some tests, of which one is the fork's own.
ALL = """
import runpy, sys, pytest
for more in (["hydra.run.dir=run"], ["-m", "seed=1", "hydra.sweep.dir=sweep"]):
    sys.argv[1:] = ["experiment=points", "data.length=96", *%r, *more]
    runpy.run_path("train.py", run_name="__main__")
sys.exit(pytest.main(["-q", "-n", "0", "test_moons.py", "tests/test_extras.py"]))
"""
LOADERS = ("cached", "resident", "threads", "torch")
# All that CONTRIBUTING.md lets one delete, but modules that others import.
MOST = " ".join(["extras", "scripts", "examples", *(f"conf/loader/{name}.yaml" for name in LOADERS)])
WITHOUT = ("extras", "extras/finished", "extras/report", "extras/sweep", "extras/webdataset")
WITHOUT = [pytest.param(folder, marks=pytest.mark.slow) for folder in WITHOUT if (ROOT / folder).exists()]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("without", [pytest.param(MOST, id="most"), *WITHOUT])
def test_a_fork_without_what_it_does_not_use_trains_and_sweeps(python, tmp_path, without):
    fork = copy(tmp_path / "fork", without, FILES)
    call(python, fork, ["-c", ALL % SHORT])
    for run in (fork / "run", fork / "sweep" / "0"):
        assert json.loads((run / "summary.json").read_text())["verdict"]
        assert checkpoint(run)["step"] == 6 and checkpoint(run)["callbacks"]["patience"]
    assert (fork / "sweep" / "sweep.md").exists() == (fork / "extras" / "sweep").exists()
    if without not in (MOST, "extras"):
        call(python, fork, [*PYTEST, "-q", "-n", "0", "tests/examples", "extras", "--collect-only"])


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("without", [folder.values[0] for folder in WITHOUT[:2]])
def test_all_tests_of_a_fork_pass(tmp_path, without):
    fork = copy(tmp_path / "fork", without, FILES)
    (fork / ".venv").symlink_to(sys.prefix)
    environment = {**os.environ, "PYTHONPATH": "", "PYTEST_ADDOPTS": ""}
    command = [fork / "scripts" / "test", "-q", "--ignore", "tests/test_fork.py", "--timeout", "300"]
    command += ["--ignore", "tests/loaders"]  # they know no extras
    done = subprocess.run(command, cwd=fork, env=environment, capture_output=True, text=True, timeout=3500)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
