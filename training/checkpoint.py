"""Checkpoints: written whole or not at all, and read without running code that they contain."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from torch import nn

from training.config import ConfigError
from training.files import replacing

KEYS = {"model", "optimizer", "optimizer_class", "loader", "random", "random_cuda", "step", "best_accuracy"}


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Writes `state`, a nest of tensors, numbers and strings."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        torch.save(state, file)


def read_checkpoint(resume: str, device: torch.device) -> tuple[Path, dict[str, Any]]:
    """The path and the content of the checkpoint that `train.resume` names: a file, or the last one in a run's folder.

    Raises ConfigError if there is none or it cannot be read.
    """
    given = Path(resume).expanduser()
    path = next(filter(Path.is_file, (given, given / "checkpoints" / "last.pt", given / "last.pt")), None)
    if path is None:
        what = "has no checkpoints/last.pt" if given.is_dir() else "does not exist"
        raise ConfigError(f"train.resume={given} {what}: give a checkpoint file or the folder of a run that saved one")
    try:
        state = torch.load(path, map_location=device, weights_only=True)
    except (RuntimeError, EOFError, OSError, pickle.UnpicklingError, ValueError, KeyError) as error:
        raise ConfigError(
            f"train.resume: {path} cannot be read as a checkpoint: it is damaged, or not a checkpoint"
        ) from error
    if not isinstance(state, dict) or not state.keys() >= KEYS:
        raise ConfigError(f"train.resume: {path} has no training state: give a checkpoint that train.py wrote")
    return path, state


def load_weights(model: nn.Module, weights: dict[str, torch.Tensor], path: Path) -> None:
    """Raises ConfigError with the first difference if the weights are those of another model."""
    ours, theirs = _shapes(model.state_dict()), _shapes(weights)
    for name in sorted(ours.keys() | theirs.keys()):
        here, there = ours.get(name, "missing"), theirs.get(name, "missing")
        if here != there:
            raise ConfigError(
                f"train.resume: {path} does not fit this run's {type(model).__name__}: {name} is {there} in the "
                f"checkpoint and {here} in the model; use the model= and data= that the checkpoint was made with"
            )
    model.load_state_dict(weights)


def _shapes(weights: dict[str, torch.Tensor]) -> dict[str, str]:
    return {name: str(tuple(tensor.shape)) for name, tensor in weights.items()}
