"""train.init_from: a new run begins with weights from a file or from an earlier run.

Reading a file runs no code that it contains. A layer is loaded whole or not at all: one of another size stays new.
"""

import importlib
import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from data.classes import listed
from data.errors import explained
from training.checkpoint import State, is_checkpoint, read_file, upgrade
from training.config import ConfigError

log = logging.getLogger(__name__)

WRAPPER = re.compile(r"(module|_orig_mod|model)\.")  # what DDP, torch.compile and Lightning put before names


@dataclass
class Weights:
    """The tensors of a file, by name, and what a checkpoint says of the data that they were trained on.

    classes: their names, if these are known. data: the fingerprint of the training set.
    """

    path: Path
    tensors: dict[str, Tensor]
    classes: list[str] | None
    data: dict[str, Any] | None


def load_weights(source: Weights, model: nn.Module) -> None:
    """Loads the weights into the layers of these names. Raises ConfigError if the network has none of them."""
    own = model.state_dict()
    weights = {name_in(own, name): weight for name, weight in source.tensors.items()}
    common = own.keys() & weights.keys()
    new = {layer_of(name) for name in common if own[name].shape != weights[name].shape}
    taken = {name: weights[name] for name in common if layer_of(name) not in new}
    if not taken:
        theirs = ", ".join(weights)[:150]
        ours = ", ".join(own)[:150]
        raise ConfigError(
            f"train.init_from: {source.path} has none of the layers of the network: {theirs}; it has {ours}"
        )
    missing, _ = model.load_state_dict(taken, strict=False)
    new |= {layer_of(name) for name in missing}
    unused = {layer_of(name) for name in weights.keys() - own.keys()}
    log.info(
        "train.init_from: %d of %d tensors come from %s; new layers, of another size or not in it: %s; not used: %s",
        *(len(taken), len(own), source.path, listed(sorted(new)) or "none", listed(sorted(unused)) or "none"),
    )


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
        if is_checkpoint(content):
            state = upgrade(content, path)
            classes = state["classes"]
            data = state["data"]
            content = evaluated_weights(state)
        for key in ("state_dict", "model_state_dict", "model"):  # below which programs save them
            content = content.get(key, content)
        named = {name: value for name, value in content.items() if isinstance(name, str)}
        tensors = {name: value for name, value in named.items() if isinstance(value, Tensor)}
        return Weights(path, tensors, classes, data)


def evaluated_weights(state: State) -> dict[str, Tensor]:
    """The weights that a run evaluated: the average in `trainer.ema_model`, if its checkpoint has one."""
    weights = state["model"]
    averaged = state["ema_model"] or weights
    if averaged.keys() != weights.keys():  # an AveragedModel of torch has them in its module
        averaged = {name.removeprefix("module."): value for name, value in averaged.items()}
    return {name: averaged[name] for name in weights if name in averaged}


def name_in(own: dict[str, Any], name: str) -> str:
    """The name without what wrappers of a network put before it, unless the network has that name."""
    while name not in own and (wrapper := WRAPPER.match(name)):
        name = name[wrapper.end() :]
    return name


def layer_of(name: str) -> str:
    return name.rpartition(".")[0] or name
