"""Configs for tests of runs."""

from functools import cache
from pathlib import Path

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

CONF = Path(__file__).resolve().parents[1] / "conf"


def composed(*overrides: str) -> DictConfig:
    """The config that train.py has with these overrides. Only new choices of groups and new keys are left to Hydra."""
    choices = [text for text in overrides if text.startswith(("+", "~")) or (CONF / text.partition("=")[0]).is_dir()]
    values = [text for text in overrides if text not in choices]
    return OmegaConf.merge(composed_by_hydra(*choices), OmegaConf.from_dotlist(values))


@cache
def composed_by_hydra(*overrides: str) -> DictConfig:
    """It takes longer than a small run."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("config", overrides=list(overrides))


def has_part(name: str) -> bool:
    """Whether a part of conf/callbacks/standard/ is there: a fork may have deleted it."""
    return (CONF / "callbacks" / "standard" / f"{name}.yaml").exists()


# Overrides for a run that is not measured at its end.
NO_TRIALS = ["timing.trial_seconds=0"] if has_part("report") else []
