"""The state of a run: what a checkpoint contains, which checkpoint a run begins with, and what it loads of it.

command_line.complete has by then put the settings of the earlier run before those of the command line.
"""

import logging
from pathlib import Path
from typing import Any

from hydra.utils import to_absolute_path

from data.errors import home_path
from loaders import merge_states
from training.checkpoint import newest, read_checkpoint, step_files
from training.checks import alike
from training.config import ConfigError, changes
from training.optimizer import resume_optimizer, set_optimizer_mode
from training.processes import is_sweep
from training.run import Run
from training.trainer import Trainer
from training.weights import begin_from

log = logging.getLogger(__name__)

# Settings that do not change the result of a job, and those that do not change the steps that a finished run has done.
SAME_JOB = ("train.checkpoint_every", "train.keep_checkpoints", "train.process_timeout", "timing", "device")
SAME_RESULT = ("train.epochs", "train.max_steps", *SAME_JOB)


def resume(run: Run) -> dict[str, Any] | None:
    """Gives the run what it begins with. Returns the summary of a run that has finished already."""
    state = run.earlier
    run.earlier = None  # it takes as much memory as the weights
    if state is None:
        if run.config.train.init_from:
            begin_from(run.config.train.init_from, run.trainer.model, run.processes)
        return None
    check_job(run, state)
    changed = load_state(run, state)
    sentences = "; ".join(changed.values()) or "none"
    log.info("resuming after step %d; changed settings: %s", run.progress.step, sentences)
    limit = run.progress.limit_reached
    if not limit:
        return None
    summary: dict[str, Any] | None = run.processes.from_main(run.results.earlier_summary)
    if summary is not None and not all(key.startswith(SAME_RESULT) for key in changed):
        raise ConfigError(
            f"{run.folder} has a finished run with other settings ({sentences}): "
            "choose another folder, or train.resume=null to train in this one again"
        )
    log.info("this run has finished: raise %s to continue it", limit)
    return summary


def check_job(run: Run, state: dict[str, Any]) -> None:
    """Raises ConfigError if a job of a sweep is to go on from that of other values, whose folder it has got."""
    settings = changes(run.trainer.settings, state["config"]).items()
    differing = "; ".join(sentence for key, sentence in settings if not key.startswith(SAME_JOB))
    has_own = run.processes.from_main(lambda: is_sweep() and bool(step_files(run.folder / "checkpoints")))
    if has_own and differing:
        raise ConfigError(
            f"{run.folder} has a job of other values ({differing}): choose another hydra.sweep.dir, or "
            "train.resume=null to train in this one again"
        )


def find_checkpoint(folder: Path, choice: str | None) -> dict[str, Any] | None:
    """The checkpoint with which a run in `folder` begins; None for a new run. choice: train.resume."""
    # 1. null: none, whatever the folder has.
    # 2. The newest of the run's own folder: the run may have begun from another one, and been interrupted later.
    # 3. auto: none, as the folder has none.
    # 4. The named file, or the newest one of the named folder.
    # Without a checkpoint, `resume` loads the weights that train.init_from names, or keeps the new ones.
    if choice is None:
        return None
    elif (own := newest(folder / "checkpoints")) is not None:
        return own
    elif choice == "auto":
        return None
    path = Path(to_absolute_path(str(home_path(choice))))  # a job may have another working directory
    state = read_checkpoint(path) if path.is_file() else newest(path / "checkpoints")
    if state is None:
        raise ConfigError(f"train.resume={choice}: there is no checkpoints/step-*.pt")
    return state


def state_of(run: Run) -> dict[str, Any]:
    """What a run needs to continue as if it had not been stopped. All processes have to call it.

    The weights are those that are evaluated, until the next step: see set_optimizer_mode.
    """
    trainer = run.trainer
    set_optimizer_mode("eval", trainer.optimizers)
    trainer.note_own_rates()
    callbacks = run.callbacks.items()
    return {
        "model": trainer.model.state_dict(),
        "others": {name: module.state_dict() for name, module in trainer.extra_modules.items()},
        "optimizers": [optimizer.state_dict() for optimizer in trainer.optimizers],
        "own_rates": trainer.has_own_rates,
        "altered": run.module_state.altered(),
        "scaler": trainer.scaler.state_dict(),
        "means": [trainer.means.state_dict(), trainer.logged.state_dict()],  # since the last line of metrics.jsonl
        "loader": merge_states(run.processes.gather(run.train_loader.state_at(run.progress.position))),
        "step": run.progress.step,
        "data": run.fingerprint,
        "classes": run.data.classes,
        "config": trainer.settings,
        "callbacks": {name: item.state_dict() for name, item in callbacks if hasattr(item, "state_dict")},
    }


def save(run: Run) -> None:
    """Saves a checkpoint, unless something in it that was finite is not any more. All processes have to call it.

    Raises ConfigError if one is not, with train.stop_at_nan, or for a change that ModuleState.check refuses.
    """
    run.module_state.check()
    names = sorted(set().union(*run.processes.gather(run.module_state.not_finite())))
    if not names:
        run.checkpoints.save(state_of(run))
        return
    run.checkpoints.restart_interval()
    run.warn_of_nan(f"no checkpoint is saved: {', '.join(names[:3])}")


def load_state(run: Run, state: dict[str, Any]) -> dict[str, str]:
    """Continues from a checkpoint, with the settings of this run. Returns a sentence for each changed key."""
    trainer = run.trainer
    progress = run.progress
    loader = run.train_loader
    changed = changes(trainer.settings, state["config"])
    is_within_epoch = state["loader"]["samples"] > 0
    new = loader.state_dict()
    loader_state = state["loader"] if is_within_epoch else match_loader(state["loader"], new, changed)
    if loader_state.get("dataset_length") == new.get("dataset_length") and "data" in state:
        changed |= changed_data(state["data"], run.fingerprint, is_within_epoch)
    try:
        if "optim._target_" in changed:
            raise ValueError("it has the state of another optimizer")
        loader.load_state_dict(loader_state)
        progress.resume(state["step"], loader.position)
        load_modules(trainer, state, changed)
    except (KeyError, RuntimeError, ValueError) as error:
        settings = "; ".join(changed.values()) or "the settings are the same, but not the code or the data"
        raise ConfigError(f"train.resume: the checkpoint does not fit this run ({settings}): {error}") from error
    for means, sums in zip((trainer.means, trainer.logged), state["means"], strict=True):
        means.load_state_dict(sums)
    run.callback_states = state["callbacks"]
    run.altered = state.get("altered", {})
    if progress.limit_reached and is_within_epoch:
        progress.epoch += 1  # train.max_steps has ended it
    return changed


def match_loader(saved: dict[str, Any], new: dict[str, Any], changed: dict[str, str]) -> dict[str, Any]:
    """The loader's state between two epochs, with the batch size and the dataset of this run's loader.

    They are added to `changed`. Within an epoch the loader refuses what does not fit.
    """
    keys = ("global_batch_size", "dataset_length", "mixture")
    differing = {key: new.get(key) for key in keys if saved.get(key) != new.get(key)}
    for key, value in differing.items():
        changed[key] = f"{key} is {value}, was {saved.get(key)}"
    return {**saved, **differing}


def load_modules(trainer: Trainer, state: dict[str, Any], changed: dict[str, str]) -> None:
    """Loads the modules and optimizers. The schedules are not loaded, but stepped to where the run is."""
    trainer.model.load_state_dict(state["model"])
    for name, module in trainer.extra_modules.items():
        module.load_state_dict(state["others"][name])
    trainer.step_schedules()
    trainer.has_own_rates = state.get("own_rates", False)
    for optimizer, saved in zip(trainer.optimizers, state["optimizers"], strict=True):
        resume_optimizer(optimizer, saved, changed, trainer.has_own_rates)
    if trainer.has_own_rates:
        lr = trainer.optimizers[0].param_groups[0]["lr"]
        log.info("the learning rate is %g again: a callback had set it, not the schedule alone", lr)
    trainer.scaler.load_state_dict(state["scaler"])


def changed_data(saved: dict[str, Any], ours: dict[str, Any], is_within_epoch: bool) -> dict[str, str]:
    """Says what of the training set has changed. Raises ConfigError if its labels have, within an epoch."""
    if saved["labels"] != ours["labels"]:
        if is_within_epoch:
            raise ConfigError(
                "train.resume: the labels of the training set, or their order, have changed within an epoch: "
                "restore them, or resume from an end-of-epoch checkpoint"
            )
        return {"data.labels": "the labels of the training set, or their order, have changed"}
    if not alike(saved["first"], ours["first"]):
        return {"data.first": "the first samples of the training set have changed"}
    return {}
