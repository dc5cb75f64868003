"""train.init_from: a new run begins with weights from a file or from an earlier run.

Reading a file runs no code that it contains. A layer is loaded whole or not at all: one of another size stays new.
"""

import importlib
import logging
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from hydra.utils import to_absolute_path
from torch import Tensor, nn

from data.errors import explained, home_path
from training.checkpoint import read_file, step_files
from training.config import ConfigError
from training.processes import Processes

log = logging.getLogger(__name__)

WRAPPER = re.compile(r"(module|_orig_mod|model)\.")  # what DDP, torch.compile and Lightning put before names


def begin_from(source: str, model: nn.Module, processes: Processes) -> None:
    """Loads the weights of `source`, which the main process reads. Raises ConfigError if it has none of the layers."""
    path, weights = processes.from_main(lambda: read_weights(source))
    own = model.state_dict()
    weights = {name_in(own, name): weight for name, weight in weights.items()}
    common = own.keys() & weights.keys()
    new = {layer_of(name) for name in common if own[name].shape != weights[name].shape}
    taken = {name: weights[name] for name in common if layer_of(name) not in new}
    if not taken:
        theirs = ", ".join(weights)[:150]
        ours = ", ".join(own)[:150]
        raise ConfigError(f"train.init_from: {path} has none of the layers of the network: {theirs}; it has {ours}")
    missing, _ = model.load_state_dict(taken, strict=False)
    new |= {layer_of(name) for name in missing}
    unused = {layer_of(name) for name in weights.keys() - own.keys()}
    log.info(
        "train.init_from: %d of %d tensors come from %s; new layers, of another size or not in it: %s; not used: %s",
        *(len(taken), len(own), path, listed(new), listed(unused)),
    )


Names = list[str] | None


def known_classes(saved: dict[str, Any] | None, init_from: str | None, processes: Processes) -> tuple[Names, Names]:
    """The names of the classes that a network was trained on: in the checkpoint to resume, and in train.init_from."""
    if saved is not None:
        if "classes" not in saved:
            log.info("the checkpoint has no names of classes, as it is of an earlier version: they are not compared")
        return saved.get("classes"), None
    return None, processes.from_main(lambda: classes_in(init_from)) if init_from else None


def classes_in(source: str) -> Names:
    """The names of the classes in the file of train.init_from, if it is a run's checkpoint. Reads no weights."""
    path = find(Path(to_absolute_path(str(home_path(source)))))
    with suppress(Exception):  # of a damaged file, or one of another kind, begin_from says what is wrong
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        return state["classes"] if {"model", "callbacks"} <= state.keys() else None
    return None


def read_weights(source: str) -> tuple[Path, dict[str, Tensor]]:
    """The file of train.init_from, as `find` chooses it, and the tensors in it."""
    path = find(Path(to_absolute_path(str(home_path(source)))))  # a job may have another working directory
    with explained(
        f"{path} has no weights",
        "save a state_dict with torch.save, or with safetensors (pip install safetensors)",
    ):
        if path.suffix == ".safetensors":
            content = importlib.import_module("safetensors.torch").load_file(path)
        else:
            content = read_file(path)
        is_ours = {"model", "callbacks"} <= content.keys()
        content = evaluated_weights(content) if is_ours else content
        for key in ("state_dict", "model_state_dict", "model"):  # below which programs save them
            content = content.get(key, content)
        named = {name: value for name, value in content.items() if isinstance(name, str)}
        return path, {name: value for name, value in named.items() if isinstance(value, Tensor)}


def evaluated_weights(state: dict[str, Any]) -> dict[str, Tensor]:
    """The weights that a run evaluated: their running mean (EMA), if its checkpoint has one."""
    mean = state.get("callbacks", {}).get("ema", {})
    averaged = {key.removeprefix("module."): value for key, value in mean.items() if key.startswith("module.")}
    return averaged or state["model"]


def find(path: Path) -> Path:
    """The checkpoint file to use: `path`, or else best.pt in that run's folder, or else its newest one."""
    if path.is_file():
        return path
    best = path / "checkpoints" / "best.pt"
    files = [best] if best.exists() else step_files(path / "checkpoints")
    if not files:
        raise ConfigError(f"{path}: there is no checkpoint file, and no checkpoints/step-*.pt below it")
    return files[0]


def listed(layers: set[str]) -> str:
    return ", ".join(sorted(layers)) or "none"


def name_in(own: dict[str, Any], name: str) -> str:
    """The name without what wrappers of a network put before it, unless the network has that name."""
    while name not in own and (wrapper := WRAPPER.match(name)):
        name = name[wrapper.end() :]
    return name


def layer_of(name: str) -> str:
    return name.rpartition(".")[0] or name
