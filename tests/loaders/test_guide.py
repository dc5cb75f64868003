"""The snippets of loaders/README.md run, in their order, as one program."""

import re
from pathlib import Path

import loaders

GUIDE = (Path(loaders.__file__).parent / "README.md").read_text()
ROOT = Path(loaders.__file__).parents[1]


def test_the_snippets_of_the_guide_run(python, tmp_path, bound):
    snippets = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
    # By Python 3.14's default, forkserver, a stock DataLoader would have to stand in a main().
    forks = 'import multiprocessing\nmultiprocessing.set_start_method("fork")'
    (tmp_path / "program.py").write_text("\n".join([forks, *snippets]))
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = python.run(tmp_path / "program.py", cwd=tmp_path, env=environment, timeout=3 * bound)
    assert done.returncode == 0, done.stderr
    shape, lines, verdict = done.stdout.splitlines()
    assert (shape, lines) == ("torch.Size([256, 32, 32, 3])", "20")
    assert verdict.partition(":")[0] in ("data-bound", "compute-bound", "not measured")


def test_the_files_that_the_guide_names_exist():
    names = re.findall(r"^[PTW] +([\w/]+\.py) ", GUIDE, re.MULTILINE)
    assert len(names) > 6 and [name for name in names if not (ROOT / "loaders" / name).exists()] == []
