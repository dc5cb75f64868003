"""The running average of the weights, beside torch's own AveragedModel."""

from types import SimpleNamespace

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from training.callbacks.ema import EMA


class Odd(nn.Module):
    """Weights of two dtypes, one of them used twice, and buffers of a norm, and others, which are copied."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.half = nn.Linear(3, 3, dtype=torch.bfloat16)
        self.again = self.half
        self.register_buffer("mask", torch.tensor([0.0, float("-inf")]))
        self.register_buffer("center", torch.zeros(3))
        self.limit = nn.Parameter(torch.tensor([float("-inf")]), requires_grad=False)

    def change(self):
        with torch.no_grad():
            for weight in self.parameters():
                weight.add_(torch.rand_like(weight))
        self.norm.num_batches_tracked += 1
        self.norm.running_mean += torch.rand(3)
        self.mask = torch.cat([torch.rand(1), self.mask[1:]])
        self.center = self.center + 1  # another tensor


def test_weights_and_statistics_of_norms_get_the_mean_that_torch_gives_them_and_other_buffers_are_copied():
    model = Odd()
    ema = EMA(0.9)
    trainer = SimpleNamespace(model=model)
    known = SimpleNamespace(never_finite={"model.mask": "infinity", "model.limit": "infinity"}, empty_at_start=set())
    run = SimpleNamespace(trainer=trainer, module_state=known)
    ema.on_start(run)
    expected = AveragedModel(model, use_buffers=True)
    for step in range(4):
        model.change()
        ema.on_step(run)
        expected.multi_avg_fn = get_ema_multi_avg_fn(min(0.9, (1 + step) / (10 + step)))
        expected.update_parameters(model)
    ours = trainer.ema_model.state_dict()
    torchs = expected.module.state_dict()
    assert ours.keys() == torchs.keys() and ema.state_dict() == {"n_averaged": 4}
    newest = model.state_dict()
    copied = {name: newest[name] for name in ("norm.num_batches_tracked", "mask", "center", "limit")}
    for name, value in (torchs | copied).items():
        assert torch.equal(ours[name], value), name
    again = EMA(0.9)
    first = trainer.ema_model
    again.on_start(run)
    again.load_state_dict(ema.state_dict())
    trainer.ema_model.load_state_dict(ours)
    model.change()
    for one in (ema, again):
        one.on_step(run)
    assert all(torch.equal(value, first.state_dict()[name]) for name, value in trainer.ema_model.state_dict().items())


def test_the_average_of_a_network_with_a_spectral_norm_has_vectors_of_length_1():
    """They estimate the norm of the weights: the average of unit vectors is shorter, and would enlarge the outputs."""
    model = nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3))
    ema = EMA(0.9)
    known = SimpleNamespace(never_finite={}, empty_at_start=set())
    run = SimpleNamespace(trainer=SimpleNamespace(model=model), module_state=known)
    ema.on_start(run)
    for _ in range(5):
        with torch.no_grad():
            model.parametrizations.weight.original.normal_()
        model(torch.rand(2, 3))
        ema.on_step(run)
    lengths = [buffer.norm() for buffer in run.trainer.ema_model.buffers()]
    torch.testing.assert_close(lengths, [torch.tensor(1.0)] * 2)
