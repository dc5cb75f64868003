"""Runs train.py under Hydra: checks the command line, runs the job or the sweep, shows errors.

A job that fails writes error.txt into its folder, the sweep goes on with its other jobs, and the exit code is 1. An
error about a setting, a file or the machine is shown as one sentence, any other with its traceback. With
HYDRA_FULL_ERROR=1 Hydra shows every error itself.
"""

from __future__ import annotations

import errno
import gc
import logging
import os
import re
import shutil
import signal
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import distributions
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

import torch
import yaml
from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from data.errors import DataError
from loaders import Accelerator, LoaderConfigError, MachineFull, StreamError, WorkerFailure, chosen_device
from loaders.workers.pool import WorkerTimeout
from training.checkpoint import CheckpointError
from training.command_line import check_overrides, complete, resume_command
from training.config import CONF, ConfigError, full_errors
from training.files import write_whole
from training.processes import ProcessesLost, is_main_process
from training.stopping import Stopped

log = logging.getLogger(__name__)

# Errors about a setting, a file or the machine: their message says all that the user needs.
OF_LOADERS = (LoaderConfigError, MachineFull, StreamError, WorkerFailure, WorkerTimeout)
EXPECTED = (ConfigError, DataError, *OF_LOADERS, torch.OutOfMemoryError, CheckpointError, ProcessesLost)
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)
# Hydra merges the presets in conf/hydra/launcher/ with the plugins' configs of the same names, and warns of that.
warnings.filterwarnings("ignore", "(?s).*is validated against ConfigStore schema with the same name")


def run_job(run: Callable[[DictConfig, Path], object], cfg: DictConfig) -> None:
    """Hydra's task function: calls `run` for a job of a sweep, or for the only job, which exits with 1 if it fails."""
    hydra = HydraConfig.get()
    folder = Path(hydra.runtime.output_dir)
    if is_main_process():
        (folder / "error.txt").unlink(missing_ok=True)  # an earlier run in this folder may have left it
    try:
        run(cfg, folder)
    except Stopped as stop:
        if is_main_process():
            config: Any = OmegaConf.to_container(cfg, resolve=True)
            log.warning("%s; to continue: %s", stop, resume_command(folder, config))
        if "SUBMITIT_EXECUTOR" not in os.environ:
            raise
        raise SystemExit(stop.exit_code) from None  # submitit would show the traceback of Stopped
    except Exception as error:
        if full_errors():
            raise
        sentence = sentence_of(error)
        log.error("error: %s", sentence, exc_info=not is_expected(error))
        if is_main_process():
            with suppress(OSError):  # the disk may be full
                write_whole(folder / "error.txt", sentence + "\n")
        if hydra.mode != RunMode.MULTIRUN:  # else the sweep goes on with its other jobs
            raise SystemExit(1) from None
    finally:
        gc.collect()  # frees this job's memory for the next one
        Accelerator(chosen_device("auto")).empty_cache()


def launch(main: Callable[[], None], conf: Path) -> None:
    """Checks the command line, runs Hydra's main, exits.

    The exit code is 0, or 1 after an error, 130 after Ctrl-C, 75 after another signal ("try again").
    """
    code: int | str | None = 0
    # Jobs in other processes import train.py, and may run in another folder.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(conf.parent), os.environ.get("PYTHONPATH")]))
    try:
        check_launcher(sys.argv[1:])
        sys.argv[1:] = complete(sys.argv[1:])
        check_overrides(sys.argv[1:], conf)
        main()
    except (ConfigError, yaml.YAMLError) as error:
        if full_errors():
            raise
        code = f"error: {' '.join(str(error).split())}"
    except Stopped as stop:
        code = stop.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        code = 130
    except SystemExit as stopped:  # the error has been shown
        code = stopped.code
        if code == 2:  # argparse's, after a sentence of its own
            print("settings are written as key=value: python train.py train.batch_size=64", file=sys.stderr)
    if SweepStart.folder is not None:
        for function in SweepStart.at_end:
            with suppress(ValueError):  # no job has started
                function(SweepStart.folder)
        code = code or int(not all_done(SweepStart.folder))
    sys.exit(code)


class SweepStart(Callback):
    """Hydra's callback in conf/config.yaml: remembers the sweep's folder.

    at_end: functions to call with the folder at the end of the sweep, also after Ctrl-C or a job that failed; other
    callbacks of Hydra may add to them.
    """

    folder: ClassVar[Path | None] = None
    at_end: ClassVar[list[Callable[[Path], object]]] = []

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        SweepStart.folder = Path(config.hydra.sweep.dir)
        # By default SIGTERM would end this process at once, while joblib's processes train on.
        signal.signal(signal.SIGTERM, stop_sweep)


def stop_sweep(number: int, frame: FrameType | None) -> None:
    """Handles SIGTERM between two jobs. StopSignals handles it during a job, and then calls this function."""
    raise Stopped("stopped by SIGTERM", number)


def all_done(sweep: Path) -> bool:
    """Whether all jobs in the sweep's folder are done, in this process or in others."""
    jobs = [overrides.parents[1] for overrides in sweep.glob("*/.hydra/overrides.yaml")]
    return bool(jobs) and all((job / "summary.json").exists() for job in jobs)


def check_launcher(arguments: list[str]) -> None:
    """Raises ConfigError if the plugin of the sweep's launcher is not installed, or if there is no Slurm for it."""
    for name in [text.partition("=")[2] for text in arguments if text.startswith("hydra/launcher=")]:
        package = f"hydra-{name.partition('_')[0]}-launcher"
        if name == "submitit_slurm" and shutil.which("srun") is None:
            raise ConfigError(
                f"hydra/launcher={name} submits to Slurm, and there is no srun here: run it on a login node of the "
                "cluster, or use hydra/launcher=joblib on this machine"
            )
        if (CONF / "hydra" / "launcher" / f"{name}.yaml").exists() and not list(distributions(name=package)):
            raise ConfigError(f"hydra/launcher={name} needs {package}, which is not installed: pip install {package}")


def is_expected(error: BaseException) -> bool:
    """Whether the error is about a setting, a file or the machine: then its message is shown without a traceback."""
    return isinstance(error, EXPECTED) or (isinstance(error, OSError) and error.errno in DISK_ERRORS)


def sentence_of(error: Exception) -> str:
    """The error's message, with its type if it is unexpected. Leaves out the traceback of a worker around it."""
    kind = type(error).__name__
    message = re.split(rf"\n(?:[\w.]+\.)?{kind}: ", str(error))[-1].strip()
    if is_expected(error):
        return message
    return f"{kind}: {message}" if message else kind
