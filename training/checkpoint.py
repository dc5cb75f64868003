"""Checkpoints: written whole or not at all, read without running anything that they contain."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import torch
from torch import nn

from training.config import ConfigError

KEYS = {"model", "optimizer", "optimizer_class", "loader", "random", "step", "best_accuracy"}


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Writes `state` (tensors, numbers, strings, nested) beside `path` first: a crash leaves the old file whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    with open(partial, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def read_checkpoint(resume: str, device: torch.device) -> tuple[Path, dict[str, Any]]:
    """The checkpoint that `train.resume` names, a file or the last of a run's folder, and where it lies.

    Raises ConfigError where there is none or it cannot be read.
    """
    path = _find(Path(resume).expanduser())
    try:
        state = torch.load(path, map_location=device, weights_only=True)
    except (RuntimeError, EOFError, OSError, pickle.UnpicklingError, ValueError, KeyError) as error:
        raise ConfigError(
            f"train.resume: {path} cannot be read as a checkpoint: it is damaged or another file"
        ) from error
    if not isinstance(state, dict) or not state.keys() >= KEYS:
        raise ConfigError(f"train.resume: {path} holds no training state: give a checkpoint that train.py wrote")
    return path, state


def _find(path: Path) -> Path:
    for candidate in (path, path / "checkpoints" / "last.pt", path / "last.pt"):
        if candidate.is_file():
            return candidate
    what = "has no checkpoints/last.pt" if path.is_dir() else "does not exist"
    raise ConfigError(f"train.resume={path} {what}: give a checkpoint file or the folder of a run that saved one")


def load_weights(model: nn.Module, weights: dict[str, torch.Tensor], path: Path) -> None:
    """Raises ConfigError, naming the first difference, for the weights of another model."""
    ours = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    theirs = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    for name in sorted(ours.keys() | theirs.keys()):
        if ours.get(name) != theirs.get(name):
            raise ConfigError(
                f"train.resume: {path} is of another model than this run's {type(model).__name__}: {name} is "
                f"{_shape(theirs.get(name))} there and {_shape(ours.get(name))} here; choose the model= and data= "
                "of that run"
            )
    model.load_state_dict(weights)


def _shape(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else f"of shape {shape}"
