"""What happens between the command line and run(): checks before, error messages and the sweep's table after.

A job that fails writes error.txt into its folder, the other jobs of the sweep go on, and the exit code is 1. An error
about a setting, a file or the machine is shown as one sentence, any other with its traceback. With HYDRA_FULL_ERROR=1
Hydra shows every error itself.
"""

from __future__ import annotations

import gc
import logging
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from data.errors import DataError
from loaders import LoaderConfigError, MachineFull, WorkerFailure
from training.config import ConfigError, check_overrides, full_errors
from training.files import write_whole
from training.sweep import Sweep, write_report

log = logging.getLogger(__name__)

EXPECTED = (ConfigError, DataError, LoaderConfigError, MachineFull, WorkerFailure, torch.OutOfMemoryError)


class Launcher:
    """Runs jobs for Hydra, and remembers whether one failed and which sweep they belong to."""

    def __init__(self, run: Callable[[DictConfig, Path], object]) -> None:
        self._run, self._failed = run, False
        self._sweep: Path | None = None

    def job(self, cfg: DictConfig) -> None:
        """Hydra's task function: runs a job of a sweep, or the only job."""
        hydra = HydraConfig.get()
        folder = Path(hydra.runtime.output_dir)
        for outcome in ("error.txt", "summary.json"):  # of an earlier run in the same folder
            (folder / outcome).unlink(missing_ok=True)
        if hydra.mode == RunMode.MULTIRUN:
            self._sweep = folder.parent
        try:
            self._run(cfg, folder)
        except Exception as error:
            if full_errors():
                raise
            self._failed, sentence = True, sentence_of(error)
            write_whole(folder / "error.txt", sentence + "\n")
            log.error("error: %s", sentence, exc_info=not is_expected(error))
        finally:
            gc.collect()  # so that the next job has this one's memory
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            if self._sweep is not None:
                try:
                    write_report(self._sweep)
                except Exception as error:  # the other jobs matter more than the report
                    log.warning("the sweep's report could not be written: %s", error)

    def launch(self, main: Callable[[], None], conf: Path) -> None:
        """Checks the command line, runs Hydra's main, prints a sweep's table, exits with 0, 1 or 130 (Ctrl-C)."""
        code: int | str = 0
        try:
            check_single_process()
            check_overrides(sys.argv[1:], conf)
            main()
        except ConfigError as error:
            code = f"error: {error}"
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            code = 130
        if self._sweep is not None:
            print(Sweep(self._sweep).text())
        sys.exit(code or int(self._failed))


def check_single_process() -> None:
    """Raises ConfigError if torchrun started several processes: each would train alone, on all of the data."""
    processes = os.environ.get("WORLD_SIZE", "1")
    if processes.isdecimal() and int(processes) > 1:
        raise ConfigError(
            f"WORLD_SIZE={processes}: train.py cannot run in several processes yet: start it without torchrun"
        )


def is_expected(error: BaseException) -> bool:
    """Whether the error is about a setting, a file or the machine, so that its sentence says all that is needed."""
    return isinstance(error, EXPECTED)


def sentence_of(error: Exception) -> str:
    """The error in one sentence. If a worker process raised it, the sentence that it had there."""
    kind = type(error).__name__
    message = re.split(rf"\n(?:[\w.]+\.)?{kind}: ", str(error))[-1].strip()
    if is_expected(error):
        return message
    return f"{kind}: {message}" if message else kind
