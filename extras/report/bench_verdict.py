"""Is a run's verdict right? Runs train.py on cases whose bottleneck is known by construction, and compares.

python scripts/bench_verdict.py            # ten cases; four minutes
python scripts/bench_verdict.py --gains    # also runs what each verdict says to try, and compares the images/s

Each case runs on two cores, so that its bottleneck does not depend on the machine: the first two that this process
may use (`taskset -c` chooses others). They must be idle: another program on them changes the bottleneck.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.bench_harness import Columns, chosen, parser, report
from scripts.command import run_script
from scripts.verdict_cases import cases
from training.config import ConfigError

ROOT = Path(__file__).resolve().parents[1]
CORES = 2
COLUMNS: Columns = [
    *((key, key, "{}") for key in ("case", "truth", "said", "right", "try")),
    *((f"{kind}_gain", f"{kind} gain", "{:.2f}") for kind in ("said", "measured")),
]


def train(overrides: list[str]) -> dict[str, Any]:
    """Runs train.py. Returns the run's summary. Raises ConfigError with the end of the log if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "train.py", *overrides, f"hydra.run.dir={folder}"]
        environment = {**os.environ, "OMP_NUM_THREADS": str(CORES)}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise ConfigError(f"{shlex.join(command)} failed: {(done.stdout + done.stderr)[-2000:]}")
        return json.loads(Path(folder, "summary.json").read_text())


def main(arguments: list[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument("--cases", help=f"names, separated by commas (all): {', '.join(cases())}")
    options.add_argument("--gains", action="store_true", help="run what each verdict says to try, and compare them")
    given = options.parse_args(arguments)
    names = chosen("--cases", given.cases, cases())

    cores = sorted(os.sched_getaffinity(0))[:CORES]
    if len(cores) < CORES:
        raise ConfigError(f"the cases need {CORES} cores, and this process may use {len(cores)}")
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
    right = f"{sum(row['right'] == 'yes' for row in rows)} of {len(rows)} verdicts name the bottleneck"
    report(f"cases on {CORES} cores", COLUMNS, {"rows": rows}, given.json, right)


if __name__ == "__main__":
    run_script(main)
