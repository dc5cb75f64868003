"""What a class of a config is called with: an argument that it does not take, or misses, is a sentence."""

import pytest

from training.build import build
from training.config import ConfigError
from training.datasets import build_data


class WithoutTrain:
    def __init__(self, root: str = "") -> None:
        self.root = root


class NeedsSize:
    def __init__(self, train: bool, size: int) -> None:
        self.size = size


class Nothing:
    pass


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("WithoutTrain", "data: .*WithoutTrain takes no argument 'train', but gets it: add a parameter 'train'"),
        ("Nothing", "data: .*Nothing takes no argument 'train', but gets it"),
        ("NeedsSize", "data: .*NeedsSize: missing a required argument: 'size'; set data.KEY=VALUE"),
    ],
)
def test_a_dataset_that_cannot_be_called_as_it_is_is_a_sentence(name, said):
    with pytest.raises(ConfigError, match=said):
        build_data("data", {"_target_": f"{__name__}.{name}"}, {}, 0, train=True)


def test_a_class_that_takes_no_positional_argument_is_a_sentence():
    with pytest.raises(ConfigError, match=r"schedule: .*Nothing: too many positional arguments"):
        build("schedule", {"_target_": f"{__name__}.Nothing"}, "the optimizer")
