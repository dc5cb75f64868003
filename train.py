"""Trains a network, and reports how much of the time it waited for data. conf/config.yaml explains the keys.

python train.py                                     # Fashion-MNIST images that ship with the repository
python train.py loader=torch loader.num_workers=4   # another loader: conf/loader/
python train.py data=cifar10 model=resnet18         # another dataset and network: conf/data/, conf/model/
python train.py train.resume=outputs/2026-11-21_10-00-00_123456     # continues an earlier run
python train.py -m loader=torch,prefetch loader.num_workers=0,2     # a sweep, which ends with a table
"""

from __future__ import annotations

import gc
import logging
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import hydra
import torch
from omegaconf import DictConfig

from loaders import LoaderConfig, Preloader, build_loader
from training.checkpoint import Checkpoints
from training.clock import FILE_MAKING, Clock
from training.config import Config, ConfigError, checked
from training.datasets import Datasets, collate_of
from training.launch import launch, run_job
from training.processes import Processes, start_processes
from training.results import Results
from training.resume import resume
from training.run import Run, build_callbacks
from training.samplers import build_order, total_steps
from training.schedule import step_all
from training.stopping import StopSignals
from training.targets import build
from training.trainer import Trainer

CONF = Path(__file__).resolve().parent / "conf"
log = logging.getLogger("train")


def run(cfg: DictConfig, folder: Path | None = None) -> dict[str, Any]:
    """Trains as `cfg` says, and returns the content of summary.json.

    folder: where the run's files go; None makes a new folder in outputs/.
    Raises ConfigError or DataError for settings and files that cannot work, Stopped after a signal.
    """
    config = checked(cfg)
    with ExitStack() as cleanup:
        signals = cleanup.enter_context(StopSignals())
        processes = cleanup.enter_context(start_processes(config))  # one, or as many as torchrun started
        config = checked(processes.share(lambda: cfg))
        cleanup.callback(torch.set_num_threads, torch.get_num_threads())  # for the next job of a sweep
        torch.set_num_threads(config.train.num_threads or torch.get_num_threads())

        clock, callbacks = Clock(), build_callbacks(config)
        results = Results(folder, processes.is_main)
        with clock.phase("start-up"):
            data = Datasets(config)
        clock.recount(data.made_seconds, "start-up", FILE_MAKING)
        make = partial(make_loader, config, processes, data)
        order = build_order(config, data.train, processes)
        make_train_loader = partial(make, data.train, data.augment, **order)
        train_loader = cleanup.enter_context(make_train_loader(config.loader))
        eval_split, eval_set = ("test", data.test) if data.val is None else ("val", data.val)
        eval_loader = cleanup.enter_context(make(eval_set, data.transform, config.loader, pad=False))

        steps = total_steps(config, data.train, train_loader, processes)
        trainer: Trainer = build("trainer", config.trainer, config, data, processes, steps)
        if not isinstance(trainer, Trainer):
            raise ConfigError(f"trainer: {config.trainer['_target_']} is no subclass of training.trainer.Trainer")
        trainer.set_up(data)
        checkpoints = Checkpoints(results.folder, config.train, processes, signals, clock.phase)
        if found := checkpoints.find(config.train.resume):
            resume(trainer, *found, train_loader)
        if (summary := processes.share(results.earlier_summary)) and is_complete(trainer, results, summary):
            return summary
        score_name = f"{eval_split}_{data.task.metric}"
        results.begin(trainer.step, score_name, data.task.higher_is_better, trainer.at_epoch_end)
        results.scores = processes.share(lambda: results.scores)  # only the main process has read metrics.jsonl
        log.info("%s %s; writing to %s", trainer, processes, results.folder)
        log.info("%s", data.describe(config, trainer.last_step))

        loaders = train_loader, make_train_loader
        parts = Run(config, data, trainer, *loaders, results, checkpoints, clock, processes, callbacks)
        cleanup.enter_context(parts)
        gc.collect()
        gc.freeze()  # else the garbage collector would stop a step for 20 ms, to walk through all that was imported
        cleanup.callback(gc.unfreeze)
        clock.begin_training()
        parts.call("on_start")
        scores = train(parts, eval_loader, eval_split)
        if data.val is not None:
            with cleanup.enter_context(make(data.test, data.transform, config.loader, pad=False)) as test_loader:
                scores |= score(parts, test_loader, "test")

        total = processes.total(parts.timer.run())
        summary = {
            "loader": config.loader.name,
            "num_workers": config.loader.num_workers,
            "batch_size": config.train.batch_size,
            "device": str(processes.device),
            "processes": processes.world_size,
            **parts.timer.summary(total),
            **scores,
            "score": score_name,
            "lower_is_better": not data.task.higher_is_better,
            "epochs": trainer.epoch,
            "stopped_early": not trainer.finished,
        }
        log.info("test %s %.4f, %s", data.task.metric, scores[f"test_{data.task.metric}"], parts.text_of(total))
        parts.call("on_end", summary)
        return results.finish(**summary)


def is_complete(trainer: Trainer, results: Results, summary: dict[str, Any]) -> bool:
    """Whether the run in this folder, which wrote `summary`, has nothing left to train.

    Raises ConfigError if `train.resume` names the run, or if its settings were changed.
    """
    if trainer.finished:
        limit = "train.max_steps" if trainer.step == trainer.config.max_steps else "train.epochs"
        hint = f"this run has finished after {trainer.step} steps: raise {limit} to continue"
    elif summary.get("stopped_early") and not trainer.changed:
        hint = f"this run has stopped early after {trainer.step} steps: change what stopped it, such as "
        hint += "train.early_stop=null, to continue"
    else:
        return False
    if trainer.config.resume != "auto":
        raise ConfigError(f"train.resume={trainer.config.resume}: {hint}")
    if trainer.changed:  # the summary is not that of these settings
        raise ConfigError(
            f"{results.folder} has a finished run with other settings ({'; '.join(trainer.changed)}): choose another "
            "folder, or train.resume=null to start afresh in this one"
        )
    log.info(hint)
    return True


def make_loader(
    config: Config,
    processes: Processes,
    data: Datasets,
    dataset: Any,
    transform: Any,
    loader: LoaderConfig,
    **order: Any,
) -> Preloader:
    """A loader of this process's share of every global batch; `order` is more arguments of build_loader."""
    order |= {"seed": config.seed, "rank": processes.rank, "world_size": processes.world_size}
    order["batch_size"] = config.train.batch_size // processes.world_size
    order["collate_fn"] = collate_of(dataset, data.task, data.collate)
    return build_loader(loader, dataset, device=processes.device, transform=transform, **order)


def train(run: Run, eval_loader: Preloader, split: str) -> dict[str, float]:
    """Trains and evaluates, epoch by epoch, until the run's last step. Returns the scores of the last evaluation."""
    trainer = run.trainer
    if trainer.at_epoch_end or run.stops_early:
        scores = end_epoch(run, eval_loader, split)
    while not trainer.finished and not run.stops_early:
        with run.clock.phase("training"):
            train_epoch(run)
        scores = end_epoch(run, eval_loader, split)
    return scores


def train_epoch(run: Run) -> None:
    """Trains for one epoch, or for the rest of an interrupted one."""
    trainer, loader, timer = run.trainer, run.train_loader, run.timer

    def state() -> dict[str, Any]:
        if trainer.finished or loader.state_dict()["samples"] == 0:
            log_steps(run)  # a run that resumes at the epoch's end does not log its steps
        return trainer.state_dict(loader)

    loader.set_epoch(trainer.epoch)
    for batch in timer.batches(loader):
        trainer.train_step(batch)
        run.call("on_step")
        if trainer.step % trainer.config.log_interval == 0 or trainer.step == 1:
            log_steps(run)
        timer.end_step()
        if trainer.by_epoch and loader.state_dict()["samples"] == 0:  # a checkpoint of now is of a complete epoch
            step_all(trainer.schedules)
        run.checkpoints.after_step(trainer.step, state)
        if trainer.finished:
            break
    log_steps(run)
    trainer.epoch += 1
    window, first = trainer.processes.total(timer.epoch()), timer.epoch_first_batch_seconds
    log.info("epoch %d: %s, first batch %.2f s", trainer.epoch, run.text_of(window), first)


def log_steps(run: Run) -> None:
    """Writes the mean loss and scores, and the timing, since the last call to the log and metrics.jsonl."""
    trainer = run.trainer
    if trainer.step == run.logged_step:
        return
    run.logged_step = trainer.step
    means, window = trainer.means.read(), trainer.processes.total(run.timer.window())
    text = run.text_of(window)
    if "loss" in means:
        text = f"loss {means['loss']:.3f}, {text}"
    run.write(
        epoch=trainer.epoch + 1,
        **means,
        lr=trainer.learning_rate,
        images_per_second=window.images_per_second,
        data_wait_fraction=window.data_wait_fraction,
    )
    log.info("step %d: %s", trainer.step, text)


def end_epoch(run: Run, loader: Preloader, split: str) -> dict[str, float]:
    """Saves a checkpoint, evaluates the set that chooses the best one, and returns its scores.

    A run that resumes from this checkpoint repeats the rest as a whole: it may have stopped anywhere in it.
    """
    trainer = run.trainer
    run.checkpoints.save(trainer.state_dict(run.train_loader))
    scores = score(run, loader, split)
    log.info("epoch %d: %s", trainer.epoch, ", ".join(f"{name} {value:.4f}" for name, value in scores.items()))
    run.call("on_evaluation", scores)
    run.call("on_epoch_end")
    if trainer.logged.state_dict():  # callbacks have logged something
        run.write()
    return scores


def score(run: Run, loader: Preloader, split: str) -> dict[str, float]:
    """Returns the mean loss and scores of a split by name, such as test_accuracy, and writes them to metrics.jsonl."""
    trainer = run.trainer
    with run.clock.phase("evaluation"):
        means, stopped_by = trainer.evaluate(loader, run.checkpoints.signals)
    run.checkpoints.stop_if(stopped_by, trainer.step)
    scores = {f"{split}_{name}": value for name, value in means.items()}
    run.write(**scores)
    return scores


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(cfg: DictConfig) -> None:
    run_job(run, cfg)


if __name__ == "__main__":
    launch(main, CONF)
