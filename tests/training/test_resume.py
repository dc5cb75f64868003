"""A run that stops anywhere, in any way, and goes on with any loader, ends with the bits of one that did not stop."""

import os
import signal
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from data.array_dataset import ArrayDataset
from tests.configs import has_part
from tests.test_train import metrics, train
from tests.training.test_doors import HERE as DOORS
from training.run import Run
from training.stopping import Stopped
from training.trainer import Trainer

LINEAR = [f"model._target_={DOORS}.linear", "~model.width"]
HERE = "tests.training.test_resume"
AUGMENTED = [f"data._target_={HERE}.augmented_images"]
TWO_PARTS = [
    *(f"model._target_={DOORS}.TwoParts", "~model.width", "train.precision=fp16"),
    *(f"task.metrics={{worst: {{_target_: {DOORS}.Confusion}}}}", "task.metric=worst"),
    *(["train.ema=0.5"] if has_part("ema") else []),
]
PARTS = {  # settings of a run of 16 steps in two epochs
    "plain": [],
    "augmented": AUGMENTED,
    "all at once": [*TWO_PARTS, f"trainer._target_={HERE}.TwoLosses", "train.accumulate=3", "train.clip_norm=1"],
    "two steps in one": [*TWO_PARTS, f"trainer._target_={DOORS}.Alternating", "train.max_steps=13"],
    "modules beside the network": [*LINEAR, f"trainer._target_={DOORS}.Beside", "task.metric=loss"],
    "a step of three batches": [*LINEAR, f"trainer._target_={DOORS}.Accumulating"],
    "a loss with a state": [*LINEAR, f"task.loss={{_target_: {DOORS}.Centred}}"],
    "batch sampler": [*LINEAR, f"batch_sampler._target_={DOORS}.Pairs", "train.last_batch=keep", "data.length=16"],
}
SCHEDULES = {"cosine": [], "one_cycle": [], "step": ["schedule.step_size=1"]}
CALLBACK = f"+callbacks.epochs._target_={HERE}.Epochs"
LOADERS = ["torch", "prefetch", "threads", "resident"]


class TwoLosses(Trainer):
    """Returns the sum of the losses of two networks, each with an optimizer of its own."""

    def configure_optimizers(self):
        first, second = self.model.first.parameters(), self.model.second.parameters()
        return torch.optim.SGD(first, 0.05, momentum=0.9), torch.optim.AdamW(second, 0.01)

    def training_step(self, batch):
        (images,), labels = self.inputs_and_labels(batch)
        losses = [self.task.loss(part(images), labels) for part in (self.model.first, self.model.second)]
        self.log(second=losses[1])
        return sum(losses)


class Epochs:
    """Logs how many epochs have ended."""

    def on_epoch_end(self, run) -> None:
        run.log(epochs_done=run.trainer.epoch)


def augmented_images(train: bool, length: int, test_length: int, **_) -> ArrayDataset:
    random = np.random.default_rng(train)
    images = random.integers(256, size=(length if train else test_length, 8, 8, 3), dtype=np.uint8)
    about = {"classes": range(10), "mean": (0.5,) * 3, "std": (0.2,) * 3}
    return ArrayDataset(images, np.arange(len(images)) % 10, train=train, pad=2, flip=True, **about)


def state(folder: Path) -> dict:
    found = torch.load(folder / "checkpoints" / "last.pt", weights_only=True)
    return {key: value for key, value in found.items() if key != "config"}


def numbers(folder: Path) -> list[dict]:
    """The lines of metrics.jsonl, without the speed of the machine."""
    return [
        {key: line[key] for key in line.keys() - {"images_per_second", "data_wait_fraction"}}
        for line in metrics(folder)
    ]


def best(folder: Path) -> str:
    return (folder / "checkpoints" / "best.pt").resolve().name


def newest_step(folder: Path) -> int:
    return max((int(path.stem[5:]) for path in folder.glob("checkpoints/step-*.pt")), default=0)


def differences(one: object, other: object, where: str = "") -> list[str]:
    if isinstance(one, dict):
        keys = one.keys() | other.keys()
        return [text for key in keys for text in differences(one.get(key), other.get(key), f"{where}.{key}")]
    if isinstance(one, list | tuple):
        return [text for pair in zip(one, other, strict=True) for text in differences(*pair, where)]
    return [] if (torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other) else [where]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Returns the folder of a run that nothing stops."""

    @cache
    def trained(part: str, schedule: str, loader: str) -> Path:
        folder = tmp_path_factory.mktemp("whole")
        train(folder, CALLBACK, *PARTS[part], f"schedule={schedule}", *SCHEDULES[schedule], f"loader={loader}")
        return folder

    return trained


def stop(patch: pytest.MonkeyPatch, step: int, how: str) -> None:
    """Stops the run in or after a step, by a signal or by an error; the error loses what was not saved."""
    train_step, evaluate, write = Trainer.train_step, Trainer.evaluate, Run.write

    def stopping(trainer: Trainer, batch: dict) -> None:
        train_step(trainer, batch)
        if trainer.step == step and how not in ("evaluation", "its line"):
            os.kill(os.getpid(), getattr(signal, how)) if how.startswith("SIG") else 1 / 0

    def failing(trainer: Trainer, *arguments: object) -> object:
        return evaluate(trainer, *arguments) if trainer.step < step else 1 / 0

    def failing_after(run: Run, **values: object) -> None:
        write(run, **values)
        assert "lr" in values or run.trainer.step < step, 1 / 0

    patch.setattr(Trainer, "train_step", stopping)
    if how == "its line":
        patch.setattr(Run, "write", failing_after)
    if how == "evaluation":
        patch.setattr(Trainer, "evaluate", failing)


@settings(max_examples=4, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(
    part=st.sampled_from(list(PARTS)),
    schedule=st.sampled_from(list(SCHEDULES)),
    stops=st.lists(
        st.tuples(st.integers(1, 16), st.sampled_from(["SIGINT", "SIGTERM", "error", "evaluation", "its line"])),
        max_size=2,
    ).map(sorted),
    loaders=st.lists(st.sampled_from(LOADERS), min_size=3, max_size=3),
)
@example("augmented", "cosine", [(3, "SIGTERM"), (11, "error")], ["prefetch", "resident", "torch"])
@example("all at once", "one_cycle", [(5, "SIGTERM"), (13, "evaluation")], ["prefetch", "torch", "threads"])
@example("two steps in one", "one_cycle", [(8, "SIGINT"), (13, "SIGTERM")], ["torch", "prefetch", "torch"])
@example("a step of three batches", "cosine", [(5, "SIGTERM"), (10, "error")], ["torch", "prefetch", "torch"])
@example("a loss with a state", "cosine", [(5, "SIGTERM"), (10, "error")], ["torch", "prefetch", "torch"])
@example("modules beside the network", "one_cycle", [(11, "SIGTERM"), (12, "error")], ["torch", "prefetch", "torch"])
@example("all at once", "step", [(12, "error")], ["torch", "torch", "torch"])
@example("batch sampler", "cosine", [(5, "SIGINT")], ["prefetch", "prefetch", "torch"])
@example("plain", "step", [(4, "its line"), (16, "SIGTERM")], ["torch", "prefetch", "torch"])
@example("plain", "cosine", [(8, "evaluation")], ["torch", "threads", "torch"])
def test_a_run_that_stops_anywhere_is_resumed_to_the_same_bits(
    tmp_path_factory, undisturbed, part, schedule, stops, loaders
):
    alike = {"augmented": ["prefetch", "resident"], "batch sampler": ["prefetch"]}.get(part, LOADERS)
    loaders = [loader if loader in alike else alike[0] for loader in loaders]
    whole, folder = undisturbed(part, schedule, alike[0]), tmp_path_factory.mktemp("stopped")
    given = [CALLBACK, *PARTS[part], f"schedule={schedule}", *SCHEDULES[schedule], "train.checkpoint_every=4"]
    for (step, how), loader in zip(stops, loaders, strict=False):
        with pytest.MonkeyPatch.context() as patch:
            stop(patch, step, how)
            try:
                train(folder, *given, f"loader={loader}")
            except Stopped:
                assert state(folder)["step"] == step, "a signal loses no step"
            except ZeroDivisionError:
                assert newest_step(folder) >= (step - 4 if how == "error" else step), "an error loses few"
    train(folder, *given, f"loader={loaders[len(stops)]}")
    assert differences(state(whole), state(folder)) == []
    assert numbers(whole) == numbers(folder) and best(whole) == best(folder)
