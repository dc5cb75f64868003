import numpy as np
import pytest
import torch

from data.augment import random_boxes
from data.batch_transform import BatchTransform, Normalize
from loaders import Random
from tests.data.reading import distance
from tests.infrastructure.later import Later

v2 = Later("torchvision.transforms.v2")

MEAN = [0.4, 0.5, 0.6]
STD = [0.2, 0.25, 0.3]


def pixels(*shape):
    return torch.randint(256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def make_batch(count=16):
    return {"image": pixels(count, 20, 30, 3), "label": torch.arange(count) % 5, "name": "kept"}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("channels", [1, 3])
def test_images_become_normalised_channels_first_in_channels_last_memory(device, dtype, channels):
    image = pixels(4, 6, 5, channels)
    mean = torch.tensor(MEAN[:channels])
    std = torch.tensor(STD[:channels])
    result = Normalize(mean.tolist(), std.tolist(), dtype)({"image": image.to(device)}, None)["image"]
    expected = ((image.double() / 255 - mean) / std).permute(0, 3, 1, 2).to(dtype)
    assert result.dtype == dtype and result.device.type == device
    assert result.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(result.cpu(), expected, atol=2e-6, rtol=torch.finfo(dtype).eps)


def test_one_transform_accepts_batches_of_every_size_and_layout_and_changes_nothing_else():
    normalize = Normalize(MEAN, STD)
    for shape in ((2, 4, 6, 3), (1, 6, 4, 3), (0, 4, 6, 3)):
        given = {"image": pixels(*shape), "label": torch.tensor([1, 2])}
        before = dict(given)
        strided = given["image"].permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0)
        result = normalize(given)
        assert torch.equal(result["image"], normalize({"image": strided})["image"])
        assert given == before and result["label"] is given["label"]


def augment(batch=None, key=0, **settings):
    return BatchTransform(Normalize(MEAN, STD), (), 5, **settings)(batch or make_batch(), Random(0, 0, key))


def normalized(count=16):
    return Normalize(MEAN, STD)(make_batch(count))["image"]


def test_by_default_or_with_one_image_a_batch_is_only_normalised():
    batch = augment()
    assert torch.equal(batch["image"], normalized())
    assert torch.equal(batch["label"], make_batch()["label"]) and batch["name"] == "kept"
    batch = augment(make_batch(1), mixup=1.0, cutmix=1.0)
    assert torch.allclose(batch["image"], normalized(1), atol=1e-6)
    assert batch["label"].tolist() == [[1, 0, 0, 0, 0]]


@pytest.mark.parametrize("settings", [{"erase": 0.5}, {"mixup": 0.4}, {"cutmix": 1.0}, {"mixup": 0.2, "cutmix": 1.0}])
def test_the_same_key_gives_the_same_batch_and_another_key_another_batch(settings):
    given = make_batch()
    state = torch.get_rng_state()
    first, again, other = (augment(given, key, **settings)["image"] for key in (0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert torch.equal(given["image"], make_batch()["image"]) and torch.equal(torch.get_rng_state(), state)
    assert first.is_contiguous(memory_format=torch.channels_last)
    floats = {**given, "image": normalized()}
    BatchTransform(None, (), 5, **settings)(floats, Random(0, 0, 0))
    assert torch.equal(floats["image"], normalized())


def box_around(pixels):
    """The rows and columns of the smallest box that has all of these pixels of a mask (H, W)."""
    rows, columns = (torch.nonzero(pixels.any(dim=axis))[:, 0] for axis in (1, 0))
    return slice(rows[0], rows[-1] + 1), slice(columns[0], columns[-1] + 1)


def test_erasing_sets_one_box_to_the_mean_in_the_given_share_of_the_images():
    images = augment(make_batch(400), erase=0.25)["image"]
    changed = (images != normalized(400)).any(dim=1)  # (B, H, W)
    erased = changed.flatten(1).any(dim=1)
    assert 70 <= erased.sum() <= 130
    for image, mask in zip(images[erased], changed[erased], strict=True):
        box = image[(..., *box_around(mask))]
        assert (box == 0).all() and mask.sum() <= box[0].numel()


@pytest.mark.parametrize("size", [(20, 30), (8, 8)])
def test_erased_boxes_have_the_distribution_of_torchvisions(size):
    torch.manual_seed(0)
    theirs = v2.RandomErasing(p=1.0)
    blank = torch.zeros(3, *size)
    drawn = [theirs.make_params([blank]) for _ in range(3000)]
    expected = np.array([[0, 0, 0, 0] if one["v"] is None else [one[key] for key in "ihjw"] for one in drawn])
    top, bottom, left, right = random_boxes(torch.zeros(3000, 3, *size), 1.0, Random(0, 0, 0)).numpy()
    for ours, column in zip((top, bottom - top, left, right - left), expected.T, strict=True):
        assert distance(ours, column) < 0.06  # by chance once in 10,000 times
    assert (top >= 0).all() and (left >= 0).all()
    assert (bottom <= size[0]).all() and (right <= size[1]).all()


def test_mixup_blends_images_and_labels_with_the_same_share():
    batch = augment({**make_batch(), "label": make_batch()["label"].to(torch.uint8)}, mixup=0.4)
    plain = normalized()
    share = batch["label"][1, 1].item()  # of class 1, of which image 1 is, and image 0 not
    assert 0 < share < 1
    assert torch.allclose(batch["image"], share * plain + (1 - share) * plain.roll(1, 0), atol=1e-5)
    labels = torch.nn.functional.one_hot(make_batch()["label"], 5).float()
    assert torch.allclose(batch["label"], share * labels + (1 - share) * labels.roll(1, 0), atol=1e-6)


@pytest.mark.parametrize("key", range(5))
def test_cutmix_pastes_a_box_and_blends_the_labels_by_its_area(key):
    batch = augment(key=key, cutmix=1.0)
    plain = normalized()
    pasted = (batch["image"] != plain).any(dim=1).any(dim=0)  # (H, W)
    if pasted.any():
        box = box_around(pasted)
        assert pasted[box].all()
        assert torch.equal(batch["image"][(..., *box)], plain.roll(1, 0)[(..., *box)])
    share = 1 - pasted.sum().item() / pasted.numel()
    assert batch["label"][1, 1].item() == pytest.approx(share)
    assert batch["label"].sum(dim=1).allclose(torch.ones(16))


@pytest.mark.cuda
def test_on_a_gpu_the_batch_is_the_same_and_the_host_does_not_wait():
    settings = {"erase": 0.5, "mixup": 0.4, "cutmix": 1.0}
    step = BatchTransform(Normalize(MEAN, STD), (), 5, **settings)
    batch = {**make_batch(), "image": make_batch()["image"].cuda(), "label": make_batch()["label"].cuda()}
    step(batch, Random(0, 0, 0))  # makes the constants
    torch.cuda.set_sync_debug_mode("error")
    try:
        result = step(batch, Random(0, 0, 1))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    expected = augment(key=1, **settings)
    assert all(torch.allclose(result[name].cpu(), expected[name], atol=1e-5) for name in ("image", "label"))
