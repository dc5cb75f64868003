"""Feeding the accelerator: loaders that keep the training step from waiting.

This folder stands alone: it imports nothing of the rest of the repository, so it can be lifted out whole.
"""

from loaders.build import LoaderConfig, LoaderConfigError, build_loader
from loaders.preloader import Preloader
from loaders.resident import ResidentLoader
from loaders.torch_loader import TorchLoader
from loaders.worker_loader import WorkerLoader

__all__ = [
    "LoaderConfig",
    "LoaderConfigError",
    "Preloader",
    "ResidentLoader",
    "TorchLoader",
    "WorkerLoader",
    "build_loader",
]
