"""from_timm.py, with timm's smallest networks and with weights in a local folder."""

import pytest
import torch

from extras.pretrained.from_timm import from_timm, preprocessing
from extras.pretrained.pretrained import Preprocessing
from tests.later import Later

timm = Later("timm")


@pytest.fixture(autouse=True)
def needs_timm():
    pytest.importorskip("timm")


@pytest.mark.parametrize(("name", "size", "channels"), [("test_resnet", 64, 4), ("test_vit3", 48, 1)])
def test_a_network_takes_the_images_that_the_data_have_and_timms_other_arguments(name, size, channels):
    model = from_timm(name, False, num_classes=7, in_channels=channels, image_size=size, drop_rate=0.3)
    assert model(torch.randn(2, channels, size, size)).shape == (2, 7)
    assert name != "test_vit3" or model.head_drop.p == 0.3


def test_pretrained_weights_are_loaded_but_for_the_last_layer_and_tell_how_images_are_prepared(tmp_path):
    saved = timm.create_model("test_resnet", pretrained_cfg_overlay={"mean": (0.1, 0.2, 0.3), "crop_pct": 0.9})
    timm.models.save_for_hf(saved, tmp_path)
    name, weights = f"local-dir:{tmp_path}", saved.state_dict()
    for key, tensor in from_timm(name, True, num_classes=7, in_channels=1).state_dict().items():
        if key.startswith("fc."):
            assert len(tensor) == 7
        elif key == "conv1.0.weight":
            torch.testing.assert_close(tensor, weights[key].sum(1, keepdim=True))
        else:
            assert torch.equal(tensor, weights[key]), key
    found = preprocessing(name, True)
    assert (found.image_size, found.test_crop, found.mean) == (160, 0.9, (0.1, 0.2, 0.3))
    half = (0.5, 0.5, 0.5)
    assert preprocessing("vit_base_patch16_224.augreg_in21k", True) == Preprocessing(224, "bicubic", 0.9, half, half)
    assert preprocessing("vit_base_patch16_224", False, img_size=96) == Preprocessing(96)
    assert preprocessing("inception_v3", False) == Preprocessing(299)


@pytest.mark.parametrize(
    ("name", "place", "value", "sentence"),
    [
        ("resnt50", None, None, r"no network in timm named 'resnt50': timm.list_models\(\) names them all"),
        ("local-dir:/nowhere", None, None, "/nowhere cannot be loaded .*config.json.*model.pretrained=false"),
        ("test_vit", "timm.__version__", "1.0.25", r"timm 1\.0\.25 could execute code in a file of weights: pip"),
    ],
)
def test_what_cannot_be_loaded_is_named_in_a_sentence(monkeypatch, name, place, value, sentence):
    if place:
        monkeypatch.setattr(place, value)
    with pytest.raises(ValueError, match=sentence):
        from_timm(name, True, num_classes=7, in_channels=3, image_size=160)
