"""Trains an image classifier, and reports how much of the time it waited for data. conf/config.yaml explains the keys.

python train.py                                     # a part of Fashion-MNIST, which ships with the repository
python train.py loader=torch loader.num_workers=4   # another loader: conf/loader/
python train.py data=cifar10 model=resnet18         # another dataset and network: conf/data/, conf/model/
python train.py train.resume=outputs/2026-11-21_10-00-00_123456     # continues an earlier run
python train.py -m loader=torch,prefetch loader.num_workers=0,2     # a sweep, which ends with a table
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import hydra
import torch
from omegaconf import DictConfig
from torch import Tensor
from tqdm.contrib.logging import logging_redirect_tqdm

from data.augment import Augment
from data.transform import Normalize
from loaders import LoaderConfig, Preloader, build_loader
from training.checkpoint import Checkpoints
from training.config import Config, ConfigError, build, changed_loader, checked
from training.launch import Launcher
from training.processes import Processes, start_processes
from training.record import Record
from training.report import Report
from training.stopping import StopSignals
from training.trainer import Trainer
from training.trial import Trials

CONF = Path(__file__).resolve().parent / "conf"
log = logging.getLogger("train")


def run(cfg: DictConfig, folder: Path | None = None) -> dict[str, Any]:
    """Trains as `cfg` says. Returns the summary that it writes to `folder` (default: a new one in outputs/).

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
            train_set, test_set = (build("data", config.data, train=train) for train in (True, False))
        report.leave_out_of_start_up(train_set, test_set)
        normalize = Normalize(train_set.mean, train_set.std)
        augment = Augment(normalize, len(train_set.classes), **config.augment)
        make = partial(make_loader, config, processes)
        make_train_loader = partial(make, train_set, augment, shuffle=True, last_batch=config.train.last_batch)
        train_loader = cleanup.enter_context(make_train_loader(config.loader))
        train_loader.timeline = report.timeline
        test_loader = cleanup.enter_context(make(test_set, normalize, config.loader, pad=False))

        trainer = Trainer(config, train_set, processes)
        checkpoints = Checkpoints(record.folder, config.train, processes, signals, report.phase)
        if found := checkpoints.find(config.train.resume):
            trainer.resume(*found, train_loader)
        if trainer.finished and (summary := processes.share(record.finished)):
            hint = f"this run has finished after {trainer.step} steps: raise train.epochs or train.max_steps to go on"
            if config.train.resume != "auto":
                raise ConfigError(f"train.resume={config.train.resume}: {hint}")
            if trainer.changed:  # the summary is not what these settings would give
                raise ConfigError(
                    f"{record.folder} has a finished run with other settings ({'; '.join(trainer.changed)}): choose "
                    "another folder, or train.resume=null to start afresh in this one"
                )
            log.info(hint)
            return summary
        record.begin(trainer.step)
        record.accuracies = processes.share(lambda: record.accuracies)  # the main process has read them
        log.info("%s %s; writing to %s", trainer, processes, record.folder)
        log.info("%s", report.beginning(train_set, test_set, trainer.last_step))

        report.begin_training()
        cleanup.enter_context(record.reports_a_stop(report, train_loader))
        bar = cleanup.enter_context(trainer.progress_bar())
        unevaluated = trainer.step not in record.accuracies
        if found and unevaluated and (trainer.resumed_at_epoch_end or trainer.finished):  # stopped before it
            evaluate(trainer, train_loader, test_loader, record, report, checkpoints)
        while not trainer.finished:
            with report.phase("training"):
                train_epoch(trainer, train_loader, record, report, checkpoints, bar)
            evaluate(trainer, train_loader, test_loader, record, report, checkpoints)
            window, first = processes.total(report.timer.epoch()), report.timer.epoch_first_batch_seconds
            log.info("epoch %d: %s, first batch %.2f s", trainer.epoch, window, first)
        bar.close()

        total = processes.total(report.timer.run())
        summary = {
            "loader": config.loader.name,
            "num_workers": config.loader.num_workers,
            "batch_size": config.train.batch_size,
            "device": str(processes.device),
            "processes": processes.world_size,
            **report.timer.summary(total),
            "test_accuracy": record.accuracies[trainer.step],
            "epochs": trainer.epoch,
        }
        if total.steps:
            record.draft(**summary, **report.summary())  # if what is measured now should fail, the run is complete
            seconds = min(config.timing.trial_seconds, total.seconds / 5)
            trials = Trials(trainer, signals, seconds, partial(try_loader, config, make_train_loader))
            report.finish(total, train_loader, trials)
        summary = record.summary(**summary, **report.summary())
        record.report(report)
        log.info("test accuracy %.4f, %s\n\n%s", summary["test_accuracy"], total, report.text)
        return summary


def make_loader(
    config: Config, processes: Processes, dataset: Any, transform: Any, loader: LoaderConfig, **order: Any
) -> Preloader:
    order |= {"seed": config.seed, "rank": processes.rank, "world_size": processes.world_size}
    order["batch_size"] = config.train.batch_size // processes.world_size
    return build_loader(loader, dataset, device=processes.device, transform=transform, **order)


@contextmanager
def try_loader(config: Config, make: Any, overrides: tuple[str, ...]) -> Iterator[tuple[Preloader, int]]:
    """A training loader with changed settings, and how many batches it loads ahead."""
    changed, threads = changed_loader(config.loader, overrides), torch.get_num_threads()
    with ExitStack() as cleanup, make(changed) as loader:
        if "train.num_threads=1" in overrides:
            torch.set_num_threads(1)
            cleanup.callback(torch.set_num_threads, threads)
        yield loader, int(changed.num_workers) * int(changed.prefetch_factor) + changed.preload_depth


def train_epoch(
    trainer: Trainer, loader: Preloader, record: Record, report: Report, checkpoints: Checkpoints, bar: Any
) -> None:
    """Trains for one epoch, or for the rest of one that was interrupted."""
    loader.set_epoch(trainer.epoch)
    losses: list[Tensor] = []
    for batch in report.timer.batches(loader):
        losses.append(trainer.train_step(batch))
        bar.update()
        if trainer.step % trainer.config.log_interval == 0 or trainer.step == 1:
            log_steps(trainer, losses, record, report, bar)
        report.timer.end_step()
        checkpoints.after_step(trainer.step, lambda: trainer.state_dict(loader))
        if trainer.finished:
            break
    if losses:
        log_steps(trainer, losses, record, report, bar)
    trainer.epoch += 1


def log_steps(trainer: Trainer, losses: list[Tensor], record: Record, report: Report, bar: Any) -> None:
    """Writes the mean loss and the timing since the last call to the log, to metrics.jsonl and to the bar."""
    loss, window = torch.stack(losses).mean().item(), trainer.processes.total(report.timer.window())
    loss = sum(loss for (loss,) in trainer.processes.gather(loss)) / trainer.processes.world_size
    losses.clear()
    bar.set_postfix_str(f"epoch {trainer.epoch + 1}, loss {loss:.3f}, {window}")
    record.metrics(
        step=trainer.step,
        epoch=trainer.epoch + 1,
        loss=loss,
        lr=trainer.schedule.get_last_lr()[0],
        images_per_second=window.images_per_second,
        data_wait_fraction=window.data_wait_fraction,
    )
    log.info("step %d: loss %.3f, %s", trainer.step, loss, window)


def evaluate(
    trainer: Trainer,
    train_loader: Preloader,
    test_loader: Preloader,
    record: Record,
    report: Report,
    checkpoints: Checkpoints,
) -> None:
    """Saves a checkpoint, so that nothing is lost if evaluation fails; keeps it if it is the best one so far."""
    checkpoints.save(trainer.state_dict(train_loader))
    with report.phase("evaluation"):
        accuracy, stopped_by = trainer.evaluate(test_loader, checkpoints.signals)
    checkpoints.stop_if(stopped_by, trainer.step)
    record.metrics(step=trainer.step, epoch=trainer.epoch, test_accuracy=accuracy)
    log.info("epoch %d: accuracy %.4f", trainer.epoch, accuracy)
    if accuracy >= max(record.accuracies.values()):
        checkpoints.mark_best(trainer.step)


launcher = Launcher(run)


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(cfg: DictConfig) -> None:
    launcher.job(cfg)


if __name__ == "__main__":
    launcher.launch(main, CONF)
