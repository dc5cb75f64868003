import numpy as np
import pytest
import torch

from data.array_dataset import ArrayDataset
from tests.data.fakes import arrays
from tests.data.reading import Given, assert_equal_batches, read_batch

IMAGES = np.arange(2 * 5 * 4 * 3, dtype=np.uint8).reshape(2, 5, 4, 3)  # all values differ
LABELS = np.array([1, 0], dtype=np.uint8)


def make(train=True, labels=LABELS, flip=False, pad=0):
    return arrays(train, IMAGES, labels, pad=pad, transform=["crop", "flip"] if flip else ["crop"])


def test_without_augmentation_the_pixels_are_those_of_the_array():
    for dataset in (make(), make(train=False, pad=2, flip=True)):
        assert np.array_equal(dataset[1]["image"], IMAGES[1])
        assert dataset[0]["label"].item() == 1


def test_a_subclass_is_still_one_without_augmentation():
    class WithIndex(ArrayDataset):
        def __getitem__(self, index):
            return super().__getitem__(index) | {"index": index}

    dataset = WithIndex(IMAGES, LABELS, classes="ab", mean=(0.5,) * 3, std=(0.5,) * 3, train=True, pad=1)
    sample = dataset.without_augmentation()[1]
    assert sample["index"] == 1 and np.array_equal(sample["image"], IMAGES[1])


def test_training_samples_are_all_crops_of_the_padded_image_and_their_mirror_images_and_nothing_else():
    padded = np.pad(IMAGES[1], ((1, 1), (1, 1), (0, 0)), mode="reflect")
    crops = [padded[top : top + 5, left : left + 4] for top in range(3) for left in range(3)]
    expected = {crop.tobytes() for crop in crops} | {crop[:, ::-1].tobytes() for crop in crops}
    assert {make(pad=1, flip=True)[1]["image"].numpy().tobytes() for _ in range(500)} == expected
    torch.manual_seed(0)
    mirrored = sum(np.array_equal(make(flip=True)[0]["image"], IMAGES[0][:, ::-1]) for _ in range(400))
    assert 150 < mirrored < 250


def test_labels_are_integers_of_any_kind():
    series = pytest.importorskip("pandas").Series([1, 0], [7, 8])
    for labels in ([1, 0], [True, False], LABELS[:, None], LABELS.astype(np.uint64), series):
        assert read_batch(make(labels=labels), 2)["label"].tolist() == [1, 0]


def gathered(dataset, indices):
    return {name: torch.from_numpy(array[indices]) for name, array in dataset.arrays().items()}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize("augmentation", [{"pad": 1, "flip": True}, {"pad": 2}, {"flip": True}, {}])
def test_augment_batch_gives_the_samples_of_read_batch(augmentation, device):
    dataset = make(**augmentation)
    indices = np.arange(300) % 2
    random = Given(*np.random.default_rng(0).random((300, 3)))
    out = read_batch(dataset, indices, random)
    rows = {name: field.to(device) for name, field in gathered(dataset, indices).items()}
    batch = dataset.augment_batch(rows, random)
    assert_equal_batches({name: field.cpu() for name, field in batch.items()}, out)
    for each in (dataset, make(train=False, **augmentation)):
        assert np.array_equal(each.augment_batch(gathered(each, [1, 0]), None)["image"], IMAGES[[1, 0]])
