"""from_torchvision.py; the weights that tests load are made up, as a download would take a network."""

from urllib.error import URLError

import pytest
import torch

from extras.pretrained.pretrained import Preprocessing
from tests.later import Later

module = Later("extras.pretrained.from_torchvision")
torchvision = Later("torchvision")


@pytest.mark.parametrize(
    ("name", "size", "channels"),
    [
        *[("squeezenet1_1", 64, 4), ("googlenet", 64, 3), ("googlenet", 64, 1)],
        *[("inception_v3", 96, 4), ("vit_b_16", 48, 1), ("maxvit_t", 448, 4)],
    ],
)
def test_every_kind_of_network_gives_one_logit_per_class_in_training(name, size, channels):
    with torch.device("meta"):  # shapes without arithmetic
        model = module.from_torchvision(name, False, num_classes=7, in_channels=channels, image_size=size)
        assert model.train()(torch.empty(2, channels, size, size)).shape == (2, 7)
    assert not any(name.startswith("aux") for name, _ in model.named_modules())


@pytest.fixture
def downloads(monkeypatch):
    """A function that makes random weights of a network, and gives them to whoever downloads them."""

    def make(name, **options):
        weights = torchvision.models.get_model(name, weights=None, **options).state_dict()
        monkeypatch.setattr(torchvision.models.WeightsEnum, "get_state_dict", lambda *_, **__: weights)
        return weights

    return make


@pytest.mark.parametrize(
    ("name", "head", "classes"),
    [("squeezenet1_1", "classifier.1", 7), ("mobilenet_v3_small", "classifier.3", 7), ("squeezenet1_1", "none", 1000)],
)
def test_pretrained_weights_are_loaded_but_for_the_last_layer_of_other_classes(name, head, classes, downloads):
    weights = downloads(name)
    for key, tensor in module.from_torchvision(name, True, classes, in_channels=3).state_dict().items():
        assert len(tensor) == classes if key.startswith(head) else torch.equal(tensor, weights[key]), key


@pytest.mark.parametrize("channels", [1, 6])
def test_grey_images_give_the_same_logits_whatever_the_number_of_channels(channels, downloads):
    downloads("squeezenet1_1")
    in_three, in_others = (
        module.from_torchvision("squeezenet1_1", True, 1000, count).eval() for count in (3, channels)
    )
    grey = torch.randn(2, 1, 64, 64)
    with torch.no_grad():
        ours, theirs = in_others(grey.expand(-1, channels, -1, -1)), in_three(grey.expand(-1, 3, -1, -1))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_a_failed_download_and_a_misspelt_name_end_in_a_sentence(monkeypatch):
    def offline(*_, **__):
        raise URLError("Name or service not known")

    monkeypatch.setattr(torchvision.models.WeightsEnum, "get_state_dict", offline)
    with pytest.raises(ValueError, match=r"SqueezeNet.*cannot be loaded .*not known.*: put https://.* into .*"):
        module.from_torchvision("squeezenet1_1", True, num_classes=7, in_channels=3)
    with pytest.raises(ValueError, match=r"no network in torchvision named 'resnt50': torchvision.models"):
        module.preprocessing("resnt50", True)


def test_the_weights_tell_how_images_are_prepared():
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    assert module.preprocessing("resnet50", True) == Preprocessing(224, "bilinear", 224 / 232, mean, std)
    assert module.preprocessing("swin_t", True).interpolation == "bicubic"
    assert module.preprocessing("inception_v3", False) == Preprocessing(299)
