import numpy as np
import torch

from data.collate import pad
from tests.data.reading import refused


def test_samples_of_several_lengths_are_padded_and_their_lengths_kept():
    batch = pad([{"text": torch.tensor([7, 8]), "label": 1}, {"text": np.array([9, 9, 9]), "label": 2}], value=-1)
    assert batch["text"].tolist() == [[7, 8, -1], [9, 9, 9]]
    assert batch["text_length"].tolist() == [2, 3] and batch["label"].tolist() == [1, 2]
    with refused("return dicts"):
        pad([(torch.ones(2), 1)])
