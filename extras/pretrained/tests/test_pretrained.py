"""Networks of timm (its smallest) and torchvision; the weights are made up, as a download would take a network."""

from importlib.util import find_spec
from unittest.mock import Mock
from urllib.error import URLError

import pytest
import torch

from extras.pretrained.pretrained import Preprocessing
from tests.infrastructure.later import Later
from training.optimizer import build_optimizer

timm = Later("timm")
timm_optim = Later("timm.optim")
torchvision = Later("torchvision")
of_timm = Later("extras.pretrained.from_timm")
of_torchvision = Later("extras.pretrained.from_torchvision")
pytestmark = pytest.mark.skipif(find_spec("timm") is None, reason="timm is not installed")
IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def build(name, pretrained=False, num_classes=7, in_channels=3, **options):
    package = of_timm.from_timm if name.startswith(("test_", "local-dir:")) else of_torchvision.from_torchvision
    return package(name, pretrained, num_classes, in_channels, **options)


def downloads(monkeypatch, name):
    """Makes random weights of a network of torchvision, and gives them to whoever downloads them."""
    weights = torchvision.models.get_model(name, weights=None).state_dict()
    monkeypatch.setattr(torchvision.models.WeightsEnum, "get_state_dict", lambda *_, **__: weights)
    return weights


@pytest.mark.parametrize(
    ("name", "size", "channels"),
    [
        *(("test_resnet", 64, 4), ("test_vit3", 48, 1), ("squeezenet1_1", 64, 4), ("googlenet", 64, 1)),
        *(("inception_v3", 96, 4), ("vit_b_16", 48, 1), ("maxvit_t", 448, 4)),
    ],
)
def test_every_kind_of_network_gives_one_logit_per_class_in_training(name, size, channels):
    options = {"drop_rate": 0.3} if name == "test_vit3" else {}
    with torch.device("cpu" if name.startswith("test_") else "meta"):  # shapes without arithmetic
        model = build(name, in_channels=channels, image_size=size, **options)
        assert model.train()(torch.zeros(2, channels, size, size)).shape == (2, 7)
    assert not any(name.startswith("aux") for name, _ in model.named_modules())
    assert not options or model.head_drop.p == 0.3


def test_weights_are_loaded_but_for_the_last_layer_and_tell_how_images_are_prepared(tmp_path):
    saved = timm.create_model("test_resnet", pretrained_cfg_overlay={"mean": (0.1, 0.2, 0.3), "crop_pct": 0.9})
    timm.models.save_for_hf(saved, tmp_path)
    name = f"local-dir:{tmp_path}"
    weights = saved.state_dict()
    weights["conv1.0.weight"] = weights["conv1.0.weight"].sum(1, keepdim=True)
    for key, tensor in build(name, True, in_channels=1).state_dict().items():
        assert len(tensor) == 7 if key.startswith("fc.") else torch.allclose(tensor, weights[key], atol=1e-6), key
    found = of_timm.preprocessing(name, True)
    assert (found.image_size, found.test_crop, found.mean) == (160, 0.9, (0.1, 0.2, 0.3))
    theirs = of_torchvision.preprocessing
    assert theirs("resnet50", True) == Preprocessing(224, "bilinear", 224 / 232, *IMAGENET)
    assert of_timm.preprocessing("vit_base_patch16_224", False, img_size=96) == Preprocessing(96)
    assert theirs("inception_v3", False) == Preprocessing(299)


def test_torchvisions_weights_are_loaded_but_for_the_last_layer_of_other_classes(monkeypatch):
    weights = downloads(monkeypatch, "mobilenet_v3_small")
    for key, tensor in build("mobilenet_v3_small", True).state_dict().items():
        assert len(tensor) == 7 if key.startswith("classifier.3") else torch.equal(tensor, weights[key]), key


def test_grey_images_give_the_same_logits_whatever_the_number_of_channels(monkeypatch):
    downloads(monkeypatch, "squeezenet1_1")
    grey = torch.randn(2, 1, 64, 64)
    with torch.no_grad():
        logits = [build("squeezenet1_1", True, 1000, n).eval()(grey.expand(-1, n, -1, -1)) for n in (1, 3, 6)]
    for ours in (logits[0], logits[2]):
        torch.testing.assert_close(ours, logits[1], rtol=1e-4, atol=1e-5)


def test_what_cannot_be_loaded_is_named_with_the_remedy(monkeypatch):
    offline = Mock(side_effect=URLError("Name or service not known"))
    monkeypatch.setattr(torchvision.models.WeightsEnum, "get_state_dict", offline)
    for package, words in ((of_timm, r"'resnt50': timm.list_models\(\)"), (of_torchvision, "Unknown model resnt50")):
        with pytest.raises(ValueError, match=words):
            package.preprocessing("resnt50", True)
    with pytest.raises(ValueError, match=r"SqueezeNet.*cannot be loaded .*not known.*: put https://.* into .*"):
        build("squeezenet1_1", True)
    monkeypatch.setattr("timm.__version__", "1.0.25")
    with pytest.raises(ValueError, match=r"timm 1\.0\.25 .* pip install -U timm"):
        build("test_vit", True)


def test_layers_with_rates_of_their_own_are_the_groups_of_a_network_of_timm():
    model = build("test_vit3")
    theirs = timm_optim.param_groups_layer_decay(model, layer_decay=0.5, weight_decay=0)
    shares = {id(weight): group["lr_scale"] for group in theirs for weight in group["params"]}
    settings = {"_target_": "timm.optim.create_optimizer_v2", "opt": "lamb", "lr": 0.4, "layer_decay": 0.5}
    groups = build_optimizer(model, settings).param_groups
    ours = {id(weight): group["lr"] / 0.4 for group in groups for weight in group["params"]}
    assert ours == pytest.approx(shares) and len({*ours.values()}) > 3
