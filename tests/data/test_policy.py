import pickle

import pytest
import torch
from later import Later

from data.augment import Policy
from data.errors import DataError

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
    policy, before = Policy(name), torch.get_rng_state()
    draws = [0.3] * policy.draws
    assert torch.equal(pickle.loads(pickle.dumps(policy))(image(), draws), policy(image(), draws))
    assert torch.equal(torch.get_rng_state(), before)


def test_an_unknown_policy_is_refused_with_a_suggestion():
    with pytest.raises(DataError, match=r"data\.policy=trival: did you mean trivial\? it is one of trivial, rand"):
        Policy("trival")
