"""The state of a run: what a checkpoint contains, when it is saved, and how a run gets it back.

training/resume.py decides what a run begins with.
"""

import logging

from torch import Tensor

from data.errors import reason_of
from loaders import merge_states
from training.checkpoint import State, file_of, read_checkpoint
from training.checks import differ
from training.command_line import resume_of
from training.config import ConfigError
from training.optimizer import resume_optimizer, saved_optimizer, set_optimizer_mode
from training.processes import is_sweep
from training.resume import (
    LIMITS,
    OF_LOADER,
    Origin,
    changes_since,
    check_same_run,
    load_module,
    load_weights,
    sentences,
)
from training.run import Run

log = logging.getLogger(__name__)


def state_of(run: Run) -> State:
    """What a run needs to continue as if it had not been stopped. All processes have to call it.

    The weights are those that are evaluated, until the next step: see set_optimizer_mode.
    """
    trainer = run.trainer
    set_optimizer_mode("eval", trainer.optimizers)
    trainer.schedules.note_own_rates()
    return {
        "model": trainer.model.state_dict(),
        "ema_model": None if trainer.ema_model is None else trainer.ema_model.state_dict(),
        "others": {name: module.state_dict() for name, module in trainer.extra_modules.items()},
        "optimizers": [saved_optimizer(optimizer) for optimizer in trainer.optimizers],
        "own_rates": trainer.schedules.has_own_rates,
        **run.module_state.state_dict(),  # altered, by_on_start
        "scaler": trainer.scaler.state_dict(),
        "means": [trainer.means.state_dict(), trainer.logged.state_dict()],  # since the last line of metrics.jsonl
        "loader": merge_states(run.processes.gather(run.train_loader.state_at(run.progress.position))),
        "step": run.progress.step,
        "data": run.fingerprint,
        "classes": run.data.classes,
        "new_images": run.data.new_images,
        "config": trainer.settings,
        "callbacks": run.callback_states(),
    }


def save(run: Run) -> None:
    """Saves a checkpoint, unless something in it that was finite is not any more. All processes have to call it.

    Then it raises ConfigError, or warns with train.stop_at_nan=false. Raises ConfigError for a change that
    ModuleState.check refuses.
    """
    run.module_state.check()
    names = sorted(set().union(*run.processes.gather(run.module_state.newly_not_finite())))
    if not names:
        run.checkpoints.save(state_of(run))
        return
    run.checkpoints.restart_interval()
    found = f"no checkpoint is saved: {', '.join(names[:3])}"
    if all(name.startswith("infinity") for name in names):
        found += " (a tensor that is meant to hold some has to hold some when it is built)"
    run.stop_or_warn(found)


def warn_of_unsaved(run: Run) -> None:
    """Warns of weights and buffers that are not those of the last checkpoint. Called when all callbacks have ended."""
    path = run.folder / "checkpoints" / file_of(run.progress.step)
    if not (run.is_main and path.exists()):
        return
    if sentence := run.checkpoints.overwritten():
        log.warning(sentence)
        return
    saved = read_checkpoint(path)
    set_optimizer_mode("eval", run.trainer.optimizers)
    before = {"model": saved["model"], "ema_model": saved["ema_model"], **saved["others"]}
    modules = {"model": run.trainer.model, "ema_model": run.trainer.ema_model, **run.trainer.extra_modules}
    changed = []
    for name, module in modules.items():
        values = {} if module is None else module.state_dict()
        for key, value in values.items():
            earlier = (before.get(name) or {}).get(key)
            if isinstance(value, Tensor) and differ(value.cpu(), earlier):  # no extra state of a module
                changed.append(f"{name}.{key}")
    if changed:
        log.warning(
            "%s has changed after the last checkpoint was saved, so none has it: if a callback changes it, do so in "
            "on_step of the last step; if the network does while it is evaluated, guard that by `if self.training`",
            ", ".join(changed[:3]),
        )


def load_origin(run: Run) -> None:
    """Loads what the run begins with, as resume.py has chosen it: a checkpoint, weights, or nothing.

    Of a checkpoint it loads the loader's position, progress, modules, schedules, optimizers and sums. Run.start loads
    the rest: the state of each callback, the average of the weights, and the settings that callbacks had altered. If
    the run in this folder has finished, it loads its `summary` alone.
    """
    origin = run.origin
    run.origin = Origin()  # it takes as much memory as the weights
    has_finished = run.processes.from_main(run.results.earlier_summary) is not None
    if has_finished and not origin.is_own and run.config.train.resume is not None:
        raise ConfigError(
            f"{run.folder} has the summary.json of a finished run, but none of its checkpoints, and would be "
            "overwritten: choose another hydra.run.dir or hydra.sweep.dir, or set train.resume=null to train anew"
        )
    if origin.weights is not None:
        load_weights(origin.weights, run.trainer.model, run.trainer.device)
        origin.weights.tensors.clear()  # run.data has them, too
    if origin.state is None:
        return
    state = origin.state
    position = state["loader"]
    run.tell_dataset(max(position["epoch"] - (position["samples"] == 0), 0))  # the epoch in which it was saved
    changed = changes_since(state, run.trainer.settings, run.train_loader.state_dict(), run.fingerprint)
    limit = run.progress.limit_at(state["step"], position["epoch"])
    # The summary goes when a run trains on, so that of one which no limit has ended is of one that a callback has.
    is_same = not any(key.startswith((*LIMITS, "callbacks.")) for key in changed)
    summary = run.processes.from_main(run.results.earlier_summary) if limit or (origin.is_own and is_same) else None
    check_same_run(run.folder, changed, origin.is_own and is_sweep(), summary is not None)
    log.info("resuming after step %d; changed settings: %s", state["step"], sentences(changed) or "none")
    if limit:
        found = "no step is left to train" if summary is None else "this run has finished"
        log.info("%s: to continue it, use %s and raise %s", found, resume_of(run.folder), limit)
    elif summary is not None:
        log.info(
            "this run has finished, as a callback ended it: to continue it, use %s and change a setting of that "
            "callback, such as callbacks.best.early_stop",
            resume_of(run.folder),
        )
    if summary is not None:
        run.summary = summary
    else:
        load_state(run, state, changed)


def load_state(run: Run, state: State, changed: dict[str, str]) -> None:
    """Continues from a checkpoint. Run.start loads the states of callbacks, and what these had altered."""
    trainer = run.trainer
    progress = run.progress
    loader = run.train_loader
    new = loader.state_dict()
    try:
        if "optim._target_" in changed:
            raise ValueError("it has the state of another optimizer")
        loader.load_state_dict({**state["loader"], **{key: new.get(key) for key in OF_LOADER if key in changed}})
        progress.resume(state["step"], loader.position)
        load_module(trainer.model, state["model"], trainer.device)
        of_loss = {name: value.clone() for name, value in trainer.task.named_buffers()}
        for name, module in trainer.extra_modules.items():
            load_module(module, state["others"][name], trainer.device)
        for name, value in trainer.task.named_buffers():  # such as the weight of task.loss
            if f"task.loss.{name.removeprefix('own_loss.')}" in changed:
                value.copy_(of_loss[name])
        trainer.schedules.step()  # they are not loaded, but stepped to where the run is
        trainer.schedules.has_own_rates = state["own_rates"]
        for optimizer, saved in zip(trainer.optimizers, state["optimizers"], strict=True):
            resume_optimizer(optimizer, saved, changed, state["own_rates"])
        trainer.schedules.note_scheduled()
        if state["scaler"]:  # it is empty without fp16
            trainer.scaler.load_state_dict(state["scaler"])
    except (KeyError, RuntimeError, ValueError) as error:
        settings = sentences(changed) or "the settings are the same, but not the code or the data"
        reason = reason_of(error)[:300]
        raise ConfigError(
            f"train.resume: the checkpoint of step {state['step']} does not fit this run ({settings}): {reason}; undo "
            "these changes, or begin a new run, by train.resume=null"
        ) from error
    if state["own_rates"]:
        lr = trainer.optimizers[0].param_groups[0]["lr"]
        log.info("the learning rate is %g: a callback had set it, not the schedule alone", lr)
    for means, sums in zip((trainer.means, trainer.logged), state["means"], strict=True):
        means.load_state_dict(sums)
    run.resumed = {key: state[key] for key in run.resumed}
    if "train.freeze" in changed or "train.unfreeze_after" in changed:
        altered = state["altered"].items()
        replaced = (".requires_grad", ".training")
        run.resumed["altered"] = {name: value for name, value in altered if not name.endswith(replaced)}
    if progress.limit_reached and state["loader"]["samples"]:  # train.max_steps has ended its epoch
        progress.end_epoch()
