import pytest
import torch
from later import Later
from torch import nn

from models.small_cnn import SmallCNN
from training.config import ConfigError
from training.optimizer import build_optimizer, freeze, training_mode

torchvision = Later("torchvision")
SGD = {"_target_": "torch.optim.SGD", "lr": 0.5, "momentum": 0.9, "weight_decay": 0.1}


def small_cnn() -> SmallCNN:
    return SmallCNN(num_classes=10, in_channels=1, width=2)


def rates(model: nn.Module, layer_decay: float) -> dict[str, float]:
    """The learning rate of each parameter."""
    optimizer = build_optimizer(model, {**SGD, "layer_decay": layer_decay})
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {names[parameter]: group["lr"] for group in optimizer.param_groups for parameter in group["params"]}


def order(optimizer: torch.optim.Optimizer) -> list[int]:
    return [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]


def test_weights_decay_and_biases_and_norms_do_not() -> None:
    model = small_cnn()
    decayed, others = build_optimizer(model, SGD).param_groups
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    assert decayed["lr"] == others["lr"] == 0.5
    assert {parameter.ndim for parameter in decayed["params"]} == {2, 4}
    assert {parameter.ndim for parameter in others["params"]} == {1}
    assert len(decayed["params"] + others["params"]) == len(list(model.parameters()))


def test_each_earlier_layer_learns_at_a_share_of_the_next_ones_rate() -> None:
    layers = ["features.0.", "features.2.", "features.3.", "features.5.", "features.6.", "features.8.", "classifier."]
    for name, rate in rates(small_cnn(), 0.5).items():
        (number,) = (number for number, layer in enumerate(layers) if name.startswith(layer))
        assert rate == 0.5 * 0.5 ** (6 - number), name


def test_the_blocks_of_residual_networks_and_transformers_are_layers() -> None:
    with torch.device("meta"):
        residual, transformer = (
            rates(make(), 0.5) for make in (torchvision.models.resnet18, torchvision.models.vit_b_16)
        )
    assert residual["conv1.weight"] == residual["bn1.weight"] == 0.5**10
    assert residual["layer1.0.conv1.weight"] == residual["layer1.0.bn2.bias"] == 0.5**9
    assert residual["layer4.1.conv2.weight"] == 0.5**2 and residual["fc.bias"] == 0.5
    first = {transformer[name] for name in ("class_token", "conv_proj.weight", "encoder.pos_embedding")}
    assert first == {0.5**14}
    assert transformer["encoder.layers.encoder_layer_0.mlp.0.weight"] == 0.5**13
    assert transformer["encoder.ln.weight"] == transformer["encoder.layers.encoder_layer_11.ln_1.bias"] == 0.5**2


def test_timms_networks_tell_their_layers_and_the_last_ones() -> None:
    timm = pytest.importorskip("timm")
    found = rates(timm.create_model("test_convnext", depths=(2, 1, 1, 1)), 0.5)  # whose stages are no Sequentials
    assert found["stages.0.blocks.0.mlp.fc1.weight"] < found["stages.0.blocks.1.mlp.fc1.weight"] < 0.5
    assert found["head.fc.weight"] == 0.5
    model = timm.create_model("deit_tiny_distilled_patch16_224", depth=1)
    freeze(model, ["backbone"])
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert trained == ["head.weight", "head.bias", "head_dist.weight", "head_dist.bias"]


def test_a_checkpoints_state_fits_whatever_the_layer_decay_and_the_frozen_layers() -> None:
    model = small_cnn()
    plain = order(build_optimizer(model, SGD))
    freeze(model, ["features"])
    assert order(build_optimizer(model, {**SGD, "layer_decay": 0.5})) == plain


@pytest.mark.parametrize("value", [0, 1.5, "x"])
def test_a_layer_decay_that_cannot_work_is_refused(value):
    with pytest.raises(ConfigError, match=f"optim.layer_decay={value}: give a number above 0"):
        build_optimizer(small_cnn(), {**SGD, "layer_decay": value})


@pytest.mark.parametrize(
    ("names", "trained"),
    [
        ([], ["1.weight", "1.bias", "10.weight", "10.bias", "fc.weight", "fc.bias"]),
        (["backbone"], ["fc.weight", "fc.bias"]),
        (["backbone", "fc.bias"], ["fc.weight"]),
        (["1"], ["10.weight", "10.bias", "fc.weight", "fc.bias"]),
        (["1", "10.bias"], ["10.weight", "fc.weight", "fc.bias"]),
    ],
)
def test_named_layers_are_frozen(names: list[str], trained: list[str]) -> None:
    model = nn.ModuleDict({name: nn.Linear(2, 2) for name in ("1", "10", "fc")})
    freeze(model, names)
    assert [name for name, parameter in model.named_parameters() if parameter.requires_grad] == trained


def test_a_frozen_backbone_keeps_its_weights_and_statistics() -> None:
    torch.manual_seed(0)
    model = small_cnn()
    freeze(model, ["backbone"])
    optimizer = build_optimizer(model, {**SGD, "layer_decay": 0.5})
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    training_mode(model)
    model(torch.randn(4, 1, 8, 8)).square().sum().backward()
    optimizer.step()
    changed = [name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])]
    assert model.training and changed == ["classifier.weight", "classifier.bias"]

    part = small_cnn()
    freeze(part, ["features.0"])
    training_mode(part)
    norms = [module.training for module in part.modules() if isinstance(module, nn.BatchNorm2d)]
    assert norms == [False] + [True] * (len(norms) - 1)


@pytest.mark.parametrize(
    ("names", "sentence"),
    [
        (["feature"], r"train.freeze=feature: the network has nothing of that name; did you mean features\?"),
        (["backbon"], r"did you mean backbone\?"),
        (["features", "classifier"], "train.freeze=features,classifier freezes all of the parameters"),
    ],
)
def test_names_that_cannot_be_frozen_are_refused(names: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        freeze(small_cnn(), names)
