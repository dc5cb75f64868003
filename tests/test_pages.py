"""Every command and snippet of README.md, of docs/ and of the extras' pages runs, in a fork that has the snippets.

A snippet that begins with the line `# PATH` is a file of the fork. Commands run one after the other, with small
settings where they leave these open. Words in capital letters are names of folders, which the fork has.
"""

import json
import os
import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SLOW = {"doors.md": pytest.mark.slow}  # many runs; tests/training/test_doors.py goes through each door
EXTRAS = sorted(path for path in ROOT.glob("extras/*/README.md"))
SMALL = [
    *("train.max_steps=2", "train.batch_size=16", "train.epochs=1", "train.eval_steps=2", "loader.num_workers=1"),
    *("train.num_threads=1", "callbacks.report.seconds=0", "train.warmup_epochs=0"),
]
ELSEWHERE = (  # what a command needs that a test has not: it is only composed
    *("submitit_slurm", "ylecun/mnist", "data.path=NAME", "pretrained=true", "s3://", "data_bound", "data=webdataset"),
    *("data.path=FOLDER", "data=cifar10", "logger="),
)
OF = {"hydra/launcher": "slurm", "callbacks.timeline": "timeline", "experiment=data_bound": "benchmarks"}
PARTS = ("training", "loaders", "data", "models", "conf", "scripts", "extras", "examples")
OURS = "# A PyTorch training template for accelerators that wait for data"
pytestmark = pytest.mark.skipif(
    not (ROOT / "README.md").read_text().startswith(OURS), reason="a fork's pages make promises of their own"
)
# Runs commands as `python COMMAND` in one process, in which importing takes its time once.
DRIVER = """
import json, runpy, sys
for line in json.loads(sys.argv[1]):
    sys.argv = line
    try:
        runpy.run_path(line[0], run_name="__main__")
    except SystemExit as end:
        if end.code:
            sys.exit(f"{line}: {end.code}")
"""


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


def commands(page: Path) -> list[list[str]]:
    """The words of each command, of code blocks and of inline code that begins with `python`."""
    lines = [line for block in blocks(page, "bash") for line in block.splitlines()]
    lines += re.findall(r"`(python [^`\n]+)`", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL))
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def small(words: list[str]) -> list[str]:
    """A command of train.py, with SMALL for what it leaves open."""
    keys = {word.lstrip("+~").partition("=")[0] for word in words}
    elsewhere = any(name in word for name in ELSEWHERE for word in words)
    left_open = [] if elsewhere else [text for text in SMALL if text.partition("=")[0] not in keys]
    if "train.resume" in keys or not (ROOT / "extras" / "report").exists():
        left_open = [text for text in left_open if "report" not in text]
    if "loader=torch" in words:
        left_open = [text for text in left_open if "num_workers" not in text]
    if "data=plankton" in words:
        left_open.append("data.root=PLANKTON")
    if elsewhere:
        words = ["--cfg", "job", *(word for word in words if word not in ("-m", "...") and "," not in word)]
    return [*words, *left_open]


def runs(words: list[str]) -> list[str] | None:
    """The command as the driver runs it; None for one of the shell, of another test, or of an extra that is gone."""
    if any(
        word.startswith(key) and not (ROOT / "extras" / extra).exists() for word in words for key, extra in OF.items()
    ):
        return None
    if words[0] == "python" and words[1].endswith(".py") and "GROUP=CHOICE" not in words:
        return ["train.py", *small(words[2:])] if words[1] == "train.py" else words[1:]
    return None


@pytest.fixture
def fork(tmp_path: Path):
    """Makes a copy of the repository in tmp_path, with the files of a page and the folders that commands name."""

    def make(*pages: Path) -> Path:
        (tmp_path / "fork").mkdir()
        shutil.copy(ROOT / "train.py", tmp_path / "fork")
        for folder in PARTS:
            if (ROOT / folder).exists():
                ignored = shutil.ignore_patterns("__pycache__", "tests")
                shutil.copytree(ROOT / folder, tmp_path / "fork" / folder, ignore=ignored)
        for text in [text for page in pages for kind in ("python", "yaml") for text in blocks(page, kind)]:
            if found := re.match(r"(?:# @package \S+\n)?# (\S+\.(?:py|yaml))\n", text):
                path = tmp_path / "fork" / found[1]
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
        random = np.random.default_rng(0)
        for split, name, number in ((s, n, i) for s in ("train", "val") for n in ("cat", "dog") for i in range(20)):
            path = tmp_path / "fork" / "DIR" / split / name / f"{number}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(random.integers(256, size=(40, 48, 3), dtype=np.uint8)).save(path)
        for name in ("IMAGES", "photos"):
            (tmp_path / "fork" / name).symlink_to("DIR")
        (tmp_path / "fork" / "PLANKTON").mkdir()
        for split in ("train", "test"):
            np.save(
                tmp_path / f"fork/PLANKTON/{split}-images.npy",
                random.integers(256, size=(32, 64, 64, 3), dtype=np.uint8),
            )
            np.save(tmp_path / f"fork/PLANKTON/{split}-labels.npy", np.arange(32) % 3)
        return tmp_path / "fork"

    return make


def call(python, fork: Path, *lines: list[str]) -> None:
    environment = {**os.environ, "PYTHONPATH": "", "OMP_NUM_THREADS": "1"}
    options = {"cwd": fork, "env": environment, "timeout": 600}
    (fork / "driver.py").write_text(DRIVER)
    done = python.run(fork / "driver.py", json.dumps(lines), **options)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", [pytest.param(p, marks=SLOW.get(p.name, ()), id=p.name) for p in PAGES])
def test_the_commands_of_a_page_run_in_a_fork_with_its_snippets(python, fork, page):
    lines = [line for words in commands(page) if (line := runs(words)) and line[0] == "train.py"]
    if not lines:
        pytest.skip("it has none")
    needed = [ROOT / "docs" / "data.md"] if page.parent.name == "docs" and page.name != "data.md" else []
    folder = fork(page, *needed)
    call(python, folder, ["train.py", *SMALL[:6], "hydra.run.dir=outputs/DATE_TIME"], *lines)


def test_the_doors_of_the_readme_open(python, fork):
    readme = ROOT / "README.md"
    text = readme.read_text()
    doors = ["model=net", "'task.loss={_target_: my.loss}'", "trainer._target_=my.Noisy"]
    doors.append("+callbacks.enough._target_=my.Enough")
    assert all(f"`{door}`" in text for door in doors) and "`_target_: my.Net`" in text
    folder = fork(readme)
    (folder / "conf" / "model" / "net.yaml").write_text("_target_: my.Net\n")
    call(python, folder, ["train.py", *SMALL[:6], *(shlex.split(door)[0] for door in doors)])


def test_the_snippet_of_the_readme_loads_batches():
    (snippet,) = [text for text in blocks(ROOT / "README.md", "python") if "from loaders" in text]
    steps: list[object] = []
    here = snippet.replace('device="cuda", depth=2', 'device="cpu", depth=0').replace("num_workers=8", "num_workers=1")
    exec(here, {"dataset": list(range(1000)), "step": steps.append})
    assert here != snippet and len(steps) == 4


def test_the_test_of_a_dataset_on_the_page_passes(python, fork):
    folder = fork(ROOT / "docs" / "data.md")
    (folder / "program.py").write_text("from test_moons import test_moons\n\ntest_moons()\n")
    call(python, folder, ["program.py"])


@pytest.mark.parametrize("page", [*PAGES, ROOT / "loaders/README.md", *EXTRAS], ids=lambda p: str(p.relative_to(ROOT)))
def test_links_files_and_options_that_a_page_names_exist(page):
    for link in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        assert "://" in link or is_there((page.parent / link).resolve()), link
    for words in commands(page):
        for word in words:
            if re.fullmatch(r"(\./)?(scripts|extras|examples|tests)/[^*\s]+", word):
                path = ROOT / word
                assert is_there(path), word
                if path.suffix == ".py" and path.exists():
                    options = [one.partition("=")[0] for one in words if one.startswith("--")]
                    assert all(option in path.read_text() for option in options), words


def is_there(path: Path) -> bool:
    """Whether the file exists, or belongs to an extra that was deleted."""
    parts = path.relative_to(ROOT).parts
    return path.exists() or (parts[0] == "extras" and not (ROOT / "extras" / parts[1]).exists())


def test_readme_has_short_lines_and_says_what_is_in_each_folder():
    text = (ROOT / "README.md").read_text()
    assert not [line for line in text.splitlines() if len(line) > 120 and not line.startswith("data-bound: ")]
    for name in ("train.py", "training/", "loaders/", "data/", "models/", "conf/", "scripts/", "tests/"):
        assert f"\n{name} " in text


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", EXTRAS, ids=lambda page: page.parent.name)
def test_the_commands_of_an_extra_run(python, fork, page):
    lines = [line for words in commands(page) if (line := runs(words))]
    lines = [line for line in lines if "benchmarks" not in line[0] and "index_tars" not in line[0]]
    images = ["data=image_folder", "data.root=DIR", "data.image_size=32"]
    call(python, fork(page), ["train.py", *SMALL, *images, "hydra.run.dir=outputs/DATE_TIME"], *lines)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_torchrun_as_on_the_pages(python, fork):
    lines = [words for page in PAGES for words in commands(page) if words[0] == "torchrun"]
    folder = fork()
    for words in lines:
        options = [word for word in words[1:] if word.startswith("--")]
        rest = small([word for word in words[1:] if word not in ("train.py", *options)])
        program = "import sys; from torch.distributed.run import main; main(sys.argv[1:])"
        environment = {**os.environ, "PYTHONPATH": "", "OMP_NUM_THREADS": "1"}
        arguments = [*options, "train.py", *rest, "device=cpu"]
        done = python.run("-c", program, *arguments, cwd=folder, env=environment, timeout=400)
        assert done.returncode == 0, done.stderr[-3000:]
