"""What a class of a config is called with: an argument that it does not take, or misses, is a sentence."""

import logging
import logging.config
import random
from contextlib import nullcontext
from inspect import isfunction
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hydra import utils
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR

from loaders import seed_globals
from loaders.build import LOADERS
from tests.configs import SMALL, composed, composed_by_hydra, train
from tests.data.reading import refused
from training.build import build
from training.config import checked
from training.datasets import build_data, build_task
from training.optimizer import build_optimizer, build_schedule, freeze
from training.order import build_order
from training.run import build_callbacks
from training.tasks import Classification, Task


class WithoutTrain:
    def __init__(self, root=""):
        self.root = root


class NeedsSize:
    def __init__(self, train, size):
        self.size = size


class Nothing:
    pass


def test_a_module_that_draws_at_its_import_has_the_same_numbers_in_each_process_and_disturbs_no_others(
    tmp_path, monkeypatch
):
    text = "import random, numpy, torch\nDRAWN = random.random(), *numpy.random.rand(2), *torch.rand(2).tolist()\n"
    monkeypatch.syspath_prepend(tmp_path)
    drawn = []
    for number in (1, 2):
        (tmp_path / f"drawing_{number}.py").write_text(text + "def dataset(parts, train): return DRAWN")
        seed_globals(number)
        parts = [{"_target_": f"drawing_{number}.dataset", "parts": None, "train": True}]
        drawn += build("data", {"_target_": "builtins.dict", "inside": parts})["inside"]
        after = np.random.rand()
        seed_globals(number)
        assert after == np.random.rand()
    assert drawn[0] == drawn[1]


def configured_by(statement):
    exec(statement, {"logging": logging})


@pytest.mark.parametrize("in_a_constructor", [True, False])
@pytest.mark.parametrize(
    ("statement", "is_said"),
    [
        ("logging.getLogger().setLevel(logging.ERROR)", True),
        ("logging.disable(logging.WARNING)", True),
        ("logging.basicConfig(level=logging.ERROR, force=True)", True),
        ("logging.config.dictConfig({'version': 1})", True),  # which disables all loggers
        ("logging.getLogger('matplotlib').setLevel(logging.ERROR)", False),
        ("logging.basicConfig(level=logging.ERROR)", False),  # there are handlers, so it does nothing
    ],
)
def test_a_run_goes_on_saying_what_it_does_whatever_a_users_code_does_to_logging(
    tmp_path, monkeypatch, caplog, statement, is_said, in_a_constructor
):
    caplog.set_level("INFO")
    target = f"{__name__}.configured_by"
    if not in_a_constructor:
        target = f"loud_{abs(hash(statement))}.dict"
        monkeypatch.syspath_prepend(tmp_path)
        text = f"import logging.config\n{statement}\ndict = dict"
        (tmp_path / target).with_suffix(".py").write_text(text)
    root = logging.getLogger()
    level = root.level
    build("data", {"_target_": target, "statement": statement})
    said = [text for text in caplog.messages if "settings of `logging`" in text]
    assert len(said) == is_said and all(text.startswith(target) for text in said)
    assert caplog.handler in root.handlers and root.level == level
    assert logging.getLogger("training.run").isEnabledFor(logging.INFO)


@pytest.mark.parametrize(
    ("name", "keys", "said"),
    [
        ("WithoutTrain", {}, "data: .*WithoutTrain .*'train'"),
        ("Nothing", {}, "data: .*Nothing .*'train'"),
        ("NeedsSize", {}, "data: .*NeedsSize .*'size'.*data.KEY=VALUE"),
        ("NeedsSize", {"train": "a.csv", "size": 3}, "data.train=a.csv"),
    ],
)
def test_a_dataset_that_cannot_be_called_as_it_is_is_a_sentence(name, keys, said):
    with refused(said):
        build_data("data", {"_target_": f"{__name__}.{name}", **keys}, {}, 0, train=True)


def drawing(train, parts=()):
    return random.random(), np.random.rand(), torch.rand(()).item()


@pytest.mark.parametrize("parts", [None, {"one": {"_target_": f"{__name__}.drawing"}}])
def test_both_sets_draw_the_same_numbers_from_the_global_generators_in_their_constructors(parts):
    section = {"_target_": f"{__name__}.drawing", **({"parts": parts} if parts else {})}
    first = build_data("data", section, {}, 0, train=True)
    np.random.rand()
    assert build_data("data", section, {}, 0, train=False) == first
    assert build_data("data", section, {}, 1, train=True) != first


def test_a_function_whose_first_parameter_is_named_like_one_that_is_filled_by_name_is_a_sentence():
    with refused(r"optim: .*of_network gets another argument before `model`"):
        build("optim", {"_target_": f"{__name__}.of_network"}, ["a group"], optional={"model": "the network"})


def of_network(model, lr=0.1):
    raise AssertionError


def test_hydra_gets_only_what_it_calls_and_all_keys_are_given_as_they_are_in_their_order(monkeypatch):
    section = {
        "_target_": "builtins.dict",
        "first": "${name}",
        "called": [{"_target_": "builtins.dict", "inside": "text"}],
        "names": [f"class {number}" for number in range(20_000)],
    }
    seen = []
    instantiate = utils.instantiate

    def record(config):
        seen.append({*config})
        return instantiate(config)

    monkeypatch.setattr(utils, "instantiate", record)
    built = build("data", section)
    assert seen == [{"_target_", "called", "_partial_", "_convert_"}]
    assert [*built.items()] == [("first", "${name}"), ("called", [{"inside": "text"}]), ("names", section["names"])]
    assert built["names"] is not section["names"], "a class may change its list"


def test_a_class_that_takes_no_positional_argument_is_a_sentence():
    with refused(r"schedule: .*Nothing"):
        build("schedule", {"_target_": f"{__name__}.Nothing"}, "the optimizer")


def test_a_function_in_place_of_a_metric_is_told_what_a_metric_has():
    with refused(r"task\.metrics\.f1: .* it has to return an object with update, compute"):
        build("task.metrics.f1", {"_target_": "torch.nn.functional.mse_loss"}, methods={"update": [], "compute": []})


class Named(Classification):
    """A task that sets an attribute of a name to a module, a number or a function."""

    def __init__(self, dataset, name, value):
        super().__init__(dataset)
        setattr(self, name, {"module": nn.Identity(), "number": 1, "function": abs}[value])


METHODS = [name for name, value in vars(Task).items() if isfunction(value) and not name.startswith("__")]


@pytest.mark.parametrize("name", [*METHODS, "embedding", "backbone"])
@pytest.mark.parametrize("value", ["module", "number", "function"])
def test_an_attribute_of_a_task_that_is_in_place_of_a_method_is_refused_by_name(name, value):
    is_refused = name in METHODS and value != "function"
    with refused(rf"Named.*\b{name} ") if is_refused else nullcontext():
        section = {"_target_": f"{__name__}.Named", "name": name, "value": value}
        build_task(section, SimpleNamespace(classes=["a", "b"]))


def step_every(optimizer, every=3):
    return StepLR(optimizer, every)


def measured_task(dataset, scores=None):
    return Task(dataset)


def test_a_parameter_of_the_name_of_a_key_of_ours_is_warned_of(caplog):
    schedule = {"_target_": f"{__name__}.step_every", "every": "epoch"}
    build_schedule(schedule, SGD(nn.Linear(1, 1).parameters(), 0.1), 6, 0, 2)
    assert "step_every has a parameter every, which does not get schedule.every" in caplog.text
    build_task({"_target_": f"{__name__}.measured_task"}, None)
    assert "measured_task has a parameter scores, which does not get task.scores" in caplog.text


def passes_on(**options):
    return nn.Linear(1, **options)


def test_a_key_that_a_constructor_passes_on_to_one_that_does_not_take_it_is_named():
    section = {"_target_": f"{__name__}.passes_on", "out_features": 1}
    assert build("task", section).out_features == 1
    with refused(r"task: .*passes_on does not take label_smoothing .*remove it, '~task.label_smoothing'"):
        build("task", section | {"label_smoothing": 0.1})
    with pytest.raises(TypeError):  # it is not the section's key
        build("task", {"_target_": f"{__name__}.passes_wrongly"})


def passes_wrongly():
    return passes_on(smoothing=0.1)


def test_a_schedule_of_an_optimizer_without_a_rate_is_told_of_it():
    optimizer = SGD(nn.Linear(1, 1).parameters(), 0.1)
    optimizer.param_groups[0]["lr"] = None  # as Adafactor of transformers has it, which finds a rate itself
    with refused("cosine needs a learning rate, and the optimizer has none: set optim.lr"):
        build_schedule({"_target_": "training.optimizer.cosine"}, optimizer, 6, 0, 2)


def test_a_callback_that_is_null_is_left_out():
    assert build_callbacks({"progress_bar": None}) == {}


class Forgetful:
    def on_log(self, run):
        pass


def test_a_callback_whose_method_takes_other_arguments_is_a_sentence_at_the_start():
    with refused(r"callbacks\.mine: .*on_log .*\(run, values\)"):
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


class Broken(nn.Module):
    """A network whose constructor has a fault, of its own or in a layer of torch's."""

    def __init__(self, num_classes, in_channels, fault, **_):
        super().__init__()
        if fault == "own":
            self.width = {"small": 3}["large"]
        self.layer = nn.Conv2d(in_channels, num_classes, 3, groups=7)


@pytest.mark.parametrize(("fault", "kind"), [("own", KeyError), ("in torch", ValueError)])
def test_a_fault_in_a_constructor_of_a_fork_keeps_its_traceback_also_inside_one_of_ours(tmp_path, fault, kind):
    with pytest.raises(kind):
        train(tmp_path, f"model._target_={__name__}.Broken +model.fault='{fault}'")


def test_a_null_that_a_class_does_not_take_is_left_out_and_another_value_refused():
    assert build("data", {"_target_": f"{__name__}.WithoutTrain", "root": None, "side": None}).root is None
    with refused("side"):
        build("data", {"_target_": f"{__name__}.WithoutTrain", "side": 3})


@pytest.mark.parametrize(
    ("world_size", "target", "warnings"), [(1, "rankless", 0), (2, "rankless", 1), (2, "by_rank", 0)]
)
def test_a_batch_sampler_that_does_not_ask_for_its_rank_is_named_under_several_processes(
    caplog, world_size, target, warnings
):
    config = checked(composed(*SMALL, f"batch_sampler._target_={__name__}.{target}"))
    build_order(config, [0, 1], SimpleNamespace(rank=0, world_size=world_size))
    assert caplog.text.count("has no parameter rank") == warnings


def rankless(dataset):
    return [[0, 1]]


def by_rank(dataset, rank):
    return [[rank]]
