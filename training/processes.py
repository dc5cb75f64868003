"""The processes that train together: one, or as many as torchrun started, on one machine or on several.

train.py is written for any number of processes. Each gets its share of every global batch. DistributedDataParallel
averages their gradients. Only the main process, rank 0, writes files, the log and the progress bar.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from loaders import Accelerator, Window, chosen_device
from training.config import Config, ConfigError, one_line
from training.stopping import Stopped

log = logging.getLogger(__name__)


class ProcessesLost(RuntimeError):
    """The other processes cannot be reached, or do not answer."""


class Processes:
    """The processes of a run: this one alone, or with `timeout` those that torchrun started.

    They communicate by torch's backend for their device: NCCL on CUDA, gloo on CPUs. Raises ProcessesLost if another
    process cannot be reached for `timeout` seconds. Its `with` block turns the errors of torch.distributed about a
    lost process into it, too.
    """

    def __init__(self, device: torch.device, timeout: float | None = None) -> None:
        self.device, self.rank, self.world_size = device, 0, 1
        self.averages_in_backward = True
        self._pending: tuple[Any, torch.Tensor] | None = None  # the previous `agree`, under way
        accelerator = Accelerator(device)
        accelerator.make_current()
        if fallbacks := accelerator.fallbacks():
            log.warning("torch has for %s %s", device, "; ".join(fallbacks))
        if timeout is None:
            return
        self.rank, self.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._timeout, limit = timeout, timedelta(seconds=timeout)
        try:
            store, _, _ = next(rendezvous("env://", timeout=limit))
            group: dict[str, Any] = {"rank": self.rank, "world_size": self.world_size, "timeout": limit}
            store_of_this_start = PrefixStore(meet(store, **group), store)
            backend = dist.get_default_backend_for_device(device.type)
            dist.init_process_group(backend, store=store_of_this_start, **group)
            self._control: Any = dist.new_group(backend="gloo", timeout=limit)  # for everything but gradients
        except (dist.DistError, RuntimeError, ValueError) as error:
            where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
            raise ProcessesLost(
                f"rank {self.rank} of {self.world_size} could not connect to the others through MASTER_ADDR and "
                f"MASTER_PORT, {where}, within train.process_timeout={timeout:g} seconds: {one_line(error)}"
            ) from error

    @property
    def is_main(self) -> bool:
        """Whether this process writes the files and the log."""
        return self.rank == 0

    def parallel(self, model: nn.Module) -> nn.Module:
        """Wraps the model for training: its backward pass averages the gradients of all processes."""
        if self.world_size == 1:
            return model
        return DistributedDataParallel(model, None if self.device.type == "cpu" else [self.device])

    def average_in_backward(self, model: nn.Module, averages: bool) -> None:
        """Whether backward passes average the gradients of all processes from now on, or only sum up this one's."""
        self.averages_in_backward = averages
        if isinstance(model, DistributedDataParallel):
            model.require_backward_grad_sync = averages  # as no_sync does
            model.require_forward_param_sync = True  # DDP would not copy buffers after a step without averaging

    def average_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Averages the gradients of the parameters over all processes. One that another process lacks is 0 there."""
        weights = list(parameters)
        if self.world_size == 1 or not weights:
            return
        used = torch.tensor([weight.grad is not None for weight in weights], dtype=torch.uint8, device="cpu")
        dist.all_reduce(used, dist.ReduceOp.MAX, group=self._control)
        gradients = []
        for weight, is_used in zip(weights, used.tolist(), strict=True):
            if is_used:
                weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
                gradients.append(weight.grad)
        if not gradients:
            return
        whole = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(whole)
        parts = (whole / self.world_size).split([gradient.numel() for gradient in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))

    def share_buffers(self, *modules: nn.Module) -> None:
        """Copies the main process's buffers to the other processes: their batch norm statistics differ."""
        for buffer in (b for module in modules for b in module.buffers()) if self.world_size > 1 else ():
            dist.broadcast(buffer, 0)

    def gather(self, value: Any = None) -> list[Any]:
        """Returns the value of each process, by rank. All processes have to call it, and wait for one another."""
        values = [value] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(values, value, group=self._control)
        return values

    def total(self, window: Window) -> Window:
        """Merges the windows of all processes. All processes have to call it, and wait for one another."""
        return Window.of_processes(self.gather(window))

    def share(self, make: Callable[[], Any]) -> Any:
        """Calls `make` in the main process only, and returns its result in every process."""
        values = [make() if self.is_main else None]
        if self.world_size > 1:
            dist.broadcast_object_list(values, 0, group=self._control)
        return values[0]

    def agree(self, *numbers: int) -> tuple[int, ...]:
        """Returns the largest of each number over all processes.

        Several processes get the result of the previous call, zeros at first, so that no step waits for the others.
        """
        if self.world_size == 1:
            return numbers
        previous, largest = self._pending, torch.tensor(numbers)
        self._pending = dist.all_reduce(largest, dist.ReduceOp.MAX, group=self._control, async_op=True), largest
        if previous is None:
            return (0,) * len(numbers)
        work, result = previous
        work.wait()  # it has had a whole step of time
        return tuple(result.tolist())

    def __str__(self) -> str:
        if self.world_size == 1:
            return f"on {self.device}"
        return f"in {self.world_size} processes, each on its own {self.device.type} device"

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if self.world_size == 1:
            return
        if error is None or isinstance(error, Stopped):  # all processes get here at the same step
            dist.destroy_process_group()
        elif isinstance(error, RuntimeError) and (isinstance(error, dist.DistError) or "gloo" in str(error)):
            raise ProcessesLost(
                f"rank {self.rank} lost another process: it has exited (see its own message), or it did not answer "
                f"for train.process_timeout={self._timeout:g} seconds: {one_line(error)}"
            ) from error


def meet(store: Any, rank: int, world_size: int, timeout: timedelta) -> str:
    """Returns a prefix for the store's keys that all processes of this start share, and that no earlier start used.

    torchrun keeps its store when it restarts the processes. Without a new prefix, a process could read the address of
    a process that has exited, and wait for it. So rank 0 numbers the starts, and sends this start's number to every
    other rank that asks for it with a new request.
    """
    if rank > 0:
        request = uuid4().hex
        store.set(f"request/{rank}", request)
        start = store.get(f"answer/{request}").decode()
        store.set(f"met/{start}/{rank}", "")
        return f"start/{start}"
    start, end = str(store.add("starts", 1)), time.monotonic() + timeout.total_seconds()
    missing, answered = set(range(1, world_size)), set[bytes]()
    while missing:
        for other in sorted(missing):
            if store.check([f"request/{other}"]) and (asked := store.get(f"request/{other}")) not in answered:
                store.set(f"answer/{asked.decode()}", start)
                answered.add(asked)
            if store.check([f"met/{start}/{other}"]):
                missing.remove(other)
        if time.monotonic() > end:
            raise RuntimeError(f"ranks {sorted(missing)} did not connect")
        time.sleep(0.01)
    return f"start/{start}"


def start_processes(config: Config) -> Processes:
    """Connects to the other processes, if torchrun started any. Raises ConfigError or ProcessesLost."""
    device = chosen_device(config.device)
    if not started_by_torchrun():
        return Processes(device)
    on_gpu = device.type != "cpu"
    world_size, local = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_RANK"])
    if config.train.batch_size % world_size:
        nearest = max(1, round(config.train.batch_size / world_size)) * world_size
        raise ConfigError(
            f"train.batch_size={config.train.batch_size} is the batch of all {world_size} processes together and is "
            f"not divisible by {world_size}: use {nearest}"
        )
    if on_gpu and local >= (count := Accelerator(device).count()):
        raise ConfigError(
            f"torchrun started {os.environ.get('LOCAL_WORLD_SIZE', local + 1)} processes on this machine, which has "
            f"{count} GPUs: each process needs its own; give torchrun --nproc-per-node=gpu"
        )
    if device != torch.device(device.type):
        raise ConfigError(f"device={device} is one device for all processes: use device={device.type}")
    return Processes(torch.device(device.type, local) if on_gpu else device, config.train.process_timeout)


def started_by_torchrun() -> bool:
    """Whether this is one of several processes. Raises ConfigError if torchrun's environment is incomplete."""
    if os.environ.get("WORLD_SIZE", "1") in ("", "1"):
        return False
    missing = [name for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing:
        raise ConfigError(
            f"WORLD_SIZE={os.environ['WORLD_SIZE']} is set, but not {', '.join(missing)}: start several processes "
            "with torchrun --nproc-per-node=2 train.py, or unset WORLD_SIZE"
        )
    return True


def is_main_process() -> bool:
    """Whether this process writes the run's files. It can be called before the processes are connected."""
    return not started_by_torchrun() or os.environ["RANK"] == "0"
