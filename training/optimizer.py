"""What is trained, and how fast: frozen parameters, weight decay, and lower learning rates for earlier layers."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any

import yaml
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from data.errors import did_you_mean
from training.config import CONF, ConfigError, build

log = logging.getLogger(__name__)

BATCH_SIZE = 128  # for which the learning rates in conf/optim/ were chosen


def build_optimizer(model: nn.Module, section: dict[str, Any]) -> Optimizer:
    """The optimizer of the section `optim`. Weight decay applies to weights, not to biases and norms.

    With `layer_decay` in the section each layer learns at that share of the next layer's rate (Bao et al.,
    arXiv:2106.08254). The order of the parameters does not depend on it, nor on what is frozen, so that a checkpoint's
    state fits: parameters that are frozen have no gradient, which optimizers skip.
    Raises ConfigError for values that cannot work.
    """
    decay = section.get("layer_decay")
    if decay is not None and not (isinstance(decay, (int, float)) and 0 < decay <= 1):
        raise ConfigError(f"optim.layer_decay={decay}: give a number above 0 and at most 1, or null for none")
    numbers = {} if decay is None else layers(model)
    last = max(numbers.values(), default=0)
    weights = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    groups = [
        {"params": list(group), "layer": layer, **settings}
        for parameters, settings in ((weights, {}), (others, {"weight_decay": 0.0}))
        for layer, group in groupby(parameters, lambda parameter: numbers.get(parameter, last))
    ]
    section = {key: value for key, value in section.items() if key != "layer_decay"}
    optimizer: Optimizer = build("optim", section, groups)
    for group in optimizer.param_groups:
        earlier = last - group.pop("layer")
        group["lr"] *= (decay or 1) ** earlier
    return optimizer


def warn_of_batch_size(section: dict[str, Any], batch_size: int) -> None:
    """Warns if the learning rate is that of conf/optim/, and the batch size far from the one it was chosen for."""
    scale = batch_size / BATCH_SIZE
    presets = [yaml.safe_load(path.read_text()) for path in (CONF / "optim").glob("*.yaml")]
    is_preset = any(
        preset["_target_"] == section.get("_target_") and preset["lr"] == section.get("lr") for preset in presets
    )
    if is_preset and not 1 / 4 < scale < 4:
        better = section["lr"] * (math.sqrt(scale) if "Adam" in section["_target_"] else scale)
        log.warning(
            "optim.lr=%g was chosen for batches of %d: with train.batch_size=%d, try optim.lr=%.2g or near it",
            *(section["lr"], BATCH_SIZE, batch_size, better),
        )


def layers(model: nn.Module) -> dict[nn.Parameter, int]:
    """The number of each parameter's layer, from 0 for the first.

    timm's networks tell theirs. In others a layer is a module that has weights, with the biases and norms that follow
    it; what is in a Sequential or a ModuleList, or in a module with more than half of the network, is looked at one by
    one. Parameters beside the layers, such as a position embedding, belong to the first.
    """
    if hasattr(model, "group_matcher"):
        from timm.models import group_parameters

        matcher: Any = model.group_matcher
        by_name = group_parameters(model, matcher(coarse=False), reverse=True)
        return {parameter: by_name[name] for name, parameter in model.named_parameters()}
    numbers, last = dict.fromkeys(model.parameters(), 0), -1
    for block in blocks(model, size(model) / 2):
        last += any(parameter.ndim > 1 for parameter in block.parameters())
        numbers |= dict.fromkeys(block.parameters(), max(last, 0))
    return numbers


def blocks(module: nn.Module, large: float) -> Iterator[nn.Module]:
    for child in module.children():
        descends = type(child) in (nn.Sequential, nn.ModuleList) or size(child) > large
        yield from blocks(child, large) if descends and any(child.children()) else (child,)


def size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def freeze(model: nn.Module, names: list[str]) -> None:
    """Stops training parameters, before the optimizer and processes.parallel see them.

    names: the beginnings of their names up to a dot, such as layer1; ["backbone"] is all but the last layer.
    Raises ConfigError if a name fits nothing, or if all parameters or none would be trained.
    """
    parameters = dict(model.named_parameters())
    if names == ["backbone"]:
        frozen = parameters.keys() - _within(head(model), parameters)
    else:
        for name in names:
            if not _within([name], parameters):
                known = list(dict.fromkeys(name.partition(".")[0] for name in parameters))
                hint = did_you_mean(name, [*known, "backbone"])
                raise ConfigError(
                    f"train.freeze={name}: the network has nothing of that name; {hint}it has {', '.join(known)}"
                )
        frozen = _within(names, parameters)
    if names and len(frozen) in (0, len(parameters)):
        raise ConfigError(f"train.freeze={','.join(names)} freezes {'all' if frozen else 'none'} of the parameters")
    for name in frozen:
        parameters[name].requires_grad_(False)
    if frozen:
        trained = sum(parameter.numel() for parameter in parameters.values() if parameter.requires_grad)
        log.info("train.freeze: %s of %s parameters are trained", f"{trained:,}", f"{size(model):,}")


def head(model: nn.Module) -> list[str]:
    """The names of the last layers: those that timm gives, else the module of the last parameter."""
    told = getattr(model, "pretrained_cfg", {}).get("classifier")
    if told:
        return [told] if isinstance(told, str) else list(told)
    *_, (name, _) = model.named_parameters()
    return [name.rpartition(".")[0]]


def _within(prefixes: Iterable[str], names: Iterable[str]) -> set[str]:
    return {name for name in names for prefix in prefixes if f"{name}.".startswith(f"{prefix}.")}


def training_mode(model: nn.Module) -> None:
    """model.train(), but frozen batch norms keep their statistics."""
    model.train()
    for module in model.modules():
        if isinstance(module, _BatchNorm) and module.weight is not None and not module.weight.requires_grad:
            module.eval()
