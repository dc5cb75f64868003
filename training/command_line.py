"""The command line of a run: how it is completed, kept in command.yaml, and taken up again by a resume."""

import argparse
import json
import os
import re
import shlex
import sys
from contextlib import suppress
from dataclasses import fields
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import yaml
from hydra._internal import utils as hydra_utils
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import OverrideParseException
from omegaconf import OmegaConf

from data.transform import OLD_KEYS
from training.config import ROOT, Config, ConfigError
from training.files import write_whole
from training.processes import number_in, rank, world_size
from training.resume import named_path

COMMAND = "command.yaml"  # in a run's folder: the flags and the overrides with which it began
# Processes that are not the main one make no folder and no log.
SILENT = ["hydra.run.dir=.", "hydra.output_subdir=null", "hydra/job_logging=none", "hydra/hydra_logging=none"]
# Settings of Hydra that a resume does not take over from the earlier command.
NOT_RESUMED = ("hydra.run.", "hydra.sweep", "hydra.mode", "hydra/sweeper", "hydra/launcher", "hydra.launcher")
# What the key of a dict needs a backslash for on a command line.
SPECIAL = re.compile(r"[\\()\[\]{}:=, \t]")
PLUGINS = {  # of Hydra, by the group and the first word of the choice that they add
    **{("hydra/sweeper", name): name for name in ("ax", "nevergrad", "optuna")},
    ("hydra/sweeper", "search"): "optuna",
    **{("hydra/launcher", name): name for name in ("joblib", "ray", "rq", "submitit")},
}


class TextHelpParser(argparse.ArgumentParser):
    """The parser of Hydra's options. Hydra 1.3 gives an object as a help text, which Python 3.14 refuses."""

    def add_argument(self, *names: str, **options: Any) -> argparse.Action:
        help_text = options.get("help")
        if help_text is not None and not isinstance(help_text, str):
            options["help"] = str(help_text).replace("%", "%%")
        return super().add_argument(*names, **options)

    def error(self, message: str) -> NoReturn:
        remedy = "write a setting as KEY=VALUE, without -- and without spaces"
        if "--local-rank" in message or "--local_rank" in message:  # python -m torch.distributed.launch
            remedy = "start the processes with torchrun"
        elif "ipykernel" in sys.modules:
            remedy = "the arguments are those of the notebook: start `!python train.py` there"
        raise ConfigError(f"{message}; {remedy}")


# Hydra makes its parser in this module alone, which needs nothing else of argparse. Hydra 1.4 does without this.
hydra_utils.argparse = SimpleNamespace(ArgumentParser=TextHelpParser)  # type: ignore[attr-defined, assignment]  # a module


def complete(arguments: list[str]) -> list[str]:
    """The command line of a process of the run.

    The settings of the run to resume come before those of `arguments`; `hydra.run.dir` is set to its folder, or to the
    folder of torchrun's processes, which also share the folder of a sweep. A `~` becomes the home folder.
    """
    arguments = [with_home(argument) for argument in arguments]
    options = hydra_utils.get_args_parser().parse_intermixed_args(arguments)
    overrides: list[str] = options.overrides
    check_names(options.config_dir)
    if options.multirun and (options.cfg or options.info):
        raise ConfigError("--cfg and --info show the settings of one run: leave out -m, and give each key one value")
    flags = [argument for argument in arguments if argument not in overrides]
    for text in overrides:
        if text.endswith("\r"):
            raise ConfigError(
                f"{text[:-1]} ends with a carriage return, as the lines of a script that was saved on Windows do: "
                "sed -i 's/\\r$//' SCRIPT"
            )
    by_key = parsed(overrides)
    if "" in by_key:
        raise ConfigError(f"{by_key[''].input_line}: there is no key before the =")
    for text in overrides:
        if text.endswith("=") and not text.startswith("hydra."):
            raise ConfigError(
                f"{text}: there is no value, as where a variable of the shell is not set: give one, or "
                f"{text}null; an empty text is \"{text}''\""
            )
    # Whether there is a sweep, a yaml file may say too: hydra.mode=MULTIRUN.
    names = {"hydra.run.dir": "outputs", "hydra.sweep.dir": "multirun"}
    folders = {key: folder_of_torchrun(parent) for key, parent in names.items()}
    override = by_key.get("train.resume")
    if override is not None and override.is_sweep_override():
        raise ConfigError(f"{override.input_line}: each run has its own settings: resume one run at a time")
    resumed = named_path(override and override.value())
    if resumed is not None:
        run_folder = folder_of_run(resumed)
        command = earlier_command(run_folder)
        flags = [*command["flags"], *flags]
        earlier = [line for line in command["overrides"] if not is_replaced(line, by_key)]
        overrides = [*earlier, *overrides]
        if resumed.is_dir() and not options.multirun:  # a checkpoint file starts a run in a new folder
            folders["hydra.run.dir"] = run_folder
            if "hydra.mode" not in by_key:  # its yaml file may ask for a sweep, of which the run is a job
                overrides = [*overrides, "hydra.mode=RUN"]
            if rank() == 0 and not (run_folder / COMMAND).exists():  # Hydra will overwrite what it was read from
                write_whole(run_folder / COMMAND, yaml.safe_dump(command))
    for key, folder in folders.items():
        if folder is not None and key not in by_key:
            overrides = [*overrides, f"{key}={value_of(folder)}"]
    return [*flags, *overrides, *(SILENT if rank() > 0 else [])]


def with_home(argument: str) -> str:
    return re.sub(r"(?<=[=,\'\"[])~(?=[/,]|$)", lambda _: os.path.expanduser("~"), argument)


def check_names(config_dir: str | None) -> None:
    """Raises ConfigError if conf/, an extra's or --config-dir has another file by a name of one before it.

    Hydra would take the first.
    """
    folders = config_folders(config_dir)
    for place, conf in enumerate(folders, 1):
        ours = sorted(conf.rglob("*.yaml")) if place < len(folders) else []  # the last may have a million other files
        for first, folder in product(ours, folders[place:]):
            second = folder / first.relative_to(conf)
            if second.is_file() and second.read_bytes() != first.read_bytes():
                raise ConfigError(f"{second} is not used, as {first} has its name: choose another name")


def config_folders(config_dir: str | None = None) -> list[Path]:
    """Where Hydra looks for yaml files: in conf/ first."""
    return [ROOT / "conf", *sorted(ROOT.glob("extras/*/conf")), *([Path(config_dir)] if config_dir else [])]


def parsed(overrides: list[str]) -> dict[str, Override]:
    return {override.key_or_group: override for override in OverridesParser.create().parse_overrides(overrides)}


def is_replaced(line: str, by_key: dict[str, Override]) -> bool:
    """Whether an earlier override goes, as one of `by_key` sets its key. One that adds it stays, to be changed."""
    ((key, earlier),) = parsed([line]).items()
    is_group = any((folder / key).is_dir() for folder in config_folders())
    adds = earlier.is_add() or earlier.is_force_add()
    return key in by_key and (is_group or not adds or by_key[key].is_add() or by_key[key].is_force_add())


def say_remedies(arguments: list[str], refusal: BaseException | None) -> None:
    """Says what to do about a command line that Hydra has refused by `refusal`, where Hydra does not know it."""
    options = hydra_utils.get_args_parser().parse_intermixed_args(arguments)
    if no_package := re.search(r"In '((\w+)/[^']*)': .*\nKey '\2' not in 'Config'", str(refusal)):
        remedy = package_of(no_package[1], options.config_dir)
        print(f"error: {no_package[1]}.yaml: {remedy}", file=sys.stderr)
    by_key = parsed(options.overrides)
    for file in recipes(by_key.get("experiment"), options.config_dir):
        for group, choice in choices_without_override(file).items():
            remedy = f"write '- override /{group}: {choice}' at the end of its defaults"
            print(f"error: {file}: to choose another {group}, {remedy}", file=sys.stderr)
    where = f" (change it in {COMMAND} in the run's folder)" if "train.resume" in by_key else ""
    unknown = re.search(r"Could not override '([^']+)'", str(refusal))
    if where and unknown:
        line = by_key[unknown[1]].input_line if unknown[1] in by_key else unknown[1]
        remedy = f"if the earlier run has set it, remove it from {COMMAND} in its folder"
        print(f"error: {line} does not fit the other settings: {remedy}", file=sys.stderr)
    for key, override in by_key.items():
        old_key = re.sub(r"^data\.(parts\.[^.]+\.)?", "", key)
        is_list = override.is_sweep_override() or isinstance(override.value(), list)
        is_list = is_list and old_key in ("transform", "test_transform")
        if key.startswith("data.") and old_key in OLD_KEYS and not is_list:
            print(f"error: {override.input_line}: {OLD_KEYS[old_key]}{where}", file=sys.stderr)
        if override.is_add() and override.package is None and key in choices_of_root():
            print(f"error: {override.input_line}: write {str(override.input_line).lstrip('+')}", file=sys.stderr)
        if plugin := PLUGINS.get((key, str(override.value()).partition("_")[0])):
            install = f"pip install --pre hydra-{plugin}-{key.removeprefix('hydra/')}"
            print(f"error: {override.input_line}: if Hydra cannot load it, {install}", file=sys.stderr)
        name = key.partition(".")[2].partition(".")[0]
        if key.startswith("callbacks.") and override.is_add() and name in names_of_callbacks():
            print(f"error: {override.input_line}: there is a callback {name!r}: choose another name", file=sys.stderr)


def package_of(name: str, config_dir: str | None) -> str:
    """What to change in a yaml file, GROUP/CHOICE, of a group that is no section of the config."""
    group = name.partition("/")[0]
    contents: list[Any] = []
    for folder in config_folders(config_dir):
        with suppress(OSError, ValueError, yaml.YAMLError):
            contents.append(yaml.safe_load((folder / f"{name}.yaml").read_text()))
    keys = {key for content in contents if isinstance(content, dict) for key in content}
    if keys <= {"defaults", "hydra", *(each.name for each in fields(Config))}:
        return "begin it with the line '# @package _global_'"
    if group == "logger":
        return "begin it with the line '# @package callbacks', and put its keys below a name, as extras/loggers/ do"
    field = f"{group}: Section = field(default_factory=dict)"
    return f"a section {group} of your own needs `{field}` at the end of Config in training/config.py"


def recipes(override: Override | None, config_dir: str | None) -> list[Path]:
    """The files that `experiment` names."""
    names = override.value() if override is not None and not override.is_sweep_override() else []
    paths = [
        folder / "experiment" / f"{name}.yaml" for name in as_list(names) for folder in config_folders(config_dir)
    ]
    return [path for path in paths if path.is_file()]


def choices_without_override(recipe: Path) -> dict[str, Any]:
    """The choices, by group of config.yaml, that Hydra does not take as a recipe writes them."""
    try:
        keys = yaml.safe_load(recipe.read_bytes())
    except yaml.YAMLError:  # Hydra has said it
        return {}
    keys = keys if isinstance(keys, dict) else {}
    groups = choices_of_root()
    choices = {key: choice for key, choice in keys.items() if isinstance(choice, str)}
    for key, choice in choices_in(as_list(keys.get("defaults"))).items():
        group = str(key).split()[-1].removeprefix("/")
        if key != f"override /{group}":
            choices[group] = choice
    return {group: choice for group, choice in choices.items() if group in groups}


def choices_of_root() -> dict[str, Any]:
    """The choices, by group, of config.yaml."""
    return choices_in(yaml.safe_load((ROOT / "conf" / "config.yaml").read_bytes())["defaults"])


def choices_in(defaults: list[Any]) -> dict[str, Any]:
    return {key: choice for entry in defaults if isinstance(entry, dict) for key, choice in entry.items()}


def as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def names_of_callbacks() -> set[str]:
    """The names of the callbacks in the repository."""
    return {path.stem for folder in config_folders() for path in folder.glob("callbacks/standard/*.yaml")}


def save_command(folder: Path) -> None:
    """Writes command.yaml. What Hydra writes to .hydra/ may be of a later command, which was refused."""
    if not HydraConfig.initialized():
        return
    config: Any = HydraConfig.get()
    if OmegaConf.select(config, "runtime.output_dir") == str(folder):  # else Hydra has started another run
        hydra: Any = OmegaConf.to_container(config)
        write_whole(folder / COMMAND, yaml.safe_dump(command_of(hydra, hydra["overrides"]["task"])))


def folder_of_run(resumed: Path) -> Path:
    """The folder of the run that train.resume names, by it or by a file in it. Raises ConfigError for another path."""
    parents = resumed.parents[: 2 if resumed.is_file() else 1]  # of RUN/checkpoints/FILE and RUN/checkpoints
    for path in (resumed, *parents) if resumed.exists() else ():
        if any((path / name).exists() for name in (COMMAND, ".hydra", "checkpoints")):
            return path
    if not resumed.exists():
        raise ConfigError(f"train.resume={resumed}: there is no such file or folder")
    runs = sorted(str(path.parent) for path in resumed.glob(f"*/{COMMAND}"))
    choices = f"one of {', '.join(runs[-3:])}" if runs else "a run's folder, or train.init_from=FILE for its weights"
    raise ConfigError(f"train.resume={resumed} is no run's folder, as it has no {COMMAND}: give {choices}")


def earlier_command(folder: Path) -> dict[str, list[str]]:
    """The flags and the overrides with which the run in `folder` began."""
    file = folder / COMMAND
    try:
        if file.exists():
            command = yaml.safe_load(file.read_text())
            return {key: list(command[key]) for key in ("flags", "overrides")}
        # A run of before there was a command.yaml.
        file = folder / ".hydra" / "overrides.yaml"
        hydra = yaml.safe_load(file.with_name("hydra.yaml").read_text())["hydra"]
        return command_of(hydra, yaml.safe_load(file.read_text()), Path(hydra["runtime"]["cwd"]))
    except (OSError, TypeError, KeyError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(
            f"train.resume: {file} cannot be read ({error}): "
            "give all settings again, train.resume=auto and hydra.run.dir=FOLDER"
        ) from error


def command_of(hydra: dict[str, Any], overrides: list[str], root: Path = ROOT) -> dict[str, list[str]]:
    """The flags and the overrides of a command line, from Hydra's own config and the overrides of ours.

    root: where the project lay at that time, whose conf/ needs no flag.
    """
    paths = {source["provider"]: source["path"] for source in hydra["runtime"]["config_sources"]}
    flags = [f"--config-dir={paths['command-line']}"] if "command-line" in paths else []
    if Path(paths["main"]) not in (ROOT / "conf", root / "conf"):
        flags.append(f"--config-path={paths['main']}")
    flags.append(f"--config-name={hydra['job']['config_name']}")
    of_hydra = [line for line in hydra["overrides"]["hydra"] if not line.lstrip("+~").startswith(NOT_RESUMED)]
    return {"flags": flags, "overrides": [*map(str, overrides), *of_hydra]}


def folder_of_torchrun(parent: str) -> Path | None:
    """The folder of torchrun's processes: the same one after a restart, another one for each torchrun."""
    name = os.environ.get("TORCHELASTIC_RUN_ID")
    if name == "none":  # its logs have their own folder: /tmp/torchelastic_XXX/none_YYY/attempt_0/0/error.json
        error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
        name = next(iter(Path(error_file or "").parts[-4:-3]), None)
    return Path(parent) / name if name else None


def remedy_of(override: str) -> str:
    """What to type in place of an override that Hydra cannot parse."""
    key, equals, text = override.partition("=")
    if text.endswith(","):
        return "remove the comma at its end"
    if not (key and equals):
        return "write KEY=VALUE, without spaces around the ="
    value: Any = text
    with suppress(yaml.YAMLError):
        value = yaml.safe_load(text) if text[:1] in ("{", "[") else text
    typed = f"{key}={value_of(value, quotes=True)}"
    with suppress(OverrideParseException):
        (read,) = OverridesParser.create().parse_overrides([typed])
        if read.value() == value:
            return f"if it is a value with special characters, type {shlex.quote(typed)}"
    return "a command line cannot have this value: write it into a yaml file, such as conf/experiment/NAME.yaml"


def resume_command(folder: Path) -> str:
    """The command that continues the run of this folder, as this one was started."""
    starter = "python"
    if world_size() > 1:
        is_one_machine = number_in("LOCAL_WORLD_SIZE", 0) == world_size()
        starter = f"torchrun --nproc-per-node={world_size()}" if is_one_machine else "torchrun (as before)"
    # Python may have been given a link to it; or it is the program of a launcher.
    program = sys.argv[0] if Path(sys.argv[0]).resolve().name == "train.py" else "train.py"
    return f"{starter} {shlex.quote(program)} {resume_of(folder)}"


def resume_of(folder: Path) -> str:
    """The argument that continues the run of this folder, as it is typed in a shell."""
    return shlex.quote(f"train.resume={value_of(folder)}")


def value_of(value: Any, quotes: bool = False) -> str:
    """A path, or another value, as that of an override; texts in quotes if they need them, or if `quotes`."""
    if isinstance(value, dict):
        keys = [SPECIAL.sub(r"\\\g<0>", str(key)) for key in value]
        entries = [value_of(entry, quotes=True) for entry in value.values()]
        return "{" + ", ".join(f"{key}: {entry}" for key, entry in zip(keys, entries, strict=True)) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(value_of(entry, quotes=True) for entry in value) + "]"
    if not isinstance(value, str | Path):
        return json.dumps(value, default=str)
    is_plain = re.fullmatch(r"[\w/.:@%+-]+", str(value), re.ASCII) and not quotes
    return str(value) if is_plain else QuotedString(str(value), Quote.single).with_quotes()
