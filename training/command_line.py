"""The command line of train.py: completed for train.resume and torchrun, and checked, before Hydra reads it.

A run that is resumed gets the settings in its checkpoint. An override replaces one value, the choice of a group (such
as model=linear) its whole section, and keys that the checkpoint lacks come from conf/.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from data.errors import check_choice, did_you_mean
from training.checkpoint import find_checkpoint
from training.config import CONF, RESUME_KEYS, Config, ConfigError, flat, full_errors, one_line, with_types
from training.processes import is_main_process, started_by_torchrun
from training.trust import check_config, check_links, to_trust

# Overrides for the processes that are not the main one: they make no folder and no log.
SILENT = ["hydra.run.dir=.", "hydra.output_subdir=null", "hydra/job_logging=none", "hydra/hydra_logging=none"]
SWEEP_FLAGS = {"-m", "--multirun"}
RESUMED = "resumed"  # the name of the config that has the settings of an earlier run, beside conf/config.yaml
RESUMES = f"--config-name={RESUMED}"
OUR_FLAGS = {*SWEEP_FLAGS, RESUMES}
TYPES = {bool: "true or false", int: "an integer", float: "a number"}
TRUST = "train.trust=[{}]"


def complete(arguments: list[str]) -> list[str]:
    """Returns the arguments with those that `train.resume` and torchrun need.

    Raises ConfigError for an override that cannot be parsed, if the settings of the run to continue cannot be read or
    trusted, and for a sweep under torchrun.
    """
    overrides = {override.key_or_group: override for override in _parsed(arguments)}
    is_sweep, folder = bool(SWEEP_FLAGS & set(arguments)), None
    resume = _values(overrides["train.resume"]) if "train.resume" in overrides else []
    if len(resume) == 1 and resume[0] not in ("auto", None):
        run = _store_settings_of(Path(str(resume[0])).expanduser(), overrides)
        arguments = [RESUMES, *arguments]  # argparse wants the flags before or after all overrides
        folder = None if is_sweep else run  # each job of a sweep is a run of its own
    if started_by_torchrun():
        if is_sweep:
            raise ConfigError("-m: torchrun starts one run; start a torchrun for each setting of the sweep")
        if not is_main_process():
            return [*arguments, *SILENT]
        folder = folder or _folder_of_torchrun()
    if folder is None or "hydra.run.dir" in overrides:
        return arguments
    return [*arguments, f"hydra.run.dir={_quoted(folder)}"]


def _folder_of_torchrun() -> Path:
    """A new folder, or the same one after a restart by torchrun."""
    name = os.environ.get("TORCHELASTIC_RUN_ID", "none")[:16]
    earlier = sorted(Path("outputs").glob(f"*_{name}"))
    return earlier[-1] if earlier else Path(f"outputs/{datetime.now():%Y-%m-%d_%H-%M-%S}_{name}")


def _store_settings_of(resume: Path, overrides: dict[str, Override]) -> Path | None:
    """Stores the config RESUMED. Returns the run's folder if it is to be continued there, None for a checkpoint."""
    for key, override in overrides.items():
        if override.is_delete() or key in ("experiment", "debug"):
            raise ConfigError(
                f"{override.input_line}: with train.resume, give the settings themselves, such as train.epochs=30"
            )
    path, state = find_checkpoint(resume)
    replaced = {"callbacks" if key == "logger" else key.partition("/")[0] for key in overrides}
    sections = Config.__dataclass_fields__.keys() - replaced  # none of Hydra's own, which could start programs
    settings = {section: value for section, value in state["config"].items() if section in sections}
    train = settings.get("train", {})
    settings["train"] = {key: value for key, value in train.items() if f"train.{key}" not in RESUME_KEYS}
    trust = _values(overrides["train.trust"])[0] if "train.trust" in overrides else []
    trusted = [str(name) for name in trust] if isinstance(trust, list) else []
    check_config(settings, path, [*trusted, *(key for key in overrides if "." in key)], TRUST)
    _store(settings)
    if not resume.is_dir():
        return None
    run = path.parents[1] if path.parent.name == "checkpoints" else path.parent
    check_links(run, trusted=trusted, option=TRUST)
    return run


def _store(settings: dict[str, Any]) -> None:
    groups = [{f"override {section}": None} for section in settings if (CONF / section).is_dir()]
    ConfigStore.instance().store(name=RESUMED, node={"defaults": ["config", *groups, "_self_"], **settings})


def compose_with(settings: dict[str, Any], overrides: Sequence[str]) -> DictConfig:
    """The config of conf/ with an earlier run's settings and `overrides` on top. Raises ConfigError for wrong ones."""
    _store(settings)
    check_overrides([RESUMES, *overrides], CONF)
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose(RESUMED, list(overrides))


def resume_command(folder: Path, config: dict[str, Any]) -> str:
    """The shell command that continues the run in `folder`, which has this config."""
    program = "python train.py"
    if started_by_torchrun():
        program = f"torchrun --nproc-per-node={os.environ.get('LOCAL_WORLD_SIZE', os.environ['WORLD_SIZE'])} train.py"
    overrides = [f"train.resume={_quoted(folder)}"]
    if names := to_trust(config):
        overrides.append(TRUST.format(",".join(names)))
    return f"{program} {shlex.join(overrides)}"


def check_overrides(arguments: list[str], conf: Path) -> None:
    """Raises ConfigError for an override that has an unknown key, an unknown choice or a value of a wrong type.

    Hydra 1.3 exits on such an override without a suggestion. Checks nothing if there are flags other than -m, such as
    --help or --cfg, or with HYDRA_FULL_ERROR=1.
    """
    if full_errors() or any(argument.startswith("-") and argument not in OUR_FLAGS for argument in arguments):
        return
    overrides = [override for override in _parsed(arguments) if not override.key_or_group.startswith("hydra")]
    with initialize_config_dir(str(conf), version_base="1.3"):
        loader, chosen = GlobalHydra.instance().config_loader(), []
        for override in list(overrides):
            if not (choices := loader.get_group_options(override.key_or_group)):
                continue
            overrides.remove(override)
            values = _values(override)
            for value in values:  # a list for groups of which several may be chosen, null for none
                for choice in value if isinstance(value, list) else [value or choices[0]]:
                    check_choice(override.key_or_group, str(choice), choices, ConfigError)
            chosen.append(f"{override.get_key_element()}={values[0] or 'null'}")
        try:
            known = with_types(compose(RESUMED if RESUMES in arguments else "config", chosen))
        except (HydraException, ValueError) as error:  # ValueError for the choice null
            raise ConfigError(" ".join(str(error).split("\n")[:2])) from error
        names = [*_names(known), *(group for group in loader.list_groups("") if group != "hydra")]
    for override in overrides:
        if not str(override.input_line).startswith(("+", "~")):
            for value in _values(override):
                _check_value(override.key_or_group, value, known, names)


def _check_value(key: str, value: Any, known: DictConfig, names: list[str]) -> None:
    given = f"{key}={'null' if value is None else value}"
    if key not in names:
        parent, _, last = key.rpartition(".")
        in_sections = [name for name in names if name.rpartition(".")[2] == last]  # lr or train.lr, for optim.lr
        hint = f"did you mean {in_sections[0]}? " if in_sections else did_you_mean(key, names)
        if last == "_target_" and parent in names:  # such as task.loss, which is null
            hint = f"write '{parent}={{_target_: {value}}}'; "
        hint += f"python train.py --cfg job prints all keys, +{key}=... adds one"
        raise ConfigError(f"{given}: there is no key {key}; {hint}")
    default = OmegaConf.select(known, key)
    if isinstance(default, DictConfig) and not isinstance(value, dict):
        hint = f"there is no conf/{key}/{value}.yaml" if (CONF / key).is_dir() else "give one of its keys"
        raise ConfigError(f"{given}: {key} is a section: {hint if value is not None else f'~{key} leaves it out'}")
    # Many keys have no declared type: a value must have the type of the default.
    kinds = {float: (int, float)}.get(kind := type(default), (kind,))
    if kind in TYPES and value not in (None, "auto") and type(value) not in kinds:
        raise ConfigError(f"{given}: it takes {TYPES[kind]}, such as {key}={str(default).lower()}")
    try:
        OmegaConf.update(known.copy(), key, value)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{given}: {one_line(error)}") from error


def _parsed(arguments: Sequence[str]) -> list[Override]:
    """The overrides among the arguments. Raises ConfigError for one that Hydra cannot parse."""
    has_flags = any(argument.startswith("-") and argument not in OUR_FLAGS for argument in arguments)  # --cfg job
    lines = [line for line in arguments if not line.startswith("-") and ("=" in line or not has_flags)]
    try:
        return OverridesParser.create().parse_overrides(lines)
    except OverrideParseException as error:
        raise ConfigError(
            f"{error.override!r} cannot be read as key=value: an override looks like train.epochs=3, and a value with "
            "braces needs quotes: 'key=\"...\"'"
        ) from error


def _values(override: Override) -> list[Any]:
    """The override's value, or the values that it sweeps over."""
    values = override.sweep_iterator() if override.is_sweep_override() else [override.value()]
    return [value.text if isinstance(value, QuotedString) else value for value in values]


def _names(config: DictConfig) -> list[str]:
    """The names of all keys and sections, such as train and train.epochs."""
    parts = [key.split(".") for key in flat(OmegaConf.to_container(config))]
    return list(dict.fromkeys(".".join(one[:length]) for one in parts for length in range(1, len(one) + 1)))


def _quoted(path: Path) -> str:
    """The path in the syntax of Hydra's overrides, in quotes if it needs them."""
    is_plain = re.fullmatch(r"[\w./-]+", str(path))
    return str(path) if is_plain else QuotedString(str(path), Quote.single).with_quotes()
