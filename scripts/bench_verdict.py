"""Is a run's verdict right? Runs train.py on cases whose bottleneck is known by construction, and compares.

python scripts/bench_verdict.py            # ten cases; four minutes
python scripts/bench_verdict.py --gains    # also runs what each verdict says to try, and compares the images/s

Each case runs on two cores, so that its bottleneck does not depend on the machine: the first two that this process
may use (`taskset -c` chooses others). They must be idle: another program on them changes the bottleneck.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.bench_harness import BenchError, Columns, chosen, parsed, report, run
from scripts.verdict_cases import cases

ROOT = Path(__file__).resolve().parents[1]
CORES = 2
COLUMNS: Columns = [
    *((key, key, str) for key in ("case", "truth", "said", "right", "try")),
    *((f"{kind}_gain", f"{kind} gain", lambda gain: f"{gain:.2f}" if gain else "-") for kind in ("said", "measured")),
]


def train(overrides: list[str]) -> dict[str, Any]:
    """Runs train.py. Returns the run's summary. Raises BenchError with the end of the log if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "train.py", *overrides, f"hydra.run.dir={folder}"]
        environment = {**os.environ, "OMP_NUM_THREADS": str(CORES)}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise BenchError(f"{shlex.join(command)} failed: {(done.stdout + done.stderr)[-2000:]}")
        return json.loads(Path(folder, "summary.json").read_text())


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", help=f"names, separated by commas (all): {', '.join(cases())}")
    parser.add_argument("--gains", action="store_true", help="run what each verdict says to try, and compare the gain")
    given = parsed(parser, arguments)
    names = chosen("--cases", given.cases, cases())

    cores = sorted(os.sched_getaffinity(0))[:CORES]
    if len(cores) < CORES:
        raise BenchError(f"the cases need {CORES} cores, and this process may use {len(cores)}")
    os.sched_setaffinity(0, cores)
    rows = []
    for name in names:
        truth, overrides = cases()[name]
        before = train(overrides)
        said, advice = before.get("bottleneck") or "-", before.get("try") or []
        row = {"case": name, "truth": truth, "said": said, "right": "yes" if said == truth else "NO"}
        row |= {"try": " ".join(advice) or "-", "said_gain": before.get("gain"), "measured_gain": None}
        if advice and given.gains:
            row["measured_gain"] = train([*overrides, *advice])["images_per_second"] / before["images_per_second"]
        rows.append(row)
    report(f"cases on {CORES} cores", COLUMNS, {"rows": rows}, given.json)
    print(f"\n{sum(row['right'] == 'yes' for row in rows)} of {len(rows)} verdicts name the bottleneck")


if __name__ == "__main__":
    run(main)
