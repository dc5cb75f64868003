"""What fits passes the checks before the first step, which leave no trace."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from tests.configs import DOORS, LINEAR, checkpoint, metrics, steps, train
from tests.training.doors import Images, Stream, Worst

HERE = __name__
IMAGES = [f"data._target_={DOORS}.Images", "data.length=64", "train.batch_size=16", LINEAR]


class OneOfAStream(IterableDataset):
    classes = Stream.classes

    def __init__(self, train: bool, **_: Any) -> None: ...

    def __iter__(self) -> Any:
        yield torch.ones(8, 8, 3, dtype=torch.uint8), 3


class Broken(Images):
    """Its first two samples cannot be read."""

    def __getitem__(self, index: int) -> Any:
        if index < 2:
            raise OSError(f"{index}.png is truncated")
        return super().__getitem__(index)


class Floats(Images):
    def __getitem__(self, index: int) -> Any:
        image, label = super().__getitem__(index)
        return image.permute(2, 0, 1) / 255, label


FITTING = {
    "parts of which one has one sample": ["train.batch_size=4", "train.accumulate=3"],
    "one sample": ["data.length=1", "data.test_length=1", "train.batch_size=1"],
    "a last batch of one sample": ["data.length=17", "train.last_batch=keep"],
    "a stream of one sample": [
        *(f"data._target_={HERE}.OneOfAStream", "train.steps_per_epoch=2", "train.batch_size=1", "loader=workers"),
        *("loader.streams=1", "loader.num_workers=0"),
    ],
    "first samples that cannot be read": [
        *(f"data._target_={HERE}.Broken", "loader=workers", "loader.on_error=skip", "loader.num_workers=0")
    ],
    "float images": [f"data._target_={HERE}.Floats"],
}


@pytest.mark.parametrize("case", FITTING)
def test_what_fits_trains(tmp_path, case):
    summary = train(tmp_path, *IMAGES, "train.epochs=1", *FITTING[case])
    assert np.isfinite(summary["test_loss"]) and steps(tmp_path)[0]["loss"] > 0


def test_a_batch_of_debug_fast_is_capped_to_the_set(tmp_path, command):
    done = command("debug=fast", "data=synthetic", "data.length=64", "data.image_size=8", "hydra.run.dir=out")
    assert done.code == 0, done.shown


# No trace


class Noisy(nn.Module):
    """Counts in buffers, and draws random numbers, in each forward pass, unless `quiet`."""

    def __init__(self, num_classes: int, in_channels: int, quiet: bool = False, **_: Any) -> None:
        super().__init__()
        self.quiet, self.norm = quiet, nn.BatchNorm2d(in_channels)
        self.layer = nn.Linear(64 * in_channels, num_classes)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, images: Tensor) -> Tensor:
        self.calls += 1
        if not self.quiet:
            torch.rand(3), np.random.rand(), random.random()
        return self.layer(self.norm(images).flatten(1))


class CountingMetric(Worst):
    """Draws random numbers, and returns how many samples it has seen."""

    def update(self, outputs: Tensor, labels: Tensor) -> None:
        torch.rand(1)
        super().update(outputs, labels)

    def compute(self) -> Tensor:
        return self.all.sum()


class Snapshot:
    """Keeps what the first step begins with."""

    def on_start(self, run: Any) -> None:
        run.log(started=1.0)
        model = run.trainer.model
        Snapshot.randoms = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
        Snapshot.state = {name: value.clone() for name, value in model.state_dict().items()}
        Snapshot.gradients = [weight.grad for weight in model.parameters()]


def test_the_checks_before_the_first_step_leave_no_trace(tmp_path):
    overrides = [f"model._target_={HERE}.Noisy", f"task.metrics={{seen: {{_target_: {HERE}.CountingMetric}}}}"]
    overrides += ["train.max_steps=3"]
    overrides += [f"+callbacks.snapshot._target_={HERE}.Snapshot", f"trainer._target_={DOORS}.Doubled"]
    randoms = []
    for quiet in (False, True):
        train(tmp_path / str(quiet), *overrides, f"+model.quiet={quiet}")
        randoms.append(Snapshot.randoms)
        assert Snapshot.state["calls"] == 0 == Snapshot.state["norm.num_batches_tracked"]
        assert torch.equal(Snapshot.state["norm.running_mean"], torch.zeros(3))
        assert Snapshot.gradients == [None] * len(Snapshot.gradients)
    one, other = randoms
    assert torch.equal(one[0], other[0]) and one[1:] == other[1:]
    saved = checkpoint(tmp_path / "False")["model"]
    assert saved["norm.num_batches_tracked"] == 3
    lines = metrics(tmp_path / "False")
    assert [line["test_seen"] for line in lines if "test_seen" in line] == [64.0]
    assert lines[0]["rows"] == 32.0 and "evaluated" not in lines[0]
