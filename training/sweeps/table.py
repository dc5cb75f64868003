"""SweepTable: writes a sweep's report after each job, and prints it at the end of the sweep.

Hydra's callback in conf/callbacks/standard/sweep.yaml.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from hydra.types import RunMode

from training.launch import SweepStart
from training.sweeps.sweep import Sweep, write_report

log = logging.getLogger(__name__)


class SweepTable(Callback):
    """Writes sweep.csv, sweep.md and sweep.png into the sweep's folder."""

    def on_multirun_start(self, config: Any, **_: Any) -> None:
        SweepStart.at_end.append(print_sweep)

    def on_job_end(self, config: Any, job_return: Any, **_: Any) -> None:
        if config.hydra.mode == RunMode.MULTIRUN:
            try:
                write_report(Path(config.hydra.runtime.output_dir).parent)
            except Exception as error:  # the other jobs matter more than the report
                log.warning("the sweep's report could not be written: %s", error)


def print_sweep(folder: Path) -> None:
    """Writes a sweep's report and prints it."""
    with suppress(ValueError):  # no job has started
        write_report(folder)
        print(Sweep(folder).text())
