"""What is added to the command line before Hydra reads it: the settings of a run that is continued, and its folder."""

from __future__ import annotations

import os
import re
import shlex
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import OverrideParseException

from training.config import ConfigError
from training.files import write_whole
from training.processes import is_main_process, started_by_torchrun
from training.trust import check_earlier, check_links

# For all processes but the main one: they make no folder and no log.
SILENT = ["hydra.run.dir=.", "hydra.output_subdir=null", "hydra/job_logging=none", "hydra/hydra_logging=none"]
SWEEP = {"-m", "--multirun"}


def complete(arguments: list[str]) -> list[str]:
    """The arguments with what `train.resume` and torchrun imply. Raises ConfigError for what cannot work."""
    return _for_torchrun(_for_resume(arguments))


def check_folder(arguments: list[str]) -> None:
    """Raises ConfigError if no folder can be made for the run, which Hydra would answer with a traceback."""
    if not is_main_process():
        return
    key = "hydra.sweep.dir" if SWEEP & set(arguments) else "hydra.run.dir"
    folder = _path(_values(arguments).get(key, ".")).absolute()
    nearest = next(path for path in (folder, *folder.parents) if path.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        raise ConfigError(f"{nearest} cannot be written to: {key}=FOLDER chooses another folder for the run")


def continued_run(arguments: list[str]) -> Path | None:
    """The folder of the run that `train.resume` names, or whose checkpoint it names; None if it has no config."""
    given = _values(arguments)
    if "train.resume" not in given:
        return None
    resume = _path(given["train.resume"])
    folders = [resume] if resume.is_dir() else resume.parents[:2]
    return next((folder for folder in folders if (folder / ".hydra" / "config.yaml").is_file()), None)


class EarlierRun:
    """The settings of a run that is continued. Hydra replaces them in its folder before train.py can check them."""

    def __init__(self, run: Path) -> None:
        self._files = {path: path.read_bytes() for path in (run / ".hydra").glob("*.yaml")}
        self._last = run / "checkpoints" / "last.pt"
        self._saved = self._last.resolve()

    def restore(self) -> None:
        """Undoes an override that failed, so that the run can be continued as it was.

        Once a checkpoint has been saved with the new settings, they are the run's own.
        """
        if self._last.resolve() != self._saved:
            return
        for path, content in self._files.items():
            write_whole(path, content)


def resume_command(folder: Path) -> str:
    """The command that continues the run in `folder`, to be pasted into a shell."""
    program = "python train.py"
    if started_by_torchrun():
        program = f"torchrun --nproc-per-node={os.environ.get('LOCAL_WORLD_SIZE', os.environ['WORLD_SIZE'])} train.py"
    return f"{program} {shlex.quote(f'train.resume={_quoted(folder)}')}"


def changes(config: dict[str, Any], earlier: dict[str, Any]) -> list[str]:
    """What is different in `config`: "train.epochs is 3, was 2"."""
    ours, theirs = flat(config), flat(earlier)
    keys = [
        key
        for key in {**theirs, **ours}
        if key not in ("train.resume", "train.trust") and ours.get(key) != theirs.get(key)
    ]
    return [f"{key} is {ours.get(key, 'left out')}, was {theirs.get(key, 'left out')}" for key in keys]


def _for_resume(arguments: list[str]) -> list[str]:
    """Puts the overrides of the continued run before those given, except where they set the same.

    A run's folder is continued in place; from a checkpoint file a new run starts, in a folder of its own.
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
    check_earlier(earlier, run, _list(given.get("train.trust", "[]")))
    in_place = _path(given["train.resume"]).is_dir() and not SWEEP & set(arguments)
    if in_place:
        check_links(run, trusted=_list(given.get("train.trust", "[]")), option="train.trust=[{}]")
    return [*earlier, *arguments, *(_folder(run) if in_place and "hydra.run.dir" not in given else [])]


def _for_torchrun(arguments: list[str]) -> list[str]:
    """Gives the run of several processes one folder, the same one after torchrun has restarted them."""
    if not started_by_torchrun():
        return arguments
    if SWEEP & set(arguments):
        raise ConfigError("-m: torchrun starts one run; start a torchrun for each setting of the sweep")
    if not is_main_process():
        return [*arguments, *SILENT]
    if "hydra.run.dir" in _values(arguments):
        return arguments
    name = os.environ.get("TORCHELASTIC_RUN_ID", "none")[:16]
    earlier = sorted(Path("outputs").glob(f"*_{name}"))
    return [
        *arguments,
        *_folder(earlier[-1] if earlier else Path(f"outputs/{datetime.now():%Y-%m-%d_%H-%M-%S}_{name}")),
    ]


def _folder(path: Path) -> list[str]:
    return [f"hydra.run.dir={_quoted(path, always=True)}"]


def _quoted(path: Path, always: bool = False) -> str:
    """The path as Hydra's overrides write it."""
    plain = re.fullmatch(r"[\w./:-]+", str(path)) and not always
    return str(path) if plain else QuotedString(str(path), Quote.single).with_quotes()


def _values(arguments: list[str]) -> dict[str, str]:
    return {_key(argument): argument.partition("=")[2] for argument in arguments if "=" in argument}


def _path(value: str) -> Path:
    """The path that an override's value names, which may be quoted."""
    parsed = _parsed(value)
    return Path(parsed if isinstance(parsed, str) else value).expanduser()


def _list(value: str) -> list[str]:
    parsed = _parsed(value)
    return [str(one) for one in parsed] if isinstance(parsed, list) else []


def _parsed(value: str) -> Any:
    """What an override's value means; None for one that cannot be read, which check_overrides reports."""
    try:
        return OverridesParser.create().parse_override(f"key={value}").value()
    except OverrideParseException:
        return None


def _key(override: str) -> str:
    return override.partition("=")[0].lstrip("+~")


def _is_set(key: str, given: dict[str, str]) -> bool:
    """Whether `given` sets the key, or replaces the group that it belongs to."""
    return key in given or key.partition(".")[0] in given or key in ("train.resume", "train.trust")


def flat(config: Any, prefix: str = "") -> dict[str, Any]:
    """The values of nested dictionaries, by keys such as `train.epochs`."""
    if not isinstance(config, dict):
        return {prefix: config}
    values: dict[str, Any] = {}
    for key, value in config.items():
        values |= flat(value, f"{prefix}.{key}" if prefix else str(key))
    return values
