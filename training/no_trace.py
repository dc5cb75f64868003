"""Puts back what a block has changed in a trainer, its modules, and its loss, scores and metrics.

`no_trace` prepares the trainer, and runs the block in `tensors_put_back`; afterwards that restores weights and buffers
first, then `no_trace` attributes and sums, and seeds the random generators anew. After an error, with which the run
ends, only weights and buffers are restored.
"""

from collections.abc import Iterator, Set
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from training.config import ConfigError
from training.metrics import Means
from training.trainer import Trainer, evaluating

# What each module keeps in private attributes: weights, buffers, modules, hooks. `training` is put back.
OF_MODULES = {*vars(nn.Module()), "_compiled_call_impl"} - {"training"}


@contextmanager
def no_trace(trainer: Trainer) -> Iterator[None]:
    """Sets evaluation mode in the block. Afterwards restores modes, buffers, weights, attributes and sums.

    A network may change weights in its forward pass, as an Embedding with max_norm does, or note in an attribute what
    it does once, such as initialising them by its first batch. A loss may count its calls. What is in a list, a dict
    or an array stays as the block has left it.
    """
    modules = trainer.all_modules
    functions = trainer.functions
    with_functions = trainer.all_modules
    with_functions._modules |= {path: part for path, part in functions.items() if isinstance(part, nn.Module)}
    parts = [*modules.modules(), *functions.values(), trainer]
    attributes = [(part, own_attributes(part, OF_MODULES)) for part in parts]
    tensors = []  # in attributes, and no buffers
    for _, earlier in attributes:
        for value in earlier.values():
            if isinstance(value, Tensor) and not value.is_inference():
                tensors.append((value, value._version, value.detach().to("cpu", copy=True)))
    sums = trainer.means, trainer.logged
    trainer.means = Means(trainer.processes)
    trainer.logged = Means(trainer.processes)
    # Two samples are not worth a minute of compiling.
    eager = torch.compiler.set_stance("force_eager") if trainer.train_config.compile else nullcontext()
    with tensors_put_back(with_functions), evaluating(*modules.children()), torch.no_grad(), trainer.autocast, eager:
        yield
    for part, earlier in attributes:
        for name in own_attributes(part, OF_MODULES).keys() - earlier.keys():
            del vars(part)[name]
        if earlier:
            vars(part).update(earlier)
    for tensor, version, before in tensors:
        if tensor._version != version:  # it was changed in place
            tensor.detach().copy_(before)
    trainer.means, trainer.logged = sums
    for value in (*vars(trainer).values(), *parts):
        if hasattr(value, "compute") and hasattr(value, "reset"):  # task.metrics, and metrics of a subclass
            value.reset()
    trainer.seed_step()


def own_attributes(part: Any, left_out: Set[str] | None = None) -> dict[str, Any]:
    """Of a module its public attributes, with `training`, without weights, buffers and modules; of a trainer those of
    a subclass; of anything else all.

    left_out: of a module all attributes but these, also private ones.
    """
    if isinstance(part, Trainer):
        return part.added_attributes()
    attributes = getattr(part, "__dict__", {})
    if isinstance(part, nn.Module):
        items = attributes.items()
        return {name: value for name, value in items if (name[0] != "_" if left_out is None else name not in left_out)}
    return dict(attributes) if isinstance(attributes, dict) else {}  # a class has a read-only view


@contextmanager
def tensors_put_back(modules: nn.Module) -> Iterator[None]:
    """After the block weights and buffers are as before it. Copies are on the CPU: a device may have no room.

    Raises ConfigError if the block has registered weights, or buffers that checkpoints would have, or has changed the
    size of such a buffer.
    """
    tensors = []
    empty = []  # a first forward pass may set such a buffer
    resized = []
    names = {}
    weights = {*modules.parameters()}
    for path, part in modules.named_modules():
        names[path] = {*part._buffers.keys()}
        for name, value in (*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)):
            tensors.append((part, name, value, value.detach().to("cpu", copy=True)))
        empty += [(part, name) for name, value in part._buffers.items() if value is None]
    try:
        yield
    finally:
        with torch.no_grad():
            for part, name, value, before in tensors:
                size = getattr(getattr(part, name), "shape", before.shape)
                if size != before.shape and name not in part._non_persistent_buffers_set and not loads_itself(part):
                    resized.append((part, name, before.shape, size))
                if value.shape != before.shape:
                    value.resize_(before.shape)  # the observers of torch.ao resize theirs
                value.copy_(before)
                if getattr(part, name) is not value:
                    setattr(part, name, value)
        for part, name in empty:
            setattr(part, name, None)
    for path, part in modules.named_modules():
        for name, weight in part.named_parameters(recurse=False):
            if weight not in weights:
                raise ConfigError(
                    f"{path}.{name} is made in a forward pass, so that no optimizer has this weight: make it in the "
                    "constructor, by nn.LazyLinear or another lazy module if its size is not known there"
                )
        now = {*part._buffers.keys()}  # of a TorchScript module a list
        for name in now - names.get(path, now) - part._non_persistent_buffers_set:
            raise ConfigError(
                f"{type(part).__name__} registers the buffer {name} in its forward pass, so that no new network could "
                f'load a checkpoint with it: call self.register_buffer("{name}", None) in its constructor, and set '
                f"self.{name} in forward"
            )
    for part, name, before, size in resized:
        raise ConfigError(
            f"{type(part).__name__} changes the size of the buffer {name} in its forward pass, from {tuple(before)} "
            f"to {tuple(size)}, so that no new network could load a checkpoint with it: call "
            f'self.register_buffer("{name}", None) in its constructor, and set self.{name} in forward, or '
            f'self.register_buffer("{name}", ..., persistent=False), if no checkpoint has to have it'
        )


def loads_itself(part: nn.Module) -> bool:
    """Whether a module loads its state in a way of its own, as the observers of torch.ao take buffers of any size."""
    return type(part)._load_from_state_dict is not nn.Module._load_from_state_dict
