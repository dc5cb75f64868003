"""Trains an image classifier, and reports how much of the time it waited for data. conf/config.yaml explains the keys.

python train.py                                     # a part of Fashion-MNIST, which ships with the repository
python train.py loader=torch loader.num_workers=4   # another loader: conf/loader/
python train.py data=cifar10 model=resnet18         # another dataset and network: conf/data/, conf/model/
python train.py train.resume=outputs/2026-11-21_10-00-00_123456     # continues an earlier run
python train.py -m loader=torch,prefetch loader.num_workers=0,2     # a sweep, which ends with a table
"""

from __future__ import annotations

import logging
import math
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import hydra
import torch
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from data.augment import Augment
from data.transform import Normalize
from loaders import Preloader, build_loader
from loaders.timing import StepTimer, verdict
from training.checkpoint import load_weights, read_checkpoint, save_checkpoint
from training.config import Config, ConfigError, build, checked
from training.launch import Launcher
from training.record import Record

CONF = Path(__file__).resolve().parent / "conf"
log = logging.getLogger("train")


def run(cfg: DictConfig, folder: Path | None = None) -> dict[str, Any]:
    """Trains as `cfg` says. Returns the summary that it writes to `folder` (default: a new one in outputs/).

    Raises ConfigError or DataError for settings and files that cannot work.
    """
    config = checked(cfg)
    device = torch.device("cuda" if config.device != "cpu" and torch.cuda.is_available() else "cpu")
    torch.manual_seed(config.seed)
    torch.backends.cudnn.benchmark = True

    with ExitStack() as cleanup, logging_redirect_tqdm():
        record = Record(folder)
        train_set, test_set = (build("data", config.data, train=train) for train in (True, False))
        normalize = Normalize(train_set.mean, train_set.std)
        augment = Augment(normalize, len(train_set.classes), **config.augment)
        loader = make_loader(config, train_set, device, augment, shuffle=True, drop_last=True)
        train_loader = cleanup.enter_context(loader)
        test_loader = cleanup.enter_context(make_loader(config, test_set, device, normalize, pad=False))

        trainer = Trainer(config, train_set, len(train_loader), device)
        if config.train.resume is not None:
            trainer.resume(config.train.resume, train_loader)
        log.info("%s on %s; writing to %s", trainer, device, record.folder)

        timer = StepTimer(device, config.train.timing_warmup_steps)
        while not trainer.finished:
            train_epoch(trainer, train_loader, timer, record)
            accuracy = trainer.evaluate(test_loader)
            record.metrics(step=trainer.step, epoch=trainer.epoch, test_accuracy=accuracy)
            first = f"first batch {timer.epoch_first_batch_seconds:.2f} s"
            log.info("epoch %d: accuracy %.4f, %s, %s", trainer.epoch, accuracy, timer.epoch(), first)
            best = record.folder / "checkpoints" / "best.pt"
            if (
                accuracy >= trainer.best_accuracy or not best.exists()
            ):  # a run that is resumed in a new folder has none
                trainer.best_accuracy = accuracy
                save_checkpoint(best, trainer.state_dict(train_loader))
            save_checkpoint(best.with_name("last.pt"), trainer.state_dict(train_loader))

        total = timer.run()
        summary = record.summary(
            loader=config.loader.name,
            num_workers=config.loader.num_workers,
            batch_size=config.train.batch_size,
            device=str(device),
            **timer.summary(),
            test_accuracy=accuracy,
            epochs=trainer.epoch,
            verdict=verdict(total.data_wait_fraction, config.loader, os.cpu_count() or 1),
        )
        log.info("test accuracy %.4f, %s\n%s", accuracy, total, summary["verdict"])
        return summary


def make_loader(config: Config, dataset: Any, device: torch.device, transform: Any, **options: Any) -> Preloader:
    settings = {"batch_size": config.train.batch_size, "seed": config.seed, "device": device, "transform": transform}
    return build_loader(config.loader, dataset, **settings, **options)


def train_epoch(trainer: Trainer, loader: Preloader, timer: StepTimer, record: Record) -> None:
    """Trains for one epoch, with a progress bar, and writes to the log and metrics.jsonl at intervals."""
    loader.set_epoch(trainer.epoch)
    losses: list[Tensor] = []
    with tqdm(total=len(loader), desc=f"epoch {trainer.epoch + 1}", unit="step", leave=False, disable=None) as bar:
        for batch in timer.batches(loader):
            losses.append(trainer.train_step(batch))
            bar.update()
            at_interval = trainer.step % trainer.config.log_interval == 0 or trainer.step % len(loader) == 0
            if at_interval or trainer.step == 1 or trainer.finished:
                loss, window = torch.stack(losses).mean().item(), timer.window()
                losses.clear()
                bar.set_postfix_str(str(window))
                record.metrics(
                    step=trainer.step,
                    epoch=trainer.epoch + 1,
                    loss=loss,
                    lr=trainer.schedule.get_last_lr()[0],
                    images_per_second=window.images_per_second,
                    data_wait_fraction=window.data_wait_fraction,
                )
                log.info("step %d: loss %.3f, %s", trainer.step, loss, window)
            if trainer.finished:
                break
    trainer.epoch += 1


class Trainer:
    """The model, its optimizer and schedule, and how far training has come."""

    def __init__(self, config: Config, train_set: Any, epoch_steps: int, device: torch.device) -> None:
        if epoch_steps == 0:
            size = config.train.batch_size
            raise ConfigError(f"train.batch_size={size}: there are only {len(train_set)} training images; lower it")
        self.config, self.device = config.train, device
        self.epoch, self.step, self.best_accuracy = 0, 0, 0.0
        self.last_step = min(self.config.epochs * epoch_steps, self.config.max_steps or math.inf)
        self.warmup_steps = min(self.config.warmup_epochs * epoch_steps, self.last_step / 2)

        channels = train_set.sample_spec()["image"][0][-1]
        model = build("model", config.model, num_classes=len(train_set.classes), in_channels=channels)
        memory_format = torch.channels_last if self.config.channels_last else torch.contiguous_format
        self.model: nn.Module = model.to(device, memory_format=memory_format)
        self.forward = torch.compile(self.model) if self.config.compile else self.model
        gpu_has_bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        self.bf16 = self.config.precision == "bf16" or (self.config.precision == "auto" and gpu_has_bf16)
        self.autocast = torch.autocast(device.type, torch.bfloat16, enabled=self.bf16)

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
        mean_loss = torch.zeros((), device=self.device)
        parts = self.config.accumulate  # more than 1 if the device cannot hold a whole batch's activations at once
        for images, labels in zip(batch["image"].chunk(parts), batch["label"].chunk(parts), strict=True):
            with self.autocast:
                logits = self.forward(images)
            loss = nn.functional.cross_entropy(logits.float(), labels, label_smoothing=self.config.label_smoothing)
            loss = loss * (len(labels) / len(batch["label"]))
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
    def evaluate(self, loader: Preloader) -> float:
        """The share of the loader's samples that the model classifies correctly."""
        self.model.eval()
        correct, seen = torch.zeros((), dtype=torch.int64, device=self.device), 0
        for batch in loader:
            with self.autocast:
                logits = self.forward(batch["image"])
            correct += (logits.argmax(dim=1) == batch["label"]).sum()
            seen += len(batch["label"])
        return correct.item() / seen

    def state_dict(self, loader: Preloader) -> dict[str, Any]:
        """Everything a run needs to continue from here as if it had not stopped."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "optimizer_class": type(self.optimizer).__name__,
            "loader": loader.state_dict(),
            "random": torch.get_rng_state(),
            "random_cuda": torch.cuda.get_rng_state_all() if self.device.type == "cuda" else [],
            "step": self.step,
            "best_accuracy": self.best_accuracy,
        }

    def resume(self, checkpoint: str, loader: Preloader) -> None:
        """Loads the state from a checkpoint, or from the last one in a run's folder. Raises ConfigError."""
        path, state = read_checkpoint(checkpoint, self.device)
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
        torch.set_rng_state(state["random"].cpu())
        torch.cuda.set_rng_state_all([random.cpu() for random in state["random_cuda"][: torch.cuda.device_count()]])
        self.epoch, self.step, self.best_accuracy = state["loader"]["epoch"], state["step"], state["best_accuracy"]
        if self.finished:
            raise ConfigError(
                f"train.resume: {path} was saved after {self.step} steps, and this run ends after {self.last_step}: "
                "raise train.epochs or train.max_steps"
            )

    def __str__(self) -> str:
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        return f"{type(self.model).__name__} with {parameters:,} parameters in {'bf16' if self.bf16 else 'fp32'}"


launcher = Launcher(run)


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(cfg: DictConfig) -> None:
    launcher.job(cfg)


if __name__ == "__main__":
    launcher.launch(main, CONF)
