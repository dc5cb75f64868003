"""The page of a run: report.html, made of what is in its folder. To make it again, such as after evaluate.py:

    python extras/report/page.py outputs/2026-11-21_10-00-00_123456

Promise: it stays under 2 MB and takes less than half a second, however long the run was.
"""

from __future__ import annotations

import io
import re
import shlex
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import yaml
from PIL import Image

from extras.report.curves import charts_of, number
from training.command_line import COMMAND
from training.config import ConfigError
from training.files import line_of, read_json
from training.page import embedded, write_page
from training.script import parser, run_script

TEMPLATE = Path(__file__).with_name("report.html")
PATTERNS = ("*.png", "*/*.png", "evaluation/*/*.png")  # where pictures are in a run's folder
MOST_PICTURES = 8
MOST_BYTES = 1_000_000  # size of all pictures; further ones are only named
LARGE = 200_000  # bytes of a picture from which on it is shown as a JPEG, as photographs in a PNG take megabytes
MOST_LARGE = 5_000_000  # bytes of all large pictures that are opened, which takes 0.4 seconds
MOST_LINES = 2000  # training steps that are read from metrics.jsonl
MOST_WARNINGS = 20
LOG_BYTES = 2_000_000  # size of the end of train.log that is searched for warnings
ENTRY = re.compile(r"^\[[^]]+\]\[[^]]+\]\[(?P<level>\w+)\] - (?P<text>.*)")


def write(folder: Path, facts: dict[str, Any], status: str) -> None:
    """Writes report.html. facts: entries of summary.json, as far as they are known. status: such as "running"."""
    typed = folder / COMMAND
    overrides = yaml.safe_load(typed.read_text())["overrides"] if typed.exists() else []
    first_batch = json_of(folder / "first_batch.json")
    errors = [facts["error"]] if "error" in facts else []
    rows = metrics(folder / "metrics.jsonl")
    pictures, named = pictures_in(folder)
    write_page(
        folder / "report.html",
        TEMPLATE,
        title="/".join(folder.resolve().parts[-2:]),
        status=status,
        facts=facts,
        last={name: value for row in rows for name, value in row.items()} | facts,
        number=number,
        charts=charts_of(rows),
        first_batch=first_batch,
        pictures=pictures,
        named=named,
        command=shlex.join(["python", "train.py", *overrides]),
        warnings=dict.fromkeys([*errors, *first_batch.get("warnings", []), *warnings_of(folder / "train.log")]),
    )


def json_of(path: Path) -> dict[str, Any]:
    """The content of a file; empty if there is no file."""
    return read_json(path) if path.exists() else {}


def metrics(path: Path) -> list[dict[str, Any]]:
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
            pictures.append({"name": name, "source": embedded(content, kind)})
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
    """The last warnings and errors of a log, without their tracebacks, each once."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - LOG_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
    entries = filter(None, map(ENTRY.match, lines))
    texts = [entry["text"] for entry in entries if entry["level"] not in ("INFO", "DEBUG")]
    return [*dict.fromkeys(texts)][-MOST_WARNINGS:]


def main(arguments: list[str]) -> None:
    options = parser(__doc__)
    options.add_argument("run", type=Path, help="the folder of a run")
    folder = options.parse_args(arguments).run
    if not (folder / "metrics.jsonl").exists():
        raise ConfigError(f"{folder} is not the folder of a run that has trained: it has no metrics.jsonl")
    facts = json_of(folder / "summary.json")
    write(folder, facts, "finished" if facts else "not finished")
    print(folder / "report.html")


if __name__ == "__main__":
    run_script(lambda: main(sys.argv[1:]))
