"""Checks the command line against conf/ before Hydra starts: Hydra 1.3 exits on a wrong override without a hint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, QuotedString
from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig, ListConfig, OmegaConf, UnionNode
from omegaconf.errors import OmegaConfBaseException

from data.errors import check_choice, did_you_mean
from training.command_line import SWEEP_FLAGS
from training.config import Config, ConfigError, full_errors, one_line, with_types

SECTIONS = {*Config.__dataclass_fields__, "debug", "experiment", "hydra"}
LISTS = (
    "callbacks",
    "callbacks/standard",
    "logger",
)  # groups of which several may be chosen: logger=[tensorboard,wandb]
TYPES = {bool: "true or false", int: "an integer", float: "a number"}


def check_overrides(arguments: list[str], conf: Path) -> None:
    """Raises ConfigError for a command-line override that has an unknown key, an unknown choice or a wrong type.

    Checks nothing if there are flags other than -m, such as --help or --cfg, or with HYDRA_FULL_ERROR=1.
    """
    for argument, following in zip(arguments, [*arguments, "VALUE"][1:], strict=True):
        name, equals, value = argument.removeprefix("--").partition("=")
        if argument.startswith("--") and name.partition(".")[0] in SECTIONS:
            raise ConfigError(f"{argument}: overrides have no dashes: write {name}={value if equals else following}")
    flags = {argument for argument in arguments if argument.startswith("-")}
    if flags - SWEEP_FLAGS - {"-r", "--run"} or full_errors():
        return
    overrides = _parsed([argument for argument in arguments if not argument.startswith(("-", "hydra"))])
    for override in overrides:
        if override.is_sweep_override() and not flags & SWEEP_FLAGS:
            raise ConfigError(f"{override.input_line}: add -m to sweep over values, or give a list as key=[1,2]")
    with initialize_config_dir(str(conf), version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        for argument in arguments:  # for a wrong one Hydra itself would print a page
            if argument.startswith("hydra/launcher="):
                choices = loader.get_group_options("hydra/launcher")
                check_choice("hydra/launcher", argument.partition("=")[2], choices, ConfigError)
        groups = [override for override in overrides if loader.get_group_options(override.key_or_group)]
        for override in groups:
            _check_group(override, loader.get_group_options(override.key_or_group))
        try:
            known = with_types(
                compose("config", [f"{group.get_key_element()}={_values(group)[0] or 'null'}" for group in groups])
            )
        except HydraException as error:
            raise ConfigError(one_line(error)) from error
        names = [*_names(known), *(group for group in loader.list_groups("") if group != "hydra")]
    for override in overrides:
        adds_or_deletes = str(override.input_line).startswith(("+", "~"))
        if override not in groups and not (adds_or_deletes and not _is_typed(override.key_or_group)):
            for value in _values(override):
                _check_value(override.key_or_group, value, known, names)


def _parsed(lines: list[str]) -> list[Override]:
    try:
        return OverridesParser.create().parse_overrides(lines)
    except OverrideParseException as error:
        raise ConfigError(
            f"{error.override!r} cannot be read as key=value: an override looks like train.epochs=3, and a value with "
            "braces needs quotes: 'key=\"...\"'"
        ) from error


def _check_group(override: Override, options: list[str]) -> None:
    for value in _values(override):
        is_list = isinstance(value, list) and override.key_or_group in LISTS
        for choice in value if is_list else [value]:
            if choice is not None:  # null leaves out an optional group such as debug
                check_choice(override.key_or_group, str(choice), options, ConfigError)


def _is_typed(key: str) -> bool:
    """Whether the key's section is a dataclass, to which no key can be added."""
    return key.startswith(("train.", "loader.", "timing."))


def _check_value(key: str, value: Any, known: DictConfig, names: list[str]) -> None:
    parent, _, last = key.rpartition(".")
    if key not in names and last == "_target_" and parent in names:
        raise ConfigError(f"{key}={value}: {parent} is not set; write '{parent}={{_target_: {value}}}'")
    if key not in names:
        in_sections = [name for name in names if name.rpartition(".")[2] == last]  # lr or train.lr, for optim.lr
        hint = f"did you mean {in_sections[0]}? " if in_sections else did_you_mean(key, names)
        raise ConfigError(f"{key}={value}: there is no key {key}; {hint}python train.py --cfg job prints all keys")
    default = OmegaConf.select(known, key)
    if isinstance(default, DictConfig):
        raise ConfigError(f"{key}={value}: {key} is a section: set one of its keys, {', '.join(default)}")
    kind, example = type(default), str(default).lower()
    takes = TYPES.get(kind, f"a {kind.__name__}")
    if kind is ListConfig:
        takes, example = "a list", f"[{value}]"
    section, _, name = key.rpartition(".")
    if section and isinstance(OmegaConf.select(known, section)._get_node(name), UnionNode):  # int | str
        kind, takes = (str if value == "auto" else int), "an integer or auto"
    wants = f"it takes {takes}, such as {key}={example}"
    # The keys of data, model and optim have no declared type: a value must have the type of the default.
    if kind in TYPES and value is not None and type(value) not in ((int, float) if kind is float else (kind,)):
        raise ConfigError(f"{key}={value}: {wants}")
    try:
        OmegaConf.update(known.copy(), key, value)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{key}={value}: {one_line(error) if default is None else wants}") from error


def _values(override: Override) -> list[Any]:
    """The override's value, or the values that it sweeps over."""
    values = override.sweep_iterator() if override.is_sweep_override() else [override.value()]
    return [value.text if isinstance(value, QuotedString) else value for value in values]


def _names(config: DictConfig, prefix: str = "") -> list[str]:
    """The names of all keys and sections, such as train and train.epochs."""
    names = []
    for key, value in config.items_ex(resolve=False):
        name = f"{prefix}{key!s}"
        names += [name, *(_names(value, f"{name}.") if isinstance(value, DictConfig) else [])]
    return names
