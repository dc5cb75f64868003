"""The Trainer: the training step, evaluation, optimizers and schedules, and the content of a checkpoint.

For another training step, write a subclass in a package of your own beside data/, and choose it:
trainer._target_=my.MyTrainer. It overrides any of

    training_step(batch) -> loss            the mean loss of a batch, a scalar with a gradient
    evaluation_step(batch) -> scores        by name, a number per sample (B,), or their mean ()
    configure_optimizers() -> optimizers    one, or a list

A training_step may instead call self.backward(loss) and self.optimizer_step(optimizer) itself, and return None.
self.model is the network. Other modules that are attributes of the trainer are saved with it, and trained if an
optimizer has their parameters; tensors that are no part of a module are not saved: make them its buffers.
self.log(name=value) adds a mean to the next line of metrics.jsonl. For task.metrics an evaluation_step calls
self.metrics.update(outputs, labels).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel
from tqdm import tqdm

from data.errors import check_choice
from loaders import Preloader, merge_states
from training.checks import check_optimizers, check_trainer, warn_of_untrained
from training.config import Config, ConfigError
from training.datasets import Datasets
from training.metrics import EpochMetrics, Means
from training.optimizer import build_network, build_optimizer, count_parameters, parameters_of, training_mode
from training.precision import choose_dtype, memory_format, seed_step
from training.processes import Processes
from training.schedule import build_schedule, step_all
from training.step import Step, split_batch
from training.stopping import StopSignals

log = logging.getLogger(__name__)


class Trainer:
    """The network, its optimizers and schedules, and the number of epochs and steps that it was trained for.

    steps: the optimizer steps of all epochs. A subclass with arguments of its own (+trainer.NAME=...) passes on the
    others.
    Raises ConfigError if the network cannot be built.
    """

    def __init__(self, config: Config, data: Datasets, processes: Processes, steps: int) -> None:
        self.config, self.seed, self.task, self.spec = config.train, config.seed, data.task, data.spec
        self.by_epoch = config.schedule.get("every") == "epoch"  # whether schedules step once an epoch
        self.settings = asdict(config)
        self.changed: list[str] = []  # the settings that are different from those of the resumed checkpoint
        self.processes, self.device = processes, processes.device
        self.epoch, self.step = 0, 0
        self.is_in_step = self.at_epoch_end = False  # the latter: whether the resumed checkpoint ends an epoch
        self._has_stepped = False  # whether an optimizer has, since the scaler's last update
        self._steps_per_epoch = steps / self.config.epochs
        self.last_step = min(steps, self.config.max_steps or steps)

        torch.backends.cudnn.benchmark = True  # tries which algorithm is the fastest for each shape
        self.model: Any = build_network(config, data.spec.model_options, self.device)
        self.memory_format = memory_format(self.config.channels_last, self.device)
        self.dtype = choose_dtype(self.config.precision, self.device)
        self.autocast = torch.autocast(self.device.type, self.dtype) if self.dtype != torch.float32 else nullcontext()
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.dtype == torch.float16)
        self.means, self.logged = Means(processes), Means(processes)  # of training's scores, and of what `log` got
        self.metrics = EpochMetrics(config.task.get("metrics"), processes)
        if config.task.get("higher_is_better") is None:
            self.task.higher_is_better = self.metrics.higher_is_better(self.task.metric, self.task.higher_is_better)
        for module in self.task.modules().values():
            module.to(self.device)
        self._mean: AveragedModel | None = None  # of the weights, which is evaluated in place of the network
        self.saved_mean: dict[str, Any] | None = None  # that of the resumed checkpoint

    def set_up(self, data: Datasets) -> None:
        """Checks the first samples, and makes the optimizers and schedules of self.model: nothing can be added later.

        Raises ConfigError or DataError if the network, the task and the first samples do not fit together.
        """
        if not hasattr(self, "scaler"):
            raise ConfigError(f"trainer: {type(self).__name__}.__init__ has to call super().__init__(...)")
        given = self.configure_optimizers()
        self.optimizers = [given] if isinstance(given, Optimizer) else given
        check_optimizers(self)
        check_trainer(self, data)  # after the optimizers: what makes them may also make modules
        if self.config.compile:
            self.model.compile()
        self.parallel = self.processes.parallel(Step(self))
        self._averaged = {id(weight) for weight in self.parallel.parameters() if weight.requires_grad}  # by DDP
        warmup = self.config.warmup_epochs * self._steps_per_epoch
        self.schedules = [
            build_schedule(self.settings["schedule"], optimizer, self.last_step, warmup, self._steps_per_epoch)
            for optimizer in self.optimizers
        ]

    def training_step(self, batch: dict[str, Any]) -> Tensor | None:
        """Returns the mean loss of a batch, or of the part of it that train.accumulate makes."""
        inputs, labels = self.inputs_and_labels(batch)
        outputs = self.model(*inputs)
        loss = self.task.loss(outputs, labels)
        with torch.no_grad():
            self.means.add(self.task.count(batch), self.task.scores(outputs, labels))
        return loss

    def evaluation_step(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        """Returns the scores of a batch. What `self.metrics.update` gets is for task.metrics, at the epoch's end."""
        inputs, labels = self.inputs_and_labels(batch)
        outputs = self.model(*inputs)
        self.metrics.update(outputs, labels)
        return {"loss": self.task.loss(outputs, labels), **self.task.scores(outputs, labels)}

    def configure_optimizers(self) -> Optimizer | Sequence[Optimizer]:
        """Returns the optimizer, or several, each of which gets the schedule of conf/schedule/.

        By default it is the one of conf/optim/, for all of self.model.
        """
        return build_optimizer(self.model, self.settings["optim"])

    def log(self, **values: float | Tensor) -> None:
        """Adds the mean that each name's values have in all processes to the next line of metrics.jsonl.

        A tensor of one element stays on its device until then, so that the host does not wait for it.
        """
        self.logged.add(1, values)

    def overrides(self, step: str) -> bool:
        """Whether a subclass defines the step of that name."""
        return getattr(type(self), step) is not getattr(Trainer, step)

    def backward(self, loss: Tensor) -> None:
        """Adds the gradients of `loss` to those of the parameters."""
        if self.is_in_step:  # DDP averages in passes after the forward pass only: optimizer_step does instead
            self.processes.average_in_backward(self.parallel, False)
        self._update_scale()
        with torch.autocast(self.device.type, enabled=False) if self.is_in_step else nullcontext():
            self.scaler.scale(loss).backward()

    def optimizer_step(self, optimizer: Optimizer) -> None:
        """Averages the gradients over all processes, clips them to train.clip_norm, steps, and clears them."""
        parameters = parameters_of([optimizer])  # some may have been unfrozen after DDP looked
        by_hand = self.is_in_step or not self.processes.averages_in_backward
        self.processes.average_gradients(
            w for w in parameters if by_hand or (w.requires_grad and id(w) not in self._averaged)
        )
        if self.config.clip_norm is not None:
            self.scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(parameters, self.config.clip_norm)
        self.scaler.step(optimizer)
        self._has_stepped = True
        torch.clear_autocast_cache()  # else the rest of the step would use copies of the weights from before
        optimizer.zero_grad(set_to_none=True)

    def _update_scale(self) -> None:
        """Changes the scale of fp16 losses. The gradients of one optimizer's step have one scale."""
        if self._has_stepped:
            self.scaler.update()
        self._has_stepped = False

    def train_step(self, batch: dict[str, Any]) -> None:
        """One step of the run. Adds its loss and scores to `means`, on the device, so that the host does not wait."""
        if not self.model.training:  # it walks all modules: once after each evaluation is enough
            training_mode(self.model)
        seed_step(self.device, self.seed, self.step, self.processes.rank)
        count, loss = self.task.count(batch), None
        parts = split_batch(batch, count, self.config.accumulate)
        for number, (part, size) in enumerate(parts, 1):
            self.processes.average_in_backward(self.parallel, number == len(parts))
            with self.autocast:
                loss = self.parallel(part)
            if loss is not None:
                if loss.numel() != 1:
                    raise ConfigError(f"trainer: the loss has the shape {tuple(loss.shape)}: return its mean")
                if not loss.requires_grad:
                    raise ConfigError(
                        "trainer: the loss has no gradient: it was detached, or needs no weight that trains"
                    )
                self.means.add(size, {"loss": loss})
                self.backward(loss if size == count else loss * (size / count))
        if loss is not None:
            for optimizer in self.optimizers:
                self.optimizer_step(optimizer)
            if self.step == 0:
                warn_of_untrained(self)
        elif len(parts) > 1:
            raise ConfigError(
                f"train.accumulate={len(parts)}: {type(self).__name__}.training_step steps its optimizers itself, "
                "with a part of the batch each time: use train.accumulate=1"
            )
        elif self.step == 0 and not self._has_stepped and all(w.grad is None for w in parameters_of(self.optimizers)):
            log.warning("trainer: training_step returned None, and called neither backward nor optimizer_step")
        self._update_scale()
        if not self.by_epoch and self.step < self.last_step:  # measurements come after
            step_all(self.schedules)
        self.step += 1

    @torch.no_grad()  # a network may train with what it keeps from here, but not with tensors of inference_mode
    def evaluate(self, loader: Preloader, signals: StopSignals) -> tuple[dict[str, float], int]:
        """Returns the mean loss and scores over the loader's samples, of all processes, and the number of a signal.

        The number is 0 without a signal. A signal ends the evaluation early: the means are not those of all samples.
        """
        trained, means = self.model, Means(self.processes)
        in_training = [one for module in self.others.values() for one in module.modules() if one.training]
        self.model = trained if self._mean is None else self._mean.module
        loader.set_epoch(self.epoch)  # samples draw the same numbers in a resumed run, and in evaluate.py
        seed_step(self.device, self.seed, self.step, self.processes.rank)
        try:
            for module in (self.model, *self.others.values()):
                module.eval()
            self.processes.share_buffers(self.model, *self.others.values())
            disable = None if self.processes.is_main else True  # None: only if the output is not a terminal
            batches = loader if (steps := self.config.eval_steps) is None else islice(loader, steps)
            for batch in tqdm(batches, "evaluating", steps, unit="step", leave=False, disable=disable):
                with self.autocast:
                    means.add(self.task.count(batch), self.evaluation_step(batch))
                if signals.received:
                    break
        finally:
            self.model = trained
            for module in in_training:
                module.training = True
        scores = means.read() | self.metrics.compute()
        check_choice("task.metric", self.task.metric, scores, ConfigError)
        return scores, max(self.processes.gather(signals.received))

    def evaluate_with(self, mean: AveragedModel) -> None:
        """Evaluates a mean of the weights in place of the network, and saves it in each checkpoint.

        If the checkpoint that the run resumes from has such a mean, loads it.
        """
        self._mean = mean
        if self.saved_mean is not None:
            mean.load_state_dict(self.saved_mean)

    @property
    def others(self) -> dict[str, nn.Module]:
        """The modules that a subclass keeps beside self.model, and those with a state that the task has, by name."""
        ours = ("model", "parallel", "_mean")
        found = {
            name: value for name, value in vars(self).items() if isinstance(value, nn.Module) and name not in ours
        }
        return found | {f"task.{name}": module for name, module in self.task.modules().items()}

    @property
    def finished(self) -> bool:
        return self.step >= self.last_step

    @property
    def learning_rate(self) -> float:
        """The highest one of all optimizers and parameters."""
        return max(group["lr"] for optimizer in self.optimizers for group in optimizer.param_groups)

    def inputs_and_labels(self, batch: dict[str, Any]) -> tuple[list[Any], Any]:
        """The fields of a batch that the network gets, and the labels; None with task.label=null."""
        inputs = [batch[name] for name in self.task.inputs]
        if self.memory_format is torch.contiguous_format:  # the transform returns images in channels-last format
            inputs = [field.contiguous() if isinstance(field, Tensor) else field for field in inputs]
        return inputs, None if self.task.label is None else batch[self.task.label]

    def state_dict(self, loader: Preloader) -> dict[str, Any]:
        """The content of a checkpoint: what a run needs to continue from here as if it had not been stopped."""
        gradients = [None if weight.grad is None else weight.grad.cpu() for weight in parameters_of(self.optimizers)]
        return {
            "model": self.model.state_dict(),
            "frozen": [name for name, weight in self.model.named_parameters() if not weight.requires_grad],
            "others": {name: module.state_dict() for name, module in self.others.items()},
            **({} if self._mean is None else {"ema": self._mean.state_dict()}),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "optimizer_classes": [type(optimizer).__name__ for optimizer in self.optimizers],
            "schedules": [schedule.state_dict() for schedule in self.schedules],
            "scaler": self.scaler.state_dict(),
            "loader": merge_states(self.processes.gather(loader.state_dict())),
            "step": self.step,
            "gradients": self.processes.gather(gradients),  # a step may add them up over batches
            "means": [means.state_dict() for means in (self.means, self.logged)],
            "config": self.settings,
            "data_spec": asdict(self.spec),
        }

    def __str__(self) -> str:
        precision = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(self.dtype, "fp32")
        rate = "" if self.overrides("configure_optimizers") else f", learning rate {self.settings['optim'].get('lr')},"
        return f"{type(self.model).__name__} with {count_parameters(self.model):,} parameters in {precision}{rate}"
