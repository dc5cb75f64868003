"""Between the command line and run(): names are checked first, errors end in a sentence, sweeps in a table.

A job that fails leaves error.txt in its folder and the others go on; the exit code is 1 if any failed. An expected
error (a setting, a file) is shown as one sentence; any other with its traceback. With HYDRA_FULL_ERROR=1 every
error is left to Hydra.
"""

from __future__ import annotations

import gc
import logging
import os
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from data.errors import DataError
from loaders.pools.results import WorkerFailure
from loaders.slots import MachineFull
from training.config import ConfigError, check_overrides
from training.files import write_whole
from training.sweep import format_report, write_report

log = logging.getLogger(__name__)

EXPECTED = (ConfigError, DataError, WorkerFailure, MachineFull)


class Launcher:
    """Runs jobs for Hydra and remembers which failed and which sweep they belong to."""

    def __init__(self, run: Callable[[DictConfig], object]) -> None:
        self._run = run
        self._failed = False
        self._sweep: Path | None = None

    def job(self, cfg: DictConfig) -> None:
        """Hydra's task function: a job of a sweep, or the only one."""
        hydra = HydraConfig.get()
        folder = Path(hydra.runtime.output_dir)
        for outcome in ("error.txt", "summary.json"):  # of an earlier run in the same folder
            (folder / outcome).unlink(missing_ok=True)
        if hydra.mode == RunMode.MULTIRUN:
            self._sweep = folder.parent
        try:
            self._run(cfg)
        except Exception as error:
            if full_errors():
                raise
            self._failed = True
            self._report(error, folder)
        finally:
            gc.collect()  # the next job starts without this one's memory
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            self._update_sweep()

    def launch(self, main: Callable[[], None], conf: Path) -> None:
        """Checks the command line, runs Hydra's main, prints a sweep's table, exits with 0, 1 or 130 (Ctrl-C)."""
        try:
            check_overrides(sys.argv[1:], conf)
            main()
        except ConfigError as error:
            sys.exit(f"error: {error}")
        except KeyboardInterrupt:
            self._print_sweep()
            print("interrupted", file=sys.stderr)
            sys.exit(130)
        self._print_sweep()
        sys.exit(1 if self._failed else 0)

    def _report(self, error: Exception, folder: Path) -> None:
        sentence = sentence_of(error)
        write_whole(folder / "error.txt", sentence + "\n")
        if isinstance(error, EXPECTED):
            log.error("error: %s", sentence)
        else:
            log.error("".join(traceback.format_exception(error)))

    def _update_sweep(self) -> None:
        if self._sweep is not None:
            try:
                write_report(self._sweep)
            except (OSError, ValueError) as error:  # the other jobs are worth more than the table
                log.warning("the sweep's report could not be written: %s", error)

    def _print_sweep(self) -> None:
        if self._sweep is not None:
            print(format_report(self._sweep))


def sentence_of(error: Exception) -> str:
    """The error in one sentence; of one that a worker process raised, what it said there."""
    kind = type(error).__name__
    message = re.split(rf"\n(?:[\w.]+\.)?{kind}: ", str(error))[-1].strip()
    if isinstance(error, EXPECTED):
        return message
    return f"{kind}: {message}" if message else kind


def full_errors() -> bool:
    return os.environ.get("HYDRA_FULL_ERROR") == "1"
