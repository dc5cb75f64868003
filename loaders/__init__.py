"""Loaders that keep the training step from waiting for data.

This folder imports nothing of the rest of the repository: it can be copied into another project as it is.
"""

from .arguments import LoaderConfigError
from .build import LoaderConfig, build_loader
from .machine import available_cores
from .nested import move, rows, tensors
from .preload.accelerator import Accelerator, chosen_device
from .preload.preloader import Preloader
from .randomness import Random
from .resident_loader import ResidentLoader
from .timeline import Timeline
from .timing import StepTimer, Window
from .torch_loader import TorchLoader
from .worker_loader import WorkerLoader
from .workers.pool import WorkerFailure
from .workers.reader import offers
from .workers.shared_memory import MachineFull
from .workers.stream_epochs import merge_states
from .workers.streams import StreamError

__all__ = [
    "Accelerator",
    "LoaderConfig",
    "LoaderConfigError",
    "MachineFull",
    "Preloader",
    "Random",
    "ResidentLoader",
    "StepTimer",
    "StreamError",
    "Timeline",
    "TorchLoader",
    "Window",
    "WorkerFailure",
    "WorkerLoader",
    "available_cores",
    "build_loader",
    "chosen_device",
    "merge_states",
    "move",
    "offers",
    "rows",
    "tensors",
]
