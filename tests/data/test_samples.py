"""What a dataset may return, and what is refused with the name of the dataset and the sample's index."""

import numpy as np
import pytest
import torch
from PIL import Image

from data.errors import DataError
from data.samples import Samples

IMAGE = torch.zeros(8, 8, 3, dtype=torch.uint8)


class Plankton(list):
    """A dataset of given samples."""


def samples(*given, names=("image", "label"), num_classes=3) -> Samples:
    return Samples(Plankton(given), names, num_classes)


@pytest.mark.parametrize("label", [2, np.int64(2), torch.tensor(2), torch.tensor([2]), True])
@pytest.mark.parametrize("image", [IMAGE, IMAGE.numpy(), torch.zeros(3, 8, 8), np.zeros((3, 8, 8), np.float32)])
def test_a_tuple_becomes_a_dict_and_a_dict_stays_as_it_is(image, label):
    assert samples((image, label))[0] == {"image": image, "label": label}
    sample = {"image": image, "label": label, "file": "a.jpg"}
    assert samples(sample)[0] is sample


def test_fields_may_have_other_names_and_a_float_is_float32_as_networks_need_it():
    tokens = torch.zeros(5, dtype=torch.int64)
    found = samples((tokens, "five", 5, 1), names=("tokens", "text", "length", "class"), num_classes=None)
    assert found[0] == {"tokens": tokens, "text": "five", "length": 5, "class": 1}
    found = samples((tokens, 0.5), names=("tokens", "value"), num_classes=None)
    assert torch.equal(found[0]["value"], torch.tensor(0.5))


def test_an_array_that_is_read_backwards_is_copied():
    assert torch.equal(torch.from_numpy(samples((IMAGE.numpy()[:, ::-1], 1))[0]["image"]), IMAGE)


def test_with_a_collate_function_samples_need_not_have_all_inputs():
    plankton = Plankton([(torch.zeros(5), 1), {"tokens": torch.zeros(5), "label": 1, "file": None}])
    given = Samples(plankton, ("tokens", "tokens_length", "label"), 3, has_collate=True)
    assert given[0].keys() == {"tokens", "label"} and given[1]["file"] is None
    unlabelled = Plankton([{"tokens": torch.zeros(5)}, (torch.zeros(5),)])
    given = Samples(unlabelled, ("tokens", "tokens_length"), None, has_collate=True, has_label=False)
    assert given[0].keys() == given[1].keys() == {"tokens"}


def test_what_is_not_augmented_is_that_of_the_dataset():
    class Augmented(Plankton):
        def without_augmentation(self):
            return [(IMAGE, 2)]

    assert Samples(Augmented([(IMAGE, 1)]), ("image", "label"), 3).without_augmentation()[0]["label"] == 2
    assert samples((IMAGE, 1)).without_augmentation()[0]["label"] == 1


@pytest.mark.parametrize(
    ("sample", "sentence"),
    [
        (None, r"is of type NoneType: return \(image, label\), or a dict"),
        (IMAGE, r"is of type Tensor: return \(image, label\)"),
        ((IMAGE, 1, 2), r"has 3 parts: return \(image, label\)"),
        ({"pixels": IMAGE, "label": 1}, r"has no field 'image', only pixels, label: rename one, or set task\.inputs"),
        ((None, 1), r"has None as 'image': return a tensor"),
        ((Image.new("RGB", (8, 8)), 1), r"has 'image' of type Image: return a tensor, such as torch\.from_numpy"),
        (([[0.5]], 1), r"has 'image' of type list: return a tensor"),
        ((np.array(["a"]), 1), r"has 'image' of type ndarray"),
        ((torch.zeros(3, 8, 8, dtype=torch.float64), 1), r"has float64 values as 'image': return them as float32"),
        ((IMAGE.long(), 1), r"an image of int64: return uint8 \(H, W, C\) or float \(C, H, W\)"),
        ((IMAGE[:, :, 0], 1), r"an image of shape \(8, 8\): .*three dimensions, \(H, W, C\)"),
        ((IMAGE.permute(2, 0, 1), 1), r"an image of shape \(3, 8, 8\): uint8 images are \(H, W, C\); use permute"),
        ((torch.zeros(8, 8, 3), 1), r"an image of shape \(8, 8, 3\): float32 images are \(C, H, W\)"),
        ((IMAGE, 3), r"has 'label' 3: give 0 to 2, as there are 3 classes"),
        ((IMAGE, -1), r"has 'label' -1: give 0 to 2"),
        ((IMAGE, 0.5), r"has 'label' 0\.5: give an integer, or choose task=regression"),
        ((IMAGE, "cat"), r"has 'label' 'cat': give its number, 0 to 2"),
        ((IMAGE, torch.ones(3)), r"has 'label' of shape \(3,\): .*task=multilabel"),
        ((IMAGE, torch.ones(8, 8)), r"has 'label' of shape \(8, 8\): for a mask choose task=own with your own task"),
    ],
)
def test_a_sample_that_training_cannot_use_is_refused_in_a_sentence(sample, sentence):
    with pytest.raises(DataError, match=rf"^Plankton\[1\] .*{sentence}") as error:
        samples((IMAGE, 1), sample)[1]
    assert "\n" not in str(error.value)


def test_all_samples_need_the_shapes_of_the_first_unless_a_collate_function_pads_them():
    sizes = [(IMAGE, 1), (IMAGE.numpy(), np.int64(2)), (IMAGE[:4], 1)]
    without = samples(*sizes)
    assert [without[index]["label"] for index in (0, 1)] == [1, 2]
    with pytest.raises(DataError, match=r"^Plankton\[2\] has 'image' of shape \(4, 8, 3\), and Plankton\[0\] of"):
        without[2]
    padded = Samples(Plankton(sizes), ("image", "label"), 3, has_collate=True)
    assert [len(padded[index]["image"]) for index in (0, 1, 2)] == [8, 8, 4]
