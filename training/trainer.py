"""The Trainer: the training step, evaluation, the learning rate, and the content of a checkpoint."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from tqdm import tqdm

from data.errors import DataError, check_choice
from loaders import Preloader
from loaders.nested import move
from training.checkpoint import load_weights
from training.config import ARGUMENT_ERRORS, Config, ConfigError, TrainConfig, changes, one_line
from training.optimizer import build_optimizer, count_parameters, freeze, training_mode, warn_of_batch_size
from training.processes import Processes
from training.sets import Sets
from training.stopping import StopSignals
from training.targets import build

log = logging.getLogger(__name__)


class Trainer:
    """The model, its optimizer and schedule, and the number of epochs and steps that it was trained for.

    Raises ConfigError or DataError if the model, the task and the first samples do not fit together.
    """

    def __init__(self, config: Config, sets: Sets, processes: Processes) -> None:
        self.config, self.seed, self.task, self.spec = config.train, config.seed, sets.task, sets.spec
        self.settings = {key: value for key, value in asdict(config).items() if key not in ("timing", "logger")}
        self.changed: list[str] = []  # the settings that are different from those of the resumed checkpoint
        self.processes, self.device = processes, processes.device
        self.epoch, self.step = 0, 0
        self._nan_seen = False
        self.resumed_at_epoch_end = False  # True if the resumed checkpoint was saved at the end of an epoch
        steps = total_steps(len(sets.train), self.config)
        self.last_step = min(steps, self.config.max_steps or steps)
        self.warmup_steps = min(self.config.warmup_epochs * steps / self.config.epochs, self.last_step / 2)

        model = build("model", config.model, optional=sets.spec.model_options)
        if not isinstance(model, nn.Module):
            name, kind = config.model["_target_"], type(model).__name__
            raise ConfigError(f"model: {name} returned a {kind}: return the network, a torch.nn.Module")
        choice = self.config.channels_last
        channels_last = choice == "true" or (choice == "auto" and self.device.type == "cuda")
        self.memory_format = torch.channels_last if channels_last else torch.contiguous_format
        self.model = model.to(self.device).to(memory_format=self.memory_format)
        if self.config.sync_batchnorm:
            self.model = nn.SyncBatchNorm.convert_sync_batchnorm(self.model)
        freeze(self.model, self.config.freeze)
        self.bf16 = uses_bf16(self.config.precision, self.device)
        self.autocast = torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16)
        self.score_names = self._check_first_samples(sets)
        self.means = Means(processes, self.score_names)  # of the training steps since they were last read
        self.parallel = processes.parallel(self.model)
        self.forward = torch.compile(self.parallel) if self.config.compile else self.parallel
        self.ema: AveragedModel | None = None
        if self.config.ema is not None:
            self.ema = AveragedModel(self.model, multi_avg_fn=self._average, use_buffers=True)

        warn_of_batch_size(config.optim, self.config.batch_size)
        self.optimizer = build_optimizer(self.model, config.optim)
        self.schedule = LambdaLR(self.optimizer, self.learning_rate)

    @property
    def finished(self) -> bool:
        return self.step >= self.last_step

    def learning_rate(self, step: int) -> float:
        """The learning rate of a step, as a share of the peak: a linear rise, then half a cosine down to zero."""
        if step < self.warmup_steps:
            return (step + 1) / (self.warmup_steps + 1)
        return 0.5 + 0.5 * math.cos(math.pi * (step - self.warmup_steps) / (self.last_step - self.warmup_steps))

    def train_step(self, batch: dict[str, Any]) -> None:
        """One optimizer step. Adds its loss and scores to `means`, on the device, so that the host does not wait."""
        training_mode(self.model)
        seed_step(self.device, self.seed, self.step, self.processes.rank)
        inputs, labels = self._inputs_and_labels(batch)
        parts = list(zip(*(field.chunk(self.config.accumulate) for field in (*inputs, labels)), strict=True))
        for number, (*part_inputs, part_labels) in enumerate(parts, 1):
            with nullcontext() if number == len(parts) else self.processes.without_averaging(self.parallel):
                with self.autocast:
                    outputs = self.forward(*part_inputs)
                loss = self.task.loss(outputs, part_labels)
                (loss * (len(part_labels) / len(labels))).backward()
            with torch.no_grad():
                self.means.add(len(part_labels), {"loss": loss, **self.task.scores(outputs, part_labels)})
        if self.config.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.schedule.step()
        if self.ema is not None:
            self.ema.update_parameters(self.model)
        self.step += 1

    def _average(self, means: Any, weights: Any, count: Any) -> None:
        """Updates the running mean of the weights. The decay rises from 0.1 to train.ema: the first weights fade."""
        assert self.config.ema is not None
        get_ema_multi_avg_fn(min(self.config.ema, (1 + self.step) / (10 + self.step)))(means, weights, count)

    @torch.inference_mode()
    def evaluate(self, loader: Preloader, signals: StopSignals) -> tuple[dict[str, float], int]:
        """Returns the mean loss and scores over the loader's samples, of all processes, and the number of a signal.

        The number is 0 without a signal. A signal ends the evaluation early: the means are not those of all samples.
        """
        model = self.model if self.ema is None else self.ema.module
        model.eval()
        self.processes.share_buffers(model)
        means = Means(self.processes, self.score_names)
        with self._bar("evaluating", total=len(loader)) as bar:
            for batch in loader:
                inputs, labels = self._inputs_and_labels(batch)
                with self.autocast:
                    outputs = model(*inputs)
                means.add(len(labels), {"loss": self.task.loss(outputs, labels), **self.task.scores(outputs, labels)})
                bar.update()
                if signals.received:
                    break
        signal_number = max(number for (number,) in self.processes.gather(signals.received))
        return means.read(), int(signal_number)

    def warn_of_nan(self, loss: float) -> None:
        """Warns once if the loss is NaN or infinite: training cannot recover from it."""
        if not math.isfinite(loss) and not self._nan_seen:
            self._nan_seen = True
            advice = "is there a NaN in the data, or is optim.lr too high? train.clip_norm may help"
            log.warning("the loss is %g by step %d: %s", loss, self.step, advice)

    def _inputs_and_labels(self, batch: dict[str, Any]) -> tuple[list[Tensor], Tensor]:
        """The fields of a batch that the network gets, and the labels."""
        inputs = [batch[name] for name in self.task.inputs]
        if self.memory_format is torch.contiguous_format:  # the transform returns images in channels-last format
            inputs = [field.contiguous() for field in inputs]
        return inputs, batch[self.task.label]

    @torch.no_grad()
    def _first_outputs(self, sets: Sets, split: str, first: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Passes the first samples of a split through the network. Returns outputs and labels, which fit the task."""
        batch = move(first, lambda tensor: tensor.to(self.device))
        batch = batch if sets.transform is None else sets.transform(batch)
        inputs, labels = self._inputs_and_labels(batch)
        shapes = ", ".join(str(tuple(field.shape)) for field in inputs)
        self.model.eval()
        try:
            with self.autocast:
                outputs = self.model(*inputs)
        except ARGUMENT_ERRORS as error:
            name = type(self.model).__name__
            raise ConfigError(
                f"model: {name} cannot take inputs of shape {shapes}: {one_line(error)} (first {split} samples)"
            ) from error
        self.task.check(outputs, labels)
        return outputs, labels

    def _check_first_samples(self, sets: Sets) -> list[str]:
        """Checks the first samples of both sets. Returns the names of the loss and the scores.

        Raises DataError or ConfigError if samples, network and task do not fit together.
        """
        outputs, labels = self._first_outputs(sets, "training", sets.first)
        self._first_outputs(sets, "test", sets.first_tested)
        if len(labels) == self.task.num_outputs:  # a loss could take samples for outputs, and would fail later
            outputs, labels = (torch.cat([tensor, tensor[:1]]) for tensor in (outputs, labels))
        possible_labels = [labels]
        if sets.mixes:  # mixup and cutmix turn labels into shares of the classes
            possible_labels.append(nn.functional.one_hot(labels.long().flatten(), self.task.num_outputs).float())
        for labels in possible_labels:
            try:
                if not self.task.loss(outputs.requires_grad_(), labels).requires_grad:
                    raise DataError("task.loss has no gradient: compute it from the outputs, without argmax or item")
                names = ["loss", *self.task.scores(outputs.detach(), labels)]
            except DataError:
                raise
            except ARGUMENT_ERRORS as error:
                raise ConfigError(
                    f"task: outputs of shape {tuple(outputs.shape)} and labels of shape {tuple(labels.shape)}, "
                    f"{labels.dtype}, do not fit the loss or a score: {one_line(error)}"
                ) from error
        check_choice("task.metric", self.task.metric, names, ConfigError)
        return names

    def state_dict(self, loader: Preloader) -> dict[str, Any]:
        """The content of a checkpoint: what a run needs to continue from here as if it had not been stopped."""
        return {
            "model": self.model.state_dict(),
            **({} if self.ema is None else {"ema": self.ema.state_dict()}),
            "optimizer": self.optimizer.state_dict(),
            "optimizer_class": type(self.optimizer).__name__,
            "loader": loader.state_dict(),
            "step": self.step,
            "config": self.settings,
            "data_spec": asdict(self.spec),
        }

    def resume(self, path: Path, state: dict[str, Any], loader: Preloader) -> None:
        """Continues from a checkpoint. Raises ConfigError if it does not fit this run."""
        load_weights(self.model, state["model"], path)
        if self.ema is not None:
            # The mean of a checkpoint without one starts with the checkpoint's weights.
            self.ema.load_state_dict(state.get("ema") or AveragedModel(self.model).state_dict())
        theirs, ours = state["optimizer_class"], type(self.optimizer).__name__
        if theirs != ours:
            raise ConfigError(
                f"train.resume: {path} was trained with {theirs} and this run has {ours}: use the same optim="
            )
        # Only the optimizer's running state is loaded: the learning rate and other settings are those of this run.
        optimizer_state = {**self.optimizer.state_dict(), "state": state["optimizer"]["state"]}
        try:
            self.optimizer.load_state_dict(optimizer_state)
            loader.load_state_dict(state["loader"])
        except ValueError as error:
            raise ConfigError(f"train.resume: {path} does not fit this run: {error}") from error
        self.schedule = LambdaLR(self.optimizer, self.learning_rate, last_epoch=state["step"] - 1)
        self.epoch, self.step = state["loader"]["epoch"], state["step"]
        self.resumed_at_epoch_end = state["loader"]["samples"] == 0
        where = f"at the end of epoch {self.epoch}" if self.resumed_at_epoch_end else f"in epoch {self.epoch + 1}"
        log.info("resuming after step %d, %s, from %s", self.step, where, path)
        self.changed = changes(self.settings, state.get("config", self.settings))
        if self.changed:
            log.info("train.resume with other settings: %s", "; ".join(self.changed))

    def progress_bar(self) -> tqdm:
        return self._bar("training", total=self.last_step, initial=self.step)

    def _bar(self, what: str, **counts: int) -> tqdm:
        disable = None if self.processes.is_main else True  # None: only if the output is not a terminal
        return tqdm(desc=what, unit="step", leave=False, disable=disable, **counts)

    def __str__(self) -> str:
        precision = "bf16" if self.bf16 else "fp32"
        return f"{type(self.model).__name__} with {count_parameters(self.model):,} parameters in {precision}"


class Means:
    """Means over samples. The sums stay on the device until `read`, which all processes call at the same step."""

    def __init__(self, processes: Processes, names: Sequence[str]) -> None:
        self._processes, self._names = processes, names
        self._reset()

    def _reset(self) -> None:
        zero = torch.zeros((), dtype=torch.float64, device=self._processes.device)
        self._sums, self._count = dict.fromkeys(self._names, zero), 0

    def add(self, samples: int, values: dict[str, Tensor]) -> None:
        """Adds the values of `samples` samples by name: one value for each sample (B,), or their mean ()."""
        for name, value in values.items():
            value = value.detach()
            self._sums[name] = self._sums[name] + (value.sum(dtype=torch.float64) if value.ndim else value * samples)
        self._count += samples

    def read(self) -> dict[str, float]:
        """Returns the means since the last call, over all processes."""
        every = self._processes.gather(self._count, *(total.item() for total in self._sums.values()))
        count, *sums = (sum(values) for values in zip(*every, strict=True))
        self._reset()
        return {name: total / max(count, 1) for name, total in zip(self._names, sums, strict=True)}


def uses_bf16(precision: str, device: torch.device) -> bool:
    """Whether the network computes in bf16 on the device; `precision` is train.precision."""
    gpu_has_bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return precision == "bf16" or (precision == "auto" and gpu_has_bf16)


def total_steps(samples: int, config: TrainConfig) -> int:
    """The number of optimizer steps in all epochs. Raises ConfigError if an epoch has too few samples for a step."""
    epochs, size = config.epochs, config.batch_size
    if samples < size and config.last_batch != "keep":
        raise ConfigError(f"train.batch_size={size}: there are only {samples} training samples; lower it")
    return {
        "drop": epochs * (samples // size),
        "keep": epochs * -(-samples // size),
        "rollover": epochs * samples // size,
    }[config.last_batch]


def seed_step(device: torch.device, seed: int, step: int, rank: int) -> None:
    """Seeds torch's generators for one step, so that dropout draws the same numbers in a resumed run."""
    number = int.from_bytes(blake2b(f"{seed} {step} {rank}".encode(), digest_size=8).digest(), "little")
    torch.default_generator.manual_seed(number)  # torch.manual_seed takes 0.1 ms, because it seeds all devices
    if device.type == "cuda":
        torch.cuda.manual_seed(number)
