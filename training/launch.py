"""What happens between the command line and run(): checks before, error messages and the sweep's table after.

A job that fails writes error.txt into its folder, the other jobs of the sweep go on, and the exit code is 1. An error
about a setting, a file or the machine is shown as one sentence, any other with its traceback. With HYDRA_FULL_ERROR=1
Hydra shows every error itself.
"""

from __future__ import annotations

import errno
import gc
import logging
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from data.errors import DataError
from loaders import LoaderConfigError, MachineFull, WorkerFailure
from training.checkpoint import CheckpointError
from training.command_line import changes, check_folder, complete, continued_run
from training.config import ConfigError, check_overrides, full_errors
from training.files import write_whole
from training.processes import ProcessesLost, is_main_process
from training.stopping import Stopped
from training.sweep import Sweep, write_report

log = logging.getLogger(__name__)

EXPECTED = (
    *(ConfigError, DataError, LoaderConfigError, MachineFull, WorkerFailure, torch.OutOfMemoryError),
    *(CheckpointError, ProcessesLost),
)
DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)


class Launcher:
    """Runs jobs for Hydra, and remembers whether one failed and which sweep they belong to."""

    def __init__(self, run: Callable[[DictConfig, Path], object]) -> None:
        self._run, self._failed = run, False
        self._sweep: Path | None = None
        self._earlier: Any = None  # the config of the run that train.resume continues

    def job(self, cfg: DictConfig) -> None:
        """Hydra's task function: runs a job of a sweep, or the only job."""
        hydra = HydraConfig.get()
        folder = Path(hydra.runtime.output_dir)
        if is_main_process():
            (folder / "error.txt").unlink(missing_ok=True)  # of an earlier run in the same folder
        if hydra.mode == RunMode.MULTIRUN:
            self._sweep = folder.parent
        if self._earlier is not None and (changed := changes(cfg, self._earlier)):
            log.info("train.resume with other settings: %s", "; ".join(changed))
        try:
            self._run(cfg, folder)
        except Stopped as stop:
            log.warning("%s; to go on: python train.py train.resume=%s", stop, folder)
            raise
        except Exception as error:
            if full_errors():
                raise
            self._failed, sentence = True, sentence_of(error)
            if is_main_process():
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
        """Checks the command line, runs Hydra's main, prints a sweep's table, exits.

        The exit code is 0, 1 after an error, 130 after Ctrl-C, and 75 after another signal: try again.
        """
        code: int | str = 0
        try:
            if run := continued_run(sys.argv[1:]):
                self._earlier = OmegaConf.load(run / ".hydra" / "config.yaml")
            sys.argv[1:] = complete(sys.argv[1:])
            check_overrides(sys.argv[1:], conf)
            check_folder(sys.argv[1:])
            main()
        except ConfigError as error:
            code = f"error: {error}"
        except Stopped as stop:
            code = stop.exit_code
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            code = 130
        if self._sweep is not None:
            print(Sweep(self._sweep).text())
        sys.exit(code or int(self._failed))


def is_expected(error: BaseException) -> bool:
    """Whether the error is about a setting, a file or the machine, so that its sentence says all that is needed."""
    return isinstance(error, EXPECTED) or (isinstance(error, OSError) and error.errno in DISK)


def sentence_of(error: Exception) -> str:
    """The error in one sentence. If a worker process raised it, the sentence that it had there."""
    kind = type(error).__name__
    message = re.split(rf"\n(?:[\w.]+\.)?{kind}: ", str(error))[-1].strip()
    if is_expected(error):
        return message
    return f"{kind}: {message}" if message else kind
