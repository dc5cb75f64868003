"""Builds the network and its optimizer, with weight decay and a learning rate per layer; freezes parameters."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from data.errors import did_you_mean
from training.config import Config, ConfigError
from training.precision import in_format, memory_format
from training.targets import build

log = logging.getLogger(__name__)


def build_network(config: Config, options: dict[str, Any], device: torch.device) -> nn.Module:
    """Builds the network of the section `model` on the device; `options` are arguments that it gets if it takes them.

    Raises ConfigError if the target cannot be called, or returns no network.
    """
    model = build("model", config.model, optional=options)
    if not isinstance(model, nn.Module):
        name, kind = config.model["_target_"], type(model).__name__
        raise ConfigError(f"model: {name} returned a {kind}: return the network, a torch.nn.Module")
    model = in_format(model.to(device), memory_format(config.train.channels_last, device))
    if config.train.sync_batchnorm:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    freeze(model, config.train.freeze)
    return model


def build_optimizer(model: nn.Module, section: dict[str, Any]) -> Optimizer:
    """Builds the optimizer of the section `optim`. Weight decay applies to weights, not to biases and norms.

    With `layer_decay` in the section, each layer's learning rate is that share of the next layer's (Bao et al.,
    arXiv:2106.08254). All parameters are passed, always in the same order, so that a checkpoint fits whatever the
    layer_decay and whatever is frozen; optimizers skip frozen parameters, which have no gradient.
    Raises ConfigError for values that cannot work.
    """
    decay = section.get("layer_decay")
    if decay is not None and not (isinstance(decay, (int, float)) and 0 < decay <= 1):
        raise ConfigError(f"optim.layer_decay={decay}: give a number above 0 and at most 1, or null for none")
    layer_of = {} if decay is None else layers(model)
    last = max(layer_of.values(), default=0)
    weights = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    groups = [
        {"params": list(group), "layer": layer, **settings}
        for parameters, settings in ((weights, {}), (others, {"weight_decay": 0.0}))
        for layer, group in groupby(parameters, lambda parameter: layer_of.get(parameter, last))
    ]
    section = {key: value for key, value in section.items() if key != "layer_decay"}
    optimizer: Optimizer = build("optim", section, groups)
    for group in optimizer.param_groups:
        group["lr"] *= (decay or 1) ** (last - group.pop("layer"))
    return optimizer


def layers(model: nn.Module) -> dict[nn.Parameter, int]:
    """The number of each parameter's layer; the first layer has 0.

    timm's networks define their layers. In other networks a layer is a child module with weights, and the modules
    without weights that follow it (biases and norms). A Sequential, a ModuleList, or a module with more than half of
    all parameters is not one layer: its children are looked at instead. Parameters outside of all layers, such as a
    position embedding, belong to the first.
    """
    if hasattr(model, "group_matcher"):
        from timm.models import group_parameters

        matcher: Any = model.group_matcher
        by_name = group_parameters(model, matcher(coarse=False), reverse=True)
        return {parameter: by_name[name] for name, parameter in model.named_parameters()}
    numbers, last = dict.fromkeys(model.parameters(), 0), -1
    for block in _blocks(model, count_parameters(model) / 2):
        last += any(parameter.ndim > 1 for parameter in block.parameters())
        numbers |= dict.fromkeys(block.parameters(), max(last, 0))
    return numbers


def _blocks(module: nn.Module, large: float) -> Iterator[nn.Module]:
    """The children, and of containers and of children with more than `large` parameters theirs."""
    for child in module.children():
        descends = type(child) in (nn.Sequential, nn.ModuleList) or count_parameters(child) > large
        yield from _blocks(child, large) if descends and any(child.children()) else (child,)


def parameters_of(optimizers: Iterable[Optimizer]) -> list[nn.Parameter]:
    return [weight for optimizer in optimizers for group in optimizer.param_groups for weight in group["params"]]


def count_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def freeze(model: nn.Module, names: list[str]) -> None:
    """Sets requires_grad=False for parameters. Call it before processes.parallel.

    names: of modules or parameters, such as layer1 or layer1.0.bn1; "backbone" is all but the last layer.
    Raises ConfigError if the network has nothing of a name, or if all parameters would be frozen.
    """
    parameters, frozen = dict(model.named_parameters()), set[str]()
    for name in names:
        found = _within([name], parameters)
        if name == "backbone":
            found = parameters.keys() - _within(last_layers(model), parameters)
        if not found:
            known = dict.fromkeys(name.partition(".")[0] for name in parameters)
            hint = f"{did_you_mean(name, [*known, 'backbone'])}it has {', '.join(known)}"
            raise ConfigError(f"train.freeze={name}: the network has nothing of that name; {hint}")
        frozen |= found
    if names and len(frozen) == len(parameters):
        raise ConfigError(f"train.freeze={','.join(names)} freezes all of the parameters")
    for name in frozen:
        parameters[name].requires_grad_(False)
    if frozen:
        trained = sum(parameter.numel() for parameter in parameters.values() if parameter.requires_grad)
        log.info("train.freeze: %s of %s parameters are trained", f"{trained:,}", f"{count_parameters(model):,}")


def last_layers(model: nn.Module) -> list[str]:
    """The names of the last layers: timm's networks name them, in others it is the module of the last parameter."""
    names = getattr(model, "pretrained_cfg", {}).get("classifier")
    if names:
        return [names] if isinstance(names, str) else list(names)
    *_, (name, _) = model.named_parameters()
    return [name.rpartition(".")[0]]


def _within(modules: Iterable[str], names: Iterable[str]) -> set[str]:
    """The names of parameters that are one of `modules`, or lie in it."""
    return {name for name in names for module in modules if f"{name}.".startswith(f"{module}.")}


def training_mode(model: nn.Module) -> None:
    """Calls model.train(), but leaves frozen batch norms in evaluation mode, so that they keep their statistics."""
    model.train()
    for module in model.modules():
        if isinstance(module, _BatchNorm) and module.weight is not None and not module.weight.requires_grad:
            module.eval()
