"""FinishedRun: a network that train.py trained, and what evaluate.py, predict.py and export.py need to use it.

The weights, the settings and the DataSpec come from one checkpoint. It cannot run code: see training/trust.py.
"""

from __future__ import annotations

import logging
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from data.subset import split as split_dataset
from data.transform import Normalize
from loaders import Preloader, build_loader, chosen_device
from training.checkpoint import find_checkpoint, load_others, load_weights
from training.command_line import compose_with
from training.config import Config, ConfigError, checked, full_errors, one_line
from training.data_spec import DataSpec
from training.datasets import as_samples, build_task, collate_of, open_dataset
from training.launch import is_expected
from training.precision import choose_dtype, in_format
from training.processes import Processes
from training.targets import build, function_of, reason_of
from training.trainer import Trainer
from training.trust import check_config

# The sections and keys of a run's settings that decide what its network computes.
SECTIONS = ("data", "task", "model", "optim", "schedule", "trainer", "seed")
KEYS = {"train": ("batch_size", "precision"), "loader": ("on_error", "streams")}
SPLITS = ("test", "val", "train")
CPU_BATCH = 32  # samples


class FinishedRun:
    """The trained network of a run, on its device.

    given: a checkpoint file, or the run's folder: then its best checkpoint, or if there is none its newest.
    overrides: replace settings of the run, such as data=image_folder, data.root=DIR or device=cpu.
    trusted: modules whose classes and functions the settings may name, in addition to those in training/trust.py.
    Raises ConfigError if there is no checkpoint, it does not fit the network, or its settings could run other code.
    """

    def __init__(self, given: Path, overrides: Sequence[str] = (), trusted: Sequence[str] = ()) -> None:
        self.path, state = find(given)
        try:
            settings = {key: state["config"][key] for key in SECTIONS}
            settings |= {part: {key: state["config"][part][key] for key in keys} for part, keys in KEYS.items()}
            self.spec = DataSpec(**state["data_spec"])
        except (KeyError, TypeError) as error:
            raise ConfigError(
                f"{self.path} was saved by another version of this repository, and lacks {one_line(error)}: use that "
                "version, or train again"
            ) from error
        replaced = [override.partition("=")[0] for override in overrides]
        settings = {key: value for key, value in settings.items() if key not in replaced}
        check_config({**settings, "data_spec": {**state["data_spec"], "dataset": None}}, self.path, trusted)
        stored = self.spec.dataset  # its attributes may have any names: no library gets them as arguments
        values = {"_target_": stored["_target_"], "attributes": list(stored["attributes"].values())}
        check_config(values, self.path, trusted, key="data")
        self.config, self.step = configure(settings, overrides), int(state["step"])
        self._epochs = state["loader"]["epoch"] + (state["loader"]["samples"] > 0)  # that the run had begun
        self._others = state.get("others", {})  # the weights of the trainer's other modules
        self.folder = self.path.parent.parent if self.path.parent.name == "checkpoints" else self.path.parent
        self.device = chosen_device(self.config.device)
        # On a CPU, larger batches are slower: for each normalised batch the system would have to map new memory.
        self.batch_size = self.config.train.batch_size
        if self.device.type == "cpu":
            self.batch_size = min(self.batch_size, CPU_BATCH)
        if "pretrained" in self.config.model:
            self.config.model["pretrained"] = False  # nothing is downloaded
        self.transform = None
        if self.spec.mean is not None:
            self.transform = Normalize(self.spec.mean, self.spec.std or (), fields=self.spec.images)
        collate = self.config.data.get("collate")
        self.collate = collate and function_of("data.collate", collate)
        self.has_loss = self.config.task.get("class_weights") != "balanced"  # they need the training set's labels
        self.task = build_task(self.config.task | ({} if self.has_loss else {"class_weights": None}), self.spec)
        self.model = self._load_network(state)
        dtype = choose_dtype(self.config.train.precision, self.device)
        self._autocast = torch.autocast(self.device.type, dtype, enabled=dtype != torch.float32)

    def _load_network(self, state: dict[str, Any]) -> nn.Module:
        """Builds the network and loads the weights of the checkpoint: their running mean (EMA), if it has one."""
        options = self.spec.model_options | {"num_classes": self.task.num_outputs}
        model = build("model", self.config.model, optional=options)
        ema = {name.removeprefix("module."): tensor for name, tensor in state.get("ema", {}).items()}
        ema.pop("n_averaged", None)
        load_weights(model, ema or state["model"], self.path)
        network: nn.Module = in_format(model.to(self.device), torch.channels_last)
        return network.eval()

    def trainer(self) -> Trainer:
        """The run's trainer with the trained network, for its evaluation_step.

        `batch_size` becomes that of the run: the score of a sample may depend on the other samples of its batch.
        """
        data = SimpleNamespace(task=self.task, spec=self.spec, transform=self.transform)
        arguments = self.config, data, Processes(self.device), self.config.train.epochs
        logging.disable(logging.WARNING)  # the run has logged what its trainer warns of
        try:
            trainer: Trainer = build("trainer", self.config.trainer, *arguments)
        finally:
            logging.disable(logging.NOTSET)
        trainer.model.load_state_dict(self.model.state_dict())
        if trainer.overrides("configure_optimizers"):  # it may make modules; the default one makes none
            trainer.configure_optimizers()
        load_others(trainer.others, self._others, self.path)
        trainer.epoch, trainer.step = self._epochs, self.step
        self.model, self.batch_size = trainer.model.eval(), self.config.train.batch_size
        return trainer

    def dataset(self, split: str) -> Any:
        """The split "train", "val" or "test" of the run's data, without augmentation.

        Raises ConfigError if the run has no such split, or the data do not fit the network.
        """
        fraction = self.config.data["val_fraction"]
        if split == "val" and not fraction:
            raise ConfigError("the run has no validation set: data.val_fraction was 0")
        dataset = open_dataset(self.spec.fill(self.config.data), split != "test", self.config.seed)
        if split == "train" and hasattr(dataset, "without_augmentation"):
            dataset = dataset.without_augmentation()
        self.spec.check(dataset)
        samples = as_samples(dataset, self.task, self.collate is not None)
        return split_dataset(samples, fraction)[split == "val"] if fraction and split != "test" else samples

    def loader(self, dataset: Any, **settings: Any) -> Preloader:
        """A loader of `dataset` in order, normalised and on the device; `settings` replace those of the config."""
        loader = type(self.config.loader)(**vars(self.config.loader) | settings)
        options: dict[str, Any] = {"batch_size": self.batch_size, "seed": self.config.seed, "pad": False}
        options["collate_fn"] = collate_of(dataset, self.task, self.collate)
        return build_loader(loader, dataset, device=self.device, transform=self.transform, **options)

    def image_shape(self, what: str) -> tuple[int, int, int]:
        """The shape (H, W, C) of the input, uint8 images. Raises ConfigError, which names `what`, for other inputs."""
        if self.task.inputs != ["image"] or self.spec.shape is None or self.spec.mean is None:
            inputs = ", ".join(self.task.inputs)
            raise ConfigError(
                f"{what} needs a network that was trained on one uint8 image, and this one gets {inputs}"
            )
        height, width, channels = self.spec.shape
        return height, width, channels

    @torch.no_grad()
    def outputs(self, batch: dict[str, Any]) -> Tensor:
        """Runs the network on a normalised batch. Returns float32 (B, number of outputs)."""
        with self._autocast:
            outputs = self.model(*(batch[name] for name in self.task.inputs))
        if not isinstance(outputs, Tensor):
            raise ConfigError(
                f"{self} returns a {type(outputs).__name__}, and its predictions need a tensor: use another script, "
                "or a network that returns one"
            )
        return outputs.float()

    def __str__(self) -> str:
        return f"{type(self.model).__name__} of {self.path} (step {self.step})"


@contextmanager
def refused_as(what: str) -> Iterator[None]:
    """Turns an error of the run's own code in this block into a sentence: `what` and why."""
    try:
        yield
    except Exception as error:
        if is_expected(error) or full_errors():
            raise
        raise ConfigError(f"{what}: {reason_of(error)}") from error


def find(given: Path) -> tuple[Path, dict[str, Any]]:
    """The checkpoint to use, and its content: `given`, or best.pt in that folder, or the newest one."""
    best = given / "checkpoints" / "best.pt"
    return find_checkpoint(best if best.exists() else given)


def configure(settings: dict[str, Any], overrides: Sequence[str]) -> Config:
    """The config of conf/, with a run's settings and then `overrides`. Raises ConfigError for a wrong override."""
    cfg = compose_with(settings, overrides)
    if "decode_on" in cfg.data:
        cfg.data.decode_on = "workers"  # this machine may have no GPU
    return checked(cfg)


def with_run(options: ArgumentParser) -> ArgumentParser:
    """Adds the arguments that evaluate, predict and export share."""
    options.add_argument("run", type=Path, help="a run's folder, or a checkpoint file")
    options.add_argument("--trust", action="append", default=[], metavar="MODULE", help="a module that RUN may use")
    return options
