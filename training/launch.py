"""What happens between the command line and run(): checks before, error messages and the sweep's table after.

A job that fails writes error.txt into its folder, the other jobs of the sweep go on, and the exit code is 1. An error
about a setting, a file or the machine is shown as one sentence, any other with its traceback. With HYDRA_FULL_ERROR=1
Hydra shows every error itself.
"""

from __future__ import annotations

import errno
import gc
import importlib
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

import torch
import yaml
from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig

from data.errors import DataError
from loaders import LoaderConfigError, MachineFull, WorkerFailure
from training.checkpoint import CheckpointError
from training.command_line import EarlierRun, check_folder, complete, continued_run, resume_command
from training.config import ConfigError, full_errors
from training.files import write_whole
from training.overrides import check_overrides
from training.processes import ProcessesLost, is_main_process
from training.stopping import Stopped
from training.sweeps.sweep import Sweep, write_report

log = logging.getLogger(__name__)

EXPECTED = (
    *(ConfigError, DataError, LoaderConfigError, MachineFull, WorkerFailure, torch.OutOfMemoryError),
    *(CheckpointError, ProcessesLost),
)
DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)
LAUNCHERS = {  # the packages that have them, which are optional: requirements-extra.txt
    "joblib": "hydra-joblib-launcher",
    "submitit_local": "hydra-submitit-launcher",
    "submitit_slurm": "hydra-submitit-launcher",
}
# The presets in conf/hydra/launcher/ have the names of the plugins' own configs, so that Hydra merges the two.
warnings.filterwarnings("ignore", "(?s).*is validated against ConfigStore schema with the same name")


class Launcher:
    """Runs jobs for Hydra, and remembers whether one failed."""

    def __init__(self, run: Callable[[DictConfig, Path], object]) -> None:
        self._run, self._failed = run, False
        self._earlier: EarlierRun | None = None  # the run that train.resume continues

    def __reduce__(self) -> tuple[Callable, tuple[str]]:
        """Processes of joblib and submitit import train.py's launcher: not all that this one holds can be pickled."""
        return _launcher_in, ("train",)

    def job(self, cfg: DictConfig) -> None:
        """Hydra's task function: runs a job of a sweep, or the only job."""
        hydra = HydraConfig.get()
        folder = Path(hydra.runtime.output_dir)
        if is_main_process():
            (folder / "error.txt").unlink(missing_ok=True)  # of an earlier run in the same folder
        try:
            self._run(cfg, folder)
        except Stopped as stop:
            if is_main_process():
                log.warning("%s; to go on: %s", stop, resume_command(folder))
            if "SUBMITIT_EXECUTOR" not in os.environ:
                raise
            # submitit's own process runs this job, and would show a traceback.
            submit_again_if_preempted()
            raise SystemExit(stop.exit_code) from None
        except Exception as error:
            if self._earlier is not None and is_main_process():
                self._earlier.restore()
            if full_errors():
                raise
            self._failed, sentence = True, sentence_of(error)
            log.error("error: %s", sentence, exc_info=not is_expected(error))
            if is_main_process():
                with suppress(OSError):  # a full disk, perhaps
                    write_whole(folder / "error.txt", sentence + "\n")
        finally:
            gc.collect()  # so that the next job has this one's memory
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            if hydra.mode == RunMode.MULTIRUN:
                try:
                    write_report(folder.parent)
                except Exception as error:  # the other jobs matter more than the report
                    log.warning("the sweep's report could not be written: %s", error)

    def launch(self, main: Callable[[], None], conf: Path) -> None:
        """Checks the command line, runs Hydra's main, prints a sweep's table, exits.

        The exit code is 0, 1 after an error, 130 after Ctrl-C, and 75 after another signal: try again.
        """
        code: int | str | None = 0
        # A job in another process imports train.py, from whatever folder it was started in.
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(conf.parent), os.environ.get("PYTHONPATH")]))
        try:
            check_launcher(sys.argv[1:])
            if run := continued_run(sys.argv[1:]):
                self._earlier = EarlierRun(run)
            sys.argv[1:] = complete(sys.argv[1:])
            check_overrides(sys.argv[1:], conf)
            check_folder(sys.argv[1:])
            main()
        except ConfigError as error:
            code = f"error: {error}"
        except yaml.YAMLError as error:
            code = f"error: a config file cannot be read as YAML: {' '.join(str(error).split())}"
        except Stopped as stop:
            code = stop.exit_code
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            code = 130
        except SystemExit as stopped:  # Hydra has shown an error of its own or of its launcher
            code = stopped.code
        if SweepStart.folder is not None:
            self._failed = not report(SweepStart.folder)
        sys.exit(code or int(self._failed))


class SweepStart(Callback):
    """Remembers the folder of a sweep whose jobs may run elsewhere, for the table at its end. See conf/config.yaml."""

    folder: ClassVar[Path | None] = None

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        SweepStart.folder = Path(config.hydra.sweep.dir)
        # Otherwise SIGTERM would end this process at once, and joblib's processes would train on.
        signal.signal(signal.SIGTERM, stop_sweep)


def stop_sweep(number: int, frame: FrameType | None) -> None:
    """Handles SIGTERM between jobs, and after a job in this process that it has stopped."""
    raise Stopped("stopped by SIGTERM", number)


def _launcher_in(module: str) -> Launcher:
    return importlib.import_module(module).launcher


def report(folder: Path) -> bool:
    """Writes a sweep's report and prints it. Returns whether all jobs are done, wherever they ran."""
    try:
        write_report(folder)
        sweep = Sweep(folder)
    except ValueError:  # no job has begun
        return False
    print(sweep.text())
    return all(job.status == "done" for job in sweep.jobs)


def check_launcher(arguments: list[str]) -> None:
    """Raises ConfigError if the sweep's launcher is not installed, or if there is no Slurm here to submit to."""
    chosen = [argument for argument in arguments if argument.startswith("hydra/launcher=")]
    name = chosen[-1].partition("=")[2] if chosen else ""
    if package := LAUNCHERS.get(name):
        try:
            version(package)
        except PackageNotFoundError:
            raise ConfigError(
                f"hydra/launcher={name} needs {package}, which is not installed: pip install {package}"
            ) from None
    if name == "submitit_slurm" and shutil.which("srun") is None:
        raise ConfigError(
            "hydra/launcher=submitit_slurm submits to Slurm, and there is no srun here: run it on a login node of the "
            "cluster, or use hydra/launcher=joblib on this machine"
        )


def submit_again_if_preempted() -> None:
    """Submits this Slurm job again if another has pushed it out, and Slurm lets it end within a grace time.

    Slurm does so itself only if the job is still running after that time.
    """
    job, array = (os.environ.get(f"SLURM_{name}") for name in ("JOB_ID", "ARRAY_JOB_ID"))
    if array is not None:  # as a number alone, it may mean all jobs of the sweep
        job = f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    if job is not None:
        found = subprocess.run(["scontrol", "show", "job", job], capture_output=True, text=True, check=False).stdout
        if "PreemptTime=2" in found:  # the year's first digit; else it is PreemptTime=None
            subprocess.run(["scontrol", "requeue", job], check=False)


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
