"""The doors of a run: callbacks, the training step, schedules, metrics of an epoch, samplers. As a fork uses them."""

import json
import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DistributedSampler, RandomSampler, WeightedRandomSampler

from data.errors import DataError
from data.synthetic import Synthetic
from tests.configs import has_part
from tests.test_train import linear_model as linear
from tests.test_train import metrics, train
from training.checkpoint import CheckpointError
from training.config import ConfigError
from training.datasets import open_dataset
from training.metrics import EpochMetrics, Means
from training.precision import in_format
from training.processes import Processes
from training.tasks import Task
from training.trainer import Trainer

HERE = __name__
LINEAR = [f"model._target_={HERE}.linear", "~model.width"]


# Callbacks


class Spy:
    """Remembers how it was called."""

    def __init__(self, every: int = 1) -> None:
        self.every = every
        Spy.calls = []

    def on_start(self, run) -> None:
        assert run.config.train.batch_size == 32 and run.is_main and run.folder.is_dir()
        assert run.trainer.step == 0 and run.train_loader is not None and len(run.data.train) == 256
        self.calls.append("start")

    def on_step(self, run) -> None:
        self.calls.append("step")
        if run.trainer.step % self.every == 0:
            run.log(twice=2 * run.trainer.step)

    def on_log(self, run, values) -> None:
        self.calls.append(f"log {values['step']}")

    def on_evaluation(self, run, scores) -> None:
        assert scores.keys() == {"test_loss", "test_accuracy"}
        self.calls.append("evaluation")

    def on_epoch_end(self, run) -> None:
        run.log(epochs_done=run.trainer.epoch)
        self.calls.append("epoch end")

    def on_end(self, run, summary) -> None:
        self.calls.append("end" if summary else "interrupted")
        if summary is not None:
            summary["mine"] = 7


def test_a_callback_is_called_at_each_point_and_adds_to_the_log_and_the_summary(tmp_path):
    summary = train(tmp_path, f"+callbacks.spy._target_={HERE}.Spy", "+callbacks.spy.every=2", "train.log_interval=4")
    epoch = ["step"] * 3 + ["log 4"] + ["step"] * 4 + ["log 8", "log 8", "evaluation", "epoch end", "log 8"]
    assert Spy.calls[: 2 + len(epoch) + 1] == ["start", "step", "log 1", *epoch]
    assert Spy.calls[-1] == "end" and summary["mine"] == 7
    assert json.loads((tmp_path / "summary.json").read_text())["mine"] == 7
    lines = metrics(tmp_path)
    assert [line.get("twice") for line in lines if "lr" in line][1:3] == [6.0, 14.0], "the mean since the last line"
    assert [line["epochs_done"] for line in lines if "epochs_done" in line] == [1.0, 2.0]


def test_a_callback_learns_that_a_run_was_interrupted(tmp_path, monkeypatch):
    monkeypatch.setattr(Trainer, "train_step", lambda trainer, batch: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train(tmp_path, f"+callbacks.spy._target_={HERE}.Spy")
    assert Spy.calls == ["start", "interrupted"]


# The training step


class Doubled(Trainer):
    """A step whose loss is twice the task's."""

    def training_step(self, batch):
        inputs, labels = self.inputs_and_labels(batch)
        self.log(rows=len(labels))
        return 2 * self.task.loss(self.model(*inputs), labels)


def test_a_training_step_of_a_fork_trains_and_its_loss_is_logged(tmp_path):
    for folder, options in ((tmp_path / "own", [f"trainer._target_={HERE}.Doubled", "optim.lr=0.1"]), (tmp_path, [])):
        train(folder, *LINEAR, "optim.momentum=0", "optim.nesterov=false", "optim.weight_decay=0", *options)
    own, usual = ([line for line in metrics(folder) if "lr" in line] for folder in (tmp_path / "own", tmp_path))
    assert own[0]["loss"] == pytest.approx(2 * usual[0]["loss"], rel=1e-5) and own[0]["rows"] == 32
    assert "accuracy" not in own[0] and "accuracy" in usual[0]


def test_a_step_that_uses_the_network_after_its_optimizer_uses_the_new_weights_in_any_precision(tmp_path):
    step = [f"trainer._target_={HERE}.UsesItAfter", "optim.lr=1", "schedule=constant", "train.max_steps=3"]
    assert train(tmp_path, *LINEAR, *step, "train.precision=bf16")["epochs"] == 1


class Evaluating(Trainer):
    def evaluation_step(self, batch):
        self.log(evaluated=len(batch["label"]))
        return super().evaluation_step(batch)


def test_what_an_evaluation_step_logs_is_in_the_line_of_the_evaluation_alone(tmp_path):
    train(tmp_path, *LINEAR, f"trainer._target_={HERE}.Evaluating", "train.epochs=1")
    assert [line.get("evaluated") for line in metrics(tmp_path)] == [None] * 4 + [32.0]


class TwoParts(nn.Module):
    def __init__(self, num_classes: int, in_channels: int, dropout: float = 0.5) -> None:
        super().__init__()
        self.first = linear(num_classes, in_channels)
        self.second = nn.Sequential(nn.Dropout(dropout), linear(num_classes, in_channels))

    def forward(self, images: Tensor) -> Tensor:
        return self.first(images) + self.second(images)


class Alternating(Trainer):
    """Two optimizers, which the step uses itself, in an order that a GAN could have."""

    def configure_optimizers(self):
        parts = self.model.first, self.model.second
        return torch.optim.SGD(parts[0].parameters(), 0.05, momentum=0.9), torch.optim.Adam(
            parts[1].parameters(), 0.01
        )

    def training_step(self, batch):
        (images,), labels = self.inputs_and_labels(batch)
        for part, optimizer in zip((self.model.first, self.model.second), self.optimizers, strict=True):
            loss = self.task.loss(part(images), labels)
            self.backward(loss)
            self.optimizer_step(optimizer)
        self.log(second=loss)


class Sometimes(Alternating):
    """Steps its optimizers itself in every second step; in the others it returns the sum of their losses."""

    def training_step(self, batch):
        (images,), labels = self.inputs_and_labels(batch)
        losses = [self.task.loss(part(images), labels) for part in (self.model.first, self.model.second)]
        return sum(losses) if self.step % 2 else super().training_step(batch)


class OneByHand(Alternating):
    """Adds the gradients of one loss itself, and returns the other loss."""

    def training_step(self, batch):
        (images,), labels = self.inputs_and_labels(batch)
        self.backward(self.task.loss(self.model.first(images), labels))
        return self.task.loss(self.model.second(images), labels)


class UsesItAfter(Trainer):
    """Uses the network again after its optimizer's step, as a GAN's generator uses the discriminator."""

    def training_step(self, batch):
        (images,), labels = self.inputs_and_labels(batch)
        before = self.model(images)
        self.backward(self.task.loss(before, labels))
        self.optimizer_step(self.optimizers[0])
        after = self.model(images)
        with torch.autocast("cpu", enabled=False):
            wanted = self.model(images)
        assert (after - wanted).abs().max() < 0.1 * (before - wanted).abs().max()


class Beside(Trainer):
    """Keeps a trained module and a slowly following one beside the network; its scores draw random numbers."""

    def __init__(self, *arguments) -> None:
        super().__init__(*arguments)
        torch.manual_seed(1)
        self.head = nn.Sequential(nn.Linear(10, 10), nn.Dropout(0.5), nn.Linear(10, 10))
        self.slow = nn.Linear(10, 10).requires_grad_(False)

    def configure_optimizers(self):
        return torch.optim.SGD([*self.model.parameters(), *self.head.parameters()], 0.05, momentum=0.9)

    def training_step(self, batch):
        (images,), labels = self.inputs_and_labels(batch)
        with torch.no_grad():
            for slow, fast in zip(self.slow.parameters(), self.head[0].parameters(), strict=True):
                slow.lerp_(fast, 0.1)
        assert self.head.training
        return self.task.loss(self.head(self.model(images)), labels)

    def evaluation_step(self, batch):
        (images,), labels = self.inputs_and_labels(batch)
        noise = torch.randn(len(images), 10)
        assert self.step == 0 or not self.head.training
        return {"loss": self.task.loss(self.head(self.model(images)) + self.slow(noise), labels)}


class Accumulating(Trainer):
    """Steps after each third batch, and draws from the generators of Python and numpy."""

    def training_step(self, batch):
        (images,), labels = self.inputs_and_labels(batch)
        self.backward(self.task.loss(self.model(images), labels) * (random.random() + np.random.rand()))
        if self.step % 3 == 2:
            self.optimizer_step(*self.optimizers)


class Irregular(Trainer):
    """Skips a batch, steps twice, or returns its loss."""

    def training_step(self, batch):
        (images,), labels = self.inputs_and_labels(batch)
        for _ in range(2 * (self.step % 3)):
            self.backward(self.task.loss(self.model(images), labels))
            self.optimizer_step(*self.optimizers)
        return self.task.loss(self.model(images), labels) if self.step % 4 == 3 else None


class Remembering(nn.Sequential):
    """Keeps weights of the positions for the largest batch that it has seen, as networks for texts do."""

    kept: Tensor | None = None

    def forward(self, images: Tensor) -> Tensor:
        if self.kept is None or len(self.kept) < len(images):
            self.kept = torch.ones(len(images), 1)
        return super().forward(images) * self.kept[: len(images)]


def remembering(num_classes: int, in_channels: int) -> nn.Module:
    return Remembering(*linear(num_classes, in_channels))


class Attacking(Trainer):
    """Evaluates twice as many samples as a batch has, changed along the gradient of the loss."""

    def evaluation_step(self, batch):
        images, labels = batch["image"].repeat(2, 1, 1, 1), batch["label"].repeat(2)
        with torch.enable_grad():
            images = images.clone().requires_grad_()
            (slope,) = torch.autograd.grad(self.task.loss(self.model(images), labels), images)
        return {"loss": self.task.loss(self.model(images + 0.1 * slope.sign()), labels)}


class Lightning(Trainer):
    """Returns optimizers and schedules, as a LightningModule may."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


class Unscored(Trainer):
    def evaluation_step(self, batch):
        (images,), labels = self.inputs_and_labels(batch)
        return self.task.loss(self.model(images), labels)


class Unfed(Unscored):
    def evaluation_step(self, batch):
        return {"loss": super().evaluation_step(batch)}


class Unsaved(Trainer):
    def configure_optimizers(self):
        self.scale = nn.Parameter(torch.ones(()))
        return torch.optim.SGD([*self.model.parameters(), self.scale], 0.1)


class Confusion:
    """An epoch metric without synchronisation: the smallest recall of the classes that occur."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.right, self.all = torch.zeros(10), torch.zeros(10)

    def update(self, outputs: Tensor, labels: Tensor) -> None:
        assert outputs.dtype == torch.float32
        self.all += torch.bincount(labels.cpu(), minlength=10)
        self.right += torch.bincount(labels[outputs.argmax(1) == labels].cpu(), minlength=10)

    def compute(self) -> Tensor:
        return (self.right / self.all)[self.all > 0].min()


TWO = [f"trainer._target_={HERE}.Alternating", f"model._target_={HERE}.TwoParts", "~model.width"]


@pytest.mark.parametrize("step", ["Accumulating", "Irregular"])
def test_with_fp16_a_step_may_step_its_optimizers_never_or_twice(tmp_path, step):
    train(tmp_path, *LINEAR, f"trainer._target_={HERE}.{step}", "train.precision=fp16", "train.max_steps=8")
    saved = torch.load(tmp_path / "checkpoints" / "last.pt", weights_only=True)
    assert saved["step"] == 8 and saved["scaler"]["scale"] > 0


def test_an_evaluation_may_need_gradients_and_the_network_trains_with_what_it_keeps_from_it(tmp_path):
    attacking = [f"trainer._target_={HERE}.Attacking", "task.metric=loss"]
    assert train(tmp_path, f"model._target_={HERE}.remembering", "~model.width", *attacking)["epochs"] == 2


def test_gradients_that_ddp_does_not_know_are_averaged(tmp_path, monkeypatch):
    averaged = []
    monkeypatch.setattr(Processes, "average_gradients", lambda _, weights: averaged.append(len([*weights])))
    train(tmp_path, *TWO[1:], "train.freeze=[first]", f"+callbacks.unfreezing._target_={HERE}.Unfreezing")
    assert averaged == [0] * 8 + [2] * 8, "the weight and the bias"


def test_what_a_callback_has_unfrozen_is_trained_after_a_resume_too(tmp_path):
    unfreezing = [*TWO[1:], "train.freeze=[first]", f"+callbacks.unfreezing._target_={HERE}.Unfreezing"]
    folder, weights = tmp_path / "checkpoints", []
    for steps in (9, 12):  # the second part has no epoch's end before its steps
        train(tmp_path, *unfreezing, f"train.max_steps={steps}")
        weights.append(torch.load(folder / "last.pt", weights_only=True)["model"]["first.1.weight"])
    assert torch.load(folder / "last.pt", weights_only=True)["frozen"] == []
    assert not torch.equal(*weights)


class Careless(Trainer):
    """Keeps a module in a list, and another that no optimizer trains; counts the samples that it evaluates."""

    def __init__(self, *arguments) -> None:
        super().__init__(*arguments)
        self.teachers, self.head = [nn.Linear(10, 10)], nn.Linear(10, 10)
        self.recall = Confusion()

    def training_step(self, batch):
        (images,), labels = self.inputs_and_labels(batch)
        return self.task.loss(self.head(self.model(images)), labels)

    def evaluation_step(self, batch):
        (images,), labels = self.inputs_and_labels(batch)
        self.recall.update(outputs := self.model(images), labels)
        return {"loss": self.task.loss(outputs, labels)}


class Count:
    def on_evaluation(self, run, scores) -> None:
        run.log(counted=run.trainer.recall.all.sum())


def test_modules_that_are_not_saved_or_not_trained_are_warned_of_and_own_metrics_count_no_trial(tmp_path, caplog):
    careless = [f"trainer._target_={HERE}.Careless", "task.metric=loss", f"+callbacks.count._target_={HERE}.Count"]
    train(tmp_path, *LINEAR, *careless, "train.epochs=1")
    assert "trainer: the modules in self.teachers are in no checkpoint: use nn.ModuleList" in caplog.text
    assert "trainer: no optimizer trains weight of self.head: pass it in configure_optimizers" in caplog.text
    assert [line["counted"] for line in metrics(tmp_path) if "counted" in line] == [64]


class Forgetful(Trainer):
    def training_step(self, batch):
        super().training_step(batch)


@pytest.mark.parametrize(("trainer", "warns"), [("Forgetful", True), ("Alternating", False)])
def test_a_step_that_forgets_to_return_its_loss_is_warned_of(tmp_path, caplog, trainer, warns):
    train(tmp_path, *TWO[1:], f"trainer._target_={HERE}.{trainer}", "train.epochs=1")
    assert ("training_step returned None, and called neither" in caplog.text) == warns


class Counter:
    """A metric that counts samples, and may forget to begin anew."""

    def __init__(self, forgets: bool) -> None:
        self.forgets, self.count = forgets, 0

    def update(self, outputs: Tensor, labels: Tensor) -> None:
        self.count += len(labels)

    def compute(self) -> int:
        return self.count

    def reset(self) -> None:
        self.count = 0 if self.forgets else self.count


@pytest.mark.parametrize("forgets", [True, False])
def test_a_metric_that_does_not_begin_anew_is_warned_of(tmp_path, caplog, forgets):
    train(tmp_path, f"task.metrics={{count: {{_target_: {HERE}.Counter, forgets: {forgets}}}}}", "train.epochs=1")
    assert ("task.metrics.count: its reset() changes nothing" in caplog.text) != forgets


class EachItsOwn(Trainer):
    """Each process trains a part of its own, and counts its steps in a buffer; evaluates if all have the same."""

    def __init__(self, *arguments) -> None:
        super().__init__(*arguments)
        self.steps = nn.BatchNorm1d(1, affine=False)

    def training_step(self, batch):
        (images,), labels = self.inputs_and_labels(batch)
        assert len(set(self.processes.gather(self.steps.running_mean.item()))) == 1, "as the main process has it"
        part = (self.model.first, self.model.second)[self.processes.rank]
        self.backward(self.task.loss(part(images), labels))
        self.optimizer_step(*self.optimizers)
        self.steps.running_mean += self.processes.rank

    def evaluation_step(self, batch):
        if self.step:
            tensors = [*self.model.parameters(), *self.steps.buffers()]
            ours, *others = self.processes.gather([tensor.tolist() for tensor in tensors])
            assert all(one == ours for one in others)
        return super().evaluation_step(batch)


class Mapped(Task):
    """For networks that return a dict."""

    def loss(self, outputs, labels):
        return nn.functional.cross_entropy(outputs["logits"], labels)

    def scores(self, outputs, labels):
        return {}


class ReturnsDict(nn.Sequential):
    def forward(self, images):
        return {"logits": super().forward(images)}


def returns_dict(num_classes: int, in_channels: int) -> nn.Module:
    return ReturnsDict(*linear(num_classes, in_channels))


def test_a_task_of_a_fork_may_take_outputs_of_any_kind(tmp_path):
    mapped = [
        f"model._target_={HERE}.returns_dict",
        "~model.width",
        "task=own",
        f"task._target_={HERE}.Mapped",
        "task.label=label",
        "+model.num_classes=10",
    ]
    assert train(tmp_path, *mapped, "task.metric=loss")["test_loss"] < 2.3


class Shuffled:
    """Orders its samples itself, with the global generators."""

    def __init__(self, train: bool) -> None:
        self.order = random.sample(range(99), 99), np.random.permutation(99).tolist(), torch.randperm(99).tolist()

    def __len__(self) -> int:
        return 99

    def __getitem__(self, index: int):
        return {"image": torch.zeros(1, 8, 8), "label": 0}


def test_a_dataset_draws_the_same_for_training_and_testing_in_every_process():
    section = {"_target_": f"{HERE}.Shuffled"}
    one, same, other = (open_dataset(section, *of).order for of in ((True, 1), (False, 1), (True, 2)))
    assert one == same and all(mine != theirs for mine, theirs in zip(one, other, strict=True))


class Buffers(nn.Sequential):
    """Has a buffer of positions and one that is a mask, which have no mean."""

    def __init__(self, *layers) -> None:
        super().__init__(*layers)
        self.register_buffer("positions", torch.arange(100))
        self.register_buffer("mask", torch.full((3, 3), -torch.inf).triu(1))


def buffers(num_classes: int, in_channels: int) -> nn.Module:
    return Buffers(*linear(num_classes, in_channels))


class Rate:
    """Sets a learning rate that is a number of numpy's."""

    def on_step(self, run) -> None:
        for group in run.trainer.optimizers[0].param_groups:
            group["lr"] = np.float64(0.01)


def test_a_checkpoint_with_numpys_numbers_and_buffers_that_have_no_mean_can_be_read(tmp_path):
    settings = [f"model._target_={HERE}.buffers", "~model.width", f"+callbacks.rate._target_={HERE}.Rate"]
    train(tmp_path, *settings, *(["train.ema=0.999"] if has_part("ema") else []), "train.epochs=5")
    saved = torch.load(tmp_path / "checkpoints" / "last.pt", weights_only=True)
    assert saved["optimizers"][0]["param_groups"][0]["lr"] == 0.01
    if has_part("ema"):
        for name in ("positions", "mask"):
            assert torch.equal(saved["ema"][f"module.{name}"], saved["model"][name])


@pytest.mark.parametrize(("changed", "keeps"), [("train.log_interval=1", True), ("train.epochs=3", False)])
def test_a_resume_keeps_a_rate_that_a_callback_has_set_unless_the_schedule_changes(tmp_path, changed, keeps):
    settings = [*LINEAR, "schedule=constant"]
    train(tmp_path / "one", *settings, f"+callbacks.rate._target_={HERE}.Rate")
    saved = tmp_path / "one" / "checkpoints" / "step-0000008.pt"
    train(tmp_path / "two", *settings, changed, f"train.resume={saved}")
    assert ([line["lr"] for line in metrics(tmp_path / "two") if "lr" in line][-1] == 0.01) is keeps


class Unreadable(nn.Linear):
    def get_extra_state(self):
        return Path("here")


def unreadable(num_classes: int, in_channels: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), Unreadable(64 * in_channels, num_classes))


def test_the_first_checkpoint_says_what_could_not_be_read_again(tmp_path):
    with pytest.raises(CheckpointError, match="could not be read again: use tensors, numbers, texts"):
        train(tmp_path, f"model._target_={HERE}.unreadable", "~model.width", "train.max_steps=2")


class Centred(nn.Module):
    """A loss with a buffer that follows the outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(10))

    def forward(self, outputs: Tensor, labels: Tensor) -> Tensor:
        with torch.no_grad():
            self.centre.lerp_(outputs.mean(0), 0.1)
        return nn.functional.cross_entropy(outputs - self.centre, labels)


def test_classes_in_another_order_are_refused_at_a_resume(tmp_path):
    train(tmp_path, *LINEAR, "train.max_steps=2")
    saved = tmp_path / "checkpoints" / "step-0000002.pt"
    state = torch.load(saved, weights_only=True)
    state["data_spec"]["classes"].reverse()
    torch.save(state, saved)
    with pytest.raises(ConfigError, match="in the same order"):
        train(tmp_path / "other", *LINEAR, f"train.resume={saved}", "train.max_steps=4")


class Unfreezing:
    """Trains the whole network from the second epoch on."""

    def on_epoch_end(self, run) -> None:
        run.trainer.model.requires_grad_(True)


class Last:
    """Keeps the weights of the run's end, which it gets after the report."""

    def on_end(self, run, summary) -> None:
        Last.weights = {name: value.clone() for name, value in run.trainer.model.state_dict().items()}
        summary["norm"] = Last.weights["1.weight"].norm()


def test_a_callback_gets_the_runs_own_weights_after_measurements_too_and_may_add_a_tensor_to_the_summary(tmp_path):
    measured = ["timing.trial_seconds=0.05"] if has_part("report") else []
    train(tmp_path, *LINEAR, *measured, f"+callbacks.last._target_={HERE}.Last", "train.max_steps=4")
    saved = torch.load(tmp_path / "checkpoints" / "last.pt", weights_only=True)["model"]
    assert all(torch.equal(saved[name], value) for name, value in Last.weights.items())
    assert json.loads((tmp_path / "summary.json").read_text())["norm"] == pytest.approx(
        saved["1.weight"].norm().item()
    )


# Parts of a batch


class WithName(Synthetic):
    def __getitem__(self, index):
        return {**super().__getitem__(index), "name": str(index), "about": {"number": index, "source": "web"}}


def collate_with_size(samples):
    return {**torch.utils.data.default_collate(samples), "size": torch.tensor(len(samples))}


def test_lists_of_the_batchs_length_are_split_and_anything_else_is_refused(tmp_path):
    data = f"data._target_={HERE}.WithName"
    train(tmp_path / "list", data, "train.accumulate=3", "train.max_steps=1")
    size = "data.collate={_target_: " + HERE + ".collate_with_size}"
    with pytest.raises(ConfigError, match=r"accumulate=2: the batch's field 'size' is no tensor or list with an item"):
        train(tmp_path, data, size, "train.accumulate=2")


# Schedules


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        (["schedule=constant"], [0.25] * 16),
        (["schedule=step", "schedule.step_size=1", "schedule.gamma=0.5"], [0.25] * 8 + [0.125] * 8),
        (["schedule._target_=torch.optim.lr_scheduler.CosineAnnealingLR"], None),
        (["schedule=one_cycle"], None),
    ],
)
def test_the_learning_rate_follows_its_schedule(tmp_path, schedule, rates):
    train(tmp_path, *LINEAR, "train.log_interval=1", *schedule)
    found = [line["lr"] for line in metrics(tmp_path) if "lr" in line]
    if rates is None:  # of a step's line, the rate of the next step: at the end of the run it is near zero
        assert max(found) == pytest.approx(0.25, rel=0.05) and found[-1] < 0.01
    else:
        assert found == pytest.approx(rates)


class Scale:
    def __init__(self, optimizer) -> None: ...


# Metrics of an epoch


def with_others(*gathered: object) -> Processes:
    """One of two processes; `gathered` is what the other one gives to each `gather`."""
    processes, others = Processes(torch.device("cpu")), list(gathered)
    processes.world_size, processes.gather = 2, lambda value=None: [value, others.pop(0)]
    return processes


def test_a_metric_without_its_own_synchronisation_sees_the_batches_of_all_processes():
    outputs, labels = torch.eye(10), torch.arange(10)
    wrong = torch.eye(10).roll(1, 0)
    for others, worst in (([(wrong, labels)], 0.5), ([], 1.0)):  # the other process may have no batch
        collected = EpochMetrics({"worst": {"_target_": f"{HERE}.Confusion"}}, with_others(others))
        collected.update(outputs, labels)
        assert collected.compute() == {"worst": worst}


def test_means_are_right_if_a_process_has_no_batch():
    means = Means(with_others({"loss": (6.0, 2), "only_there": (1.0, 1)}, {}))
    assert means.read() == {"loss": 3.0, "only_there": 1.0}
    means.add(4, {"loss": torch.tensor(2.0), "right": torch.tensor([1.0, 0.0, 0.0, 1.0])})
    assert means.read() == {"loss": 2.0, "right": 0.5}


def test_a_batch_has_as_many_samples_as_labels_or_inputs_whatever_comes_first():
    task = Task(Synthetic(train=True))
    assert task.count({"edges": torch.zeros(2, 9), "image": torch.zeros(5, 3), "label": torch.zeros(4)}) == 4
    assert task.count({"step": torch.zeros(()), "image": [torch.zeros(3)] * 5}) == 5
    assert task.count({"step": torch.zeros(()), "other": torch.zeros(6)}) == 1


def test_a_network_for_volumes_has_no_channels_last_format():
    network = in_format(nn.Sequential(nn.Conv2d(2, 2, 3), nn.Conv3d(2, 2, 3)), torch.channels_last)
    assert network[0].weight.is_contiguous(memory_format=torch.channels_last) and network[1].weight.is_contiguous()


def test_a_score_may_have_any_shape():
    means = Means(Processes(torch.device("cpu")))
    means.add(4, {"one": torch.tensor([3.0]), "pixels": torch.tensor([[0.0, 1.0]] * 4)})
    assert means.read() == {"one": 3.0, "pixels": 0.5}


# Samplers


SAMPLER = f"sampler._target_={HERE}.weighted"


def weighted(dataset) -> WeightedRandomSampler:
    """Draws only samples of class 3."""
    weights = [float(label == 3) for label in (dataset[index]["label"] for index in range(len(dataset)))]
    return WeightedRandomSampler(weights, 64)


class Counted(Trainer):
    seen: list[int] = []  # noqa: RUF012

    def training_step(self, batch):
        Counted.seen += batch["label"].tolist()
        return super().training_step(batch)


class Pairs:
    """A batch sampler of pairs of neighbours."""

    def __init__(self, dataset, seed: int) -> None:
        self.batches = len(dataset) // 2

    def __len__(self) -> int:
        return self.batches

    def __iter__(self):
        return iter([[2 * number, 2 * number + 1] for number in range(self.batches)])


class Uneven(Pairs):
    """Gives rank 1 a batch less than rank 0."""

    def __init__(self, dataset, seed: int, rank: int, world_size: int) -> None:
        super().__init__(dataset, seed)
        self.batches -= rank


@pytest.mark.parametrize("loader", ["prefetch", "torch", "resident"])
def test_a_sampler_decides_which_samples_train(tmp_path, loader):
    Counted.seen = []
    sampler = [SAMPLER, "train.last_batch=keep", f"trainer._target_={HERE}.Counted"]
    summary = train(tmp_path, *sampler, f"loader={loader}", "train.epochs=3")
    assert set(Counted.seen) == {3} and len(Counted.seen) == 3 * 64
    assert summary["epochs"] == 3 and max(line["step"] for line in metrics(tmp_path)) == 6


def distributed(dataset) -> DistributedSampler:
    return DistributedSampler(dataset, num_replicas=2, rank=0)


def drawing(dataset) -> RandomSampler:
    return RandomSampler(dataset, generator=torch.Generator())


def as_tuple(samples) -> tuple:
    return tuple(samples[0].values())


class PerSample(Trainer):
    """Forgets the mean."""

    def training_step(self, batch) -> Tensor:
        return super().training_step(batch).expand(len(batch["label"]))


class Detached(Trainer):
    def training_step(self, batch) -> Tensor:
        return super().training_step(batch).detach()


class NoSuper(Trainer):
    def __init__(self, *_: object) -> None:
        """Forgets super().__init__."""


class Misspelt:
    def on_step(self, run) -> None:
        """Is called."""

    def on_epoch_ended(self, run) -> None:
        """Is not."""


def test_a_misspelt_method_of_a_callback_is_warned_of(tmp_path, caplog):
    train(tmp_path, f"+callbacks.mine._target_={HERE}.Misspelt", "train.max_steps=2")
    assert "callbacks.mine: on_epoch_ended is not called: the methods are on_start, on_step" in caplog.text


def test_a_run_that_goes_on_in_another_folder_says_where_best_pt_is(tmp_path, caplog):
    train(tmp_path / "a", "train.epochs=1")
    assert "stays there" not in caplog.text
    train(tmp_path / "b", "train.epochs=2", f"train.resume={tmp_path / 'a'}")
    assert f"{tmp_path / 'a' / 'checkpoints' / 'best.pt'} stays there: this folder's best.pt" in caplog.text


def test_a_generator_that_a_dataset_keeps_is_warned_of(tmp_path, caplog):
    train(tmp_path, f"data._target_={HERE}.Drawing", "train.max_steps=2")
    assert "Drawing.random is a random generator: its numbers depend on the number of workers" in caplog.text


class Drawing(Synthetic):
    def __init__(self, train: bool, **images) -> None:
        super().__init__(train, **images)
        self.random = np.random.default_rng(0)


class Overwriting(Trainer):
    """Logs a number under a name that each line has already."""

    def training_step(self, batch) -> Tensor:
        self.log(step=3)
        return super().training_step(batch)


class Sized(Synthetic):
    """Has a list with a number for each sample; it is the sample's label."""

    read_batch = None

    def __init__(self, train: bool, **images) -> None:
        super().__init__(train, **images)
        self.sizes, self.wanted = [index % 10 for index in range(len(self))], 3


def of_wanted_size(dataset):
    assert len(dataset.sizes) == len(dataset)
    return [number for number, size in enumerate(dataset.sizes) if size == dataset.wanted]


@pytest.mark.parametrize("fraction", [0, 0.25])
def test_a_sampler_sees_the_attributes_of_the_forks_dataset_also_with_a_validation_set(tmp_path, fraction):
    Counted.seen = []
    sampler = [f"sampler._target_={HERE}.of_wanted_size", "train.last_batch=keep", f"data.val_fraction={fraction}"]
    train(tmp_path, f"data._target_={HERE}.Sized", *sampler, f"trainer._target_={HERE}.Counted", "train.epochs=1")
    assert set(Counted.seen) == {3} and 15 <= len(Counted.seen) <= 26


REGRESSION = ["task=regression", f"data._target_={HERE}.Numbered"]
WRONG = [f"task.metrics={{wrong: {{_target_: {HERE}.Error}}}}", "task.metric=wrong"]
ADDS = "+callbacks.mine._target_=torch.nn.ReLU"


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ([ADDS], r"callbacks\.mine: ReLU needs at least one of the methods on_start, "),
        ([*TWO, "train.accumulate=2"], r"accumulate=2: Alternating\.training_step steps its optimizers itself"),
        ([f"schedule._target_={HERE}.Scale"], r"schedule: .*returned a Scale: return a subclass of torch"),
        ([f"trainer._target_={HERE}.Unsaved"], r"Unsaved\.configure_optimizers trains a parameter that checkpoints"),
        ([f"trainer._target_={HERE}.Lightning"], r"configure_optimizers returned \(\[(.|\n)*: return an optimizer"),
        ([f"trainer._target_={HERE}.Unscored"], r"Unscored\.evaluation_step returned tensor.*: return the scores"),
        (
            [f"trainer._target_={HERE}.Unfed", *WRONG],
            r"task\.metrics\.wrong got no outputs: call self\.metrics\.update",
        ),
        (["trainer._target_=torch.nn.Identity"], r"torch\.nn\.Identity is no subclass of training\.trainer\.Trainer"),
        (["schedule._target_=torch.optim.lr_scheduler.ReduceLROnPlateau"], "a callback's on_evaluation can step one"),
        (
            [f"sampler._target_={HERE}.distributed", "train.last_batch=keep"],
            "DistributedSampler's indices would be split among the processes again",
        ),
        (
            [f"sampler._target_={HERE}.drawing", "train.last_batch=keep"],
            r"sampler: RandomSampler\.generator is a random generator, and the loader cannot save its state",
        ),
        (["schedule.every=batch"], r"schedule\.every=batch: it is one of step, epoch"),
        (["task.metrics={f: {_target_: torch.nn.Flatten}}"], r"task\.metrics\.f: Flatten has no update\(\): add"),
        ([f"trainer._target_={HERE}.PerSample"], r"trainer: the loss has the shape \(32,\): return its mean"),
        (
            [f"trainer._target_={HERE}.Detached"],
            r"trainer: the loss has no gradient: it was detached, or needs no weight",
        ),
        ([f"trainer._target_={HERE}.NoSuper"], r"trainer: NoSuper\.__init__ has to call super"),
        ([SAMPLER], r"sampler decides which samples an epoch has: add train\.last_batch=keep, or drop"),
        ([SAMPLER, "train.last_batch=keep", "batch_sampler._target_=my.B"], "sampler and batch_sampler are both set"),
        (["train.batch_size=300"], r"train\.batch_size=300: there are only 256 training samples"),
        ([f"+data.collate._target_={HERE}.as_tuple"], r"data\.collate returned a tuple: return a dict of the batch's"),
        ([f"trainer._target_={HERE}.Overwriting"], r"log\(step=...\): metrics.jsonl has that already"),
    ],
)
def test_a_part_of_a_fork_that_cannot_be_used_is_refused_in_a_sentence(tmp_path, overrides, sentence):
    with pytest.raises((ConfigError, DataError), match=sentence):
        train(tmp_path, *overrides)


# Samples without labels, fields of any name


def test_torchmetrics_are_metrics_of_an_epoch(tmp_path):
    pytest.importorskip("torchmetrics")
    about = "_target_: torchmetrics.F1Score, task: multiclass, num_classes: 10, average: macro"
    both = f"both: {{_target_: {HERE}.collection}}"
    summary = train(tmp_path, f"task.metrics={{f1: {{{about}}}, {both}}}", "task.metric=f1", "train.epochs=4")
    assert summary["score"] == "test_f1" and 0 < summary["test_f1"] <= 1 + 1e-6
    assert summary["test_both_MulticlassAccuracy"] == pytest.approx(summary["test_accuracy"])


def collection():
    from torchmetrics import MetricCollection
    from torchmetrics.classification import MulticlassAccuracy

    return MetricCollection([MulticlassAccuracy(10, average="micro")])


def pairs(outputs: Tensor, labels: Tensor) -> Tensor:
    return (outputs @ outputs.T).logsumexp(1).mean() - outputs.diagonal().mean()


@pytest.mark.parametrize(
    ("override", "warned"),
    [
        (f"task.loss={{_target_: {HERE}.pairs}}", "changes what is trained: the loss of a batch is not"),
        ("task.label_smoothing=0.2", ""),
    ],
)
def test_a_loss_over_pairs_that_is_computed_in_parts_is_warned_of(tmp_path, caplog, override, warned):
    train(tmp_path, *LINEAR, override, "train.accumulate=2", "train.max_steps=1")
    assert bool(warned) == ("train.accumulate=2" in caplog.text) and warned in caplog.text


# What is better, and what metrics get


def square(outputs: Tensor, labels: Tensor) -> Tensor:
    return (outputs - labels).square()


class Several(dict):
    """Metrics by name, as a MetricCollection of torchmetrics is one."""

    def __init__(self) -> None:
        super().__init__(entropy=SimpleNamespace(higher_is_better=False))

    def update(self, outputs: Tensor, labels: Tensor) -> None:
        pass

    def compute(self) -> dict[str, float]:
        return {"entropy": 1.0}

    def reset(self) -> None:
        pass


class Error:
    """A metric of which lower is better, as it says itself."""

    higher_is_better = False

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.total = 0.0

    def update(self, outputs: Tensor, labels: Tensor) -> None:
        self.total += float((outputs - labels).square().sum())

    def compute(self) -> float:
        return self.total


@pytest.mark.parametrize(
    ("overrides", "is_lower"),
    [
        ([], False),
        ([*REGRESSION, *WRONG], True),
        ([*REGRESSION, "task.metric=mse", "task.higher_is_better=true"], False),
        ([*REGRESSION, f"task.scores={{error_rate: {{_target_: {HERE}.square}}}}", "task.metric=error_rate"], True),
        ([*REGRESSION, f"task.scores={{logloss: {{_target_: {HERE}.square}}}}", "task.metric=logloss"], True),
        ([*REGRESSION, f"task.scores={{power: {{_target_: {HERE}.square}}}}", "task.metric=power"], False),
        ([*REGRESSION, f"task.scores={{MSE: {{_target_: {HERE}.square}}}}", "task.metric=MSE"], True),
        ([*REGRESSION, f"task.metrics={{all: {{_target_: {HERE}.Several}}}}", "task.metric=all_entropy"], True),
    ],
)
def test_whether_a_higher_score_is_better_follows_from_the_metric(tmp_path, overrides, is_lower):
    summary = train(tmp_path, *LINEAR, *overrides, "train.max_steps=2")
    assert summary["lower_is_better"] == is_lower


class Numbered(Synthetic):
    """Its labels are plain numbers (), which a regression compares with outputs (B, 1)."""

    def __getitem__(self, index: int) -> dict:
        sample = super().__getitem__(index)
        return {**sample, "label": float(sample["label"])}

    read_batch = None


def test_a_metric_gets_labels_of_the_outputs_shape():
    metrics_ = EpochMetrics({"wrong": {"_target_": f"{HERE}.Error"}}, Processes(torch.device("cpu")))
    metrics_.update(torch.tensor([[1.0], [2.0]]), torch.tensor([1.0, 4.0]))
    assert metrics_.compute() == {"wrong": 4.0}
    outputs = torch.zeros(1, 3, 2, 2)
    with pytest.raises(RuntimeError, match="size of tensor"):
        metrics_.update(outputs, torch.zeros(1, 2, 2, 3))
