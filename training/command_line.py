"""Completes the command line before Hydra reads it: the overrides of a run that is continued, and the run's folder."""

from __future__ import annotations

import os
import re
import shlex
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import OverrideParseException

from training.config import RESUME_KEYS, ConfigError
from training.files import write_whole
from training.processes import is_main_process, started_by_torchrun
from training.trust import check_earlier, check_links

# Overrides for the processes that are not the main one: they make no folder and no log.
SILENT = ["hydra.run.dir=.", "hydra.output_subdir=null", "hydra/job_logging=none", "hydra/hydra_logging=none"]
SWEEP_FLAGS = {"-m", "--multirun"}


def complete(arguments: list[str]) -> list[str]:
    """Returns the arguments with the overrides that `train.resume` and torchrun need.

    Raises ConfigError if the earlier run's overrides cannot be read or trusted, or for a sweep under torchrun.
    """
    return _for_torchrun(_for_resume(arguments))


def check_folder(arguments: list[str]) -> None:
    """Raises ConfigError if the run's folder cannot be made; Hydra would print a traceback."""
    if not is_main_process():
        return
    key = "hydra.sweep.dir" if SWEEP_FLAGS & set(arguments) else "hydra.run.dir"
    folder = _path(_values(arguments).get(key, ".")).absolute()
    nearest = next(path for path in (folder, *folder.parents) if path.exists())
    try:
        TemporaryDirectory(dir=nearest).cleanup()  # permissions alone do not say whether /proc can be written to
    except OSError as error:
        raise ConfigError(
            f"{nearest} cannot be written to: {key}=FOLDER chooses another folder for the run"
        ) from error


def continued_run(arguments: list[str]) -> Path | None:
    """The folder of the run that `train.resume` names, or whose checkpoint it names; None if that has no config."""
    given = _values(arguments)
    if "train.resume" not in given:
        return None
    resume = _path(given["train.resume"])
    folders = [resume] if resume.is_dir() else resume.parents[:2]
    return next((folder for folder in folders if (folder / ".hydra" / "config.yaml").is_file()), None)


class EarlierRun:
    """A copy of the settings in a run's folder: Hydra overwrites them before train.py can check the new ones."""

    def __init__(self, run: Path) -> None:
        self._files = {path: path.read_bytes() for path in (run / ".hydra").glob("*.yaml")}
        self._last = run / "checkpoints" / "last.pt"
        self._last_at_start = self._last.resolve()

    def restore(self) -> None:
        """Writes the earlier settings back, so that the run can be continued without the override that failed.

        Does nothing if a checkpoint was saved since: that one belongs to the new settings.
        """
        if self._last.resolve() != self._last_at_start:
            return
        for path, content in self._files.items():
            write_whole(path, content)


def resume_command(folder: Path) -> str:
    """The shell command that continues the run in `folder`."""
    program = "python train.py"
    if started_by_torchrun():
        program = f"torchrun --nproc-per-node={os.environ.get('LOCAL_WORLD_SIZE', os.environ['WORLD_SIZE'])} train.py"
    return f"{program} {shlex.quote(f'train.resume={_quoted(folder)}')}"


def _for_resume(arguments: list[str]) -> list[str]:
    """Adds the overrides of the run that is continued, before the given ones and without the keys that these set.

    With a run's folder the run continues there; with a checkpoint file a new run starts, in a new folder.
    """
    run, given = continued_run(arguments), _values(arguments)
    if run is None:
        return arguments
    file = run / ".hydra" / "overrides.yaml"
    try:
        overrides = [str(override) for override in yaml.safe_load(file.read_text(encoding="utf-8")) or []]
    except (OSError, ValueError, TypeError, yaml.YAMLError):
        raise ConfigError(
            f"train.resume={run}: the run's settings cannot be read from {file}: give them all, with "
            f"hydra.run.dir={run} in place of train.resume"
        ) from None
    earlier = [override for override in overrides if not _is_set(_key(override), given)]
    trusted = _list(given.get("train.trust", "[]"))
    check_earlier(earlier, run, trusted)
    in_place = _path(given["train.resume"]).is_dir() and not SWEEP_FLAGS & set(arguments)
    if in_place:
        check_links(run, trusted=trusted, option="train.trust=[{}]")
    return [*earlier, *arguments, *(_folder(run) if in_place and "hydra.run.dir" not in given else [])]


def _for_torchrun(arguments: list[str]) -> list[str]:
    """Adds the run's folder, the same one after a restart by torchrun. All processes but the main one get SILENT."""
    if not started_by_torchrun():
        return arguments
    if SWEEP_FLAGS & set(arguments):
        raise ConfigError("-m: torchrun starts one run; start a torchrun for each setting of the sweep")
    if not is_main_process():
        return [*arguments, *SILENT]
    if "hydra.run.dir" in _values(arguments):
        return arguments
    name = os.environ.get("TORCHELASTIC_RUN_ID", "none")[:16]
    earlier = sorted(Path("outputs").glob(f"*_{name}"))
    folder = earlier[-1] if earlier else Path(f"outputs/{datetime.now():%Y-%m-%d_%H-%M-%S}_{name}")
    return [*arguments, *_folder(folder)]


def _folder(path: Path) -> list[str]:
    return [f"hydra.run.dir={_quoted(path, always=True)}"]


def _quoted(path: Path, always: bool = False) -> str:
    """The path in the syntax of Hydra's overrides, in quotes if it needs them."""
    plain = re.fullmatch(r"[\w./:-]+", str(path)) and not always
    return str(path) if plain else QuotedString(str(path), Quote.single).with_quotes()


def _values(arguments: list[str]) -> dict[str, str]:
    return {_key(argument): argument.partition("=")[2] for argument in arguments if "=" in argument}


def _path(value: str) -> Path:
    """The path in an override's value, which may be quoted."""
    parsed = _parsed(value)
    return Path(parsed if isinstance(parsed, str) else value).expanduser()


def _list(value: str) -> list[str]:
    parsed = _parsed(value)
    return [str(item) for item in parsed] if isinstance(parsed, list) else []


def _parsed(value: str) -> Any:
    """The parsed value of an override; None if Hydra cannot parse it, which check_overrides reports later."""
    try:
        return OverridesParser.create().parse_override(f"key={value}").value()
    except OverrideParseException:
        return None


def _key(override: str) -> str:
    return override.partition("=")[0].lstrip("+~")


def _is_set(key: str, given: dict[str, str]) -> bool:
    """Whether `given` sets the key or its whole group; `given` always decides about RESUME_KEYS."""
    return key in given or key.partition(".")[0] in given or key in RESUME_KEYS
