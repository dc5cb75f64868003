"""Is a run's verdict right? Runs train.py on cases whose bottleneck is known by construction, and compares.

python scripts/bench_verdict.py                        # thirteen cases; five minutes
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
import os
import shlex
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from data.errors import check_choice
from scripts.bench_harness import BenchError, Columns, Row, in_turns, parsed, report, run
from scripts.verdict_cases import CASES, HELD_OUT, Case, cases_of

REPOSITORY = Path(__file__).resolve().parent.parent
CORES = 2
CLOSE = 0.15  # how far an estimated gain may be from the measured one, as a share of the measured one
WHOLE_RUN = {"checkpoint", "evaluation", "start-up"}  # bottlenecks that images/s do not show
DATA_BOUND = {"reading", "loader"}  # those that more workers, other workers or another loader can remove
FAILED: Row = {"said": "failed", "try": "-", "estimated": None, "measured": None, "verdict": None}


def factor(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


COLUMNS: Columns = [
    *((key, key, str) for key in ("case", "truth", "said", "right", "try")),
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
        command = [sys.executable, *case.command(extra), f"hydra.run.dir={folder}"]
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
        return {**json.loads(Path(folder, "summary.json").read_text()), "seconds": seconds}


def gain(case: Case, before: dict[str, Any], after: dict[str, Any]) -> float:
    """How many times as fast the run `after` was, compared with the run `before`."""
    if case.truth in WHOLE_RUN:
        return float(before["seconds"] / after["seconds"])
    return float(after["images_per_second"] / before["images_per_second"])


def judged(case: Case, check: bool, with_gains: bool) -> Row:
    """Runs the case; to check it, without its bottleneck too; with gains, also what its verdict says to try."""
    summary = train(case, [])
    if check:
        return {"measured": gain(case, summary, train(case, case.without.split()))}
    advice = summary.get("try")
    measured = gain(case, summary, train(case, advice)) if advice and with_gains else None
    said = {"said": summary.get("bottleneck", "-"), "try": " ".join(advice) if advice else "-"}
    return {**said, "estimated": summary.get("gain"), "measured": measured, "verdict": summary.get("verdict")}


def bench(cases: dict[str, Case], repeat: int, check: bool, with_gains: bool) -> list[Row]:
    def measure(name: str) -> Row:
        try:
            return judged(cases[name], check, with_gains)
        except BenchError as error:  # go on with the other cases
            print(f"{name}: {error}", file=sys.stderr)
            return FAILED

    rows = in_turns(cases, measure, kind="case", rounds=repeat)
    for row in rows:
        case = cases[row["case"]]
        is_right = "-" if row.get("said") == "-" else "yes" if row.get("said") == case.truth else "NO"
        row |= {"truth": case.truth, "without": case.without, "least": case.speedup, "right": is_right}
    return rows


def totals(rows: list[Row]) -> str:
    """How many verdicts are right, and how many estimated gains are close to the measured ones."""
    right = sum(row["right"] == "yes" for row in rows)
    lines = [f"{right} of {len(rows)} verdicts name the bottleneck"]
    measured = [row for row in rows if row["truth"] in DATA_BOUND and row["measured"] is not None]
    if measured:
        close = sum(abs((row["estimated"] or 0) / row["measured"] - 1) <= CLOSE for row in measured)
        lines.append(f"{close} of {len(measured)} data-bound estimates are within {CLOSE:.0%} of the gain")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", help=f"names, separated by commas (all): {', '.join(cases_of(CASES))}")
    parser.add_argument("--held-out", action="store_true", help="the other ten cases")
    parser.add_argument("--gains", action="store_true", help="run what each verdict says to try, and compare the gain")
    parser.add_argument("--check", action="store_true", help="run each case with and without its bottleneck instead")
    parser.add_argument("--repeat", type=int, default=1, help="rounds, in which the cases take turns (1)")
    given = parsed(parser, arguments, positive=("repeat",))
    known = cases_of(HELD_OUT if given.held_out else CASES)
    names = given.cases.split(",") if given.cases else list(known)
    for name in names:
        check_choice("--cases", name, known, BenchError)

    cores = sorted(os.sched_getaffinity(0))[:CORES]
    if len(cores) < CORES:
        raise BenchError(f"the cases need {CORES} cores, and this process may use {len(cores)}")
    os.sched_setaffinity(0, cores)
    rows = bench({name: known[name] for name in names}, given.repeat, given.check, given.gains)
    title = f"{'held-out' if given.held_out else 'open'} cases on {CORES} cores, {given.repeat} rounds"
    report(title, CHECK_COLUMNS if given.check else COLUMNS, {"rows": rows}, given.json)
    if not given.check:
        print(f"\n{totals(rows)}")


if __name__ == "__main__":
    run(main)
