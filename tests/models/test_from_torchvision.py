"""models/from_torchvision.py; the weights that tests load are made up, as a download would take a network."""

from itertools import product
from urllib.error import URLError

import pytest
import torch
from later import Later
from torch import Tensor, nn

from models.pretrained import Preprocessing

module = Later("models.from_torchvision")
torchvision = Later("torchvision")


@pytest.mark.parametrize(
    ("name", "size", "channels"),
    [
        *product(["squeezenet1_1"], [64], [1, 3, 4]),
        ("googlenet", 64, 3),  # which would change the channels if it were left to
        *[("googlenet", 64, 1), ("inception_v3", 96, 4), ("vit_b_16", 48, 1), ("maxvit_t", 448, 4)],
    ],
)
def test_every_kind_of_network_gives_one_logit_per_class_in_training(name: str, size: int, channels: int) -> None:
    with torch.device("meta"):  # shapes without arithmetic
        model = module.from_torchvision(name, False, num_classes=7, in_channels=channels, image_size=size)
        assert model.train()(torch.empty(2, channels, size, size)).shape == (2, 7)


@pytest.fixture
def weights(monkeypatch: pytest.MonkeyPatch) -> dict[str, Tensor]:
    """The weights that are downloaded, which a test fills."""
    made: dict[str, Tensor] = {}
    monkeypatch.setattr(torchvision.models.WeightsEnum, "get_state_dict", lambda *_, **__: made)
    return made


@pytest.mark.parametrize(("name", "head"), [("squeezenet1_1", "classifier.1"), ("mobilenet_v3_small", "classifier.3")])
def test_pretrained_weights_are_loaded_but_for_the_last_layer(
    name: str, head: str, weights: dict[str, Tensor]
) -> None:
    weights.update(torchvision.models.get_model(name, weights=None).state_dict())
    model = module.from_torchvision(name, True, num_classes=7, in_channels=3).state_dict()
    for key, tensor in model.items():
        if key.startswith(head):
            assert len(tensor) == 7
        else:
            assert torch.equal(tensor, weights[key]), key


def test_with_as_many_classes_the_last_layer_is_loaded_too(weights: dict[str, Tensor]) -> None:
    weights.update(torchvision.models.get_model("squeezenet1_1", weights=None).state_dict())
    model = module.from_torchvision("squeezenet1_1", True, num_classes=1000, in_channels=3).state_dict()
    assert all(torch.equal(tensor, weights[key]) for key, tensor in model.items())


@pytest.mark.parametrize("channels", [1, 6])
def test_grey_images_give_the_same_logits_whatever_the_number_of_channels(
    channels: int, weights: dict[str, Tensor]
) -> None:
    weights.update(torchvision.models.get_model("squeezenet1_1", weights=None).state_dict())
    in_three, in_others = (
        module.from_torchvision("squeezenet1_1", True, 1000, count).eval() for count in (3, channels)
    )
    grey = torch.randn(2, 1, 64, 64)
    with torch.no_grad():
        ours, theirs = in_others(grey.expand(-1, channels, -1, -1)), in_three(grey.expand(-1, 3, -1, -1))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_a_failed_download_ends_in_a_sentence_with_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*_: object, **__: object) -> None:
        raise URLError("Name or service not known")

    monkeypatch.setattr(torchvision.models.WeightsEnum, "get_state_dict", offline)
    with pytest.raises(ValueError, match=r"SqueezeNet.*cannot be loaded .*not known.*: put https://.* into .*"):
        module.from_torchvision("squeezenet1_1", True, num_classes=7, in_channels=3)


def test_a_misspelt_name_is_refused_with_a_suggestion() -> None:
    with pytest.raises(ValueError, match=r"no network in torchvision named 'resnt50': did you mean resnet50\?"):
        module.preprocessing("resnt50", True)


def test_the_weights_tell_how_images_are_prepared() -> None:
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    assert module.preprocessing("resnet50", True) == Preprocessing(224, "bilinear", 224 / 232, mean, std)
    assert module.preprocessing("efficientnet_b1", True).interpolation == "bilinear"
    assert module.preprocessing("swin_t", True).interpolation == "bicubic"
    assert module.preprocessing("inception_v3", False) == Preprocessing(299)


def test_pretrained_inception_sees_the_numbers_that_torchvisions_own_sees(weights: dict[str, Tensor]) -> None:
    weights.update(torchvision.models.get_model("googlenet", weights=None, init_weights=False).state_dict())
    ours, theirs = (
        module.from_torchvision("googlenet", True, 1000, 3).eval(),
        torchvision.models.get_model("googlenet", weights="DEFAULT").eval(),
    )
    images, found = torch.rand(2, 3, 64, 64), module.preprocessing("googlenet", True)
    imagenet = torchvision.models.get_model_weights("googlenet").DEFAULT.transforms()
    with torch.no_grad():
        expected = theirs(torchvision.transforms.functional.normalize(images, imagenet.mean, imagenet.std))
        torch.testing.assert_close(
            ours(torchvision.transforms.functional.normalize(images, found.mean, found.std)),
            expected,
            rtol=1e-3,
            atol=1e-4,
        )


def test_auxiliary_outputs_leave_no_parameters_behind() -> None:
    with torch.device("meta"):
        model = module.from_torchvision("googlenet", False, num_classes=7, in_channels=3)
    assert not any(isinstance(module, nn.Module) and name.startswith("aux") for name, module in model.named_modules())
