"""The model, its optimizer and its learning rate: one training step, evaluation, and what a checkpoint holds."""

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
from tqdm import tqdm

from loaders import Preloader
from training.checkpoint import load_weights
from training.command_line import changes
from training.config import Config, ConfigError, TrainConfig, build
from training.data_spec import DataSpec
from training.processes import Processes
from training.stopping import StopSignals

log = logging.getLogger(__name__)


class Trainer:
    """The model, its optimizer and schedule, and how far training has come."""

    def __init__(self, config: Config, train_set: Any, processes: Processes) -> None:
        self.config, self.seed = config.train, config.seed
        self.settings = {key: value for key, value in asdict(config).items() if key not in ("timing", "logger")}
        self.changed: list[str] = []  # the settings that are different from those of the resumed checkpoint
        self.processes, self.device = processes, processes.device
        self.epoch, self.step = 0, 0
        self.first_batch: dict[str, Tensor] = {}  # on which steps are measured after the run
        self.resumed_at_epoch_end = False  # else the resumed epoch is incomplete, or none was resumed
        steps = steps_in(self.config.epochs, len(train_set), self.config)
        self.last_step = min(steps, self.config.max_steps or steps)
        self.warmup_steps = min(self.config.warmup_epochs * steps / self.config.epochs, self.last_step / 2)

        self.data_spec = asdict(DataSpec.of(train_set, train_set.mean, train_set.std))
        model = build_model(config.model, len(train_set.classes), self.data_spec["shape"])
        memory_format = torch.channels_last if self.config.channels_last else torch.contiguous_format
        self.model: nn.Module = model.to(self.device, memory_format=memory_format)
        if self.config.sync_batchnorm:
            self.model = nn.SyncBatchNorm.convert_sync_batchnorm(self.model)
        self.parallel = processes.parallel(self.model)
        self.forward = torch.compile(self.parallel) if self.config.compile else self.parallel
        self.bf16 = uses_bf16(self.config.precision, self.device)
        self.autocast = torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16)

        # Weight decay applies to weights, not to biases and norms.
        weights = [parameter for parameter in self.model.parameters() if parameter.ndim > 1]
        others = [parameter for parameter in self.model.parameters() if parameter.ndim <= 1]
        self.optimizer = build("optim", config.optim, [{"params": weights}, {"params": others, "weight_decay": 0.0}])
        self.schedule = LambdaLR(self.optimizer, self.learning_rate)

    @property
    def finished(self) -> bool:
        return self.step >= self.last_step

    def learning_rate(self, step: int) -> float:
        """The learning rate as a share of its peak: a linear rise, then half a cosine down to zero."""
        if step < self.warmup_steps:
            return (step + 1) / (self.warmup_steps + 1)
        return 0.5 + 0.5 * math.cos(math.pi * (step - self.warmup_steps) / (self.last_step - self.warmup_steps))

    def train_step(self, batch: dict[str, Tensor]) -> Tensor:
        """One optimizer step. Returns the batch's mean loss, left on the device so that nothing waits for it."""
        self.model.train()
        self.first_batch = self.first_batch or batch
        seed_step(self.device, self.seed, self.step, self.processes.rank)
        mean_loss = torch.zeros((), device=self.device)
        # More than one part if the device cannot hold a whole batch's activations at once.
        images, labels = (batch[key].chunk(self.config.accumulate) for key in ("image", "label"))
        for part in range(len(labels)):
            is_last = part == len(labels) - 1
            with nullcontext() if is_last else self.processes.without_averaging(self.parallel):
                with self.autocast:
                    logits = self.forward(images[part])
                loss = nn.functional.cross_entropy(
                    logits.float(), labels[part], label_smoothing=self.config.label_smoothing
                )
                loss = loss * (len(labels[part]) / len(batch["label"]))
                loss.backward()
            mean_loss += loss.detach()
        if self.config.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.schedule.step()
        self.step += 1
        return mean_loss

    @torch.inference_mode()
    def evaluate(self, loader: Preloader, signals: StopSignals) -> tuple[float, int]:
        """Returns the share of the loader's samples, over all processes, that the model classifies correctly.

        A signal cuts the evaluation short. Its number is returned too: 0 if none came.
        """
        self.model.eval()
        self.processes.share_buffers(self.model)
        correct, seen = torch.zeros((), dtype=torch.int64, device=self.device), 0
        with self._bar("evaluating", total=len(loader)) as bar:
            for batch in loader:
                with self.autocast:
                    logits = self.model(batch["image"])
                correct += (logits.argmax(dim=1) == batch["label"]).sum()
                seen += len(batch["label"])
                bar.update()
                if signals.received:
                    break
        every = self.processes.gather(correct.item(), seen, signals.received)
        corrects, counts, stops = zip(*every, strict=True)
        return sum(corrects) / sum(counts), int(max(stops))

    def state_dict(self, loader: Preloader) -> dict[str, Any]:
        """Everything a run needs to continue from here as if it had not stopped."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "optimizer_class": type(self.optimizer).__name__,
            "loader": loader.state_dict(),
            "step": self.step,
            "config": self.settings,
            "data_spec": self.data_spec,
        }

    def resume(self, path: Path, state: dict[str, Any], loader: Preloader) -> None:
        """Continues from a checkpoint. Raises ConfigError if it does not fit this run."""
        load_weights(self.model, state["model"], path)
        theirs, ours = state["optimizer_class"], type(self.optimizer).__name__
        if theirs != ours:
            raise ConfigError(
                f"train.resume: {path} was trained with {theirs} and this run has {ours}: use the same optim="
            )
        # Only the optimizer's state is loaded. The learning rate and other settings are those of this run.
        learnt = {**self.optimizer.state_dict(), "state": state["optimizer"]["state"]}
        try:
            self.optimizer.load_state_dict(learnt)
            loader.load_state_dict(state["loader"])
        except ValueError as error:
            raise ConfigError(f"train.resume: {path} does not fit this run: {error}") from error
        self.schedule = LambdaLR(self.optimizer, self.learning_rate, last_epoch=state["step"] - 1)
        self.epoch, self.step = state["loader"]["epoch"], state["step"]
        self.resumed_at_epoch_end = state["loader"]["samples"] == 0
        place, number = ("at the end of", self.epoch) if self.resumed_at_epoch_end else ("in", self.epoch + 1)
        log.info("resuming after step %d, %s epoch %d, from %s", self.step, place, number, path)
        self.changed = changes(self.settings, state.get("config", self.settings))
        if self.changed:
            log.info("train.resume with other settings: %s", "; ".join(self.changed))

    def progress_bar(self) -> tqdm:
        return self._bar("training", total=self.last_step, initial=self.step)

    def _bar(self, what: str, **counts: int) -> tqdm:
        silent = None if self.processes.is_main else True  # None: unless the output is no terminal
        return tqdm(desc=what, unit="step", leave=False, disable=silent, **counts)

    def __str__(self) -> str:
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        return f"{type(self.model).__name__} with {parameters:,} parameters in {'bf16' if self.bf16 else 'fp32'}"


def build_model(section: dict[str, Any], num_outputs: int, shape: Sequence[int]) -> Any:
    """The network of the section `model`, with new weights, for images of `shape` (H, W, C)."""
    return build("model", section, num_classes=num_outputs, in_channels=shape[-1])


def uses_bf16(precision: str, device: torch.device) -> bool:
    """Whether `train.precision` means bf16 on the device."""
    gpu_has_bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return precision == "bf16" or (precision == "auto" and gpu_has_bf16)


def steps_in(epochs: int, samples: int, config: TrainConfig) -> int:
    """The number of optimizer steps. Raises ConfigError if there are too few samples for one."""
    size = config.batch_size
    if samples < size and config.last_batch != "keep":
        raise ConfigError(f"train.batch_size={size}: there are only {samples} training images; lower it")
    return {
        "drop": epochs * (samples // size),
        "keep": epochs * -(-samples // size),
        "rollover": epochs * samples // size,
    }[config.last_batch]


def seed_step(device: torch.device, seed: int, step: int, rank: int) -> None:
    """Seeds what the model draws, such as dropout, from the step, so that a resumed run draws the same numbers."""
    number = int.from_bytes(blake2b(f"{seed} {step} {rank}".encode(), digest_size=8).digest(), "little")
    torch.default_generator.manual_seed(number)  # torch.manual_seed would take 0.1 ms, for devices that are not used
    if device.type == "cuda":
        torch.cuda.manual_seed(number)
