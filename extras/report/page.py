"""The page of a run: report.html, made of what is in its folder. To make it again, such as after evaluate.py:

    python extras/report/page.py outputs/2026-11-21_10-00-00_123456

Promise: it stays under 2 MB and takes less than half a second, however long the run was.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import yaml

from extras.report.curves import charts_of, number
from scripts.command import parser, run_script
from training.config import ConfigError
from training.page import embedded, write_page

TEMPLATE = Path(__file__).with_name("report.html")
PATTERNS = ("*.png", "*/*.png", "evaluation/*/*.png")  # where pictures are in a run's folder
MOST_PICTURES = 8
MOST_BYTES = 1_000_000  # size of all pictures; further ones are only named
MOST_LINES = 2000  # training steps that are read from metrics.jsonl
MOST_WARNINGS = 20
LOG_BYTES = 2_000_000  # size of the end of train.log that is searched for warnings
ENTRY = re.compile(r"^\[[^]]+\]\[(?P<name>[^]]+)\]\[(?P<level>\w+)\] - (?P<text>.*)")


def write(folder: Path, facts: dict[str, Any], status: str) -> None:
    """Writes report.html. facts: entries of summary.json, as far as they are known. status: such as "running"."""
    overrides = folder / ".hydra" / "overrides.yaml"
    first_batch = folder / "first_batch.json"
    rows = metrics(folder / "metrics.jsonl")
    pictures, named = pictures_in(folder)
    write_page(
        folder / "report.html",
        TEMPLATE,
        title=folder.resolve().name,
        status=status,
        facts=facts,
        last={name: value for row in rows for name, value in row.items()} | facts,
        number=number,
        charts=charts_of(rows),
        first_batch=json.loads(first_batch.read_text()) if first_batch.exists() else None,
        pictures=pictures,
        named=named,
        overrides=yaml.safe_load(overrides.read_text()) if overrides.exists() else [],
        warnings=warnings_of(folder / "train.log"),
    )


def metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl: all of evaluations, and up to MOST_LINES of training."""
    if not path.exists():
        return []
    lines = [line for line in path.read_text(errors="replace").splitlines() if line.endswith("}")]
    training = [line for line in lines if '"lr"' in line]
    stride = 1 + len(training) // MOST_LINES
    left_out = set(training) - set(training[::-1][::stride])
    return [json.loads(line) for line in lines if line not in left_out]


def pictures_in(folder: Path) -> tuple[list[dict[str, str]], list[str]]:
    """The newest pictures in the folder, and the names of those that are too large."""
    files = [path for pattern in PATTERNS for path in folder.glob(pattern)]
    newest = sorted(files, key=lambda path: path.stat().st_mtime)[-MOST_PICTURES:]
    pictures = list[dict[str, str]]()
    named = list[str]()
    left = MOST_BYTES
    for path in newest:
        name = str(path.relative_to(folder))
        size = path.stat().st_size
        if size > left:
            named.append(name)
        else:
            left -= size
            pictures.append({"name": name, "source": embedded(path.read_bytes())})
    return pictures, named


def warnings_of(path: Path) -> list[str]:
    """The last warnings and errors of a log, without their tracebacks, each once."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - LOG_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
    entries = filter(None, map(ENTRY.match, lines))
    texts = [f"{entry['name']}: {entry['text']}" for entry in entries if entry["level"] not in ("INFO", "DEBUG")]
    return [*dict.fromkeys(texts)][-MOST_WARNINGS:]


def main(arguments: list[str]) -> None:
    options = parser(__doc__)
    options.add_argument("run", type=Path, help="the folder of a run")
    folder = options.parse_args(arguments).run
    if not (folder / "metrics.jsonl").exists():
        raise ConfigError(f"{folder} is not the folder of a run that has trained: it has no metrics.jsonl")
    summary = folder / "summary.json"
    facts = json.loads(summary.read_text()) if summary.exists() else {}
    write(folder, facts, "finished" if facts else "not finished")
    print(folder / "report.html")


if __name__ == "__main__":
    run_script(lambda: main(sys.argv[1:]))
