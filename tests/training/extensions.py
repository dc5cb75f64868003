"""What a fork adds to the template, as small as it can be: datasets, networks, steps, metrics, samplers, callbacks.

Runs of the tests name these classes in their configs.
"""

import os
import signal
from enum import Enum

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import IterableDataset, get_worker_info

from data.errors import DataError
from training.trainer import Trainer


class Images:
    """Samples (image, label): uint8 (8, 8, 3), dark or light, without mean, std or labels. It is not random."""

    classes = ("dark", "light")

    def __init__(self, train, length=64, test_length=32, **_):
        self.train = train
        self.length = length if train else test_length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return torch.full((8, 8, 3), 200 * (index % 2), dtype=torch.uint8), index % 2


class Curriculum(Images):
    """Images that are drawn anew in each epoch, 48 more than in the one before."""

    noise = torch.zeros(4096)

    def set_epoch(self, epoch):
        self.noise = torch.rand(4096)
        self.length = 48 * (1 + epoch) if self.train else self.length

    def __getitem__(self, index):
        image, label = super().__getitem__(index)
        return image + (50 * self.noise[index]).to(torch.uint8) if self.train else image, label


class Faulty(Images):
    """`fault` names what is wrong or unusual in the samples."""

    def __init__(self, train, fault, **options):
        super().__init__(train, **options)
        self.fault = fault
        self.classes = () if fault == "no classes" else Images.classes
        self.length *= fault != "empty"

    def __getitem__(self, index):
        image, label = super().__getitem__(index)
        if index in {"unreadable": (0, 1), "one unreadable": (37,), "all unreadable": range(64)}.get(self.fault, ()):
            raise DataError(f"{index}.png is missing")
        faults = {
            "floats": (image.permute(2, 0, 1) / 255, label),
            "a wrong label": (image, label + 1),
            "a mask": (image, torch.full((8, 8), label)),
            "three fields": (image, label, 7),
            "a dict": (image, {"class": label}),
            "no label": (image, None),
            "other test images": (image if self.train else image[:6], label),
            "grey test images": (image if self.train else image[..., :1], label),
            "no channel": (image[..., 0], label),
            "a picture": (Image.fromarray(image.numpy()), label),
            "negative strides": (image.numpy()[::-1], label),
            "doubles": (image.permute(2, 0, 1).double(), label),
            "integers": (image, torch.tensor([1 - label, label])),
            "shares": (image, torch.tensor([0.9 - 0.8 * label, 0.1 + 0.8 * label])),
            "a wrong label later": (image, label + 5 * (index == 37)),
            "a field of some": {"image": image, "label": label} | ({"age": 3} if index == 0 else {}),
        }
        return faults.get(self.fault, (image, label))


class Stream(IterableDataset):
    """A stream of random images, whose labels are their numbers modulo 10."""

    classes = tuple(range(10))
    mean = (0.5,) * 3
    std = (0.25,) * 3

    def __init__(self, train, length=203, **_):
        self.length = length if train else 50

    def __iter__(self):
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        for number in range(first, self.length, step):
            yield (200 * torch.rand(8, 8, 3) + 5 * (number % 10)).to(torch.uint8), number % 10


def linear(num_classes, in_channels, **_):
    return nn.Sequential(nn.Flatten(), nn.Linear(8 * 8 * in_channels, num_classes))


class Linear(nn.Linear):
    """A network of one layer, and what a subclass adds. Names what it takes: no other options are given to it."""

    def __init__(self, num_classes, in_channels, image_size=8, **options):
        super().__init__(in_channels * image_size**2, num_classes)
        self.add(**options)

    def add(self, **_):
        pass

    def forward(self, images):
        return super().forward(images.flatten(1))


class FirstBatch(Linear):
    """Scales by a buffer that the first batch fills, which follows the next ones."""

    def add(self, **_):
        self.register_buffer("scale", None)

    def forward(self, images):
        if self.scale is None:
            self.scale = images.detach().std(0).add(1)
        if self.training:
            self.scale = self.scale.lerp(images.detach().std(0).add(1), 0.1)
        return super().forward(images / self.scale)


def darkened(images):
    """A transform of a batch, which draws from torch's generator."""
    shares = torch.rand(len(images), 1, 1, 1)
    return images * shares.to(images.device)


class Mode(str, Enum):
    FIRST = "first"
    SUM = "sum"


class TwoParts(nn.Module):
    """Two networks, one with dropout, and a buffer; the sum of their outputs, or that of the first."""

    def __init__(self, num_classes, in_channels, dropout=0.5, sums=True, **_):
        super().__init__()
        self.sums = sums
        self.mode = Mode.FIRST
        self.first = linear(num_classes, in_channels)
        self.second = nn.Sequential(nn.Dropout(dropout), linear(num_classes, in_channels))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, images):
        self.steps += self.training
        assert isinstance(self.mode, Mode)
        return self.first(images) + self.second(images) if self.sums else self.first(images)


class EveryOther(Trainer):
    def train_step(self, batch):
        if self.progress.step % 2:
            super().train_step(batch)


class Doubled(Trainer):
    """A loss that is twice the task's."""

    def training_step(self, batch):
        inputs, labels = self.inputs_and_labels(batch)
        assert self.model.training
        self.log(rows=len(labels))
        outputs = self.model(*inputs)
        return 2 * self.task.loss(outputs, labels), outputs

    def evaluation_step(self, batch):
        assert not self.model.training
        self.log(evaluated=len(batch["label"]))
        return super().evaluation_step(batch)


class Unaveraged(Trainer):
    """Has a step of its own that leaves out the gradients of the other processes."""

    def train_step(self, batch):
        loss, _ = self.training_step(batch)
        self.backward(loss)
        self.optimizer_step(self.optimizers[0])


class Alternating(Trainer):
    """Trains two networks in turn, each with its optimizer, as a GAN does: `train_step` as a whole."""

    def configure_optimizers(self):
        first = self.model.first.parameters()
        second = self.model.second.parameters()
        return [SGD(first, 0.05, momentum=0.9), Adam(second, 0.01)]

    def train_step(self, batch):
        (images,), labels = self.inputs_and_labels(batch)
        for part, optimizer in zip((self.model.first, self.model.second), self.optimizers, strict=True):
            with self.autocast:
                loss = self.task.loss(part(images), labels)
            self.backward(loss)
            self.processes.average_gradients(part.parameters())
            self.optimizer_step(optimizer)
            self.log(**{"second" if part is self.model.second else "first": loss})


class Beside(Trainer):
    """Keeps a trained module and a slowly following one beside the network; its scores draw random numbers."""

    def configure_optimizers(self):
        self.head = nn.Sequential(nn.Linear(10, 10), nn.Dropout(0.5), nn.Linear(10, 10))
        self.slow = nn.Linear(10, 10).requires_grad_(False)
        return SGD([*self.model.parameters(), *self.head.parameters()], 0.05, momentum=0.9)

    def training_step(self, batch):
        (images,), labels = self.inputs_and_labels(batch)
        with torch.no_grad():
            for slow, fast in zip(self.slow.parameters(), self.head[0].parameters(), strict=True):
                slow.lerp_(fast, 0.1)
        outputs = self.head(self.model(images))
        return self.task.loss(outputs, labels), outputs

    def evaluation_step(self, batch):
        (images,), labels = self.inputs_and_labels(batch)
        outputs = self.head(self.model(images)) + self.slow(torch.randn(len(images), 10))
        return {"loss": self.task.loss(outputs, labels)}


class Signs(Optimizer):
    """Steps by the sign of the gradient. Keeps a number in its groups, as Prodigy does."""

    def __init__(self, params, lr, weight_decay=0.0, **_):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "taken": 0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["taken"] += 1
            for weight in group["params"]:
                if weight.grad is not None:
                    weight.sub_(weight.grad.sign(), alpha=group["lr"] / group["taken"])


class Worst:
    """The smallest recall of the classes that occur."""

    higher_is_better = True

    def __init__(self):
        self.reset()

    def reset(self):
        self.right = torch.zeros(10)
        self.all = torch.zeros(10)

    def update(self, outputs, labels):
        assert outputs.dtype == torch.float32
        self.all += torch.bincount(labels.cpu(), minlength=10)
        self.right += torch.bincount(labels[outputs.argmax(1) == labels].cpu(), minlength=10)

    def sync(self, gather):
        self.right = sum(gather(self.right))
        self.all = sum(gather(self.all))

    def compute(self):
        return (self.right / self.all)[self.all > 0].min()


class Several(Worst):
    """Returns several numbers, a tensor and a text, as torchmetrics' MeanAveragePrecision does."""

    def compute(self):
        return {"worst": super().compute(), "map": np.float64(0.5), "classes": torch.arange(10), "name": "mine"}


class Pairs:
    """A batch sampler of neighbours, in an order that depends on the seed and the epoch."""

    def __init__(self, dataset, seed, rank, world_size):
        self.pairs = len(dataset) // 2
        self.seed = seed
        self.epoch = 0
        self.mine = slice(rank, None, world_size)

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return len(range(self.pairs)[self.mine])

    def __iter__(self):
        order = np.random.default_rng([self.seed, self.epoch]).permutation(self.pairs)
        return iter([[2 * int(pair), 2 * int(pair) + 1] for pair in order[self.mine]])


class Lying:
    """A sampler of `gives` samples that says it has `says`."""

    def __init__(self, gives, says):
        self.gives = gives
        self.says = says

    def __len__(self):
        return self.says

    def __iter__(self):
        return iter(range(self.gives))


class Endless(Lying):
    __len__ = None  # type: ignore[assignment]


class OnlyOnce(Lying):
    """Gives samples in epoch 0 alone."""

    def set_epoch(self, epoch):
        self.gives = 0 if epoch else self.says


def lying(gives, says, kind="Lying"):
    return f"sampler._target_={__name__}.{kind} +sampler.gives={gives} +sampler.says={says}"


class Spy:
    """Records its calls, and has a state."""

    def __init__(self):
        self.steps = 0
        Spy.calls = []

    def on_start(self, run):
        assert run.config.train.batch_size == 32 and run.is_main and run.folder.is_dir()
        assert len(run.data.train) == 256 and run.train_loader is not None
        self.calls.append("start")

    def on_step(self, run):
        self.steps += 1
        self.calls.append("step")
        run.log(twice=2 * run.progress.step)

    def on_log(self, run, values):
        self.calls.append(f"log {values['step']}")

    def on_evaluation(self, run, scores):
        assert {"test_loss", "test_accuracy"} <= scores.keys()
        self.calls.append("evaluation")

    def on_epoch_end(self, run):
        run.log(epochs_done=run.progress.epoch)
        self.calls.append("epoch end")

    def on_end(self, run, summary):
        self.calls.append("interrupted" if summary is None else "end")
        if summary is not None:
            summary["counted_steps"] = self.steps

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.calls.append(f"loaded {state['steps']}")
        self.steps = state["steps"]


class Looks:
    """Looks at the next training batch wherever it is called."""

    def on_start(self, run):
        (batch,) = run.batches_to_look_at(1)
        assert len(batch["label"])

    def on_step(self, run):
        if run.progress.step % 3 == 0 or run.progress.step == 8:  # the last of an epoch too
            self.on_start(run)

    def on_evaluation(self, run, scores):
        self.on_start(run)


class Stop:
    """Stops the run once, after a step or its evaluation, by a signal or an error.

    Tests set `Stop.at` and `Stop.how`; programs get them as arguments.
    """

    at = 0
    how = ""

    def __init__(self, at=None, how=""):
        if at is not None:
            Stop.at = at
            Stop.how = how

    def on_step(self, run):
        if run.progress.step == Stop.at and Stop.how != "evaluation":
            self._stop()

    def on_evaluation(self, run, scores):
        if run.progress.step >= Stop.at > 0 and Stop.how == "evaluation":
            self._stop()

    def _stop(self):
        how = Stop.how
        Stop.at = 0
        Stop.how = ""
        if not how.startswith("SIG"):
            raise ZeroDivisionError(how)
        os.kill(os.getpid(), getattr(signal, how))


class Plateau:
    """Lowers the learning rate of the first optimizer after each evaluation, as the score never gets better."""

    def on_start(self, run):
        self.schedule = ReduceLROnPlateau(run.trainer.optimizers[0], factor=0.5, patience=0)

    def on_evaluation(self, run, scores):
        self.schedule.step(1.0)

    def state_dict(self):
        return self.schedule.state_dict()

    def load_state_dict(self, state):
        self.schedule.load_state_dict(state)


class Leaves:
    """Looks for the checkpoint in each process, and disconnects it at the end."""

    def on_epoch_end(self, run):
        assert (run.folder / "checkpoints" / "best.pt").exists()

    def on_end(self, run, summary):
        run.processes.gather()  # none is waiting for another
        torch.distributed.destroy_process_group()


class OneRank:
    """The process of rank 1 alone changes something: in on_start, on_step or on_epoch_end."""

    def __init__(self, what, at):
        self.what = what
        setattr(self, at, self.alter)

    def alter(self, run):
        network = run.trainer.model
        if run.processes.rank == 0:
            return
        elif self.what == "trained":
            network.first.requires_grad_(False)
        elif self.what == "dropout":
            network.second[0].p = 0.7
        else:
            run.trainer.optimizers[0].param_groups[0][self.what] = 0.02


class Thaws:
    """The first epoch trains the last part alone."""

    def on_start(self, run):
        run.trainer.model.first.requires_grad_(False)

    def on_epoch_end(self, run):
        run.trainer.model.first.requires_grad_(True)


class Alters:
    """Changes numbers, flags and modes of modules between the epochs."""

    def on_epoch_end(self, run):
        network = run.trainer.model
        if run.progress.epoch == 1:
            network.second[0].p = np.float64(0.1)
            network.mode = Mode.SUM
            run.data.task.smoothing = 0.7
            run.trainer.optimizers[0].param_groups[0]["weight_decay"] = np.float64(0.5)
        else:
            network.second.eval()
            network.sums = run.progress.epoch == 2


class Averages:
    """Evaluates an average of the weights, as torch computes it."""

    def on_start(self, run):
        run.trainer.ema_model = AveragedModel(run.trainer.model)

    def on_step(self, run):
        run.trainer.ema_model.update_parameters(run.trainer.model)


class Budget:
    """Its time is over in one process an epoch earlier than in the other."""

    def on_epoch_end(self, run):
        run.stops_early |= run.progress.epoch >= 2 + run.processes.rank


class Noisy:
    """A callback: adds noise to the weights, which differs between the processes."""

    def on_step(self, run):
        with torch.no_grad():
            for weight in run.trainer.model.parameters():
                weight += torch.rand_like(weight)


class Fails:
    """A callback: one process fails after the second step, with an expected error or with another one."""

    def __init__(self, rank, expected):
        self.rank = rank
        self.error = DataError if expected else RuntimeError

    def on_step(self, run):
        if run.progress.step == 2 and run.processes.rank == self.rank:
            raise self.error("the images are gone")
