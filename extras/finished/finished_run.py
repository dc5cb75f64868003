"""FinishedRun: a trained network with its datasets, as evaluate.py, predict.py and export.py use it.

The weights and the settings come from one checkpoint, which cannot run code; datasets, network and task are built by
this repository's code, as those settings say.
"""

import logging
import os
import re
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from omegaconf import DictConfig, OmegaConf

from data.errors import explained, home_path, reason_of
from data.subset import unaugmented
from data.transform import upgraded
from extras.finished.new_images import NewImages
from loaders import ExpectedError, Preloader, build_loader
from training import script
from training.build import build
from training.checkpoint import State, best_or_newest, read_checkpoint
from training.command_line import parsed, remedy_of
from training.config import ROOT, Config, ConfigError, Section, checked, flat
from training.datasets import Datasets
from training.launch import Extras
from training.module_state import ModuleState
from training.processes import Processes
from training.resume import Origin, evaluated_settings, evaluated_weights, load_module
from training.tasks import Batch
from training.trainer import Trainer

log = logging.getLogger(__name__)

SPLITS = ("test", "val", "train")
READ = ("data", "task", "model", "trainer", "optim", "schedule", "train", "loader", "device", "seed")  # of a config
BUILT = ("data", "task", "model", "trainer")  # sections of what is built, which may name files
OVERRIDES = ("KEY=VALUE", "settings to replace, such as data.root=DIR")  # the name and the help of the arguments


class FinishedRun:
    """The trained network of a run, on its device.

    source: a checkpoint file, or the run's folder: then its best checkpoint, or its newest if it has no best one.
    overrides: replace settings of the run, such as data=image_folder, data.root=DIR or device=cpu.
    for_new_images: builds no dataset if the checkpoint has what new images need, and no setting of data is replaced.
    Raises ConfigError if there is no checkpoint, or it does not fit the network.
    """

    def __init__(self, source: Path, overrides: Sequence[str] = (), for_new_images: bool = False) -> None:
        self.path = best_or_newest(source)
        state = read_checkpoint(self.path)
        self.step = int(state["step"])
        folder = self.path.resolve().parent
        self.folder = folder.parent if folder.name == "checkpoints" else folder
        self.config = configured(state["config"], overrides)
        self.data: Datasets
        # Nothing is downloaded. A text may also choose the network.
        loaded = {"pretrained": False} if self.config.model.get("pretrained") is True else {}
        self._config = replace(self.config, model=self.config.model | loaded)
        self._processes = Processes(self.config.device, self.config.train)
        self.replaces_data = any(text.lstrip("+~").startswith("data") for text in overrides)
        with saying_what_has_moved({name: getattr(self.config, name) for name in BUILT}):
            self._build(state, for_new_images)
        self.task: Any = self.trainer.task
        self.device = self.trainer.device
        self._load(state)

    def _build(self, state: State, for_new_images: bool) -> None:
        reason = ""
        if for_new_images:
            reason = "a setting of data is given" if self.replaces_data else self._build_for_new_images(state)
        if reason:
            log.warning("%s: %s, so the run's dataset is built", self.path, reason)
        if reason or not for_new_images:
            self.data = Datasets(self.config, Origin(state), self._processes, is_finished=True)
            self.data.check_split(state["data"]["trained"])
            self._build_trainer()

    def _build_for_new_images(self, state: State) -> str:
        """Builds all without a dataset. Returns why the dataset is needed; empty if it is not."""
        new_images = state["new_images"]
        if new_images is None or new_images["prepared_by"] is None:
            return "it does not say by numbers alone how images are prepared"
        try:
            self.data = NewImages(self.config, new_images, state["classes"])
            self._build_trainer()
        except (AttributeError, ExpectedError, TypeError) as error:  # a task or a trainer looks at the dataset
            return reason_of(error)
        return ""

    def _build_trainer(self) -> None:
        config = self._config
        steps = max(config.train.epochs, self.step)  # a schedule by epoch needs a step in each
        self.trainer: Trainer = build("trainer", config.trainer, config, self.data, self._processes, steps)
        self.trainer.set_up()

    def _load(self, state: State) -> None:
        """Loads what the run evaluated: the weights, and the settings of modules, losses and scores.

        The modules are in evaluation mode.
        """
        try:
            load_module(self.trainer.model, evaluated_weights(state), self.device)
            self.trainer.ema_model = None  # a trainer may have made one, which would be evaluated instead
            for name, module in self.trainer.extra_modules.items():
                load_module(module, state["others"][name], self.device)
        except (KeyError, RuntimeError) as error:
            raise ConfigError(f"{self.path} does not fit {self}: {reason_of(error)[:300]}") from error
        ModuleState(self.trainer).restore(evaluated_settings(state))
        for module in self.trainer.all_modules.children():
            module.eval()
        self.trainer.progress.step = self.step
        self.trainer.progress.epoch = state["loader"]["epoch"]

    def dataset(self, split: str) -> Any:
        """The split "train", "val" or "test" of the run's data, without augmentation."""
        dataset = {"train": self.data.train, "val": self.data.val, "test": self.data.test}[split]
        if dataset is None:
            raise ConfigError("--split val: the run has no validation set beside its test set: use --split test")
        return unaugmented(dataset) if split == "train" else dataset

    def loader(self, dataset: Any) -> Preloader:
        """A loader of the dataset in order, as the run evaluated it."""
        return build_loader(
            self.config.loader,
            dataset,
            device=self.device,
            batch_size=self.config.train.part_size,
            seed=self.config.seed,
            pad=False,
            collate_fn=self.data.collate,
            transform=self.data.transform,
        )

    @torch.no_grad()
    def outputs(self, batch: Batch) -> Any:
        """Runs the network on a batch on its device, whose images are normalised."""
        with self.trainer.autocast:
            return self.trainer.model(*(batch[name] for name in self.task.inputs))

    def __str__(self) -> str:
        return f"{type(self.trainer.model).__name__} of {self.path} (step {self.step})"


def configured(saved: Section, overrides: Sequence[str]) -> Config:
    """The config of conf/ with a run's settings and then `overrides`: whole sections (data=cifar10) or values."""
    groups = {}
    for text in overrides:
        key = text.partition("=")[0]
        if key.lstrip("+~").partition(".")[0] not in READ:
            raise ConfigError(f"{text} cannot be used: of a finished run the sections {', '.join(READ)} are read")
        if "." not in key:
            groups[key] = text
    Plugins.instance().register(Extras)
    values: dict[str, Any] = {}
    for text in overrides:
        if text not in groups.values():
            with explained(f"{text} cannot be used", remedy_of(text)):  # as train.py reads it
                values |= {key: override.value() for key, override in parsed([text]).items()}
    with explained(f"{' '.join(overrides)} cannot be used", "give GROUP=NAME or SECTION.KEY=VALUE"):
        with without_hydra(), initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
            cfg = compose("config", overrides=list(groups.values()))
        settings: Any = OmegaConf.to_container(cfg)
        for key, value in saved.items():
            if key not in groups:
                value = upgraded(value) if key == "data" else value
                settings[key] = settings[key] | value if key in ("train", "loader") else value
        changes = OmegaConf.create({})
        for key, value in values.items():
            OmegaConf.update(changes, key, value)
        merged = OmegaConf.merge(OmegaConf.structured(Config), settings, changes)
    assert isinstance(merged, DictConfig)
    return checked(merged)


@contextmanager
def without_hydra() -> Iterator[None]:
    """In the block Hydra is not initialised. In a callback of a run it is, and in a notebook that composes configs."""
    earlier = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        yield
    finally:
        GlobalHydra.instance().hydra = earlier


@contextmanager
def saying_what_has_moved(sections: dict[str, Section]) -> Iterator[None]:
    """Adds the setting to an error that names its value, if this path does not exist here."""
    try:
        yield
    except (ExpectedError, OSError) as error:
        text = str(error)
        moved = []
        for key, value in flat(sections).items():
            if not isinstance(value, str) or os.path.exists(home_path(value)):  # False for a text that is too long
                continue
            names = re.escape(str(home_path(value)))
            if os.sep in value:  # else the word may be a column, a class, or any other
                names += rf"|(?<![\w=]){re.escape(value)}"
            is_file = isinstance(error, OSError) and error.filename == value
            if is_file or re.search(rf"({names})(?!\w)", text):
                moved.append(f"{key}=PATH")
        if not moved:
            raise
        raise ConfigError(f"{text}; if the files have moved, give {' '.join(moved)}") from error


def parser(about: str | None, out: str, others: tuple[str, str] = OVERRIDES) -> ArgumentParser:
    """A parser with the arguments that all three programs have.

    about: the program's docstring, shown as help. out: the help of --out. others: the name and the help of the
    arguments after the run.
    """
    name, meaning = others
    options = script.parser(about)
    options.add_argument("run", type=home_path, help="a run's folder, or a checkpoint file")
    options.add_argument("others", nargs="*", default=[], metavar=name, help=meaning)
    options.add_argument("--out", type=Path, help=out)
    return options
