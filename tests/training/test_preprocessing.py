from types import SimpleNamespace
from typing import Any

import pytest

from models.pretrained import Preprocessing
from training.config import ConfigError
from training.datasets import mean_and_std, with_preprocessing

DATA = {"root": None, "image_size": None, "interpolation": None, "test_crop": 0.5}


def config(**model: Any) -> Any:
    return SimpleNamespace(data=DATA, model=model)


pytest.importorskip("models.from_torchvision", reason="a fork may have deleted it")


def torchvision(name: str, pretrained: bool = True) -> Any:
    return config(_target_="models.from_torchvision.from_torchvision", name=name, pretrained=pretrained)


def test_keys_of_data_that_are_null_take_what_the_network_expects() -> None:
    data, _ = with_preprocessing(torchvision("swin_t"))
    assert data == {"root": None, "image_size": 224, "interpolation": "bicubic", "test_crop": 0.5}
    data, _ = with_preprocessing(torchvision("inception_v3", pretrained=False))
    assert data == {**DATA, "image_size": 299}


@pytest.mark.parametrize("target", ["models.small_cnn.SmallCNN", "models.none.None"])
def test_another_network_changes_nothing(target: str) -> None:
    assert with_preprocessing(config(_target_=target)) == (DATA, Preprocessing())


def test_an_unknown_network_is_reported_before_data_are_read() -> None:
    with pytest.raises(ConfigError, match=r"model: models.*named 'resnt50': did you mean resnet50\?"):
        with_preprocessing(torchvision("resnt50"))


def test_images_are_normalised_as_the_network_expects_if_they_have_its_channels() -> None:
    network = Preprocessing(mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6))
    dataset = SimpleNamespace(mean=(0.5,), std=(0.2,))
    assert mean_and_std(network, dataset, 3) == (network.mean, network.std)
    assert mean_and_std(network, dataset, 1) == mean_and_std(Preprocessing(224), dataset, 3) == ((0.5,), (0.2,))
    assert mean_and_std(Preprocessing(224), object(), 3) == (None, None)
