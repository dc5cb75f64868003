"""Search: Hydra's callback for hydra/sweeper=search, which continues a search, and prints its trials, the best first.

The sweeper stores each trial in the study of conf/hydra/sweeper/search.yaml, in a file in the sweep's folder.
"""

import atexit
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from data import attribute_of
from training.build import any_target, named_sections, target_of
from training.look import table
from training.processes import world_size

SWEEPER = "OptunaSweeper"


class Search(Callback):
    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        sweeper = config.hydra.sweeper
        if sweeper._target_.endswith(SWEEPER):
            if world_size() > 1:  # Hydra turns an Exception of a callback into a warning
                raise SystemExit(
                    "error: hydra/sweeper=search does not run under torchrun: start it with python; with "
                    "hydra/launcher=submitit_slurm or joblib each of its jobs is a process"
                )
            with read_write(config.hydra), open_dict(config.hydra):
                prepare(config)
            atexit.register(print_trials, sweeper.study_name, sweeper.storage)


def prepare(config: DictConfig) -> None:
    """Completes the settings of the sweeper, before it is made, and of the folders of its jobs."""
    sweeper = config.hydra.sweeper
    Path(config.hydra.sweep.dir).mkdir(parents=True, exist_ok=True)
    trials = trials_of(sweeper.study_name, sweeper.storage)
    finished = [trial for trial in trials if trial.state.is_finished()]
    values: dict[str, Any] = {"hydra.sweeper.n_trials": max(0, sweeper.n_trials - len(finished))}
    if sweeper.direction == "auto":
        values["hydra.sweeper.direction"] = direction_of(config.task)
    if trials:  # Hydra counts the jobs from 0 again, and the folders of those before stay
        values["hydra.sweep.subdir"] = f"{len(trials)}_${{hydra.job.num}}"
    for key, value in values.items():
        OmegaConf.update(config, key, value)
        config.hydra.overrides.hydra.append(f"{key}={value}")  # Hydra composes the config of each job from these


def direction_of(task: DictConfig) -> str:
    """Whether the score that chooses the best checkpoint is better if it is higher."""
    from training.tasks import is_better_higher

    section: Any = OmegaConf.to_container(task)
    with any_target():
        target = target_of("task", section).func
        metrics = named_sections("task.metrics", section.get("metrics"))
        metric = section.get("metric") or target.metric
        measured = target_of(f"task.metrics.{metric}", metrics[metric]).func if metric in metrics else target
    is_higher = is_better_higher(metric, section.get("higher_is_better"), attribute_of(measured, "higher_is_better"))
    return "maximize" if is_higher else "minimize"


def trials_of(study: str, storage: str) -> list[Any]:
    """The trials of the searches before; none in a new folder."""
    import optuna

    if study not in [summary.study_name for summary in optuna.get_all_study_summaries(storage)]:
        return []
    return optuna.load_study(study_name=study, storage=storage).trials


def print_trials(name: str, storage: str) -> None:
    """Prints a table of all trials, the best first; nothing if there are none, as after a refused command line."""
    import optuna

    if not trials_of(name, storage):
        return
    study = optuna.load_study(study_name=name, storage=storage)
    sign = -1 if study.direction == optuna.study.StudyDirection.MAXIMIZE else 1
    scored = [trial for trial in study.trials if trial.value is not None]
    others = [trial for trial in study.trials if trial.value is None]
    trials = [*sorted(scored, key=lambda trial: sign * trial.value), *others]
    keys = dict.fromkeys(key for trial in trials for key in trial.params)
    columns = [["trial", *(str(trial.number) for trial in trials)]]
    columns += [[key, *(str(trial.params.get(key, "-")) for trial in trials)] for key in keys]
    columns.append(["score", *("-" if trial.value is None else f"{trial.value:.4f}" for trial in trials)])
    columns.append(["state", *(trial.state.name.lower() for trial in trials)])
    print("\n".join([f"Search {storage}, the best first", *table(columns)]))
