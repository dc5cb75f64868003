"""Loaders that keep the training step from waiting for data.

This folder imports nothing of the rest of the repository: it can be copied into another project as it is.
"""

from .arguments import LoaderConfigError
from .build import LoaderConfig, build_loader
from .preload.preloader import Preloader
from .randomness import Random
from .resident_loader import ResidentLoader
from .timeline import Timeline
from .timing import StepTimer
from .torch_loader import TorchLoader
from .worker_loader import WorkerLoader
from .workers.pool import WorkerFailure
from .workers.shared_memory import MachineFull
from .workers.stream_epochs import merge_states
from .workers.streams import StreamError

__all__ = [
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
    "WorkerFailure",
    "WorkerLoader",
    "build_loader",
    "merge_states",
]
