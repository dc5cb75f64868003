import pytest
import torch

from data.transform import Normalize

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
MEAN, STD = (0.1, 0.4, 0.7), (0.2, 0.3, 0.5)


def images(*shape):
    return torch.randint(256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("channels", [1, 3])
def test_images_become_normalised_channels_first_in_channels_last_memory(device, dtype, channels):
    image = images(4, 6, 5, channels)
    mean, std = torch.tensor(MEAN[:channels]), torch.tensor(STD[:channels])
    result = Normalize(mean.tolist(), std.tolist(), dtype)({"image": image.to(device)}, None)["image"]
    expected = ((image.double() / 255 - mean) / std).permute(0, 3, 1, 2).to(dtype)
    assert result.dtype == dtype and result.device.type == device
    assert result.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(result.cpu(), expected, atol=2e-6, rtol=torch.finfo(dtype).eps)


def test_one_transform_accepts_batches_of_every_size_and_layout_and_changes_nothing_else():
    normalize = Normalize(MEAN, STD)
    for shape in ((2, 4, 6, 3), (1, 6, 4, 3), (0, 4, 6, 3)):
        given = {"image": images(*shape), "label": torch.tensor([1, 2])}
        before, strided = dict(given), given["image"].permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0)
        result = normalize(given)
        assert torch.equal(result["image"], normalize({"image": strided})["image"])
        assert given == before and result["label"] is given["label"]
