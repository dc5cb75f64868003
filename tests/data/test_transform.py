"""data.transform and data.test_transform: whatever a transform takes and returns, samples have one of two layouts."""

import sys
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data.image_folder import ImageFolder
from data.transform import GlobalRandom, OnArray, upgraded
from loaders import WorkerLoader
from tests.data.fakes import arrays, write_images
from tests.data.reading import read_batch, refused
from tests.infrastructure.later import Later
from training.build import build

v2 = Later("torchvision.transforms.v2")


@pytest.fixture
def folder(tmp_path):
    """An image folder of 12 training images, each of one colour."""
    write_images(tmp_path, count=6)
    return lambda train=True, **options: ImageFolder(train, tmp_path, **options)


class Seen:
    """Returns what it gets, and keeps it."""

    def __call__(self, image):
        self.image = image
        return image


@pytest.fixture
def albumentations(monkeypatch):
    """A class of a module of that name, which is called as the library is."""
    monkeypatch.setitem(sys.modules, "albumentations", ModuleType("albumentations"))

    class Mirror:
        __module__ = "albumentations.augmentations.flip"

        def __call__(self, *, image):
            assert isinstance(image, np.ndarray) and image.shape[2] == 3
            return {"image": image[:, ::-1]}

    return Mirror


def test_a_function_may_get_images_as_arrays(folder):
    seen = Seen()
    for make in (arrays, folder):
        assert isinstance(make(transform=OnArray(seen))[0]["image"], torch.Tensor)
        assert isinstance(seen.image, np.ndarray) and seen.image.shape[2] == 3


def test_before_the_crop_a_function_gets_whole_images_and_the_crop_what_it_returns(folder):
    for make, options in ((arrays, {}), (folder, {"image_size": 16})):
        seen = Seen()
        dataset = make(transform=[seen, torch.zeros_like, "crop", "flip"], **options)
        image = dataset[3]["image"]
        assert torch.equal(seen.image, dataset.whole(3)) and image.shape == dataset.image_shape and not image.any()
    floats = folder(transform=[v2.ToDtype(torch.float32, scale=True), "crop"], image_size=16)[1]["image"]
    assert floats.shape == (3, 16, 16) and floats.allclose(folder().whole(1)[:, :16, :16] / 255)


@settings(max_examples=60, deadline=None)
@given(steps=st.lists(st.sampled_from(["crop", "center_crop", "flip", "marked"]), max_size=5), seed=st.integers(0, 9))
def test_steps_are_done_in_their_order_and_built_in_ones_alone_by_whole_batches(steps, seed):
    order = []

    def marked(image):
        order.append(tuple(image.shape))
        return image

    functions = [marked if step == "marked" else step for step in steps]
    if steps.count("crop") + steps.count("center_crop") > 1:
        with refused("only one of crop and center_crop"):
            arrays(transform=functions)
        return
    dataset = arrays(transform=functions)
    torch.manual_seed(seed)
    sample = dataset[5]["image"]
    assert sample.shape == (12, 10, 3) and len(order) == steps.count("marked")
    assert (dataset.sample_spec() is None) == ("marked" in steps)
    if "marked" not in steps:  # whatever the order of crop and flip, a sample is the row of a batch
        torch.manual_seed(seed)
        batch = read_batch(dataset, [5], GlobalRandom())
        assert torch.equal(batch["image"][0], sample)
    if "crop" not in steps:
        plain = torch.from_numpy(dataset.images[5])
        assert any(torch.equal(sample, plain.flip(1) if mirrored else plain) for mirrored in {"flip" in steps, False})


def test_what_comes_back_is_brought_to_one_layout():
    results = [
        (v2.functional.to_image, torch.uint8),
        (v2.ToDtype(torch.float64, scale=True), torch.float32),
        (v2.ToPILImage(), torch.uint8),
        (lambda image: image.permute(1, 2, 0).numpy(), torch.uint8),
        (lambda image: image.half().permute(1, 2, 0).numpy(), torch.float32),
        ([v2.functional.hflip, v2.ToPILImage(), v2.functional.hflip], torch.uint8),
    ]
    expected = torch.from_numpy(arrays(False).images[4])
    for result, dtype in results:
        image = arrays(False, test_transform=result)[4]["image"]
        assert type(image) is torch.Tensor and image.dtype == dtype and image.is_contiguous()
        rows_first = image if dtype == torch.uint8 else image.permute(1, 2, 0)
        scale = 255 if isinstance(result, v2.ToDtype) else 1
        assert torch.allclose(rows_first.float() * scale, expected.float(), atol=1e-3)


def test_albumentations_is_known_by_its_class_and_mixes_with_others(albumentations):
    mirrored = arrays(False, test_transform=[v2.RandomHorizontalFlip(1.0), albumentations()])[2]["image"]
    assert torch.equal(mirrored, arrays(False)[2]["image"])


@pytest.mark.parametrize(
    ("transform", "words"),
    [
        (lambda image: image.permute(1, 2, 0), r"uint8 \(12, 10, 3\) for image 3"),
        (lambda image: image.float().permute(1, 2, 0), r"float32 \(12, 10, 3\) for image 3"),
        (lambda image: None, "NoneType None for image 3"),
        (lambda image: (image, 1), r"tuple \(tensor\(\[.* for image 3"),  # one line
        (lambda image: image.sum(0), r"int64 \(12, 10\) for image 3"),
        (lambda image: image.long(), "int64 .* for image 3"),
        (lambda image: image[:1], r"uint8 \(1, 12, 10\) .*3 channels: keep them .*num_output_channels"),
    ],
)
def test_what_is_not_an_image_is_a_sentence_that_names_the_image(transform, words):
    with refused(words):
        arrays(transform=transform)[3]


def test_a_step_that_takes_no_tensors_may_be_wrapped_which_its_error_says():
    to_tensor = Later("torchvision.transforms").ToTensor()
    with refused(r"ToTensor failed for image 3, uint8 \(3, 12, 10\): .*wrap it in data\.transform\.OnArray"):
        arrays(transform=to_tensor)[3]
    assert arrays(transform=OnArray(to_tensor))[3]["image"].shape == (3, 12, 10)


def test_a_step_of_pillow_images_comes_after_ToPILImage_in_a_Compose_which_its_error_says():
    v2 = Later("torchvision.transforms.v2")

    def mirrored(image):
        return image.transpose(0)  # Image.Transpose.FLIP_LEFT_RIGHT

    with refused(r"mirrored failed for image 3, .*if a Pillow image, in torchvision's Compose, after ToPILImage"):
        arrays(transform=mirrored)[3]
    wrapped = v2.Compose([v2.ToPILImage(), mirrored])
    assert arrays(transform=wrapped)[3]["image"].equal(arrays(transform=[])[3]["image"].flip(1))


def test_only_our_own_center_crop_alone_is_described_by_values(folder):
    crops = {"image_size": 224, "test_crop": 0.875, "interpolation": "bilinear", "stored_as": (None, "bilinear")}
    for make, values in ((arrays, {"image_shape": (12, 10, 3)}), (folder, crops)):
        dataset = make(True, transform=["crop", "trivial"])
        assert dataset.prepared_by == values
        for steps in (["center_crop", "flip"], ["crop"], ["center_crop", lambda image: image]):
            assert make(False, test_transform=steps).prepared_by is None
        for name in ("prepare", "transformed", "stored", "cropped", "__getitem__"):
            own = type("Own", (type(dataset),), {name: lambda self, image: image})
            dataset.__class__ = own
            assert dataset.prepared_by is None, name


STEP = {"_target_": "a.B"}
ARRAY_STEP = {"_target_": "data.transform.OnArray", "function": STEP}


@pytest.mark.parametrize(
    ("changes", "transform", "test_transform"),
    [
        ({}, ["crop", "flip"], ["center_crop"]),
        ({"flip": False, "policy": "rand"}, ["crop", "rand"], ["center_crop"]),
        ({"transform": STEP, "policy": None}, [STEP], ["center_crop"]),
        ({"test_transform": [STEP, STEP], "transform_input": "array"}, ["crop", "flip"], [ARRAY_STEP, ARRAY_STEP]),
        (
            {"transform": [STEP], "test_transform": STEP, "transform_after": "crop"},
            ["crop", "flip", STEP],
            ["center_crop", STEP],
        ),
    ],
)
def test_the_settings_of_an_earlier_version_become_lists(changes, transform, test_transform):
    own = {"transform": None, "test_transform": None, "transform_input": None, "transform_after": "decode"}
    earlier = {"root": "r", "flip": True, "policy": None, **own, **changes}
    later = {"root": "r", "transform": transform, "test_transform": test_transform}
    assert upgraded(earlier) == later == upgraded(later)
    assert upgraded({"parts": {"a": earlier, "b": {"flip": True}}}) == {"parts": {"a": later, "b": {"flip": True}}}


def test_a_transform_cannot_change_the_dataset():
    dataset = arrays(transform=["crop", "flip", lambda image: image.fill_(7)])
    before = dataset.images.copy()
    assert (dataset[0]["image"] == 7).all()
    assert (dataset.images == before).all()


def test_a_transform_that_cannot_be_imported_is_named_and_not_the_dataset():
    section = {"_target_": "data.synthetic.Synthetic", "transform": {"_target_": "torchvision.transforms.v2.Crp"}}
    with refused(r"^data: torchvision.transforms.v2.Crp [^\n]+$"):
        build("data", section, train=True)


def brightened(image):
    return image * {}["strength"]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_error_in_a_transform_names_the_transform_the_sample_and_the_error(folder, num_workers):
    dataset = folder(transform=[v2.Identity(), brightened])
    with (
        WorkerLoader(dataset, 2, num_workers=num_workers, seed=0) as loader,
        refused(r"transform: brightened .*\.jpg, uint8 \(.*KeyError: 'strength'"),
    ):
        next(loader)
