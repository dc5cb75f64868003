"""Every command and snippet of README.md, of docs/ and of the extras' pages runs, in a fork that has the snippets.

A snippet that begins with the line `# PATH` is a file of the fork. Commands run one after the other, with small
settings where they leave these open. Words in capital letters are names of folders, which the fork has.
"""

import re
import shlex
from importlib.util import find_spec

import numpy as np
import pytest

from tests.data.fakes import noise, write_images, write_table
from tests.infrastructure.forks import IS_OURS, ROOT, blocks, call, copy, snippets

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
OTHERS = [*sorted((ROOT / "loaders").glob("*.md")), ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
EXTRAS = sorted(path for path in ROOT.glob("extras/*/README.md"))
SMALL = [
    *("train.max_steps=2", "train.batch_size=16", "train.epochs=1", "train.eval_steps=2", "loader.num_workers=1"),
    *("train.num_threads=1", "callbacks.report.seconds=0", "train.warmup_epochs=0"),
]
FIRST = "hydra.run.dir=outputs/DATE_TIME"  # the run that others go on with
ELSEWHERE = (  # what a command needs that a test has not: it is only composed
    *("submitit_slurm", "ylecun/mnist", "data.path=NAME", "pretrained=true", "s3://", "data_bound", "data=webdataset"),
    *("data.path=FOLDER", "data=cifar10", "experiment=fashion_fast", "logger="),
)
NEEDS = {
    "hydra/sweeper=search": "optuna",
    "optim=timm": "timm",
    "optim=schedule_free": "schedulefree",
    "data.transform=[crop, flip, {_target_: albumentations.GaussianBlur, p: 0.5}]": "albumentations",
}
TORCHRUN = ["-c", "import sys; from torch.distributed.run import main; main(sys.argv[1:])"]
pytestmark = pytest.mark.skipif(not IS_OURS, reason="a fork's pages make promises of their own")
ALL_THERE = pytest.mark.skipif(len(EXTRAS) < 11, reason="an extra was deleted")


def commands(page):
    """The words of each command, of code blocks and of inline code that begins with `python`."""
    lines = [line for block in blocks(page, "bash") for line in block.splitlines()]
    lines += re.findall(r"`(python [^`\n]+)`", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL))
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def small(words):
    """The arguments of a command of train.py, with SMALL for what it leaves open."""
    if any(name in word for name in ELSEWHERE for word in words):
        return ["--cfg", "job", *(word for word in words if word not in ("-m", "...") and "," not in word)]
    without = {word.lstrip("+~").partition("=")[0] for word in words}
    if "train.resume" in without:
        without.add("callbacks.report.seconds")
    if "loader=torch" in words:
        without.add("loader.num_workers")
    left_open = [text for text in SMALL if text.partition("=")[0] not in without]
    return [*words, *left_open, *["data.root=PLANKTON"] * ("data=plankton" in words)]


def lines_of(page):
    """The page's commands as `call` runs them, without those of the shell."""
    lines = []
    for program, *words in commands(page):
        at = words.index("train.py") if "train.py" in words else None
        if program == "torchrun":
            lines.append([*TORCHRUN, *words[:at], "train.py", *small(words[at + 1 :]), "device=cpu"])
        elif any(word in words and find_spec(package) is None for word, package in NEEDS.items()):
            continue
        elif program == "python":
            lines.append(words if at is None else ["train.py", *small(words[1:])])
    return lines


def fork(folder, *pages):
    """A copy of the repository with the files of these pages and the folders that commands name."""
    copy(folder, files=snippets(*pages))
    write_images(folder / "DIR", count=20)
    write_table(folder / "DIR")
    for name in ("IMAGES", "photos"):
        (folder / name).symlink_to("DIR")
    (folder / "RUN").symlink_to("outputs/DATE_TIME")
    rows = [f"{path.relative_to(folder / 'DIR')},{path.parent.name}" for path in folder.glob("DIR/train/*/*.jpg")]
    (folder / "FILE.csv").write_text("\n".join(["file,species", *rows]))
    (folder / "PLANKTON").mkdir()
    for split in ("train", "test"):
        images = noise(32, 64, 64, 3)
        np.savez(folder / "PLANKTON" / f"{split}.npz", images=images, labels=np.arange(32) % 3)
    return folder


def test_the_extension_points_of_the_readme_work(python, tmp_path):
    readme = PAGES[0]
    overrides = ["model=flat", "'task.loss={_target_: torch.nn.MultiMarginLoss}'"]
    overrides += ["trainer._target_=my.steps.Consistent", "+callbacks.patience._target_=my.callbacks.Patience"]
    assert all(text in readme.read_text() for text in (*overrides, "conf/model/flat.yaml", "`_target_: my.net.flat`"))
    folder = fork(tmp_path / "fork", readme, ROOT / "docs" / "extending.md")
    (folder / "conf" / "model" / "flat.yaml").write_text("_target_: my.net.flat\n")
    given = ["data.val_fraction=0.1", *(shlex.split(text)[0] for text in overrides)]
    call(python, folder, ["train.py", *SMALL[:6], *given])


@ALL_THERE
@pytest.mark.slow  # tests/training has a test of what each of them does
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "pages", [PAGES[:1], PAGES[1:], *([page] for page in EXTRAS)], ids=lambda pages: pages[0].parent.name
)
def test_the_commands_of_the_pages_run(python, tmp_path, pages):
    images = ["data=image_folder", "data.root=DIR", "data.image_size=32"] if pages[0] in EXTRAS else []
    lines = [line for page in pages for line in lines_of(page) if "train.py" in line or page in EXTRAS]
    lines = [line for line in lines if "benchmarks" not in line[0] and "index_tars" not in line[0]]
    call(python, fork(tmp_path / "fork", *pages), ["train.py", *small([FIRST, *images])], *lines)


def test_the_snippet_of_the_readme_loads_batches():
    (snippet,) = [text for text in blocks(ROOT / "README.md", "python") if "from loaders" in text]
    steps = []
    here = snippet.replace('device="cuda", depth=2', 'device="cpu", depth=0').replace("num_workers=8", "num_workers=1")
    exec(here, names := {"dataset": list(range(1000)), "step": steps.append})
    names["loader"].close()
    assert here != snippet and len(steps) == 4


def test_the_snippet_that_trains_from_python_does(monkeypatch, tmp_path, capsys):
    (snippet,) = [text for text in blocks(ROOT / "docs" / "extending.md", "python") if "train_model" in text]
    here = snippet.replace('"train.epochs=1"', f'"model=linear", "callbacks/standard=[best]", *{SMALL[:5]}')
    monkeypatch.chdir(tmp_path)
    exec(here, {})
    assert here != snippet and len(capsys.readouterr().out.split()) == 2
    assert len(list(tmp_path.glob("outputs/*/summary.json"))) == 2


def test_the_tree_of_the_readme_names_what_is_there():
    tree = re.findall(r"^([a-z]+(?:/|[.]py))  +[a-z]", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert len(tree) == 10
    assert [name for name in tree if not (ROOT / name).exists() and name != "extras/"] == []


@pytest.mark.parametrize("page", [*PAGES, *OTHERS, *EXTRAS], ids=lambda p: str(p.relative_to(ROOT)))
def test_links_files_and_options_that_a_page_names_exist(page):
    links = [link for link in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()) if "://" not in link]
    assert [link for link in links if not is_there((page.parent / link).resolve())] == []
    for words in commands(page):
        for word in (one for one in words if re.fullmatch(r"(\./)?(scripts|extras|examples|tests)/[^*\s]+", one)):
            assert is_there(ROOT / word), word
            if word.endswith(".py") and (ROOT / word).exists():
                options = [one.partition("=")[0] for one in words if one.startswith("--")]
                assert all(option in (ROOT / word).read_text() for option in options), words


def is_there(path):
    """Whether the file exists, or belongs to an extra that was deleted."""
    parts = path.relative_to(ROOT).parts
    return path.exists() or (parts[0] == "extras" and not (ROOT / "extras" / parts[1]).exists())
