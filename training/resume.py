"""What a run begins with: which run, which file, and which class numbers. Each part below says what loads it.

1. Which run: `named_path`. command_line.complete puts its overrides before the new ones, and stays in its folder;
   of a checkpoint file, and in a sweep, the new run gets a folder of its own.
2. Which file, and what of it: `choose_origin`. state.load_origin loads it: modules by `load_module`, and weights alone
   by `load_weights`: a layer is loaded whole or not at all, one of another size stays new. Run.start loads the states
   of the callbacks; Best.load_state_dict decides whether the best score stays.
3. Which number each class has: `Origin.classes_for`. data/classes.py translates the labels.
4. What has changed: `changes_since`. The log names it; the loader and the network refuse what does not fit them.
   What a changed setting replaces is decided where it is loaded: in state.load_state (the loader's lengths and batch
   size, frozen weights, modes), optimizer.resume_optimizer (keys of optim) and Preprocessing (mean and std).
5. Whether the run in this folder is this one: `check_same_run`. If it has finished, nothing is loaded.
"""

import importlib
import logging
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from hydra.utils import to_absolute_path
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.loss import _Loss

from data.classes import are_same, listed
from data.errors import explained, home_path
from training.checkpoint import (
    State,
    best_or_newest,
    checkpoints_in,
    is_checkpoint,
    newest,
    read_checkpoint,
    read_file,
    upgrade,
)
from training.checks import are_close
from training.config import ConfigError, TrainConfig, flat

log = logging.getLogger(__name__)

# Settings that change nothing that a run reports: its scores, its speed, its pages.
OF_FILES = ("train.checkpoint_every", "train.keep_checkpoints", "train.process_timeout", "train.stop_at_nan")
# Settings that may change for the rest of an unfinished job of a sweep.
OF_SPEED = ("loader", "device", "timing", "train.num_threads", "train.log_interval")
# Settings that say how far a run goes: a finished one has gone there.
LIMITS = ("train.epochs", "train.max_steps")
# What may change between two epochs: entries of the loader's state, and of the training set's fingerprint.
OF_LOADER = ("global_batch_size", "dataset_length", "mixture")
OF_DATA = ("labels", "first", "order")

WRAPPER = re.compile(r"(module|_orig_mod|model)\.")  # what DDP, torch.compile and Lightning put before names


@dataclass
class Weights:
    """The tensors of a file, by name, and what a checkpoint says of the data that they were trained on.

    classes: their names, if these are known. data: the fingerprint of the training set. others: the names of weights
    in the file that are not among `tensors`, such as an average beside them.
    """

    path: Path
    tensors: dict[str, Tensor]
    classes: list[str] | None
    data: dict[str, Any] | None
    others: list[str]


@dataclass
class Origin:
    """What a run begins with: a checkpoint, of which everything is loaded, or weights, or neither, which is new.

    is_own: whether the checkpoint is one of the run's own folder.
    """

    state: State | None = None
    weights: Weights | None = None
    is_own: bool = False

    def classes_for(self, own: Sequence[str] | None) -> Sequence[str] | None:
        """The names of the classes, by the numbers that the network knows them by. own: those of the dataset.

        A checkpoint's stay, whatever data the run gets. Weights keep theirs if the dataset has the same classes, in
        whatever order; else their last layer learns those of the dataset.
        """
        if self.state is not None:
            return self.state["classes"] or own
        trained = self.weights and self.weights.classes
        if trained and own and are_same(own, trained):
            return trained
        if trained and own and len(own) == len(trained):
            sentence = "train.init_from: its last layer was trained on the classes %s; this run trains it on %s"
            log.warning(sentence, listed(trained), listed(own))
        return own


def choose_origin(folder: Path, config: TrainConfig) -> Origin:
    """What a run in `folder` begins with, by train.resume and train.init_from. Reads the file."""
    # The first of these that there is:
    # 1. Unless train.resume is null: the newest checkpoint of the run's own folder. The run may have begun from
    #    another one, and been interrupted later.
    # 2. The checkpoint file that train.resume names.
    # 3. The newest checkpoint of the run whose folder it names.
    # 4. The weights alone of train.init_from: of a file, or of a run's best checkpoint, or else of its newest.
    # 5. Nothing: the weights are new.
    path = named_path(config.resume, absolute)
    if config.resume is not None and (state := newest(folder / "checkpoints")) is not None:
        return Origin(state, is_own=True)
    elif path is not None and path.is_file():
        return Origin(read_checkpoint(path))
    elif path is not None:
        state = newest(checkpoints_in(path))
        if state is None:
            raise ConfigError(
                f"train.resume={config.resume}: there is no checkpoints/step-*.pt: give a checkpoint file"
            )
        return Origin(state)
    elif config.init_from:
        return Origin(weights=read_weights(best_or_newest(absolute(config.init_from))))
    else:
        return Origin()


def named_path(choice: object, path_of: Callable[[str], Path] = home_path) -> Path | None:
    """The file or the folder that train.resume names; None if it is null or auto."""
    return None if choice in (None, "auto") else path_of(str(choice))


def absolute(path: str) -> Path:
    return home_path(
        path if path.startswith("~") else to_absolute_path(path)
    )  # a job may have another working directory


def changes_since(
    state: State, settings: dict[str, Any], loader: dict[str, Any], data: dict[str, Any]
) -> dict[str, str]:
    """What differs from the checkpoint `state`: a sentence for each setting, and for each of OF_LOADER and OF_DATA.

    loader, data: the state of this run's loader, and the fingerprint of its training set. Within an epoch the loader
    refuses what does not fit; raises ConfigError if the labels differ then.
    """
    is_within_epoch = state["loader"]["samples"] > 0
    orders = state["data"]["order"], data["order"]
    theirs = flat(state["config"])
    ours = flat(settings)
    for key in () if is_within_epoch else OF_LOADER:
        theirs[key] = state["loader"].get(key)
        ours[key] = loader.get(key)
    changed: dict[str, str] = {}
    not_compared = ("train.resume.", *of_other_versions(state["config"], settings))
    for key in theirs | ours:
        if not f"{key}.".startswith(not_compared) and ours.get(key) != theirs.get(key):
            changed[key] = f"{key} is {ours.get(key)}, was {theirs.get(key)}"
    if is_within_epoch and state["loader"].get("dataset_length") != loader.get("dataset_length"):
        return changed
    if state["data"]["labels"] != data["labels"]:
        if is_within_epoch:
            raise ConfigError(
                "train.resume: the labels of the training set, or their order, have changed within an epoch: "
                "restore them, or resume from an end-of-epoch checkpoint"
            )
        changed["labels"] = "the labels of the training set, or their order, have changed"
    elif not are_close(state["data"]["first"], data["first"]):
        changed["first"] = "the first samples of the training set have changed"
    elif is_within_epoch and None not in orders and orders[0] != orders[1]:
        changed["order"] = "the sampler gives other indices, so some samples of an epoch train twice, others not"
    return changed


def of_other_versions(theirs: dict[str, Any], ours: dict[str, Any]) -> list[str]:
    """The keys that one of the runs lacks, and that no user can have added: its version of the repository lacks them.

    These are settings of `train`, `timing` and `loader`, and callbacks of the repository: extras/ may be deleted.
    """
    names = []
    for section in ("train", "timing", "loader", "callbacks"):
        one, other = (config.get(section) or {} for config in (theirs, ours))
        for name in one.keys() ^ other.keys():
            entry = (one | other)[name]
            if not isinstance(entry, dict) or str(entry.get("_target_")).startswith(("training.", "extras.")):
                names.append(f"{section}.{name}.")
    return names


def check_same_run(folder: Path, changed: dict[str, str], is_job: bool, has_finished: bool) -> None:
    """Raises ConfigError if the run in `folder` is another one than this.

    is_job: whether this run is a job of a sweep, which gives its folders by number, and that folder is its own.
    has_finished: whether the summary of that run is to be returned. Any other run may continue with what has changed.
    """
    of_speed = () if has_finished else OF_SPEED
    if is_job and (differing := sentences(changed, (*OF_FILES, *OF_LOADER, *OF_DATA, *of_speed))):
        raise ConfigError(
            f"{folder} has a job of other values ({differing}): choose another hydra.sweep.dir (and a "
            "hydra.sweep.subdir that differs from job to job), or set train.resume=null to train in this one again"
        )
    if has_finished and sentences(changed, (*OF_FILES, *LIMITS)):
        differing = sentences(changed)
        raise ConfigError(
            f"{folder} has a finished run with other settings ({differing}): for a new run set train.resume=null, and "
            f"to train in this folder again hydra.run.dir={folder}, too"
        )


def sentences(changed: dict[str, str], left_out: tuple[str, ...] = ()) -> str:
    return "; ".join(sentence for key, sentence in changed.items() if not key.startswith(left_out))


def read_weights(path: Path) -> Weights:
    """The tensors in a file of train.init_from."""
    with explained(
        f"{path} has no weights",
        "save a state_dict with torch.save, or with safetensors (pip install safetensors)",
    ):
        if path.suffix == ".safetensors":
            content = importlib.import_module("safetensors.torch").load_file(path)
        else:
            content = read_file(path)
        classes = None
        data = None
        beside: dict[str, Any] = {}
        if is_checkpoint(content):
            state = upgrade(content, path)
            classes = state["classes"]
            data = state["data"]
            content = evaluated_weights(state)
            beside = {f"others.{name}": weights for name, weights in state["others"].items()}
        for key in ("state_dict", "model_state_dict", "model"):  # below which programs save them
            if key in content:
                beside |= {name: value for name, value in content.items() if name != key}
                content = content[key]
        named = content.items()
        tensors = {name: value for name, value in named if isinstance(name, str) and isinstance(value, Tensor)}
        if content and not tensors:
            keys = ", ".join(map(str, content))[:150]
            raise ConfigError(
                f"train.init_from: {path} has no tensors, but {keys}: save one of these alone, or below the key "
                "`model`"
            )
        others = [str(name) for name, value in beside.items() if isinstance(value, dict) and has_tensors(value)]
        return Weights(path, tensors, classes, data, others)


def has_tensors(weights: dict[Any, Any]) -> bool:
    return any(isinstance(value, Tensor) for value in weights.values())


def evaluated_weights(state: State) -> dict[str, Tensor]:
    """The weights that a run evaluated: the average in `trainer.ema_model`, if its checkpoint has one."""
    weights = state["model"]
    averaged = state["ema_model"] or weights
    if averaged.keys() != weights.keys():  # an AveragedModel of torch has them in its module
        averaged = {name.removeprefix("module."): value for name, value in averaged.items()}
    return {name: averaged[name] for name in weights if name in averaged}


def evaluated_settings(state: State) -> dict[str, Any]:
    """What ModuleState has saved, with the average's settings and buffers, if it was evaluated, as the network's."""
    average = {name: value for name, value in state["altered"].items() if name.startswith("ema_model.")}
    of_network = {re.sub(r"^ema_model\.(module\.)?", "model.", name): value for name, value in average.items()}
    return state["altered"] | (of_network if state["ema_model"] else {})


def load_early(source: Weights, model: nn.Module) -> None:
    """Loads the weights before a trainer's constructor copies the network, as a teacher. load_weights then decides.

    Those that do not fit are left out, and all if one is not finite that was: load_weights, or the look after it,
    says so.
    """
    own = model.state_dict()
    taken = fitting(renamed(source.tensors, own), own)
    with suppress(NotImplementedError, RuntimeError):
        if all(weight.isfinite().all() or not own[name].isfinite().all() for name, weight in taken.items()):
            model.load_state_dict(taken, strict=False)


def fitting(weights: dict[str, Tensor], own: dict[str, Tensor]) -> dict[str, Tensor]:
    """Those of `weights` that the network has, without the layers of which one has another size."""
    resized = resized_layers(own, weights)
    return {name: weight for name, weight in weights.items() if name in own and layer_of(name) not in resized}


def load_weights(source: Weights, model: nn.Module, device: torch.device) -> None:
    """Loads the weights into the layers of these names. Raises ConfigError if the network has none of them."""
    fill_buffers(model, source.tensors, device)
    own = model.state_dict()
    weights = renamed(source.tensors, own)
    taken = fitting(weights, own)
    if not taken:
        theirs = ", ".join(weights)[:150]
        ours = ", ".join(own)[:150]
        raise ConfigError(
            f"train.init_from: {source.path} has none of the layers of the network: the file has {theirs}; the "
            f"network {ours}. Save these tensors by the network's names"
        )
    missing, _ = model.load_state_dict(taken, strict=False)  # torch does not miss the counts of old batch norms
    # A file of safetensors has a weight that layers share by one of its names.
    ids = {name: id(weight) for name, weight in model.named_parameters(remove_duplicate=False)}
    filled = {ids.get(name) for name in taken} - {None}
    missing = [name for name in missing if ids.get(name) not in filled]
    loaded = {layer_of(name) for name in taken}
    # A layer by its name, unless some of its weights are loaded, as with LoRA, which adds weights to layers.
    new, unused = (
        {name if layer_of(name) in loaded else layer_of(name) for name in names}
        for names in (missing, weights.keys() - own.keys())
    )
    log.info(
        "train.init_from: %d of %d tensors come from %s; new, of another size or not in it: %s; not used: %s",
        len(taken),
        len(own),
        source.path,
        listed(sorted(new)) or "none",
        listed([*source.others, *sorted(unused)]) or "none",
    )


def load_module(module: nn.Module, saved: dict[str, Any], device: torch.device) -> None:
    """Does what load_state_dict does, also for buffers that are None before the first forward pass.

    Names may have what wrappers put before them: a trainer may wrap its network in DDP under torchrun only.
    """
    own = module.state_dict() | empty_buffers(module)
    if not saved.keys() <= own.keys():
        saved = renamed(saved, own)
    fill_buffers(module, saved, device)
    module.load_state_dict(saved)


def fill_buffers(module: nn.Module, saved: dict[str, Any], device: torch.device) -> None:
    """Fills the empty buffers that a state_dict has: load_state_dict takes none for a buffer that is None.

    It names them as load_weights does, and fills none of a layer that has another size there.
    """
    own = module.state_dict()
    empty = empty_buffers(module)
    names = own | empty
    values = renamed(saved, names)
    resized = resized_layers(own, values)
    for name, (part, attribute) in empty.items():
        if name in values and layer_of(name) not in resized and attribute not in part._non_persistent_buffers_set:
            setattr(part, attribute, values[name].to(device, copy=True))


def empty_buffers(module: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """The module and attribute of each buffer that is None, as a first forward pass may fill it, by name.

    Not those of torch's norms and losses, whose None is a setting, such as track_running_stats=False.
    """
    return {
        f"{path}.{name}".lstrip("."): (part, name)
        for path, part in module.named_modules()
        for name, buffer in part._buffers.items()
        if buffer is None and not isinstance(part, _NormBase | _Loss)
    }


def renamed(saved: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """The tensors by the names that the network has. Another prefix is removed if all its names follow it."""
    values = {name_in(own, name): value for name, value in saved.items()}
    if not own.keys() & values.keys():
        first = next(iter(own), "")
        for prefix in [name.removesuffix(first) for name in values if name.endswith(f".{first}")]:
            below = {name.removeprefix(prefix): value for name, value in values.items()}
            if own.keys() <= below.keys():
                return below
    return values


def name_in(own: dict[str, Any], name: str) -> str:
    """The name without what wrappers of a network put before it, unless the network has that name."""
    while name not in own and (wrapper := WRAPPER.match(name)):
        name = name[wrapper.end() :]
    return name


def resized_layers(own: dict[str, Any], saved: dict[str, Any]) -> set[str]:
    """The layers of which `saved` has a tensor of another size."""
    return {
        layer_of(name)
        for name in own.keys() & saved.keys()
        if getattr(own[name], "shape", None) != getattr(saved[name], "shape", None)
    }


def layer_of(name: str) -> str:
    return name.rpartition(".")[0] or name
