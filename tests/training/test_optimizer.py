"""Optimizers and frozen parameters."""

import io
import math
import re
from copy import deepcopy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from models.small_cnn import SmallCNN
from tests.configs import TWO_PARTS, checkpoint, steps, train
from tests.data.reading import refused
from training.optimizer import (
    build_optimizer,
    build_schedule,
    cosine,
    freeze,
    has_fused_momentum,
    resume_optimizer,
    saved_optimizer,
    start_momentum,
)

SGD = {"_target_": "torch.optim.SGD", "lr": 0.5, "momentum": 0.9, "weight_decay": 0.1}
ADAM = {"_target_": "torch.optim.AdamW", "lr": 0.1, "weight_decay": 0.1}


def test_weights_decay_and_biases_and_norms_do_not_and_a_checkpoints_state_fits_whatever_is_frozen():
    model = SmallCNN(num_classes=10, in_channels=1, width=2)
    decayed, others = build_optimizer(model, SGD).param_groups
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0) and decayed["lr"] == others["lr"] == 0.5
    assert {one.ndim for one in decayed["params"]} == {2, 4} and {one.ndim for one in others["params"]} == {1}
    assert len(decayed["params"] + others["params"]) == len(list(model.parameters()))
    freeze(model, ["features"])
    for before, group in zip((decayed, others), build_optimizer(model, SGD).param_groups, strict=True):
        assert [*map(id, before["params"])] == [*map(id, group["params"])]


def test_an_orthogonal_weight_stays_orthogonal():
    layer = parametrizations.orthogonal(nn.Linear(8, 3))
    optimizer = build_optimizer(layer, {"_target_": "torch.optim.SGD", "lr": 0.1, "weight_decay": 0.1})
    for _ in range(2):
        layer(torch.randn(4, 8)).square().sum().backward()
        optimizer.step()
    assert torch.allclose(layer.weight @ layer.weight.T, torch.eye(3), atol=1e-5)


@pytest.mark.parametrize(
    ("layers", "names", "trained"),
    [
        (("1", "10", "fc"), "backbone", ["fc.weight", "fc.bias"]),
        (("1", "10", "fc"), ["backbone", "fc.bias"], ["fc.weight"]),
        (("1", "10", "fc"), ["1", "10.bias"], ["10.weight", "fc.weight", "fc.bias"]),
        (("backbone", "neck", "fc"), "backbone", ["neck.weight", "neck.bias", "fc.weight", "fc.bias"]),
    ],
)
def test_named_layers_are_frozen(layers, names, trained):
    model = nn.ModuleDict({name: nn.Linear(2, 2) for name in layers})
    freeze(model, names)
    assert [name for name, parameter in model.named_parameters() if parameter.requires_grad] == trained


@pytest.mark.parametrize(
    ("names", "trained", "said"),
    [
        ("backbone", ["embed.weight", "head.bias"], "embed.weight: of the last layer, head, too, so it is trained"),
        (["embed"], ["body.weight", "body.bias", "head.bias"], "head.weight: of a frozen layer, too, so it is frozen"),
        (["head"], ["body.weight", "body.bias"], "embed.weight: of a frozen layer, too, so it is frozen"),
        (["embed", "head"], ["body.weight", "body.bias"], ""),
        (["alias"], ["embed.weight", "head.bias"], "body.bias, body.weight: of a frozen layer, too, so it is frozen"),
    ],
)
def test_of_layers_that_share_a_weight_the_last_is_trained_and_others_are_frozen(names, trained, said, caplog):
    layers = {"embed": nn.Embedding(3, 2), "body": nn.Linear(2, 2), "head": nn.Linear(2, 3)}
    model = nn.ModuleDict(layers | {"alias": nn.Sequential(layers["body"])})
    layers["head"].weight = layers["embed"].weight
    freeze(model, names)
    assert [name for name, parameter in model.named_parameters() if parameter.requires_grad] == trained
    assert said in caplog.text and bool(said) == bool(caplog.text)


def test_a_last_layer_with_a_parametrized_weight_is_trained_with_its_bias():
    head = nn.utils.parametrizations.weight_norm(nn.Linear(2, 3))
    model = nn.ModuleDict({"body": nn.Linear(2, 2), "head": head})
    freeze(model, "backbone")
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {name for name, _ in model.named_parameters() if name.startswith("head.")} and len(trained) == 3


class Whole(nn.Module):
    """A layer that is three modules deep, parameters of its own, and a last layer."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.BatchNorm1d(2))
        self.pool = nn.Dropout()
        self.head = nn.Linear(2, 1)
        self.token = nn.Parameter(torch.zeros(1, 2))


def test_rates_fall_from_the_last_layer_to_what_the_network_has_of_its_own_and_a_task_has_that_of_the_last():
    model = Whole()
    task = nn.Linear(1, 1)
    names = {id(weight): name for name, weight in (*model.named_parameters(), *task.named_parameters("task"))}
    groups = build_optimizer(model, SGD | {"layer_decay": 0.5}, task).param_groups
    found = [
        (group["lr"], group["weight_decay"], *(names[id(weight)] for weight in group["params"])) for group in groups
    ]
    assert found == [
        (0.5, 0.1, "head.weight", "task.weight"),
        (0.5, 0, "head.bias", "task.bias"),
        (0.25, 0.1, "body.0.0.weight"),
        (0.25, 0, "body.0.0.bias", "body.1.weight", "body.1.bias"),
        (0.125, 0.1, "token"),
        (0.125, 0),
    ]


def test_a_weight_that_layers_share_has_the_rate_of_the_last_of_them():
    model = Whole()
    model.head.weight = model.body[0][0].weight
    groups = build_optimizer(model, SGD | {"layer_decay": 0.5}).param_groups
    assert [group["lr"] for group in groups for weight in group["params"] if weight is model.head.weight] == [0.5]
    with refused("optim.layer_decay=0.5: it lowers optim.lr"):
        build_optimizer(model, {"_target_": "torch.optim.Adam", "layer_decay": 0.5})


class Wrapper(nn.Module):
    """Keeps a network, an attribute of its own that is a part of it, and a module without parameters."""

    def __init__(self, network):
        super().__init__()
        self.network = network
        self.last = network.head
        self.drop = nn.Dropout()


@pytest.mark.parametrize(
    "wrap", [nn.Sequential, Wrapper, torch.compile, lambda network: nn.Sequential(Wrapper(network))]
)
def test_the_layers_of_a_wrapped_network_are_its_own(wrap):
    network = Whole()
    section = SGD | {"layer_decay": 0.5}
    groups, expected = (build_optimizer(model, section).param_groups for model in (wrap(network), network))
    for group, own in zip(groups, expected, strict=True):
        assert group["lr"] == own["lr"] and [*map(id, group["params"])] == [*map(id, own["params"])]


def test_a_state_with_another_number_of_groups_is_refused_in_words():
    network = Whole()
    saved = build_optimizer(network, SGD).state_dict()
    with pytest.raises(ValueError, match="number of parameter groups"):
        resume_optimizer(build_optimizer(network, SGD | {"layer_decay": 0.5}), saved, changed=())


@pytest.mark.parametrize("network", [nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU())])
def test_a_decay_of_rates_over_layers_is_warned_of_if_there_is_one_layer_only(caplog, network):
    build_optimizer(network, SGD)
    assert not caplog.text
    build_optimizer(network, SGD | {"layer_decay": 0.5})
    assert f"optim.layer_decay=0.5 changes nothing: {type(network).__name__} has one layer" in caplog.text


def test_metrics_have_each_rate_of_groups(tmp_path):
    train(tmp_path, f"{TWO_PARTS} optim.layer_decay=0.5 train.epochs=1")
    assert all(line["lr_2"] == line["lr"] / 2 and "lr_1" not in line for line in steps(tmp_path))
    train(tmp_path / "without", "train.epochs=1")
    assert not any("lr_2" in line for line in steps(tmp_path / "without"))


def test_weights_that_no_optimizer_has_are_not_counted_as_trained(tmp_path, caplog):
    caplog.set_level("INFO")
    extending = "tests.training.test_extending"
    train(tmp_path, f"{TWO_PARTS} trainer._target_={extending}.OfTrained train.freeze=first train.unfreeze_after=1")
    before, after = re.findall(r"trains (\S+) of \S+ parameters", caplog.text)
    assert before == after and "from epoch 2 on" in caplog.text


def has_statistics(weights):
    return any(value.any() for name, value in weights.items() if name.endswith(("running_mean", "batches_tracked")))


FROZEN = "model=small_cnn model.width=2 data.length=128 train.freeze=backbone train.keep_checkpoints=3 train.epochs=3"


@pytest.mark.parametrize("more", ["", "+optim.fused=true"])
def test_frozen_layers_and_their_norms_are_trained_after_some_epochs_unless_a_resume_says_otherwise(
    tmp_path, caplog, more
):
    caplog.set_level("INFO")
    train(tmp_path, FROZEN, more, "train.unfreeze_after=1 train.max_steps=8")
    (few, total), *unfrozen = re.findall(r"trains (\S+) of (\S+) parameters", caplog.text)
    assert few != total and unfrozen == [(total, total)] and "from epoch 2 on, SmallCNN trains" in caplog.text
    train(tmp_path, FROZEN, more, "train.unfreeze_after=null")
    trained = []
    for before, after in ((4, 8), (8, 12)):
        one, other = (checkpoint(tmp_path, f"step-{step:07}")["model"] for step in (before, after))
        trained.append({name for name in one if not torch.equal(one[name], other[name])})
    assert trained == [one.keys(), {"classifier.weight", "classifier.bias"}]
    start = checkpoint(tmp_path, "step-0000004")["model"]
    assert not has_statistics(start)


class Looks:
    """Looks at what the network gives, as many callbacks do."""

    def on_epoch_end(self, run):
        run.trainer.model.eval()
        run.trainer.model.train()


def test_the_statistics_of_frozen_norms_stay_although_a_callback_sets_the_whole_network_to_training(tmp_path):
    train(tmp_path, FROZEN, f"+callbacks.looks._target_={__name__}.Looks")
    assert not has_statistics(checkpoint(tmp_path)["model"])


def test_the_learning_rate_rises_in_a_line_and_falls_as_half_a_cosine():
    (share,) = cosine(build_optimizer(nn.Linear(1, 1, bias=False), SGD), warmup_steps=2, total_steps=10).lr_lambdas[:1]
    assert [share(step) for step in (0, 1, 2, 4, 6, 10)] == pytest.approx([1 / 3, 2 / 3, 1, 0.8536, 0.5, 0], abs=1e-4)


@pytest.mark.parametrize(
    ("section", "model", "fused"),
    [
        (SGD, nn.Linear(2, 2), True),
        (SGD | {"dampening": 0.1}, nn.Linear(2, 2), None),
        (ADAM, nn.Linear(2, 2), True),
        (ADAM | {"fused": False}, nn.Linear(2, 2), False),
        (ADAM | {"foreach": True}, nn.Linear(2, 2), None),
        (ADAM | {"_target_": "torch.optim.Adagrad"}, nn.Linear(2, 2), None),
        (SGD, nn.Embedding(2, 2, sparse=True), None),
    ],
)
def test_an_optimizer_steps_in_one_launch_where_torch_can_and_not_on_a_cpu(monkeypatch, section, model, fused):
    assert not build_optimizer(model, section).defaults["fused"]
    monkeypatch.setattr("training.optimizer.FUSED_ON", ("cpu",))
    assert build_optimizer(model, section).defaults["fused"] is fused


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_one_launch_gives_the_momentum_of_many_after_skipped_steps_and_for_weights_trained_later(
    monkeypatch, device, nesterov
):
    weights = []
    for devices in ((device,), ()):
        monkeypatch.setattr("training.optimizer.FUSED_ON", devices)
        model = nn.Sequential(nn.Linear(3, 64), nn.Linear(64, 2)).to(device)
        for weight in model.parameters():
            nn.init.constant_(weight, 0.1)
        optimizer = build_optimizer(model, SGD | {"lr": 0.01, "nesterov": nesterov})
        assert has_fused_momentum(optimizer) == bool(devices) == bool(optimizer.defaults["fused"])
        if devices:
            optimizer.register_step_pre_hook(start_momentum)
        scaler = torch.amp.GradScaler(device, init_scale=2.0)
        model[0].requires_grad_(False)
        for number in range(6):
            if number == 3:
                model[0].requires_grad_(True)
            unwritten = [
                torch.full((size,), torch.nan, device=device) for size in (2, 64, 128, 192) for _ in range(20)
            ]
            del unwritten  # memory that is reserved next has these values
            loss = model(torch.tensor([[1.0, 2.0, 3.0]], device=device)).square().sum()
            scaler.scale(loss * (math.inf if number in (0, 3) else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        weights.append([weight.detach() for weight in model.parameters()])
    torch.testing.assert_close(*weights)
    assert all(not torch.allclose(weight.cpu(), torch.tensor(0.1)) for weight in weights[0])


@pytest.mark.parametrize("fused", [True, False])
def test_a_checkpoint_whose_optimizer_was_fused_is_resumed_by_one_that_is_not_and_the_reverse(fused):
    weights = []
    for second in (fused, not fused):
        model = nn.Linear(3, 2)
        nn.init.ones_(model.weight)
        nn.init.zeros_(model.bias)
        optimizer = build_optimizer(model, ADAM | {"fused": not fused})
        step(model, optimizer)
        saved = deepcopy(optimizer.state_dict())
        optimizer = build_optimizer(model, ADAM | {"fused": second})
        resume_optimizer(optimizer, saved, [])
        assert [group["fused"] for group in optimizer.param_groups] == [second, second]
        step(model, optimizer)
        weights.append(model.weight.detach())
    assert torch.allclose(*weights, atol=1e-6) and not torch.equal(weights[0], torch.ones(2, 3))


class Lookahead(torch.optim.Optimizer):
    """An optimizer around another one. Its state has both, below keys of its own."""

    def __init__(self, params, lr, pull=0.5):
        super().__init__(params, {"lr": lr, "pull": pull})
        self.inner = torch.optim.SGD(self.param_groups, lr=lr, momentum=0.9)
        self.param_groups = self.inner.param_groups

    def step(self, closure=None):
        self.inner.step()

    def state_dict(self):
        return {"outer": super().state_dict(), "inner": [self.inner.state_dict()]}

    def load_state_dict(self, state):
        super().load_state_dict(state["outer"])
        self.inner.load_state_dict(state["inner"][0])
        self.param_groups = self.inner.param_groups


def test_the_state_of_an_optimizer_around_another_one_may_have_any_layout():
    """It has the momentum of the inner one, this run's rate, and no number of numpy, which torch.load refuses."""
    model = nn.Linear(3, 2)
    optimizer = Lookahead(model.parameters(), np.float64(0.1))
    step(model, optimizer)
    file = io.BytesIO()
    torch.save(saved_optimizer(optimizer), file)
    saved = torch.load(io.BytesIO(file.getvalue()))
    resumed = Lookahead(model.parameters(), 0.2, pull=0.7)
    resume_optimizer(resumed, saved, changed=())
    assert all(group["lr"] == 0.2 and group["pull"] == 0.5 for group in resumed.param_groups)
    before = [state["momentum_buffer"] for state in optimizer.inner.state.values()]
    after = [state["momentum_buffer"] for state in resumed.inner.state.values()]
    torch.testing.assert_close(after, before)


class Averaged(torch.optim.SGD):
    """Has another optimizer, whose groups are its own."""

    def __init__(self, params, **settings):
        super().__init__(params, **settings)
        self.inner = torch.optim.AdamW(self.param_groups[0]["params"], lr=1e-3)

    def state_dict(self):
        return {**super().state_dict(), "inner": self.inner.state_dict()}

    def load_state_dict(self, state):
        self.inner.load_state_dict(state["inner"])
        super().load_state_dict({key: state[key] for key in ("state", "param_groups")})


def test_an_optimizer_with_groups_of_its_own_keeps_the_rate_of_the_checkpoint():
    model = nn.Linear(3, 2)
    optimizer = Averaged(model.parameters(), lr=1.0, momentum=0.9)
    optimizer.inner.param_groups[0]["lr"] = 0.002
    resumed = Averaged(model.parameters(), lr=0.5, momentum=0.9)
    resume_optimizer(resumed, saved_optimizer(optimizer), changed=())
    assert resumed.param_groups[0]["lr"] == 0.5 and resumed.inner.param_groups[0]["lr"] == 0.002


def step(model, optimizer):
    optimizer.zero_grad()
    model(torch.tensor([[1.0, 2.0, 3.0]])).square().sum().backward()
    optimizer.step()


@pytest.mark.parametrize(("options", "is_warned"), [({"max_lr": 0.1}, True), ({}, False)])
def test_a_schedule_that_begins_with_one_rate_for_layers_that_have_others_is_warned_of(caplog, options, is_warned):
    network = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = build_optimizer(network, SGD | {"layer_decay": 0.5})
    build_schedule({"_target_": "torch.optim.lr_scheduler.OneCycleLR", **options}, optimizer, 10, 0, 5)
    assert ("begins with one learning rate, 0.004, for all groups" in caplog.text) == is_warned
