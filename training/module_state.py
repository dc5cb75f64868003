"""What the modules and optimizers of a run hold: whether it is finite, and what has changed that no state_dict has.

In this order: it is made when all is built; when training begins, `newly_not_finite` looks at what was loaded,
`note_built` and, after on_start of the callbacks, `note_start` note what is there, `restore` sets what the run before
had altered, and `warn_of_generators` looks; each epoch begins with `unfreeze` and `check`; and `check`,
`newly_not_finite` and `state_dict` are called when a checkpoint is saved.

Each walk serves rows of the table "a callback changes" in docs/extending.md, whose words these are:

| what                                                        | walk                 | who asks, and why            |
|-------------------------------------------------------------|----------------------|------------------------------|
| weights, buffers, an average of the weights; and the states | `_values`            | newly_not_finite: no         |
| of optimizers                                               |                      | checkpoint gets NaN          |
| buffers that state_dict leaves out; numbers, texts and      | `_unsaved`           | state_dict: saved; restore:  |
| tensors of a score, a metric, a loss that is no module, or  |                      | set again by a resume        |
| an optimizer, or that a subclass has added to a Trainer     |                      |                              |
| numbers, texts, flags and enums in public attributes of     | `_settings`          | the same; and check, as they |
| modules; `requires_grad` of weights                         |                      | may differ between processes |
| `param_groups` (lr, weight_decay): the states of optimizers | `settings_of_groups` | check, in the same way       |
| save them                                                   |                      |                              |
| new, renamed or other weights, buffers, parameter groups,   | `_parts`             | check: refused               |
| optimizers                                                  |                      |                              |
| a generator (docs/checkpoints.md, "What is not exact")      | `generators_of`      | warn_of_generators           |
"""

import io
import logging
import math
from collections.abc import Iterable, Iterator
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from loaders import generators_of, is_generator
from training.checks import differ
from training.config import ConfigError
from training.no_trace import own_attributes
from training.optimizer import RATES, as_builtin, settings_of_groups, weights_of
from training.resume import empty_buffers
from training.trained_weights import names_left_out, warn_of_left_out
from training.trainer import Trainer

log = logging.getLogger(__name__)

CHECKED = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128)
SETTINGS = (bool, int, float, str, type(None))  # other types, and classes derived from these, torch.load refuses
# Settings that have to be the same in all processes, which would else train different weights.
SAME = (*RATES, "weight_decay", "requires_grad")

ITERATOR = (
    "%s is an iterator (%s), whose place no checkpoint has: a resumed run begins it anew; to read more samples in a "
    "step, let the dataset return them as further fields"
)
NOT_SAVED = (
    "%s, which no checkpoint has: a resumed run draws other numbers from it; use the global generators, which are "
    "seeded for each step"
)


class ModuleState:
    """Made when all is built, before a checkpoint is loaded. What is not finite then, such as masks, may stay so.

    Settings are the numbers, texts, flags and enums in public attributes of modules, such as `p` of a dropout,
    `training` of a norm, `smoothing` of a task; and which weights are trained. A checkpoint has those that were
    changed by callbacks; a resume sets them again. The same goes for buffers that state_dict leaves out, and for
    numbers and tensors in attributes and buffers of scores, metrics, optimizers, and a loss that is no module.

    never_finite: "NaN" or "infinity" by the name of each tensor that has some when it is made.
    empty_at_start: the names of the buffers that are None then: a forward pass, or a checkpoint, may fill them.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._processes = trainer.processes
        self.empty_at_start = {*empty_buffers(trainer.all_modules)}
        self._parts_at_start = self._parts()
        self._built: dict[str, Any] = {}  # the settings, and what no state_dict has, before on_start
        self._at_start: dict[str, Any] = {}  # the same after it
        self._warned: set[str] = set()  # the settings of which `check` has warned
        self._left_out = {*names_left_out(trainer)}  # weights that no optimizer has, of which dry_run.py has warned
        self.never_finite = not_finite(self._values())

    def _parts(self) -> tuple[Any, ...]:
        """The weights and the saved buffers by name, the weights in the groups of the optimizers, and the optimizers.

        A weight is told by its identity, and so is an optimizer. Modules may replace their buffers, and fill
        those that are None at the start.
        """
        optimizers = self._trainer.optimizers
        buffers = {
            f"{path}.{name}"
            for path, module in self._modules().items()
            for name, buffer in module._buffers.items()
            if buffer is not None and name not in module._non_persistent_buffers_set
        } - self.empty_at_start
        weights = {name: id(weight) for name, weight in self._trainer.all_modules.named_parameters()}
        return weights, buffers, sorted(map(id, [*weights_of(optimizers), *optimizers]))

    def _modules(self) -> dict[str, nn.Module]:
        return {path: part for path, part in self._trainer.all_modules.named_modules() if path}

    def _values(self) -> list[tuple[str, Any]]:
        """What may have NaN, by name: tensors and numbers, and whatever else optimizers keep."""
        trainer = self._trainer
        modules = trainer.all_modules
        values: list[tuple[str, Any]] = [*modules.named_parameters(), *modules.named_buffers()]
        if trainer.ema_model is not None:
            values += trainer.ema_model.named_parameters("model")
            values += trainer.ema_model.named_buffers("model")
        names = {id(weight): name for name, weight in values}
        for optimizer in trainer.optimizers:
            for weight, state in optimizer.state.items():
                entries = state.items() if isinstance(state, dict) else ()
                values += [(f"{key} of {names.get(id(weight), 'a weight')}", value) for key, value in entries]
            for group in optimizer.param_groups:
                values += [(f"{key} of the optimizer", value) for key, value in group.items()]
        return values

    def newly_not_finite(self) -> set[str]:
        """What was finite and is not: "NaN in NAME", "infinity in NAME". Waits for the device.

        It looks at weights, dense buffers, also those that are not saved, their average (EMA), and the states of
        optimizers.
        """
        broken = not_finite(self._values()).items()
        return {f"{kind} in {name}" for name, kind in broken if self.never_finite.get(name) != kind}

    def note_built(self) -> None:
        """Notes what is there before on_start of the callbacks, also in a new run."""
        self._trainer.unfreeze(self._trainer.progress.newest_epoch)  # first: a callback may freeze some again
        self._built = self._settings() | self._unsaved()

    def note_start(self) -> None:
        """Notes what on_start of the callbacks has set."""
        self._at_start = self._settings() | self._unsaved()

    def restore(self, altered: dict[str, Any], by_on_start: Iterable[str] = ()) -> None:
        """Sets what the run before this resume had `altered`, except what on_start had set then, and has set now."""
        owners = self._owners() | dict(self._trainer.all_modules.named_parameters())
        set_now = {*self._set_by_on_start()}
        for name, value in altered.items():
            path, _, attribute = name.rpartition(".")
            if is_of_torch(owners.get(path)):
                continue  # earlier versions saved it
            if name in by_on_start:
                if name in set_now:
                    continue
                self._at_start[name] = value
            if path == "trainer" or hasattr(owners.get(path), attribute):
                current = getattr(owners[path], attribute, None)
                if isinstance(current, Enum):
                    value = type(current)(value)
                elif isinstance(value, Tensor):
                    value = value.to(getattr(current, "device", self._trainer.device))
                setattr(owners[path], attribute, value)
            elif attribute != "requires_grad" and not path.startswith("ema_model"):  # earlier ones had that of buffers
                log.warning("%s is not restored: the run of the checkpoint had it, and this one does not", name)

    def _settings(self) -> dict[str, Any]:
        weights = self._trainer.all_modules.named_parameters()
        settings: dict[str, Any] = {f"{name}.requires_grad": weight.requires_grad for name, weight in weights}
        for path, module in self._modules().items():
            for name, value in vars(module).items():
                setting = as_builtin(value)
                if type(setting) in SETTINGS and not name.startswith("_"):
                    settings[f"{path}.{name}"] = setting
        return settings

    def _unsaved(self) -> dict[str, Any]:
        """Copies of what no state_dict has, on the CPU."""
        values: dict[str, Any] = {}
        saved = self._saved_modules()
        for path, owner in self._owners().items():
            if is_of_torch(owner):
                continue
            if path in saved:
                attributes = {name: owner._buffers[name] for name in owner._non_persistent_buffers_set}
            else:
                buffers = owner._buffers if isinstance(owner, nn.Module) else {}
                attributes = own_attributes(owner) | buffers
            for name, value in attributes.items():
                value = as_builtin(value)
                if isinstance(value, Tensor) and value.layout is torch.strided:
                    values[f"{path}.{name}"] = value.detach().to("cpu", copy=True)
                elif type(value) in SETTINGS:
                    values[f"{path}.{name}"] = value
        return values

    def _saved_modules(self) -> dict[str, Any]:
        """The modules whose state_dict a checkpoint has, with those of an average of the weights."""
        average = self._trainer.ema_model
        return self._modules() | ({} if average is None else dict(average.named_modules(prefix="ema_model")))

    def _owners(self) -> dict[str, Any]:
        """What may have something that no state_dict has: modules, functions of the task, the trainer, optimizers."""
        trainer = self._trainer
        optimizers = {f"optimizers.{number}": optimizer for number, optimizer in enumerate(trainer.optimizers)}
        return self._saved_modules() | {"trainer": trainer} | trainer.functions | optimizers

    def warn_of_generators(self, callbacks: dict[str, Any]) -> None:
        """Warns of random generators and iterators of the trainer, its modules and callbacks that do not save them.

        The trainer and callbacks refer to the datasets, whose generators are seeded: only their attributes count.
        """
        owners: dict[str, Any] = {"trainer": self._trainer, **self._modules()}
        owners |= {f"callbacks.{name}": callback for name, callback in callbacks.items()}
        known: list[Any] = []
        for owner, value in owners.items():
            saves = getattr(type(value), "get_extra_state", None) not in (None, nn.Module.get_extra_state)
            if saves:
                known += generators_of(value)
            if saves or (owner.startswith("callbacks.") and hasattr(value, "state_dict")):
                continue
            for name, part in getattr(value, "__dict__", {}).items():
                if isinstance(part, Iterator) and not isinstance(part, io.IOBase):
                    log.warning(ITERATOR, f"{owner}.{name}", type(part).__name__)
                if is_generator(part):
                    known += generators_of(part)
                    log.warning(NOT_SAVED, f"{owner}.{name} is a random generator")
        metrics = {f"task.metrics.{name}": metric for name, metric in self._trainer.metrics.by_name.items()}
        for name, network in (dict(self._trainer.all_modules.named_children()) | metrics).items():
            hidden = [value for value in generators_of(network) if all(value is not one for one in known)]
            if hidden:
                kinds = ", ".join({type(value).__name__ for value in hidden})
                log.warning(NOT_SAVED, f"{name} has a random generator ({kinds}) inside, or in its code")

    def unfreeze(self) -> None:
        """Called before an epoch. Ends train.freeze, if it is time: a resume does the same, so this alters nothing."""
        before = self._settings()
        self._trainer.unfreeze(self._trainer.progress.epoch)
        now = self._settings()
        unfrozen = {name: value for name, value in now.items() if value != before.get(name)}
        self._built |= unfrozen
        self._at_start |= unfrozen

    def check(self) -> None:
        """Raises ConfigError for a change that no resume could load, or with which processes train different weights.

        Warns once of a network in evaluation mode, of weights that are trained now and that no optimizer has, and of
        other settings that differ between processes. All processes have to call it.
        """
        if self._parts() != self._parts_at_start:
            raise ConfigError(
                "a weight, a buffer, a group of weights or an optimizer was added, renamed or replaced after the run "
                "was built, so a resume could not load it: build it in the network, or in configure_optimizers() of a "
                "trainer; after pruning call torch.nn.utils.prune.remove"
            )
        network = self._trainer.model
        mode = "model.training"
        if self._built.get(mode) and not network.training and mode not in self._warned:  # some modules may be
            self._warned.add(mode)
            log.warning(
                "a callback has left %s in evaluation mode, so it trains without dropout and with the statistics of "
                "batch norm as they are: call run.trainer.model.train()",
                type(network).__name__,
            )
        left_out = [name for name in names_left_out(self._trainer) if name not in self._left_out]
        self._left_out.update(left_out)
        warn_of_left_out(left_out)  # which a callback has unfrozen
        self._compare_weights()
        settings = self._settings() | settings_of_groups(self._trainer.optimizers, SAME)
        of_processes = self._processes.gather(settings)
        for name in sorted(set().union(*of_processes) - self._warned):
            values = [theirs.get(name) for theirs in of_processes]
            if len({*map(repr, values)}) == 1:
                continue
            sentence = (
                f"the processes have different values of {name}, {values}: a callback, or what else sets it, has to "
                "set the same in each"
            )
            if name.rpartition(".")[2] in SAME:
                raise ConfigError(sentence)
            self._warned.add(name)
            log.warning("%s", sentence)

    def _compare_weights(self) -> None:
        """Warns once if the processes have different weights, as those do that average no gradients."""
        if self._processes.world_size == 1 or "weights" in self._warned:
            return
        weights = [weight.detach() for weight in self._trainer.all_modules.parameters() if weight.is_floating_point()]
        each = [torch.linalg.vector_norm(weight, dtype=torch.float32) for weight in weights]
        norms = self._processes.gather(torch.stack(each).norm().item())
        if not all(math.isclose(norm, norms[0], rel_tol=1e-5) for norm in norms):
            self._warned.add("weights")
            remedy = (
                "what changes weights beside the optimizers, as a callback may, has to do the same in each process, "
                "and the global generators draw other numbers in each"
            )
            if self._trainer.overrides("train_step"):
                remedy = (
                    "a train_step of your own calls self.processes.average_gradients(parameters) before "
                    "self.optimizer_step(optimizer)"
                )
            shown = ", ".join(f"{norm:g}" for norm in norms)
            log.warning("the processes train different weights, of the norms %s: %s", shown, remedy)

    def state_dict(self) -> dict[str, Any]:
        """`altered`: the settings, and what no state_dict has, that on_start has set, or that were changed later.

        `by_on_start`: the names of those that on_start has set, and that were not changed later.
        """
        now = self._settings() | self._unsaved()
        by_on_start = self._set_by_on_start().items()
        return {
            "altered": changed(self._built, now) | changed(self._at_start, now),
            "by_on_start": [name for name, value in by_on_start if name in now and not differ(now[name], value)],
        }

    def _set_by_on_start(self) -> dict[str, Any]:
        return changed(self._built, self._at_start)


def is_of_torch(owner: Any) -> bool:
    """Whether it is an optimizer of torch, whose state_dict has all that the next steps need."""
    return type(owner).__module__.startswith("torch.optim.")


def changed(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """What is another value now. A trainer may also get attributes, in its first step or from a callback."""
    values = {name: now[name] for name, value in before.items() if name in now and differ(now[name], value)}
    return values | {name: now[name] for name in now.keys() - before if name.startswith("trainer.")}


def not_finite(values: Iterable[tuple[str, Any]]) -> dict[str, str]:
    """Which of the tensors and numbers have NaN or infinities, by name: "NaN" or "infinity". Waits for the device."""
    broken = {}
    tensors: dict[Any, list[tuple[str, Tensor]]] = {}  # one launch for those of a device and dtype
    for name, value in values:
        if isinstance(value, float):
            value = torch.tensor(value)
        is_dense = isinstance(value, Tensor) and value.layout is torch.strided and not value.is_nested
        if is_dense and value.dtype in CHECKED and value.numel():
            tensors.setdefault((value.device, value.dtype), []).append((name, value.detach()))
    for alike in tensors.values():
        norms = torch._foreach_norm([value for _, value in alike], math.inf)
        for (name, _), norm in zip(alike, torch.stack(norms).cpu().tolist(), strict=True):
            if not math.isfinite(norm):
                broken[name] = "NaN" if math.isnan(norm) else "infinity"
    return broken
