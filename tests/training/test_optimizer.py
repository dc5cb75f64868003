"""Optimizers and frozen parameters."""

import pytest
from torch import nn

from models.small_cnn import SmallCNN
from training.optimizer import build_optimizer, cosine, freeze

SGD = {"_target_": "torch.optim.SGD", "lr": 0.5, "momentum": 0.9, "weight_decay": 0.1}


def test_weights_decay_and_biases_and_norms_do_not_and_a_checkpoints_state_fits_whatever_is_frozen():
    model = SmallCNN(num_classes=10, in_channels=1, width=2)
    decayed, others = build_optimizer(model, SGD).param_groups
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0) and decayed["lr"] == others["lr"] == 0.5
    assert {one.ndim for one in decayed["params"]} == {2, 4} and {one.ndim for one in others["params"]} == {1}
    assert len(decayed["params"] + others["params"]) == len(list(model.parameters()))
    freeze(model, ["features"])
    for before, group in zip((decayed, others), build_optimizer(model, SGD).param_groups, strict=True):
        assert [*map(id, before["params"])] == [*map(id, group["params"])]


@pytest.mark.parametrize(
    ("names", "trained"),
    [
        ("backbone", ["fc.weight", "fc.bias"]),
        (["backbone", "fc.bias"], ["fc.weight"]),
        (["1", "10.bias"], ["10.weight", "fc.weight", "fc.bias"]),
    ],
)
def test_named_layers_are_frozen(names, trained):
    model = nn.ModuleDict({name: nn.Linear(2, 2) for name in ("1", "10", "fc")})
    freeze(model, names)
    assert [name for name, parameter in model.named_parameters() if parameter.requires_grad] == trained


def test_the_learning_rate_rises_in_a_line_and_falls_as_half_a_cosine():
    (share,) = cosine(build_optimizer(nn.Linear(1, 1, bias=False), SGD), warmup_steps=2, total_steps=10).lr_lambdas[:1]
    assert [share(step) for step in (0, 1, 2, 4, 6, 10)] == pytest.approx([1 / 3, 2 / 3, 1, 0.8536, 0.5, 0], abs=1e-4)
