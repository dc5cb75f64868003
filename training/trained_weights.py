"""Looks which weights train: an optimizer has them, or has not, or they are in a list or an object that torch skips.

`check_optimized` compares the weights of the modules with those of the optimizers; `unregistered` walks from each
attribute of modules and of a trainer of yours to weights that are in no module.
"""

import gc
import logging
from collections import deque
from collections.abc import Iterator
from itertools import islice
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from training.config import ConfigError
from training.optimizer import weights_of
from training.trainer import Trainer

log = logging.getLogger(__name__)

MOST = 10_000  # objects that an attribute leads to, and that are looked into
ITEMS = 1000  # of a container, and keys of a dict
FUNCTIONS = (FunctionType, BuiltinFunctionType, MethodType)  # which lead to a module, or to all of an object
NOT_WALKED = (str, bytes, int, float, complex, type(None), type, ModuleType, *FUNCTIONS)


def check_optimized(trainer: Trainer) -> None:
    """Says which parameters of the task are trained, and warns of weights that no optimizer has.

    Raises ConfigError for weights in float16, and for weights of an optimizer that are in no module: a checkpoint
    would not have them, and several processes would not average their gradients.
    """
    optimized = {*map(id, weights_of(trainer.optimizers))}
    weights = dict(trainer.all_modules.named_parameters())
    known = {*map(id, weights.values())}
    if loose := optimized - known:
        raise ConfigError(
            f"an optimizer has {len(loose)} weights that are in no module: put them into an nn.Module that is an "
            f"attribute of {type(trainer).__name__}, such as nn.ParameterList([nn.Parameter(...)])"
        )
    for name in unregistered(trainer, known):
        log.warning(
            "%s has layers or parameters outside an nn.Module, where torch does not see them: they are neither "
            "trained nor saved; use nn.ModuleList, nn.ModuleDict or nn.ParameterList([nn.Parameter(...)]), make an "
            "object that holds them an nn.Module, or freeze them by requires_grad_(False)",
            name,
        )
    trainable = {name: weight for name, weight in weights.items() if weight.requires_grad}
    for name, weight in trainable.items():
        if weight.dtype == torch.float16:
            raise ConfigError(
                f"{name} is trained in float16, which rounds small updates, and the eps of Adam, to 0: keep weights "
                "in float32, and compute in float16 by train.precision=fp16"
            )
    left_out = names_left_out(trainer)
    of_task = [name for name in trainable if name.startswith("task.") and name not in left_out]
    warn_of_left_out(left_out)
    if of_task:
        log.info("%s are trained too; requires_grad_(False) keeps their values", ", ".join(of_task))


def names_left_out(trainer: Trainer) -> list[str]:
    """The weights that no optimizer has, though they are trained, or will be by train.unfreeze_after."""
    optimized = {*map(id, weights_of(trainer.optimizers))}
    later = {*map(id, trainer.frozen_weights)} if trainer.train_config.unfreeze_after else set()
    weights = trainer.all_modules.named_parameters()
    return [name for name, one in weights if (one.requires_grad or id(one) in later) and id(one) not in optimized]


def warn_of_left_out(names: list[str]) -> None:
    if names:
        log.warning(
            "no optimizer has %s (%d weights), so they keep their values: give them to one in configure_optimizers(), "
            "or say so by requires_grad_(False)",
            ", ".join(names[:3]),
            len(names),
        )


def unregistered(trainer: Trainer, known: set[int]) -> list[str]:
    """The attributes that hold trainable weights that are not `known`, by their ids: of modules, and of a subclass."""
    owners = [(path, vars(module)) for path, module in trainer.all_modules.named_modules()]
    found = []
    for path, attributes in [*owners, ("trainer", trainer.added_attributes())]:
        for name, value in attributes.items():
            weights = () if name == "_modules" else weights_in(value)
            if any(weight.requires_grad and id(weight) not in known for weight in weights):
                found.append(f"{path}.{name}")
    return found


def weights_in(attribute: Any) -> Iterator[nn.Parameter]:
    """The parameters that an attribute leads to, along the references that Python's garbage collector knows.

    It calls no code of the user's, and reads no dataset. What is far away is left out: see MOST and ITEMS.
    """
    seen: dict[int, Any] = {}  # keeps the objects: an id is reused
    waiting = deque([attribute])
    while waiting and len(seen) < MOST:
        part = waiting.popleft()
        if id(part) in seen or isinstance(part, NOT_WALKED):
            continue
        seen[id(part)] = part
        if isinstance(part, nn.Parameter):
            yield part
        if isinstance(part, Tensor):
            continue
        if isinstance(part, nn.Module):
            yield from part.parameters()
        is_array = isinstance(part, np.ndarray)
        referents = part.ravel().tolist() if is_array and part.dtype == object else gc.get_referents(part)
        walked = [item for item in islice(referents, ITEMS) if not isinstance(item, NOT_WALKED)]
        waiting.extend(walked[: MOST - len(waiting)])
