"""A search by Optuna: it continues, it survives jobs that fail, and it knows which scores are better."""

import pytest
from omegaconf import OmegaConf

from extras.search.search import Search, direction_of
from tests.configs import CONF, FAST
from tests.data.reading import refused

SEARCH = ["hydra/sweeper=search", "hydra.sweep.dir=there", "callbacks/standard=[best,search]", "train.max_steps=1"]
TASKS = "training.tasks"


def table_of(output):
    """The rows of the table that the search prints."""
    return [line.split() for line in output.partition("the best first\n")[2].splitlines()]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_same_command_continues_a_search_and_a_failed_job_is_a_failed_trial(tmp_path, python, bound):
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    command = ["-m", *FAST, *SEARCH, "augment.mixup=choice(0.0,-1.0)", "optim.lr=interval(0.01,0.5)"]
    for trials in (3, 5):
        done = python.run(
            *(CONF.parent / "train.py", *command, f"hydra.sweeper.n_trials={trials}"),
            *("hydra/sweeper/sampler=random", "hydra.sweeper.sampler.seed=1"),
            cwd=tmp_path,
            timeout=4 * bound,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        heading, *rows = table_of(done.stdout)
        assert heading[-2:] == ["score", "state"] and len(rows) == trials
    states = [row[-1] for row in rows]
    scores = [float(row[-2]) for row in rows if row[-1] == "complete"]
    assert set(states) == {"complete", "fail"}
    assert scores == sorted(scores, reverse=True)
    assert len(list((tmp_path / "there").glob("*/train.log"))) == 5, "each trial has its folder"


@pytest.mark.parametrize(
    ("task", "direction"),
    [
        ({"_target_": f"{TASKS}.Classification", "metric": "accuracy"}, "maximize"),
        ({"_target_": f"{TASKS}.Regression", "metric": "mae"}, "minimize"),
        ({"_target_": f"{TASKS}.Regression", "metric": "mine", "higher_is_better": True}, "maximize"),
        ({"_target_": f"{TASKS}.Task", "metric": None}, "minimize"),
    ],
)
def test_the_direction_is_that_of_the_score(task, direction):
    assert direction_of(OmegaConf.create(task)) == direction


def test_a_score_without_a_direction_needs_one():
    with refused("task.metric=mine: say which is the best"):
        direction_of(OmegaConf.create({"_target_": f"{TASKS}.Classification", "metric": "mine"}))


def test_a_search_under_torchrun_is_refused_at_once(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit, match="start it with python"):
        Search().on_multirun_start(OmegaConf.create({"hydra": {"sweeper": {"_target_": "OptunaSweeper"}}}))
