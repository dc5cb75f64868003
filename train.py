"""Trains a network, and reports how much of the time it waited for data. conf/config.yaml explains the keys.

python train.py                                     # Fashion-MNIST images that ship with the repository
python train.py loader=torch loader.num_workers=4   # another loader: conf/loader/
python train.py data=cifar10 model=resnet18         # another dataset and network: conf/data/, conf/model/
python train.py train.resume=outputs/2026-11-21_10-00-00_123456     # continues an earlier run
python train.py -m loader=torch,prefetch loader.num_workers=0,2     # a sweep, which ends with a table
"""

from __future__ import annotations

import logging
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import hydra
import torch
from omegaconf import DictConfig
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from loaders import LoaderConfig, Preloader, build_loader
from training.callbacks.report.report import Report
from training.callbacks.report.trial import Trials, changed_train_loader
from training.checkpoint import Checkpoints
from training.config import Config, ConfigError, checked
from training.launch import Launcher
from training.processes import Processes, start_processes
from training.record import Record
from training.sets import Sets
from training.stopping import StopSignals
from training.trainer import Trainer
from training.trust import warn_of_targets

CONF = Path(__file__).resolve().parent / "conf"
log = logging.getLogger("train")


def run(cfg: DictConfig, folder: Path | None = None) -> dict[str, Any]:
    """Trains as `cfg` says, and returns the content of summary.json.

    folder: where the run's files go; None makes a new folder in outputs/.
    Raises ConfigError or DataError for settings and files that cannot work, Stopped after a signal.
    """
    config = checked(cfg)
    with ExitStack() as cleanup, logging_redirect_tqdm():
        signals = cleanup.enter_context(StopSignals())
        processes = cleanup.enter_context(start_processes(config))  # one, or as many as torchrun started
        config = processes.share(lambda: config)
        torch.manual_seed(config.seed)
        torch.backends.cudnn.benchmark = True
        cleanup.callback(torch.set_num_threads, torch.get_num_threads())  # for the next job of a sweep
        torch.set_num_threads(config.train.num_threads or torch.get_num_threads())

        report = Report(config, processes.device)
        record = cleanup.enter_context(Record(folder, processes.is_main, config))
        with report.phase("start-up"):
            sets = Sets(config)
        report.count_file_making(sets.made_seconds)
        make = partial(make_loader, config, processes, sets)
        make_train_loader = partial(make, sets.train, sets.augment, shuffle=True, last_batch=config.train.last_batch)
        train_loader = cleanup.enter_context(make_train_loader(config.loader))
        train_loader.timeline = report.timeline
        eval_split, eval_set = sets.evaluated
        eval_loader = cleanup.enter_context(make(eval_set, sets.transform, config.loader, pad=False))

        trainer = Trainer(config, sets, processes)
        checkpoints = Checkpoints(record.folder, config.train, processes, signals, report.phase)
        if found := checkpoints.find(config.train.resume):
            trainer.resume(*found, train_loader)
        if (summary := processes.share(record.earlier_summary)) and is_complete(trainer, record, summary):
            return summary
        record.begin(trainer.step, f"{eval_split}_{sets.task.metric}", sets.task.higher_is_better)
        record.scores = processes.share(lambda: record.scores)  # only the main process has read metrics.jsonl
        log.info("%s %s; writing to %s", trainer, processes, record.folder)
        log.info("%s", report.describe_run(sets, trainer.last_step))
        warn_of_targets(config)

        report.begin_training()
        cleanup.enter_context(record.report_if_stopped(report, train_loader))
        bar = cleanup.enter_context(trainer.progress_bar())
        parts = Parts(trainer, train_loader, eval_loader, eval_split, record, report, checkpoints, bar)
        scores = train(parts)
        if sets.val is not None:
            with cleanup.enter_context(make(sets.test, sets.transform, config.loader, pad=False)) as test_loader:
                scores |= score(parts, test_loader, "test")

        total = processes.total(report.timer.run())
        summary = {
            "loader": config.loader.name,
            "num_workers": config.loader.num_workers,
            "batch_size": config.train.batch_size,
            "device": str(processes.device),
            "processes": processes.world_size,
            **report.timer.summary(total),
            **scores,
            "score": f"test_{sets.task.metric}",
            "lower_is_better": not sets.task.higher_is_better,
            "epochs": trainer.epoch,
            "stopped_early": not trainer.finished,
        }
        if total.steps:
            record.write_summary(**summary, **report.summary())  # so that the run is complete if a trial fails
            seconds = min(config.timing.trial_seconds, total.seconds / 5)
            make_changed = partial(changed_train_loader, config.loader, make_train_loader, train_loader)
            report.finish(total, train_loader, Trials(trainer, signals, seconds, make_changed))
        summary = record.finish(**summary, **report.summary())
        record.write_report(report)
        log.info("test %s %.4f, %s\n\n%s", sets.task.metric, summary[summary["score"]], total, report.text)
        return summary


def is_complete(trainer: Trainer, record: Record, summary: dict[str, Any]) -> bool:
    """Whether the run in this folder, which wrote `summary`, has nothing left to train.

    Raises ConfigError if `train.resume` names the run, or if its settings were changed.
    """
    if trainer.finished:
        hint = f"this run has finished after {trainer.step} steps: raise train.epochs or train.max_steps to continue"
    elif summary.get("stopped_early") and not trainer.changed:
        hint = f"this run has stopped early after {trainer.step} steps: train.early_stop=null continues it"
    else:
        return False
    if trainer.config.resume != "auto":
        raise ConfigError(f"train.resume={trainer.config.resume}: {hint}")
    if trainer.changed:  # the summary is not that of these settings
        raise ConfigError(
            f"{record.folder} has a finished run with other settings ({'; '.join(trainer.changed)}): choose another "
            "folder, or train.resume=null to start afresh in this one"
        )
    log.info(hint)
    return True


def make_loader(
    config: Config, processes: Processes, sets: Sets, dataset: Any, transform: Any, loader: LoaderConfig, **order: Any
) -> Preloader:
    """A loader of this process's share of every global batch; `order` is more arguments of build_loader."""
    order |= {"seed": config.seed, "rank": processes.rank, "world_size": processes.world_size}
    order["batch_size"] = config.train.batch_size // processes.world_size
    options = {"device": processes.device, "transform": transform, "collate_fn": sets.collate}
    return build_loader(loader, dataset, **options, **order)


class Parts(NamedTuple):
    """The objects of one run that the functions below share."""

    trainer: Trainer
    train_loader: Preloader
    eval_loader: Preloader
    eval_split: str  # which set eval_loader loads: "val" or "test"
    record: Record
    report: Report
    checkpoints: Checkpoints
    bar: tqdm


def train(parts: Parts) -> dict[str, float]:
    """Trains and evaluates, epoch by epoch, until the run's last step. Returns the scores of the last evaluation."""
    trainer, record, timer = parts.trainer, parts.record, parts.report.timer
    scores = {record.score_name: record.scores.get(trainer.step, float("nan"))}
    at_epoch_end = trainer.resumed_at_epoch_end or trainer.finished
    if at_epoch_end and trainer.step not in record.scores:  # the run was stopped before this evaluation
        scores = evaluate(parts)
    while not trainer.finished and not record.has_stalled(trainer.config.early_stop):
        with parts.report.phase("training"):
            train_epoch(parts)
        scores = evaluate(parts)
        window, first = trainer.processes.total(timer.epoch()), timer.epoch_first_batch_seconds
        log.info("epoch %d: %s, first batch %.2f s", trainer.epoch, window, first)
    parts.bar.close()
    return scores


def train_epoch(parts: Parts) -> None:
    """Trains for one epoch, or for the rest of an interrupted one."""
    trainer, loader, timer = parts.trainer, parts.train_loader, parts.report.timer
    loader.set_epoch(trainer.epoch)
    last_logged = trainer.step
    for batch in timer.batches(loader):
        trainer.train_step(batch)
        parts.bar.update()
        if trainer.step % trainer.config.log_interval == 0 or trainer.step == 1:
            log_steps(parts)
            last_logged = trainer.step
        timer.end_step()
        parts.checkpoints.after_step(trainer.step, lambda: trainer.state_dict(loader))
        if trainer.finished:
            break
    if trainer.step > last_logged:
        log_steps(parts)
    trainer.epoch += 1


def log_steps(parts: Parts) -> None:
    """Writes the mean loss and scores, and the timing, since the last call to the log, metrics.jsonl and the bar."""
    trainer = parts.trainer
    means, window = trainer.means.read(), trainer.processes.total(parts.report.timer.window())
    trainer.warn_of_nan(means["loss"])
    parts.bar.set_postfix_str(f"epoch {trainer.epoch + 1}, loss {means['loss']:.3f}, {window}")
    parts.record.metrics(
        step=trainer.step,
        epoch=trainer.epoch + 1,
        **means,
        lr=max(trainer.schedule.get_last_lr()),
        images_per_second=window.images_per_second,
        data_wait_fraction=window.data_wait_fraction,
    )
    log.info("step %d: loss %.3f, %s", trainer.step, means["loss"], window)


def evaluate(parts: Parts) -> dict[str, float]:
    """Returns the scores of the evaluation set. Saves a checkpoint before, and marks it if its score is the best."""
    trainer, record = parts.trainer, parts.record
    parts.checkpoints.save(trainer.state_dict(parts.train_loader))
    scores = score(parts, parts.eval_loader, parts.eval_split)
    log.info("epoch %d: %s", trainer.epoch, ", ".join(f"{name} {value:.4f}" for name, value in scores.items()))
    if record.is_best(trainer.step):
        parts.checkpoints.mark_best(trainer.step)
    return scores


def score(parts: Parts, loader: Preloader, split: str) -> dict[str, float]:
    """Returns the mean loss and scores of a split by name, such as test_accuracy, and writes them to metrics.jsonl."""
    trainer = parts.trainer
    with parts.report.phase("evaluation"):
        means, stopped_by = trainer.evaluate(loader, parts.checkpoints.signals)
    parts.checkpoints.stop_if(stopped_by, trainer.step)
    scores = {f"{split}_{name}": value for name, value in means.items()}
    parts.record.metrics(step=trainer.step, epoch=trainer.epoch, **scores)
    return scores


launcher = Launcher(run)


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(cfg: DictConfig) -> None:
    launcher.job(cfg)


if __name__ == "__main__":
    launcher.launch(main, CONF)
