"""Builds the objects of a run from its settings, in the order in which they need one another.

What has to be closed again is put on an ExitStack, which closes it in the reverse order, also after an error.
"""

from contextlib import ExitStack
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch

from data.errors import explained
from loaders import LoaderConfig, StatefulPreloader, build_loader
from training.build import build
from training.checkpoint import Checkpoints
from training.checks import check_sampler, check_settings
from training.clock import Clock
from training.config import Config, ConfigError
from training.datasets import Datasets
from training.dry_run import dry_run
from training.order import build_order, evaluated_size, smallest_part
from training.processes import Processes
from training.results import Results
from training.resume import choose_origin
from training.run import Run, build_callbacks
from training.stopping import StopSignals
from training.trainer import Trainer


def assemble(config: Config, folder: Path | None, cleanup: ExitStack) -> Run:
    """Builds everything, and checks it on the first samples. folder: None makes a new one in outputs/."""
    callbacks = build_callbacks(config.callbacks)
    clock = Clock()
    signals = cleanup.enter_context(StopSignals())
    processes = Processes(config.device, config.train)
    cleanup.push(processes.disconnect)
    # For the next job of a sweep: a network of yours may change the second one.
    cleanup.callback(torch.set_num_threads, torch.get_num_threads())
    cleanup.callback(torch.set_default_dtype, torch.get_default_dtype())
    if config.train.num_threads:
        torch.set_num_threads(config.train.num_threads)
    check_settings(processes, config)
    new = Path(datetime.now().strftime("outputs/%Y-%m-%d_%H-%M-%S_%f"))
    # Hydra makes a folder in the main process alone (SILENT in command_line.py).
    results = Results(processes.from_main(lambda: folder or new), processes.is_main)
    cleanup.callback(results.close)
    origin = processes.from_main(lambda: choose_origin(results.folder, config.train))
    with signals.at_once():  # the first sample may never come
        data = Datasets(config, origin, processes)
        data.check_processes(processes)
        if origin.state is not None:
            data.check_split(origin.state["data"]["trained"])
        elif origin.weights is not None and origin.weights.data is not None:
            data.check_split(origin.weights.data["trained"], are_others_usual=True)

    make_loader = partial(
        build_loader,
        device=processes.device,
        batch_size=config.train.batch_size // processes.world_size,
        seed=config.seed,
        rank=processes.rank,
        world_size=processes.world_size,
        collate_fn=data.collate,
    )
    eval_size = evaluated_size(config.train, processes.world_size)
    evaluated = {"batch_size": eval_size, "transform": data.transform, "pad": False}
    make_eval_loader = partial(make_loader, config.loader, **evaluated)

    def make_train_loader(settings: LoaderConfig, **order: Any) -> StatefulPreloader:
        return make_loader(settings, data.train, **data.augment_stage, **order)

    order = build_order(config, data.train, processes)
    train_loader = cleanup.enter_context(make_train_loader(config.loader, **order))
    train_loader.state_dict()  # raises an error now if a sampler has a state that cannot be saved
    checksum = check_sampler(order, data.train, config.seed, processes)
    fingerprint = data.fingerprint() | {"order": processes.gather(checksum)[0]}  # each has a batch sampler of its own
    eval_split = "test" if data.val is None else "val"
    eval_loader = cleanup.enter_context(make_eval_loader(getattr(data, eval_split)))

    remedy = "set train.steps_per_epoch for a stream, or give the sampler a __len__, and let it end after so many"
    with explained("the length of an epoch is not known", remedy, TypeError):
        steps = config.train.epochs * len(train_loader)
    if not steps and "batch_sampler" in order:
        name = type(order["batch_sampler"]).__name__
        raise ConfigError(f"batch_sampler: {name} has the length 0: let its __len__ return the batches of an epoch")
    if not steps:
        raise ConfigError(
            f"train.batch_size={config.train.batch_size}: an epoch's {len(order.get('sampler', data.train))} samples "
            "fill no batch: reduce it, or use train.last_batch=keep"
        )
    trainer: Trainer = build("trainer", config.trainer, config, data, processes, steps, methods={"set_up": []})
    trainer.set_up()
    trainer.progress.position = train_loader.position
    dry_run(trainer, data, smallest_part(config, data.train, order, processes))
    return Run(
        config=config,
        data=data,
        trainer=trainer,
        train_loader=train_loader,
        eval_loader=eval_loader,
        eval_split=eval_split,
        make_train_loader=make_train_loader,
        make_eval_loader=make_eval_loader,
        results=results,
        checkpoints=Checkpoints(results.folder, config.train, processes),
        signals=signals,
        processes=processes,
        clock=clock,
        waiting_callbacks=callbacks,
        origin=origin,
        fingerprint=fingerprint,
    )
