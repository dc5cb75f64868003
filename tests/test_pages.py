"""Every command and snippet of README.md, of docs/ and of the extras' pages runs, in a fork that has the snippets.

A snippet that begins with the line `# PATH` is a file of the fork. Commands run one after the other, with small
settings where they leave these open. Words in capital letters are names of folders, which the fork has.
"""

import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.forks import IS_OURS, ROOT, blocks, call, copy, snippets

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
EXTRAS = sorted(path for path in ROOT.glob("extras/*/README.md"))
SMALL = [
    *("train.max_steps=2", "train.batch_size=16", "train.epochs=1", "train.eval_steps=2", "loader.num_workers=1"),
    *("train.num_threads=1", "callbacks.report.seconds=0", "train.warmup_epochs=0"),
]
FIRST = "hydra.run.dir=outputs/DATE_TIME"  # the run that others go on with
ELSEWHERE = (  # what a command needs that a test has not: it is only composed
    *("submitit_slurm", "ylecun/mnist", "data.path=NAME", "pretrained=true", "s3://", "data_bound", "data=webdataset"),
    *("data.path=FOLDER", "data=cifar10", "logger="),
)
OF = {"hydra/launcher": "slurm", "callbacks.timeline": "timeline", "experiment=data_bound": "benchmarks"}
pytestmark = pytest.mark.skipif(not IS_OURS, reason="a fork's pages make promises of their own")


def commands(page: Path) -> list[list[str]]:
    """The words of each command, of code blocks and of inline code that begins with `python`."""
    lines = [line for block in blocks(page, "bash") for line in block.splitlines()]
    lines += re.findall(r"`(python [^`\n]+)`", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL))
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def small(words: list[str]) -> list[str]:
    """A command of train.py, with SMALL for what it leaves open."""
    keys = {word.lstrip("+~").partition("=")[0] for word in words}
    if any(name in word for name in ELSEWHERE for word in words):
        return ["--cfg", "job", *(word for word in words if word not in ("-m", "...") and "," not in word)]
    left_open = [text for text in SMALL if text.partition("=")[0] not in keys]
    if "train.resume" in keys or not (ROOT / "extras" / "report").exists():
        left_open = [text for text in left_open if "report" not in text]
    if "loader=torch" in words:
        left_open = [text for text in left_open if "num_workers" not in text]
    return [*words, *left_open, *["data.root=PLANKTON"] * ("data=plankton" in words)]


def lines_of(page: Path) -> list[list[str]]:
    """The page's commands as `call` runs them, without those of the shell or of an extra that is gone."""
    gone = tuple(key for key, extra in OF.items() if not (ROOT / "extras" / extra).exists())
    lines = [words[1:] for words in commands(page) if words[0] == "python" and words[1].endswith(".py")]
    lines = [line for line in lines if "GROUP=CHOICE" not in line and not any(word.startswith(gone) for word in line)]
    return [["train.py", *small(line[1:])] if line[0] == "train.py" else line for line in lines]


def fork(folder: Path, *pages: Path) -> Path:
    """A copy of the repository with the files of these pages and the folders that commands name."""
    copy(folder, files=snippets(*pages))
    random = np.random.default_rng(0)
    for split, name, number in ((s, n, i) for s in ("train", "val") for n in ("cat", "dog") for i in range(20)):
        path = folder / "DIR" / split / name / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(256, size=(40, 48, 3), dtype=np.uint8)).save(path)
    for name in ("IMAGES", "photos"):
        (folder / name).symlink_to("DIR")
    (folder / "PLANKTON").mkdir()
    for split in ("train", "test"):
        images = random.integers(256, size=(32, 64, 64, 3), dtype=np.uint8)
        np.savez(folder / "PLANKTON" / f"{split}.npz", images=images, labels=np.arange(32) % 3)
    return folder


def test_the_doors_of_the_readme_open(python, tmp_path):
    readme = PAGES[0]
    doors = ["model=net", "'task.loss={_target_: torch.nn.MultiMarginLoss}'", "trainer._target_=my.Step"]
    doors.append("+callbacks.enough._target_=my.Enough")
    assert all(door in readme.read_text() for door in (*doors, "conf/model/net.yaml", "`_target_: my.net`"))
    folder = fork(tmp_path / "fork", readme)
    (folder / "conf" / "model" / "net.yaml").write_text("_target_: my.net\n")
    step = "from training.trainer import Trainer\nclass Step(Trainer):\n    def training_step(self, batch):\n"
    step += "        return self.task.loss(self.model(batch['image']), batch['label'])\n"
    with (folder / "my.py").open("a") as file:
        file.write(step)
    call(python, folder, ["train.py", *SMALL[:6], *(shlex.split(door)[0] for door in doors)])


@pytest.mark.slow  # tests/training has a test of what each of them does
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "pages", [PAGES[:1], PAGES[1:], *([page] for page in EXTRAS)], ids=lambda pages: pages[0].parent.name
)
def test_the_commands_of_the_pages_run(python, tmp_path, pages):
    images = ["data=image_folder", "data.root=DIR", "data.image_size=32"] if pages[0] in EXTRAS else []
    lines = [line for page in pages for line in lines_of(page) if line[0] == "train.py" or page in EXTRAS]
    lines = [line for line in lines if "benchmarks" not in line[0] and "index_tars" not in line[0]]
    call(python, fork(tmp_path / "fork", *pages), ["train.py", *small([FIRST, *images])], *lines)


def test_the_snippet_of_the_readme_loads_batches():
    (snippet,) = [text for text in blocks(ROOT / "README.md", "python") if "from loaders" in text]
    steps: list[object] = []
    here = snippet.replace('device="cuda", depth=2', 'device="cpu", depth=0').replace("num_workers=8", "num_workers=1")
    exec(here, names := {"dataset": list(range(1000)), "step": steps.append})
    names["loader"].close()
    assert here != snippet and len(steps) == 4


@pytest.mark.skipif(len(EXTRAS) < 11, reason="an extra was deleted")
def test_the_tree_of_the_readme_counts_lines():
    tree = dict(re.findall(r"^(\w+)/ +([\d,]+)  ", (ROOT / "README.md").read_text(), re.MULTILINE))
    paths = [path for name in tree for kind in ("py", "sh") for path in (ROOT / name).rglob(f"*.{kind}")]
    found = dict.fromkeys(tree, 0)
    for path in paths:
        folders = path.relative_to(ROOT).parts
        found["tests" if "tests" in folders else folders[0]] += len(path.read_text().splitlines())
    assert found == {name: pytest.approx(int(lines.replace(",", "")), rel=0.1) for name, lines in tree.items()}
    assert len(tree) == 8


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


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_torchrun_as_on_the_pages(python, tmp_path):
    lines = [words[1:] for page in PAGES for words in commands(page) if words[0] == "torchrun"]
    assert lines
    for at, words in enumerate(lines):
        options = [word for word in words if word.startswith("--")]
        rest = small([word for word in words if word not in ("train.py", *options)])
        program = "import sys; from torch.distributed.run import main; main(sys.argv[1:])"
        lines[at] = ["-c", program, *options, "train.py", *rest, "device=cpu"]
    call(python, fork(tmp_path / "fork"), *lines)
