import copy
import pickle

import pytest
import torch
from later import Later
from reading import Given, read_batch

from data.array_dataset import ArrayDataset
from data.augment import Policy
from data.errors import DataError
from loaders.randomness import Random

v2 = Later("torchvision.transforms.v2")


def image(channels=3):
    return torch.randint(30, 200, (channels, 40, 30), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def scripted(monkeypatch):
    """A function that makes torch.randint and torch.rand return given numbers, for torchvision's policies."""

    def script(integers, signs):
        integers, signs = iter(integers), iter(signs)
        monkeypatch.setattr(torch, "randint", lambda *_: torch.tensor(next(integers)))
        monkeypatch.setattr(torch, "rand", lambda *_: torch.tensor(next(signs)))

    return script


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("sign", [0.1, 0.9])
@pytest.mark.parametrize("operation", range(14))
def test_trivial_augment_gives_the_pixels_of_torchvisions(operation, sign, channels, scripted):
    name = list(v2.TrivialAugmentWide._AUGMENTATION_SPACE)[operation]
    source = image(channels)
    for strength in (0, 13, 30):
        has_strength = name not in ("Identity", "AutoContrast", "Equalize")
        scripted([operation, strength] if has_strength else [operation], [sign])
        theirs = v2.TrivialAugmentWide(interpolation=v2.InterpolationMode.BILINEAR)(source)
        ours = Policy("trivial")(source, [(operation + 0.5) / 14, (strength + 0.5) / 31, sign])
        assert torch.equal(ours, theirs)
    assert name == "Identity" or channels == 1 or not torch.equal(theirs, source)


def test_rand_augment_gives_the_pixels_of_torchvisions(scripted):
    source = image()
    for first in range(14):
        second = (first + 5) % 14
        names = list(v2.RandAugment._AUGMENTATION_SPACE)
        signed = [v2.RandAugment._AUGMENTATION_SPACE[names[chosen]][1] for chosen in (first, second)]
        scripted([first, second], [0.2] * signed[0] + [0.7] * signed[1])
        theirs = v2.RandAugment(interpolation=v2.InterpolationMode.BILINEAR)(source)
        ours = Policy("rand")(source, [(first + 0.5) / 14, 0.0, 0.2, (second + 0.5) / 14, 0.0, 0.7])
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", ["trivial", "rand"])
def test_a_policy_draws_no_random_numbers_itself_and_can_be_pickled(name):
    policy = Policy(name)
    before, draws = torch.get_rng_state(), [0.3] * policy.draws
    expected = policy(image(), draws)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(pickle.loads(pickle.dumps(policy))(image(), draws), expected)
    assert torch.equal(copy.deepcopy(policy)(image(), draws), expected)


def test_an_unknown_policy_is_refused_with_a_suggestion():
    with pytest.raises(DataError, match=r"data\.policy=trival: did you mean trivial\? it is one of trivial, rand"):
        Policy("trival")


@pytest.mark.parametrize("policy", ["trivial", "rand"])
def test_a_row_in_memory_is_the_same_in_a_batch_alone_and_as_a_sample(policy):
    images = image().permute(1, 2, 0).repeat(20, 1, 1, 1).numpy()
    arguments = {"classes": ["a"], "mean": [0.5], "std": [0.5], "pad": 2, "flip": True, "policy": policy}
    dataset = ArrayDataset(images, torch.zeros(20).long().numpy(), train=True, **arguments)
    indices = torch.arange(20).numpy()
    batch = read_batch(dataset, indices, Random(3, 0, indices, indices))
    assert len(batch["image"].unique(dim=0)) > 10
    for row in range(20):
        one = indices[row : row + 1]
        single = read_batch(dataset, one, Random(3, 0, one, one))
        assert torch.equal(single["image"][0], batch["image"][row])
    torch.manual_seed(0)
    sample = dataset[0]["image"]
    torch.manual_seed(0)
    draws = torch.rand(3 + dataset.policy.draws).double().numpy()
    assert torch.equal(read_batch(dataset, [0], Given(draws))["image"][0], sample)
    test_set = ArrayDataset(images, torch.zeros(20).long().numpy(), train=False, **arguments)
    assert torch.equal(test_set[0]["image"], image().permute(1, 2, 0))
