"""train.init_from: whose weights a new run begins with."""

import logging
from argparse import Namespace
from copy import deepcopy

import numpy as np
import pytest
import torch
from torch import nn

from tests.configs import FAST, checkpoint, differences, differing_weights, separate, stop, train
from tests.data.reading import refused
from training.resume import fill_buffers, load_module, load_weights, read_weights
from training.stopping import Stopped
from training.trainer import Trainer

CNN = ("model=small_cnn", "model.width=1", "train.epochs=1")


def network(classes=3, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, classes))


def lightning(weights):
    return {"state_dict": {f"model.{name}": weight for name, weight in weights.items()}, "callbacks": {}, "epoch": 3}


FORMS = {
    "plain": lambda weights: weights,
    "lightning": lightning,
    "ddp, compiled": lambda weights: {f"module._orig_mod.{name}": weight for name, weight in weights.items()},
    "below another prefix": lambda weights: {f"a.net.{name}": weight for name, weight in weights.items()},
    "below model": lambda weights: {"model": weights, "optimizer": {}},
    "below model_state_dict": lambda weights: {"model_state_dict": weights},
}


def load(path, model):
    """The weights of the network, with those of the file."""
    load_weights(read_weights(path), model, torch.device("cpu"))
    return model.state_dict()


@pytest.mark.parametrize("form", FORMS)
def test_a_state_dict_is_loaded_however_programs_save_it(tmp_path, form):
    weights = network(seed=1).state_dict()
    torch.save(FORMS[form](weights), tmp_path / "weights.pt")
    assert differences(load(tmp_path / "weights.pt", network()), weights) == []


def test_safetensors_and_files_of_old_versions_of_torch_are_read(tmp_path):
    weights = network(seed=1).state_dict()
    pytest.importorskip("safetensors.torch").save_file(weights, tmp_path / "weights.safetensors")
    torch.save(weights, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    for name in ("weights.safetensors", "old.pth"):
        assert differences(load(tmp_path / name, network()), weights) == []


def test_names_that_the_network_has_keep_their_prefix(tmp_path):
    weights = nn.ModuleDict({"model": network(seed=1)}).state_dict()
    torch.save(FORMS["ddp, compiled"](weights), tmp_path / "w.pt")
    assert differences(load(tmp_path / "w.pt", nn.ModuleDict({"model": network()})), weights) == []


def test_a_layer_of_another_size_stays_new_as_a_whole_and_is_named(tmp_path, caplog):
    theirs = network(seed=1)
    ours = network()
    untouched = network()
    weights = theirs.state_dict()
    weights["3.weight"] = torch.zeros(3, 99)  # its bias has the same size
    weights["head.bias"] = torch.zeros(2)
    del weights["1.num_batches_tracked"]  # as in old files
    torch.save(weights, tmp_path / "w.pt")
    with caplog.at_level(logging.INFO):
        load(tmp_path / "w.pt", ours)
    assert "6 of 9 tensors come from" in caplog.text
    assert "new, of another size or not in it: 3; not used: head" in caplog.text
    assert torch.equal(ours[0].weight, theirs[0].weight) and torch.equal(ours[1].weight, theirs[1].weight)
    assert torch.equal(ours[3].weight, untouched[3].weight) and torch.equal(ours[3].bias, untouched[3].bias)


def test_weights_beside_those_that_are_loaded_are_named_as_not_used(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    weights = network(seed=1).state_dict()
    optimizer = {"state": {0: {"step": torch.zeros(())}}, "param_groups": []}
    torch.save({"state_dict": weights, "state_dict_ema": weights, "optimizer": optimizer}, tmp_path / "w.pt")
    load(tmp_path / "w.pt", network())
    assert "not in it: none; not used: state_dict_ema" in caplog.text.splitlines()[-1]
    run = separate("callbacks/standard=[] train.max_steps=1")
    train(tmp_path / "first", *run, "task.loss={_target_: torch.nn.CrossEntropyLoss, weight: [1,1,1,1,1,1,1,1,1,2]}")
    train(tmp_path / "second", *run, f"train.init_from={tmp_path / 'first'}")
    assert "not in it: none; not used: others.task\n" in caplog.text


class Adapted(nn.Linear):
    """A layer with weights beside its own, as LoRA has."""

    def __init__(self):
        super().__init__(2, 2)
        self.lora_A = nn.Parameter(torch.zeros(1, 2))


def test_weights_that_are_new_in_a_layer_or_not_used_of_it_are_named_if_others_of_it_are_loaded(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    plain = nn.ModuleDict({"fc": nn.Linear(2, 2)})
    adapted = nn.ModuleDict({"fc": Adapted(), "head": nn.Linear(2, 2)})
    for theirs, ours in ((plain, adapted), (adapted, plain)):
        torch.save(theirs.state_dict(), tmp_path / "w.pt")
        load(tmp_path / "w.pt", ours)
    assert "not in it: fc.lora_A, head; not used: none" in caplog.text
    assert "not in it: none; not used: fc.lora_A, head" in caplog.text


def test_a_weight_that_layers_share_is_not_new_if_the_file_has_it_by_one_name(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    tied = nn.ModuleDict({"embed": nn.Embedding(3, 2), "head": nn.Linear(2, 3, bias=False), "fc": nn.Linear(2, 2)})
    tied["head"].weight = tied["embed"].weight
    saved = {name: value + 1 for name, value in tied.state_dict().items() if not name.startswith(("head", "fc"))}
    torch.save(saved, tmp_path / "w.pt")
    load(tmp_path / "w.pt", tied)
    assert torch.equal(tied["head"].weight, saved["embed.weight"])
    assert "not in it: fc; not used: none" in caplog.text


class Shifted(nn.Module):
    """Has a buffer that is None until the first forward pass, and one that stays None: it has no statistics."""

    def __init__(self, size):
        super().__init__()
        self.norm = nn.BatchNorm1d(size, track_running_stats=False)
        self.register_buffer("shift", None)


def test_a_buffer_that_is_none_is_filled_from_the_file_unless_its_layer_has_another_size_or_none_is_a_setting():
    theirs = nn.ModuleDict({"same": Shifted(2), "other": Shifted(2), "wider": nn.Linear(2, 2)})
    for part in theirs["same"], theirs["other"]:
        part.shift = torch.ones(2)
        part.norm = nn.BatchNorm1d(2)
    theirs["other"].weight = nn.Parameter(torch.ones(2))
    saved = {f"model.{name}": value for name, value in theirs.state_dict().items()}
    ours = nn.ModuleDict({"same": Shifted(2), "other": Shifted(2)})
    ours["other"].weight = nn.Parameter(torch.ones(3))
    fill_buffers(ours, saved, torch.device("cpu"))
    assert torch.equal(ours["same"].shift, torch.ones(2)) and ours["other"].shift is None
    assert ours["same"].norm.running_mean is None, "track_running_stats=False"


def test_a_checkpoint_of_a_network_that_was_wrapped_is_loaded_and_one_that_lacks_a_layer_is_not():
    theirs = nn.Sequential(nn.Linear(2, 2), Shifted(2))
    theirs[1].shift = torch.ones(2)
    ours = nn.Sequential(nn.Linear(2, 2), Shifted(2))
    load_module(ours, nn.ModuleDict({"module": theirs}).state_dict(), torch.device("cpu"))
    assert differences(ours.state_dict(), theirs.state_dict()) == []
    with pytest.raises(RuntimeError, match="Missing key"):
        load_module(ours, {"module.0.weight": torch.zeros(2, 2)}, torch.device("cpu"))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"encoder.weight": torch.zeros(2)}, "w.pt .*encoder.weight"),
        ([torch.zeros(2)], "w.pt .*state_dict"),
        ({"generator": {"weight": torch.zeros(2)}, "step": 3}, "has no tensors, but generator, step"),
        (network(), r"w.pt has objects \(.*Sequential.*save its state_dict alone"),
        ({"state_dict": {}, "best": np.float64(1)}, r"w.pt has objects \(numpy.*scalar.*weights_only=False"),
        ({"state_dict": {}, "settings": Namespace(lr=1)}, r"w.pt has objects \(argparse.Namespace\)"),
    ],
)
def test_a_file_without_weights_for_the_network_is_a_sentence(tmp_path, content, words):
    torch.save(content, tmp_path / "w.pt")
    with refused(words):
        load(tmp_path / "w.pt", network())


def test_a_run_begins_with_the_evaluated_weights_of_an_earlier_runs_best_checkpoint(tmp_path):
    train(tmp_path / "first", *CNN, "callbacks.ema.decay=0.9")
    best = checkpoint(tmp_path / "first", "best")
    freezing = "train.freeze=backbone data.num_classes=4 train.max_steps=1"  # only the last layer is new
    init = f"train.init_from={tmp_path / 'first'}"
    train(tmp_path / "second", *CNN, freezing, init)
    ours = checkpoint(tmp_path / "second")["model"]
    features = [name for name in ours if name.startswith("features.") and not name.endswith("num_batches_tracked")]
    assert len(features) > 10 and ours["classifier.weight"].shape == (4, 8)
    for name in features:
        assert torch.equal(ours[name], best["ema_model"][name])
        assert "running" in name or not torch.equal(ours[name], best["model"][name])


class Anchored(Trainer):
    """Keeps a copy of the network that it begins with, as of a teacher."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.anchor = deepcopy(self.model).requires_grad_(False)


def test_a_constructor_of_a_trainer_finds_them_in_the_network(tmp_path):
    train(tmp_path / "first", *FAST)
    anchored = f"trainer._target_={__name__}.Anchored"
    train(tmp_path / "second", *FAST, f"train.init_from={tmp_path / 'first'}", anchored)
    kept = checkpoint(tmp_path / "second")["others"]["anchor"]
    assert differences(kept, checkpoint(tmp_path / "first", "best")["model"]) == []


def test_a_resumed_run_does_not_read_them(tmp_path):
    train(tmp_path / "first", *CNN, "train.max_steps=1")
    init = f"train.init_from={tmp_path / 'first'}"
    run = [*CNN, init]
    train(tmp_path / "whole", *run)
    with pytest.raises(Stopped):
        train(tmp_path / "second", *run, *stop(3))
    (tmp_path / "first").rename(tmp_path / "moved")
    train(tmp_path / "second", *run)
    assert differing_weights(tmp_path / "second", tmp_path / "whole") == []
