"""augment.transform: it gets images in 0 to 1, and what it returns is normalised; labels where it takes them."""

import logging

import pytest
import torch

from data.batch_transform import BatchTransform, Normalize
from loaders import Random
from tests.configs import DARKENED, differing_weights, train
from tests.data.reading import refused
from tests.infrastructure.later import Later

v2 = Later("torchvision.transforms.v2")

NORMALIZE = Normalize([0.5, 0.4, 0.3], [0.1, 0.2, 0.3])


def batch():
    images = torch.randint(256, (6, 8, 10, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return {"image": images, "label": torch.arange(6) % 3, "name": ["x"] * 6}


def made(*steps, label="label"):
    return BatchTransform(NORMALIZE, steps, label=label)(batch())


def halved(images):
    assert images.shape == (6, 3, 8, 10) and images.min() >= 0 and 0.9 < images.max() <= 1
    return images.mul_(0.5)


def swapped(images, labels):
    return images.flip(0), labels.copy_(labels.flip(0))


def test_a_transform_gets_images_in_0_to_1_and_the_result_is_normalised():
    images = batch()["image"].permute(0, 3, 1, 2) / 255
    expected = v2.functional.normalize(images / 2, NORMALIZE.mean, NORMALIZE.std)
    result = made(halved)
    assert torch.allclose(result["image"], expected, atol=1e-6)
    assert result["name"] == ["x"] * 6
    plain = NORMALIZE(batch())["image"]
    unchanged = made(lambda images: images)["image"]
    assert torch.allclose(unchanged, plain, atol=1e-5) and unchanged.stride() == plain.stride()


def test_erase_and_mixing_are_switched_off_while_the_transform_is_in_use_and_labels_stay_shares():
    transform = BatchTransform(NORMALIZE, num_classes=3, erase=1.0, mixup=0.5, cutmix=0.5)
    plain = NORMALIZE(batch())["image"]
    assert not torch.equal(transform(batch(), Random(0, 0, 0))["image"], plain)
    transform.erase = transform.mixup = transform.cutmix = 0.0
    result = transform(batch(), Random(0, 0, 0))
    assert torch.equal(result["image"], plain)
    assert torch.equal(result["label"], torch.eye(3)[batch()["label"]])


def test_a_label_that_is_no_class_is_a_sentence_where_it_is_mixed():
    wrong = batch()
    wrong["label"][2] = -100
    with refused("augment.mixup, augment.cutmix: a label is not one of the 3 classes .*-100.*; correct it"):
        BatchTransform(NORMALIZE, num_classes=3, mixup=0.5)(wrong, Random(0, 0, 0))


def test_labels_go_where_they_are_taken_and_the_batch_is_never_changed():
    before = batch()
    given = batch()
    transform = BatchTransform(NORMALIZE, [swapped, halved])
    assert torch.equal(transform(given)["label"], before["label"].flip(0))
    assert all(torch.equal(given[name], before[name]) for name in ("image", "label"))
    assert BatchTransform(NORMALIZE, [halved], label=None)(batch())["label"].tolist() == before["label"].tolist()
    assert made(v2.MixUp(num_classes=3))["label"].shape == (6, 3)
    assert torch.equal(made(v2.RandomHorizontalFlip(1.0))["label"], before["label"])
    chained = v2.Compose([v2.ColorJitter(0.1), v2.CutMix(num_classes=3)])
    assert torch.allclose(made(chained)["label"].sum(1), torch.ones(6))


@pytest.mark.parametrize(
    "step", [lambda images: images[:3], lambda images: None, lambda images: (images * 255).byte()]
)
def test_what_is_not_a_batch_of_images_is_a_sentence(step):
    with refused(r"augment.transform: <lambda> .*\b6 images"):
        made(step)


def test_a_function_that_needs_something_else_than_images_and_labels_is_refused_when_it_is_given():
    with refused(r"augment\.transform: <lambda> is called with the images.*'target'.*in a function of yours"):
        BatchTransform(NORMALIZE, [lambda images, target: images])


def test_a_second_normalisation_is_warned_of_once(caplog):
    transform = BatchTransform(NORMALIZE, [v2.Normalize(NORMALIZE.mean, NORMALIZE.std)], label=None)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            transform(batch())
    (line,) = caplog.messages
    assert "Normalize returned pixels from -" in line and "leave out its own normalisation" in line


@pytest.mark.parametrize("scale", [1, 255])
def test_a_mean_and_std_of_pixels_from_0_to_255_are_warned_of(caplog, scale):
    Normalize([scale * value for value in (0.485, 0.456, 0.406)], [scale * 0.2] * 3)
    assert ("divide them by 255" in caplog.text) == (scale == 255)


def test_boxes_are_erased_and_images_mixed_after_it():
    both = BatchTransform(NORMALIZE, [swapped], 3, erase=0.5, mixup=0.3)(batch(), Random(0, 0, 0))
    alone = BatchTransform(NORMALIZE, [], 3, erase=0.5, mixup=0.3)
    given = batch()
    expected = alone({**given, "image": given["image"].flip(0), "label": given["label"].flip(0)}, Random(0, 0, 0))
    assert all(torch.allclose(both[name], expected[name], atol=1e-5) for name in ("image", "label"))


@pytest.mark.parametrize(
    ("name", "options"), [("RandomAffine", {"degrees": 10.0}), ("ColorJiggle", {"brightness": 0.2})]
)
def test_kornia_takes_a_batch(name, options):
    kornia = pytest.importorskip("kornia.augmentation")
    transform = getattr(kornia, name)(**options, p=1.0)
    for step in (transform, kornia.AugmentationSequential(transform)):
        assert made(step)["image"].shape == (6, 3, 8, 10)


def test_it_changes_the_batches_of_a_run(tmp_path):
    train(tmp_path / "with", DARKENED)
    train(tmp_path / "without")
    assert differing_weights(tmp_path / "with", tmp_path / "without")
