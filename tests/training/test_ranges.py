"""Every number of the config has a range: one out of it is a sentence, before anything is built."""

import math
import re
from dataclasses import fields

import pytest

from loaders.arguments import AUTO
from loaders.build import LEAST, LoaderConfig
from tests.configs import composed, train
from training.config import RANGES, TimingConfig, TrainConfig, checked

NUMBERS = (int, float, int | None, float | None)
SECTIONS = {"train": TrainConfig, "timing": TimingConfig}
WRONG = {  # numbers of our classes that are out of range
    "callbacks.ema.decay": (-1, 2),
    "callbacks.best.early_stop": (0,),
    "task.label_smoothing": (-1, 2),
}


def test_every_number_of_a_section_has_a_range():
    for section, kind in SECTIONS.items():
        assert {field.name for field in fields(kind) if field.type in NUMBERS} == RANGES[section].keys()
    assert composed().augment.keys() - {"transform"} == RANGES["augment"].keys()
    of_loader = {field.name for field in fields(LoaderConfig) if field.type in (*NUMBERS, "int", "float")}
    assert {*of_loader, *AUTO} == {*LEAST, "timeout"}


@pytest.mark.parametrize("section", RANGES)
def test_a_number_out_of_its_range_is_a_sentence_with_the_key_and_the_range(section, error):
    for key, numbers in RANGES[section].items():
        name = f"{section}.{key}"
        least = numbers.least + numbers.above
        for value in {least, numbers.most} - {math.inf}:
            checked(composed(f"{name}={value:g}"))
        is_float = isinstance(composed()[section][key], float) or key == "clip_norm"
        below = numbers.least if numbers.above else least - 1
        wrong = [below, *([math.nan, math.inf] if is_float else [])]
        if numbers.most < math.inf:
            wrong.append(numbers.most + 1)
        for value in wrong:
            kind = "finite number" if value == math.inf and section != "augment" else "number"  # that is a text there
            with error(rf"{name}='?{value}", rf"give a {kind} (from|above) {numbers.least}"):
                checked(composed(f"{name}={value}"))
    for seed in (-1, 2**64):
        with error(f"seed={seed}: give a number from 0 to {2**64 - 1}"):
            checked(composed(f"seed={seed}"))


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ("optim.weight_decay=.nan", "optim.weight_decay=nan"),
        ("optim=adamw optim.betas=[0.9,.nan]", "optim.betas=[0.9, nan]"),
        ("schedule=step schedule.gamma=.nan", "schedule.gamma=nan"),
    ],
)
def test_a_number_of_torchs_classes_that_is_nan_is_refused_before_training(setting, named, tmp_path, error):
    with error(f"^{re.escape(named)}: give a number, not NaN"):
        train(tmp_path, setting)
    assert not (tmp_path / "metrics.jsonl").exists()


@pytest.mark.parametrize("key", WRONG)
def test_our_classes_check_their_numbers_before_the_first_step(key, tmp_path, error):
    section = ["data._target_=builtins.exit"] if key.startswith("callbacks") else []  # no dataset is built
    for value in WRONG[key]:
        with error(f"{key}={value}: give a number from"):
            train(tmp_path, f"{key}={value}", *section)
