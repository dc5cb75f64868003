"""models/from_timm.py, with timm's smallest networks and with weights in a local folder."""

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from later import Later

from models.from_timm import from_timm, preprocessing
from models.pretrained import Preprocessing

timm = Later("timm")
pytestmark = pytest.mark.skipif(find_spec("timm") is None, reason="timm is not installed")


@pytest.mark.parametrize(("name", "size", "channels"), [("test_resnet", 64, 4), ("test_vit", 48, 1)])
def test_a_network_takes_the_images_that_the_data_have(name: str, size: int, channels: int) -> None:
    model = from_timm(name, False, num_classes=7, in_channels=channels, image_size=size)
    assert model(torch.randn(2, channels, size, size)).shape == (2, 7)


def test_other_arguments_are_timms() -> None:
    assert from_timm("test_vit", False, num_classes=7, in_channels=3, image_size=160, drop_rate=0.3).head_drop.p == 0.3


@pytest.fixture
def saved(tmp_path: Path) -> tuple[str, dict[str, torch.Tensor]]:
    """The name of a network in a folder, and its weights."""
    model = timm.create_model("test_resnet", pretrained_cfg_overlay={"mean": (0.1, 0.2, 0.3), "crop_pct": 0.9})
    timm.models.save_for_hf(model, tmp_path)
    return f"local-dir:{tmp_path}", model.state_dict()


def test_pretrained_weights_are_loaded_but_for_the_last_layer(saved: tuple[str, dict[str, torch.Tensor]]) -> None:
    name, weights = saved
    model = from_timm(name, True, num_classes=7, in_channels=1)
    for key, tensor in model.state_dict().items():
        if key.startswith("fc."):
            assert len(tensor) == 7
        elif key == "conv1.0.weight":
            torch.testing.assert_close(tensor, weights[key].sum(1, keepdim=True))
        else:
            assert torch.equal(tensor, weights[key]), key


def test_the_weights_tell_how_images_are_prepared(saved: tuple[str, dict[str, torch.Tensor]]) -> None:
    name, _ = saved
    found = preprocessing(name, True)
    assert (found.image_size, found.test_crop, found.mean) == (160, 0.9, (0.1, 0.2, 0.3))
    half = (0.5, 0.5, 0.5)
    assert preprocessing("vit_base_patch16_224.augreg_in21k", True) == Preprocessing(224, "bicubic", 0.9, half, half)
    assert preprocessing("vit_base_patch16_224", False, img_size=96) == Preprocessing(96)
    assert preprocessing("inception_v3", False) == Preprocessing(299)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("resnt50", r"no network in timm named 'resnt50': did you mean resnet50\?"),
        ("resnet50.a1_in1000", r"no network in timm named 'resnet50.a1_in1000': did you mean resnet50.a1_in1k\?"),
        ("local-dir:/nowhere", "local-dir:/nowhere cannot be loaded .*config.json.*model.pretrained=false"),
    ],
)
def test_a_name_that_does_not_exist_ends_in_a_sentence(name: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        from_timm(name, True, num_classes=7, in_channels=3)


def test_a_failed_download_ends_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*_: object, **__: object) -> None:
        raise OSError("cannot find the files in the local cache.\nmore")

    monkeypatch.setattr("timm.models._builder.load_state_dict_from_hf", offline)
    with pytest.raises(ValueError, match=r"test_vit cannot be loaded \(cannot find .* cache\): .*pretrained=false"):
        from_timm("test_vit", True, num_classes=7, in_channels=3, image_size=160)


def test_a_version_that_could_execute_code_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("timm.__version__", "1.0.25")
    with pytest.raises(ValueError, match=r"timm 1\.0\.25 could execute code in a file of weights: pip install"):
        from_timm("test_vit", True, num_classes=7, in_channels=3)


def test_without_the_package_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ValueError, match="model=timm needs timm, which is not installed: pip install timm"):
        from_timm("test_vit", True, num_classes=7, in_channels=3)
