"""What a class of a config is called with: an argument that it does not take, or misses, is a sentence."""

import pytest
from torch import nn

from loaders.build import LOADERS
from tests.configs import composed_by_hydra
from tests.data.reading import refused
from training.build import build
from training.datasets import build_data
from training.optimizer import build_optimizer, freeze
from training.run import build_callbacks


class WithoutTrain:
    def __init__(self, root=""):
        self.root = root


class NeedsSize:
    def __init__(self, train, size):
        self.size = size


class Nothing:
    pass


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("WithoutTrain", "data: .*WithoutTrain .*'train'"),
        ("Nothing", "data: .*Nothing .*'train'"),
        ("NeedsSize", "data: .*NeedsSize .*'size'.*data.KEY=VALUE"),
    ],
)
def test_a_dataset_that_cannot_be_called_as_it_is_is_a_sentence(name, said):
    with refused(said):
        build_data("data", {"_target_": f"{__name__}.{name}"}, {}, 0, train=True)


def test_a_class_that_takes_no_positional_argument_is_a_sentence():
    with refused(r"schedule: .*Nothing"):
        build("schedule", {"_target_": f"{__name__}.Nothing"}, "the optimizer")


def test_a_callback_that_is_null_is_left_out():
    assert build_callbacks({"progress_bar": None}) == {}


class Forgetful:
    def on_log(self, run):
        pass


def test_a_callback_whose_method_takes_other_arguments_is_a_sentence_at_the_start():
    with refused(r"callbacks\.mine\.on_log.*\(run, values\)"):
        build_callbacks({"mine": {"_target_": f"{__name__}.Forgetful"}})


@pytest.mark.parametrize("network", [nn.Identity(), nn.Linear(2, 2).requires_grad_(False)])
def test_a_network_without_weights_to_train_is_a_sentence(network):
    freeze(network, None)
    with refused("has no weights to train"):
        build_optimizer(network, {"_target_": "torch.optim.SGD", "lr": 0.1})


@pytest.mark.parametrize("name", LOADERS)
def test_loaders_that_a_sweep_compares_take_each_others_settings(name):
    settings = {"num_workers": 1, "prefetch_factor": 3, "preload_depth": 1, "timeout": 5.0, "retries": 1, "streams": 2}
    config = composed_by_hydra(f"loader={name}", *(f"loader.{key}={value}" for key, value in settings.items()))
    assert {key: config.loader[key] for key in settings} == settings
