"""The folder loaders/ serves any project: copied under another name into another package, it needs nothing of ours."""

import shutil
from pathlib import Path

import loaders

PROGRAM = """
import sys
from project.reading.input import Preloader, WorkerLoader


def read(loader):
    return [batch.tolist() for batch in loader]


if __name__ == "__main__":
    with WorkerLoader(range(10), 4, shuffle=True, seed=3) as loader:
        expected = read(loader)
    assert sorted(sum(expected, [])) == list(range(10))
    settings = {"seed": 3, "num_workers": 2}
    with WorkerLoader(range(10), 4, shuffle=True, **settings) as loader:
        assert read(loader) == expected
    with Preloader(WorkerLoader(range(10), 4, shuffle=True, **settings), "cpu", 2) as loader:
        assert read(loader) == expected
    ours = [name for name in sys.modules if name.split(".")[0] in ("loaders", "data", "models", "training", "train")]
    assert not ours, ours
    print("read")
"""


def test_a_copy_under_another_name_reads_and_preloads(python, tmp_path, bound):
    package = tmp_path / "project"
    shutil.copytree(
        Path(loaders.__file__).parent, package / "reading" / "input", ignore=shutil.ignore_patterns("__pycache__")
    )
    for folder in (package, package / "reading"):
        (folder / "__init__.py").touch()
    (tmp_path / "program.py").write_text(PROGRAM)
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    done = python.run(tmp_path / "program.py", cwd=tmp_path, env=environment, timeout=3 * bound)
    assert (done.returncode, done.stdout) == (0, "read\n"), done.stderr
