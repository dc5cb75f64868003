"""The page of a run: report.html, made of what is in its folder. To make it again:

    python extras/report/page.py outputs/2026-11-21_10-00-00_123456

Promise: it stays under 2 MB and takes less than half a second, however long the run was.
"""

import io
import json
import re
import shlex
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from PIL import Image

from extras.report.curves import charts_of, number
from training.checkpoint import file_of, step_files
from training.command_line import earlier_command, value_of
from training.config import ROOT, ConfigError
from training.files import line_of, read_json
from training.look import embedded, write_page
from training.script import parser, run_script

TEMPLATE = Path(__file__).with_name("report.html")
FACTS = "report.json"  # in a run's folder: what the page says that no other file has
PATTERNS = ("*.png", "*/*.png", "evaluation/*/*.png")  # where pictures are in a run's folder
MOST_PICTURES = 8
MOST_BYTES = 1_000_000  # size of all pictures; further ones are only named
LARGE = 200_000  # bytes of a picture from which on it is shown as a JPEG, as photographs in a PNG take megabytes
MOST_LARGE = 5_000_000  # bytes of all large pictures that are opened, which takes 0.4 seconds
MOST_LINES = 2000  # training steps that are read from metrics.jsonl
MOST_BOXES = 20  # of warnings
ALIKE = 30  # characters, but for numbers, that the beginnings of the warnings in a box have in common
MOST_ALIKE = 3  # that a box shows
LOG_BYTES = 2_000_000  # size of the end of train.log that is searched for warnings
ENTRY = re.compile(r"^\[[^]\n]+\]\[[^]\n]+\]\[(\w+)\] - ", re.MULTILINE)  # where an entry of the log begins
TRACEBACK = "\nTraceback (most recent call last):"

Facts = dict[str, Any]  # what is known about a run, or about a step of it, by name


def write(folder: Path, by_run: bool = False) -> None:
    """Writes report.html. by_run: the run itself does, so that it is known to be alive.

    Runs of before there was a report.json have summary.json and first_batch.json.
    """
    facts = json_of(folder / "summary.json") | json_of(folder / FACTS)
    if "first_batch" not in facts:
        facts["first_batch"] = json_of(folder / "first_batch.json")
    if not by_run and facts.get("status", "").startswith("running"):
        facts["status"] = f"last written while {facts['status']}"
    rows = metrics(folder / "metrics.jsonl")
    errors = [facts["error"]] if "error" in facts else []
    warnings = dict.fromkeys([*errors, *facts.get("warnings", []), *warnings_of(folder / "train.log")])
    pictures, named = pictures_in(folder)
    write_page(
        folder / "report.html",
        TEMPLATE,
        title="/".join(folder.resolve().parts[-2:]),
        facts=facts,
        last={name: value for row in rows for name, value in row.items()} | facts,
        best=best_of(folder, rows, facts.get("score", "")),
        evaluations=evaluations_in(folder),
        seconds=seconds_of(facts),
        number=number,
        duration=duration,
        dumps=json.dumps,
        charts=charts_of(rows),
        pictures=pictures,
        named=named,
        commands=commands_of(folder, facts),
        warnings=len(warnings),
        boxes=boxes_of(warnings),
        most_boxes=MOST_BOXES,
    )


def best_of(folder: Path, rows: list[Facts], score: str) -> Facts | None:
    """The line of the evaluation whose checkpoint is best.pt, with the file's name; None if there is none."""
    file = (folder / "checkpoints" / "best.pt").resolve().name  # a link
    lines = [row for row in rows if row.get(score) is not None and file_of(row["step"]) == file]
    return {**lines[-1], "file": file} if lines else None


def evaluations_in(folder: Path) -> dict[str, Facts]:
    """What evaluate.py has written about each split, by the folder in which it is."""
    paths = sorted(folder.glob("evaluation/*/evaluation.json"))
    return {str(path.parent.relative_to(folder)): read_json(path) for path in paths}


def seconds_of(facts: Facts) -> float:
    """How long the run has taken, with its parts before a resume in the same folder."""
    return float(facts.get("earlier_seconds", 0.0) + sum(facts.get("phase_seconds", {}).values()))


def duration(seconds: float) -> str:
    """Such as "2 h 5 min", "3 min 20 s" or "12.3 s"."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, of_hour = divmod(minutes, 60)
    return f"{hours} h {of_hour} min" if hours else f"{minutes} min {rest} s"


def commands_of(folder: Path, facts: Facts) -> dict[str, str]:
    """Commands to paste in the repository's folder, by what they do."""
    command: dict[str, list[str]] = {"flags": [], "overrides": []}
    with suppress(ConfigError):  # a run that no command line has begun
        command = earlier_command(folder)
    flags = [flag for flag in command["flags"] if flag != "--config-name=config"]  # which is the default
    path = folder.resolve()
    processes = facts.get("processes", 1)
    train = ["python", "train.py"] if processes == 1 else ["torchrun", f"--nproc-per-node={processes}", "train.py"]
    resume = [*train, f"train.resume={value_of(path)}"]
    if facts.get("status") == "finished" and "planned_epochs" in facts:
        resume.append(f"train.epochs={2 * facts['planned_epochs']}")
    again = [*train, *flags, *command["overrides"]]
    commands = {"Train again": again}
    if step_files(folder / "checkpoints"):
        if "planned_epochs" in facts or not (folder / "summary.json").exists():  # else more epochs are needed
            commands["Resume"] = resume
        for name, arguments in {"evaluate": [], "predict": ["IMAGES"]}.items():
            program = f"extras/finished/{name}.py"
            if (ROOT / program).exists():
                commands[name.capitalize()] = ["python", program, str(path), *arguments]
    return {name: shlex.join(words) for name, words in commands.items()}


def json_of(path: Path) -> Facts:
    """The content of a file; empty if there is no file."""
    return read_json(path) if path.exists() else {}


def metrics(path: Path) -> list[Facts]:
    """The lines of metrics.jsonl: all of evaluations, and up to MOST_LINES of training. A damaged line is left out."""
    if not path.exists():
        return []
    lines = path.read_text(errors="replace").splitlines()
    training = [line for line in lines if '"lr"' in line]
    stride = 1 + len(training) // MOST_LINES
    left_out = set(training) - set(training[::-1][::stride])
    rows = [line_of(line) for line in lines if line not in left_out]
    return [row for row in rows if "step" in row]


def pictures_in(folder: Path) -> tuple[list[dict[str, str]], list[str]]:
    """The newest pictures in the folder, and the names of those that are not shown."""
    files = [path for pattern in PATTERNS for path in folder.glob(pattern)]
    newest = sorted(files, key=lambda path: path.stat().st_mtime)[-MOST_PICTURES:]
    pictures = list[dict[str, str]]()
    named = list[str]()
    left = MOST_BYTES
    left_to_open = MOST_LARGE
    for path in newest:
        name = str(path.relative_to(folder))
        size = path.stat().st_size
        kind = "png" if size < LARGE else "jpeg"
        content = b""
        if kind == "png":
            content = path.read_bytes()
        elif size <= left_to_open:
            left_to_open -= size
            content = as_jpeg(path)
        if 0 < len(content) <= left:
            left -= len(content)
            pictures.append({"name": name, "folder": str(Path(name).parent), "source": embedded(content, kind)})
        else:
            named.append(name)
    return pictures, named


def as_jpeg(path: Path) -> bytes:
    """The picture as a JPEG; empty if it is damaged."""
    file = io.BytesIO()
    with suppress(OSError), Image.open(path) as picture:
        picture.convert("RGB").save(file, "jpeg", quality=85)
    return file.getvalue()


def warnings_of(path: Path) -> list[str]:
    """The warnings and errors of a log, without their tracebacks."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - LOG_BYTES))
        _, *parts = ENTRY.split(file.read().decode(errors="replace"))
    entries = zip(parts[::2], parts[1::2], strict=True)  # their levels and texts
    return [text.partition(TRACEBACK)[0].strip() for level, text in entries if level not in ("INFO", "DEBUG")]


def boxes_of(warnings: Iterable[str]) -> list[str]:
    """The texts of the boxes: warnings that begin alike, such as those of files that cannot be read, are one text."""
    alike: dict[str, list[str]] = {}
    for text in warnings:
        alike.setdefault(re.sub(r"\d+", "", text)[:ALIKE], []).append(text)
    boxes = []
    for texts in alike.values():
        count = len(texts)
        first = [f"{count} warnings that begin alike:"] if count > 1 else []
        last = ["... train.log has all"] if count > MOST_ALIKE else []
        boxes.append("\n".join([*first, *texts[:MOST_ALIKE], *last]))
    return boxes


def main(typed: list[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument("run", type=Path, help="the folder of a run")
    folder = options.parse_args(typed).run
    if not (folder / "metrics.jsonl").exists():
        raise ConfigError(f"{folder} is not the folder of a run that has trained: it has no metrics.jsonl")
    write(folder)
    print(folder / "report.html")


if __name__ == "__main__":
    run_script(main)
