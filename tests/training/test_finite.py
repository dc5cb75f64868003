"""A step with NaN or infinity loses no finite checkpoint: the run ends with a sentence, or saves no such weights."""

import math
import re

import pytest
import torch
from torch import nn

from data.synthetic import Synthetic
from tests.configs import checkpoint, logged, metrics, steps, stop, train
from tests.training.extensions import Linear
from training.module_state import not_finite
from training.stopping import Stopped
from training.trainer import Trainer

POISON = 133  # the sample that is read in a late step


class Poison(Synthetic):
    """One of its training images is multiplied by `factor`."""

    def __init__(self, train, factor=math.nan, **options):
        super().__init__(train, **options)
        self.factor = factor

    def __getitem__(self, index):
        sample = super().__getitem__(index)
        image = sample["image"].permute(2, 0, 1) / 255 - 0.5
        return {**sample, "image": image * self.factor if index == POISON and len(self) == 256 else image}


class Exploding(Trainer):
    """Gradients are infinite in step 6, of a finite loss."""

    def training_step(self, batch):
        loss, outputs = super().training_step(batch)
        if self.progress.step == 5:
            loss.register_hook(lambda gradient: gradient * math.inf)
        return loss, outputs


POISONED = f"data._target_={__name__}.Poison train.checkpoint_every=1"


def saved(folder):
    """Whether the weights of each checkpoint are finite, by step."""
    files = sorted((folder / "checkpoints").glob("step-*.pt"))
    weights = {int(file.stem[5:]): torch.load(file, weights_only=True)["model"].values() for file in files}
    return {step: all(bool(weight.isfinite().all()) for weight in several) for step, several in weights.items()}


@pytest.fixture(scope="module")
def poisoned_step(tmp_path_factory):
    """The step that the sample is part of."""
    folder = tmp_path_factory.mktemp("all steps")
    train(folder, POISONED, "train.stop_at_nan=false train.log_interval=1 train.epochs=1 schedule=constant")
    return min(line["step"] for line in metrics(folder) if "lr" in line and line["loss"] is None)


@pytest.mark.parametrize("every", ["1", "2"])
def test_a_step_with_nan_ends_the_run_and_the_newest_checkpoints_are_finite(tmp_path, error, poisoned_step, every):
    assert poisoned_step > 2
    with error(r"step \d+", r"train\.stop_at_nan=false"):
        train(tmp_path, POISONED, f"train.checkpoint_every={every}")
    kept = saved(tmp_path)
    interval = int(every)
    assert all(kept.values())
    assert max(kept) == (poisoned_step - 1) // interval * interval
    assert checkpoint(tmp_path)["step"] == max(kept)


@pytest.mark.parametrize(("more", "last"), [("train.clip_norm=1", 6), ("train.checkpoint_every=6", 6)])
def test_gradients_that_are_not_finite_end_the_run_at_the_next_line_or_save(tmp_path, error, more, last):
    with error(rf"step {last}\b"):
        train(tmp_path, f"trainer._target_={__name__}.Exploding train.log_interval=1", more)
    assert steps(tmp_path)[-1]["step"] == last
    assert all(saved(tmp_path).values())


class Clips(Trainer):
    """Logs the norm of its gradients, as fp16 scales them or not."""

    def optimizer_step(self, optimizer):
        self.scaler.unscale_(optimizer)  # as torch's documentation says
        super().optimizer_step(optimizer)


class Watches(Trainer):
    def optimizer_step(self, optimizer):
        self.log(norm=nn.utils.get_total_norm([weight.grad for weight in self.model.parameters()]))
        super().optimizer_step(optimizer)


@pytest.mark.parametrize("more", ["", "train.clip_norm=1"])
def test_an_optimizer_step_of_ones_own_gets_gradients_without_the_scale_of_fp16(tmp_path, more):
    norms = []
    for precision in ("fp32", "fp16"):
        settings = f"train.precision={precision} train.log_interval=1 train.max_steps=4 data.length=64 {more}"
        train(tmp_path / precision, f"trainer._target_={__name__}.Watches", settings)
        norms.append(logged(tmp_path / precision, "norm"))
        train(tmp_path / f"own-{precision}", f"trainer._target_={__name__}.Clips", settings)
    assert norms[1] == pytest.approx(norms[0], rel=0.05)


class Forgets(Trainer):
    """Does not clear the gradients. It steps as fp16 needs it, or without its scaler."""

    def optimizer_step(self, optimizer):
        self.log(norm=nn.utils.get_total_norm([weight.grad for weight in self.model.parameters()]))
        self.scaler.step(optimizer)


class StepsItself(Forgets):
    def optimizer_step(self, optimizer):
        self.scaler, scaler = torch.amp.GradScaler("cpu", enabled=False), self.scaler
        super().optimizer_step(optimizer)
        self.scaler = scaler


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_an_optimizer_step_that_steps_by_itself_gets_the_gradients_of_its_step_alone(tmp_path, precision):
    norms = []
    for trainer in (Watches, Forgets, StepsItself):
        settings = f"train.precision={precision} train.log_interval=1 train.max_steps=4 data.length=64"
        train(tmp_path / trainer.__name__, f"trainer._target_={__name__}.{trainer.__name__}", settings)
        norms.append(logged(tmp_path / trainer.__name__, "norm"))
    assert norms[0] == norms[1] == norms[2]


class Alternates(Trainer):
    """Each of its optimizers has the gradients of every second step."""

    def configure_optimizers(self):
        return [torch.optim.SGD([weight], 0.1) for weight in self.model.parameters()]

    def training_step(self, batch):
        for number, weight in enumerate(self.model.parameters()):
            weight.requires_grad_(number == self.progress.step % 2)
        return super().training_step(batch)


def test_with_fp16_an_optimizer_without_gradients_is_left_out(tmp_path):
    train(tmp_path, f"trainer._target_={__name__}.Alternates train.precision=fp16 train.max_steps=4")
    assert checkpoint(tmp_path)["step"] == 4


class Huge(Trainer):
    """Its gradients are finite, but their norm is not: clipping scales them to 0."""

    def backward(self, loss):
        super().backward(loss * 1e30)


def test_a_norm_of_gradients_is_logged_and_an_infinite_one_ends_the_run(tmp_path, error):
    train(tmp_path / "finite", "train.clip_norm=1 train.log_interval=1 train.max_steps=2")
    assert all(0 < norm < 100 for norm in logged(tmp_path / "finite", "gradient_norm"))
    with error("^gradient_norm is not finite .* by step 1:"):
        train(tmp_path / "infinite", f"trainer._target_={__name__}.Huge train.clip_norm=1")


@pytest.mark.parametrize(
    ("more", "remedy"),
    [
        (f"data._target_={__name__}.Poison", "image of this step's batch has NaN: correct the data"),
        (f"trainer._target_={__name__}.Exploding optim=adamw +optim.eps=0", "lower optim.lr, or set optim.eps=1e-8"),
        (f"model._target_={__name__}.normed_to_nan", "no step was taken before it: check the initial weights"),
        (f"trainer._target_={__name__}.Exploding optim=adamw", "check the data, or lower optim.lr"),
    ],
)
def test_the_remedy_of_a_loss_that_is_not_finite_is_that_of_what_is_seen(tmp_path, error, more, remedy):
    with error(re.escape(remedy)):
        train(tmp_path, "train.log_interval=1 train.checkpoint_every=null", more)


def test_a_run_that_goes_on_with_nan_saves_no_such_weights_and_none_of_them_is_the_best(
    tmp_path, poisoned_step, caplog
):
    train(tmp_path, POISONED, "train.stop_at_nan=false")
    kept = saved(tmp_path)
    assert max(kept) == poisoned_step - 1
    assert all(kept.values())
    assert steps(tmp_path)[-1]["step"] == 16
    unsaved = [text for text in caplog.messages if "no checkpoint is saved: NaN in" in text]
    assert unsaved and not any("is not finite" in text for text in unsaved)
    assert not (tmp_path / "checkpoints" / "best.pt").exists()
    assert "NaN" not in (tmp_path / "metrics.jsonl").read_text(), "it is null there"


def test_a_signal_after_which_nothing_could_be_saved_says_so(tmp_path, poisoned_step):
    with pytest.raises(Stopped, match="stopped by SIGTERM; not saved"):
        train(tmp_path, POISONED, "train.stop_at_nan=false", *stop(poisoned_step))
    assert max(saved(tmp_path)) == poisoned_step - 1


def normed_to_nan(num_classes, in_channels, **_):
    """A network whose last layer divides its weights by their norm, which is 0 at first."""
    network = normed(num_classes, in_channels)
    torch.nn.init.zeros_(network[-1].weight)
    torch.nn.utils.parametrizations.weight_norm(network[-1])
    return network


def test_a_loss_that_is_not_finite_before_training_is_warned_of(tmp_path, caplog):
    for network, said in ((f"{__name__}.normed", 0), (f"{__name__}.normed_to_nan", 1)):
        train(tmp_path / str(said), f"model._target_={network} train.max_steps=1 train.stop_at_nan=false")
        assert sum("is nan before training" in text for text in caplog.messages) == said


def test_fp16_leaves_out_a_step_with_nan_and_masks_may_be_infinite(tmp_path):
    masked = f"model._target_={__name__}.Masked"
    train(tmp_path, POISONED, masked, "train.precision=fp16 train.epochs=1 callbacks.ema.decay=0.9")
    assert checkpoint(tmp_path)["step"] == 8
    assert all(weight.isfinite().all() for name, weight in checkpoint(tmp_path)["model"].items() if "mask" not in name)


class Centred(torch.nn.Module):
    """A norm that assigns its buffer, in place of writing into it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, features):
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * features.detach().mean()
        return features - self.mean


def normed(num_classes, in_channels, **_):
    layers = torch.nn.Conv2d(in_channels, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Flatten(), Centred()
    return torch.nn.Sequential(*layers, torch.nn.Linear(4 * 36, num_classes))


def test_a_step_that_fp16_skips_leaves_the_statistics_of_norms_as_they_were(tmp_path):
    beyond_fp16 = f"data._target_={__name__}.Poison +data.factor=1e6 model._target_={__name__}.normed"
    train(tmp_path, beyond_fp16, "train.precision=fp16")
    assert checkpoint(tmp_path)["step"] == 16 and checkpoint(tmp_path, "best")["step"]
    assert all(bool(value.isfinite().all()) for value in checkpoint(tmp_path)["model"].values())


class Buffers(torch.nn.Sequential):
    """A network with buffers of each kind."""

    def __init__(self, num_classes, in_channels, **_):
        super().__init__(*normed(num_classes, in_channels))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.register_buffer("phases", torch.ones(2, dtype=torch.complex64))
        self.register_buffer("sparse", torch.eye(2).to_sparse())
        self.register_buffer("none", torch.zeros(0))


def state_of_bias(trainer):
    return trainer.optimizers[0].state[trainer.model[1].bias]


# What is not finite any more, by the words that name it, in a run with a running mean (EMA).
SPOILT = {
    "NaN in model.1.running_mean": lambda trainer: trainer.model[1].running_mean,
    "NaN in model.scratch": lambda trainer: trainer.model.scratch,
    "NaN in model.phases": lambda trainer: trainer.model.phases,
    "NaN in model.0.weight": lambda trainer: trainer.ema_model[0].weight[0, 0, 0],
    "infinity in exp_avg_sq of model.1.bias": lambda trainer: state_of_bias(trainer)["exp_avg_sq"],
    "infinity in weight_decay of the optimizer": lambda trainer: trainer.optimizers[0].param_groups[0],
}


class Spoils:
    """A callback after whose step 5 something is not finite."""

    def __init__(self, name):
        self.name = name

    def on_step(self, run):
        if run.progress.step == 5:
            value = SPOILT[self.name](run.trainer)
            key = "weight_decay" if isinstance(value, dict) else 0
            with torch.no_grad():
                value[key] = math.inf if "infinity" in self.name else math.nan


@pytest.mark.parametrize("name", SPOILT)
def test_what_was_finite_and_is_not_any_more_is_named_and_not_saved(tmp_path, error, name):
    spoils = f"model._target_={__name__}.Buffers +callbacks.spoils={{_target_: {__name__}.Spoils, name: '{name}'}}"
    with error(re.escape(name), "step 6"):
        # The rate is 0: a weight that becomes NaN too would be named instead.
        train(tmp_path, spoils, "train.checkpoint_every=3 optim=adamw optim.lr=0 callbacks.ema.decay=0.9")
    assert [file.name for file in (tmp_path / "checkpoints").glob("step-*.pt")] == ["step-0000003.pt"]


@pytest.mark.parametrize("value", [".nan", ".inf", "-.inf"])
def test_an_evaluation_that_is_not_finite_is_warned_of_and_never_the_best(tmp_path, caplog, value):
    scores = f"task.scores={{own: {{_target_: {__name__}.own_score, _partial_: true, value: {value}}}}}"
    for better in ("true", "false"):
        train(tmp_path / better, scores, f"task.metric=own task.higher_is_better={better} train.epochs=1")
        assert not (tmp_path / better / "checkpoints" / "best.pt").exists()
    assert caplog.text.count("test_own is not finite") == 2


def own_score(outputs, labels, value):
    return torch.full((len(labels),), value)


@pytest.mark.parametrize("key", ["resume", "init_from"])
def test_a_checkpoint_with_nan_is_refused_and_the_masks_of_a_network_are_not(tmp_path, error, key):
    masked = f"model._target_={__name__}.Masked train.epochs=1"
    train(tmp_path, masked)
    file = (tmp_path / "checkpoints" / "last.pt").resolve()
    train(tmp_path / "other", masked, f"train.{key}={file} train.epochs=2")
    state = torch.load(file, weights_only=True)
    state["model"]["bias"][0] = math.nan
    torch.save(state, file)
    with error(r"NaN in model\.bias"):
        train(tmp_path / "broken", masked, f"train.{key}={file} train.epochs=2")


class Masked(Linear):
    def add(self, **_):
        self.register_buffer("mask", torch.full((2,), -math.inf))
        self.frozen_mask = torch.nn.Parameter(torch.full((2,), -math.inf), requires_grad=False)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_a_nested_tensor_is_not_looked_into(layout):
    nested = torch.nested.nested_tensor([torch.tensor([math.nan]), torch.ones(2)], layout=layout)
    assert not_finite([("nested", nested), ("dense", torch.tensor([math.nan]))]) == {"dense": "NaN"}
