"""Is a run's verdict right? Runs train.py on cases whose bottleneck is known by construction, and compares.

python scripts/bench_verdict.py                        # the cases of verdict_cases.py; five minutes
python scripts/bench_verdict.py --held-out --gains     # ten others; runs what each verdict says to try, too
python scripts/bench_verdict.py --check                # the cases themselves: how much faster without the bottleneck?

Each case runs on two cores, so that its bottleneck does not depend on the machine: the first two that this process
may use (`taskset -c` chooses others). They must be idle: another program on them changes the bottleneck. A gain
compares the images/s of two runs; where the bottleneck lies outside of training, the times of the whole runs, imports
included. Cases take turns; with --repeat the figures are medians. A verdict whose advice makes train.py fail is wrong.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import yaml
from tqdm import tqdm

from data.errors import check_choice
from scripts.bench_harness import BenchError, Columns, Row, parsed, report, run
from scripts.verdict_cases import CASES, Case

REPOSITORY = Path(__file__).resolve().parent.parent
CORES = 2
CLOSE = 0.15  # how far an estimated gain may be from the measured one, as a share of the measured one
FAILED: Row = {"said": "failed", "try": "-", "estimated": None, "measured": None, "seconds": None, "verdict": None}
WHOLE_RUN = {"checkpoint", "evaluation", "start-up"}  # bottlenecks that images/s do not show


def factor(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


COLUMNS: Columns = [
    ("case", "case", str),
    ("truth", "truth", str),
    ("said", "said", str),
    ("right", "right", str),
    ("try", "try", str),
    ("estimated", "estimated gain", factor),
    ("measured", "measured gain", factor),
]
CHECK_COLUMNS: Columns = [
    ("case", "case", str),
    ("truth", "truth", str),
    ("without", "without it", str),
    ("measured", "times as fast", factor),
    ("least", "at least", factor),
]


def train(case: Case, extra: list[str]) -> dict[str, Any]:
    """Runs train.py on the case with further overrides. Returns its summary and "seconds", the whole run's time.

    Raises BenchError with the end of the log if it fails.
    """
    with tempfile.TemporaryDirectory() as folder, ExitStack() as others:
        for _ in range(case.others):
            others.callback(subprocess.Popen([sys.executable, "-c", "while True: pass"]).kill)
        write_config(case, Path(folder, "conf"))
        command = [sys.executable, "train.py", "--config-dir", f"{folder}/conf", f"hydra.run.dir={folder}/run"]
        command += ["device=cpu", "data=constructed", f"model={case.model.get('of', 'constructed')}"]
        command += [*shlex.split(case.overrides), *extra]
        environment = {**os.environ, "OMP_NUM_THREADS": str(CORES)}
        began = time.perf_counter()
        try:
            done = subprocess.run(
                command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=300, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise BenchError(f"{shlex.join(command)} is still running after 300 s") from error
        seconds = time.perf_counter() - began
        if done.returncode:
            raise BenchError(f"{shlex.join(command)} failed: {(done.stdout + done.stderr)[-2000:]}")
        summary: dict[str, Any] = json.loads(Path(folder, "run", "summary.json").read_text())
    return {**summary, "seconds": seconds}


def write_config(case: Case, folder: Path) -> None:
    """Writes the case's dataset and model as choices of the config groups data and model.

    Images are so small that torch runs the transform in one thread: several would spin for a while after their work.
    """
    parts = {"data": {"test_length": 256, "image_size": 8, **case.data}, "model": {"of": "Timed", **case.model}}
    for group, part in parts.items():
        content = {"_target_": f"scripts.verdict_parts.{part.pop('of')}", **part}
        (folder / group).mkdir(parents=True)
        (folder / group / "constructed.yaml").write_text(yaml.safe_dump(content))


def gain(case: Case, before: dict[str, Any], after: dict[str, Any]) -> float:
    """How many times as fast the run `after` was, compared with the run `before`."""
    if case.truth & WHOLE_RUN:
        return float(before["seconds"] / after["seconds"])
    return float(after["images_per_second"] / before["images_per_second"])


def judged(case: Case, with_gains: bool) -> Row:
    """Runs the case; with gains, also the overrides that its verdict says to try, if any."""
    summary = train(case, [])
    advice = summary.get("try")
    tried = train(case, advice) if advice and with_gains else None
    return {
        "said": summary.get("bottleneck", "-"),
        "try": " ".join(advice) if advice else "-",
        "estimated": summary.get("gain"),
        "measured": tried and gain(case, summary, tried),
        "seconds": summary["seconds"],
        "verdict": summary.get("verdict"),
    }


def checked(case: Case) -> Row:
    """Runs the case with and without its bottleneck."""
    summary, without = train(case, []), train(case, shlex.split(case.without))
    return {"measured": gain(case, summary, without), "seconds": summary["seconds"]}


def typical(values: list[Any]) -> Any:
    """The median of numbers or the most frequent of strings, without those that are None."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    return statistics.mode(known) if isinstance(known[0], str) else statistics.median(known)


def bench(cases: dict[str, Case], repeat: int, check: bool, with_gains: bool) -> list[Row]:
    rounds: dict[str, list[Row]] = {name: [] for name in cases}
    with tqdm(total=repeat * len(cases), unit="case", leave=False, disable=None) as bar:
        for _ in range(repeat):
            for name, case in cases.items():
                bar.set_description(name)
                try:
                    rounds[name].append(checked(case) if check else judged(case, with_gains))
                except BenchError as error:  # go on with the other cases
                    tqdm.write(f"{name}: {error}", file=sys.stderr)
                    rounds[name].append(FAILED)
                bar.update()
    rows = []
    for name, case in cases.items():
        row = {key: typical([one.get(key) for one in rounds[name]]) for key in rounds[name][0]}
        row |= {
            "case": name,
            "truth": " | ".join(sorted(case.truth)),
            "without": case.without,
            "least": case.speedup,
        }
        if not check:
            row["right"] = "-" if row["said"] == "-" else "yes" if row["said"] in case.truth else "NO"
        rows.append(row)
    return rows


def totals(rows: list[Row], cases: dict[str, Case]) -> str:
    """How many verdicts are right, and how many estimated gains are close to the measured ones."""
    right = sum(row["right"] == "yes" for row in rows)
    lines = [f"{right} of {len(rows)} verdicts name the bottleneck"]
    measured = [row for row in rows if cases[row["case"]].is_data_bound and row["measured"] is not None]
    if measured:
        close = sum(is_close(row["estimated"], row["measured"]) for row in measured)
        lines.append(f"{close} of {len(measured)} data-bound estimates are within {100 * CLOSE:.0f} % of the gain")
    return "\n".join(lines)


def is_close(estimated: float | None, measured: float) -> bool:
    return estimated is not None and math.isclose(estimated, measured, rel_tol=0, abs_tol=CLOSE * measured)


def chosen(names: str | None, held_out: bool) -> dict[str, Case]:
    cases = CASES
    if held_out:
        from scripts.verdict_cases_held_out import CASES as cases
    for name in (given := names.split(",") if names else list(cases)):
        check_choice("--cases", name, cases, BenchError)
    return {name: cases[name] for name in given}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", help=f"names, separated by commas (all): {', '.join(CASES)}")
    parser.add_argument("--held-out", action="store_true", help="the other ten cases")
    parser.add_argument("--gains", action="store_true", help="run what each verdict says to try, and compare the gain")
    parser.add_argument("--check", action="store_true", help="run each case with and without its bottleneck instead")
    parser.add_argument("--repeat", type=int, default=1, help="rounds, in which the cases take turns (1)")
    given = parsed(parser, arguments, positive=("repeat",))
    cases = chosen(given.cases, given.held_out)

    cores = sorted(os.sched_getaffinity(0))[:CORES]
    if len(cores) < CORES:
        raise BenchError(f"the cases need {CORES} cores, and this process may use {len(cores)}")
    os.sched_setaffinity(0, cores)
    rows = bench(cases, given.repeat, given.check, given.gains)
    title = f"{'held-out' if given.held_out else 'open'} cases on {CORES} cores, {given.repeat} rounds"
    report(title, CHECK_COLUMNS if given.check else COLUMNS, {"rows": rows}, given.json)
    if not given.check:
        print(f"\n{totals(rows, cases)}")


if __name__ == "__main__":
    run(main)
