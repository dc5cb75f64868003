"""A fork that adds files and deletes an extra trains, and the repository's tests pass in it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_extras import ROOT, SHORT, call, copy

FILES = {
    "my/__init__.py": "",
    "my/points.py": """
import numpy as np


class Points:
    classes = ["left", "right"]

    def __init__(self, train, path, noise):
        self.points = np.load(f"{path}/{'train' if train else 'test'}.npy")

    def __len__(self):
        return len(self.points)

    def __getitem__(self, index):
        point = self.points[index]
        return {"point": point, "side": int(point[0] > 0)}
""",
    "my/counts.py": """
class Counts:
    steps = 0

    def on_step(self, run):
        self.steps += 1

    def on_end(self, run, summary):
        if summary:
            summary["my_steps"] = self.steps
""",
    "conf/data/points.yaml": "_target_: my.points.Points\npath: ???\nnoise: 0.5\n",  # as a beginner writes it
    "conf/model/my_linear.yaml": "_target_: torch.nn.Linear\nin_features: 2\nout_features: 2\n",
    "conf/callbacks/counts.yaml": "counts: {_target_: my.counts.Counts}\n",
    "conf/experiment/mine.yaml": """# @package _global_
defaults:
  - override /data: points
  - override /model: my_linear
  - override /callbacks: counts
task: {inputs: point, label: side}
""",
    "tests/test_mine.py": """
import numpy as np
from my.points import Points
from training.checks import check_dataset
from training.tasks import Classification


def test_points(tmp_path):
    np.save(tmp_path / "test.npy", np.ones((4, 2), np.float32))
    points = Points(False, tmp_path, noise=0)
    check_dataset(points, Classification(points, inputs="point", label="side"))
""",
    "write.py": """
import numpy as np

for name, count in (("train", 96), ("test", 32)):
    np.save(f"{name}.npy", np.random.default_rng(count).normal(size=(count, 2)).astype(np.float32))
""",
}
LOOK = [  # tests that look at the files of the repository
    *("tests/test_mine.py", "tests/test_extras.py", "tests/test_pages.py", "tests/data/test_datasets.py"),
    "tests/training/test_command_line.py",
    *("-k", "(mine or extras or pages or datasets or choice or inline) and not (copy or run or open or passes)"),
]

pytestmark = pytest.mark.skipif(not (ROOT / "extras").exists(), reason="extras/ was deleted")


@pytest.fixture
def fork(tmp_path: Path) -> Path:
    copy(tmp_path, min(f"extras/{path.parent.name}" for path in ROOT.glob("extras/*/README.md")))
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return tmp_path


@pytest.mark.timeout(600)
def test_a_fork_trains_on_its_own_data_and_the_tests_that_look_at_files_pass(fork):
    call(fork, "write.py")
    call(fork, "train.py", "experiment=mine", "data.path=.", *SHORT, "hydra.run.dir=run")
    assert '"my_steps": 6' in (fork / "run" / "summary.json").read_text()
    call(fork, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0", "--timeout", "300", *LOOK)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_all_tests_of_a_fork_pass(fork):
    (fork / ".venv").symlink_to(sys.prefix)
    environment = {**os.environ, "PYTHONPATH": "", "PYTEST_ADDOPTS": ""}
    command = [fork / "scripts" / "test", "-q", "--ignore", "tests/test_fork.py", "--timeout", "300"]
    done = subprocess.run(command, cwd=fork, env=environment, capture_output=True, text=True, timeout=3500)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
