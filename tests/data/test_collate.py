from collections import UserDict

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


def test_fields_that_some_samples_lack_or_that_cannot_be_stacked_are_named():
    for samples, sentence in (
        ([{"x": [1, 2], "y": 0}, {"x": [1]}], "have the field 'y', and others do not"),
        ([{"x": [1]}, {"x": [1, 2], "y": 0}], "have the field 'y', and others do not"),
        ([{"x": [1]}, ([1, 2], 0)], "return dicts"),
        ([{"words": ["a", "b"]}, {"words": ["c"]}], "the field 'words' cannot .*return .*numbers in a tensor"),
        ([{"x": torch.ones(2, 3)}, {"x": torch.ones(1, 4)}], "the field 'x' cannot .*dimensions after the first"),
        ([{"x": torch.ones(2)}, {"x": None}], "the field 'x' cannot .*no None"),
        ([{"more": {"mask": [1]}}, {"more": {"mask": None}}], "the field 'mask' cannot"),
    ):
        with refused(sentence):
            pad(samples)
    assert pad([{"x": torch.ones(2)}, {"x": [1]}])["x"].tolist() == [[1, 1], [1, 0]]
    assert pad([UserDict(x=[1]), UserDict(x=[1, 2])])["x_length"].tolist() == [1, 2]  # as tokenizers return
