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


def test_lists_of_numbers_are_padded_and_dicts_in_samples_too_and_other_lists_are_named():
    first = {"input_ids": [7, 8], "more": {"mask": torch.ones(2), "name": "a"}}
    second = {"input_ids": [9, 9, 9], "more": {"mask": torch.ones(3), "name": "b"}}
    batch = pad([first, second])
    assert batch["input_ids"].tolist() == [[7, 8, 0], [9, 9, 9]] and batch["input_ids_length"].tolist() == [2, 3]
    assert batch["more"]["mask"].sum(1).tolist() == [2, 3] and batch["more"]["name"] == ["a", "b"]
    for numbers in ([[1, 2], [0.5]], [[0.5], [1, 2]], [[], [0.5]]):
        assert pad([{"x": each} for each in numbers])["x"].dtype == torch.float32
    assert pad([{"x": []}, {"x": [16777217]}])["x"].tolist() == [[0], [16777217]]
    with refused("the field 'words' is a list .*return a tensor"):
        pad([{"words": ["a", "b"]}, {"words": ["c"]}])
