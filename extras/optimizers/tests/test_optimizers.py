"""Muon's steps against torch's own, and whole runs, which are resumed to the same bits."""

from importlib.util import find_spec

import pytest
import torch
from torch import nn

from extras.optimizers.muon import Muon, matrices, muon_with_adamw, orthogonal
from tests.configs import differing_weights, logged, stop, train, untimed
from training.stopping import Stopped

CNN = "model=small_cnn model.width=4"


SHAPES = [(5, 3), (3, 5), (4, 2, 3, 3)]


@pytest.mark.parametrize("shape", SHAPES)
def test_muon_steps_matrices_as_torchs_own_does_and_convolutions_as_matrices(monkeypatch, shape):
    monkeypatch.setattr("extras.optimizers.muon.iterated_in", lambda device: torch.bfloat16)  # as torch's does
    torch.manual_seed(0)
    ours = torch.randn(shape).requires_grad_()
    theirs = ours.detach().flatten(1).clone().requires_grad_()
    settings = {"lr": 0.1, "weight_decay": 0.2, "momentum": 0.9}
    optimizers = Muon([ours], **settings), torch.optim.Muon([theirs], adjust_lr_fn="match_rms_adamw", **settings)
    for _ in range(3):
        gradient = torch.randn(shape)
        for weight, optimizer in zip((ours, theirs), optimizers, strict=True):
            weight.grad = gradient.reshape(weight.shape)
            optimizer.step()
    assert torch.equal(ours.flatten(1), theirs)


@pytest.mark.parametrize("shape", SHAPES)
def test_on_a_cpu_the_iteration_has_the_precision_of_the_weights(shape):
    torch.manual_seed(0)
    matrix = torch.randn(shape).flatten(1)
    result = orthogonal(matrix)
    assert result.dtype == torch.float32
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    values = left.T @ result @ right.T  # the same singular vectors
    assert torch.allclose(values, values.diagonal().diag(), atol=1e-4)
    assert all(0.6 < value < 1.3 for value in values.diagonal())


class Reader(nn.Module):
    """Words as vectors, with attention between two layers, and scores."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(7, 4)
        self.places = nn.Parameter(torch.zeros(5, 4))
        self.first = nn.Linear(4, 4)
        self.attention = nn.MultiheadAttention(4, 2)
        self.filters = nn.Conv1d(4, 4, 3)
        self.norm = nn.BatchNorm1d(4)
        self.last = nn.Linear(4, 2)


def test_muon_has_the_matrices_of_inner_layers_but_no_embedding_no_bias_and_not_the_last_layer():
    network = Reader()
    names = {id(weight): name for name, weight in network.named_parameters()}
    found = [names[id(weight)] for weight in matrices(network)]
    assert found == ["attention.in_proj_weight", "attention.out_proj.weight", "filters.weight"]
    alone = nn.Linear(2, 2)
    (adamw,) = muon_with_adamw([{"params": [*alone.parameters()]}], alone, lr=0.1)
    assert isinstance(adamw, torch.optim.AdamW), "such a network has no inner layers"


SETTINGS = {
    "muon": ["optim=muon", "optim.layer_decay=0.5", "train.clip_norm=1"],
    "plateau": [
        "schedule=plateau",
        "callbacks.plateau.patience=0",
        "+callbacks.plateau.threshold=1",
        "train.epochs=4",
    ],
    "plateau of two optimizers": ["schedule=plateau", "callbacks.plateau.patience=1", "optim=muon", "train.epochs=4"],
}


@pytest.mark.parametrize("overrides", SETTINGS.values(), ids=SETTINGS)
def test_a_run_that_stops_is_resumed_to_the_same_bits(tmp_path, overrides):
    train(tmp_path / "whole", CNN, *overrides)
    for at in (3, 8, 13):
        with pytest.raises(Stopped):
            train(tmp_path / "stopped", CNN, *overrides, *stop(at))
    train(tmp_path / "stopped", CNN, *overrides)
    assert differing_weights(tmp_path / "stopped", tmp_path / "whole") == []
    assert untimed(tmp_path / "stopped") == untimed(tmp_path / "whole")


@pytest.mark.parametrize("better", ["loss", "accuracy"])
def test_the_rate_falls_when_the_score_is_not_better_for_more_evaluations_than_patience(tmp_path, better):
    """threshold: by how much a score has to be better to count. By a loss of less than 0 none is."""
    threshold = ["+callbacks.plateau.threshold_mode=abs", "+callbacks.plateau.threshold=1e9"]
    score = [f"task.metric={better}", "train.epochs=6", "callbacks.plateau.patience=1", "optim.lr=0.1"]
    train(tmp_path, CNN, "schedule=plateau", *score, *threshold, "callbacks.plateau.factor=0.5")
    assert [*dict.fromkeys(logged(tmp_path, "lr"))] == [0.1, 0.05, 0.025]


@pytest.mark.skipif(find_spec("schedulefree") is None, reason="schedulefree is not installed")
def test_schedule_free_evaluates_and_saves_its_mean_and_is_resumed_up_to_rounding(tmp_path):
    overrides = ["optim=schedule_free", "schedule=constant", "optim.warmup_steps=3"]
    whole = train(tmp_path / "whole", CNN, *overrides)
    with pytest.raises(Stopped):
        train(tmp_path / "stopped", CNN, *overrides, *stop(5))
    stopped = train(tmp_path / "stopped", CNN, *overrides)
    assert stopped["test_loss"] == pytest.approx(whole["test_loss"], rel=1e-4)
