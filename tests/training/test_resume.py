"""A run that stops anywhere, in any way, and goes on with any loader, ends with the bits of one that did not stop."""

from collections.abc import Iterator
from functools import cache
from itertools import product
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.configs import DOORS, LINEAR, checkpoint, differences, train, untimed
from tests.training.doors import Stop
from training.stopping import Stopped

TWO_PARTS = f"model._target_={DOORS}.TwoParts"
CONFIGS = {
    "plain": [],
    "ema, accumulate 3, clip, one_cycle": [
        *(TWO_PARTS, "callbacks.ema.decay=0.9", "train.accumulate=3", "train.clip_norm=1", "schedule=one_cycle")
    ],
    "bf16": ["train.precision=bf16", "optim=adamw", "schedule=step", "schedule.step_size=1"],
    "fp16, clip": ["train.precision=fp16", "train.clip_norm=1"],
    "val split, mixup, erase": ["data.val_fraction=0.25", "augment.mixup=0.2", "augment.erase=0.5", "train.epochs=3"],
    "two optimizers": [TWO_PARTS, f"trainer._target_={DOORS}.Alternating", "train.max_steps=13"],
    "modules beside the network": [LINEAR, f"trainer._target_={DOORS}.Beside", "task.metric=loss"],
    "states of a loss, an optimizer and a callback": [
        *(LINEAR, f"task.loss={{_target_: {DOORS}.Centred}}", f"optim._target_={DOORS}.Signs"),
        f"+callbacks.spy._target_={DOORS}.Spy",
    ],
    "batch sampler": [LINEAR, f"batch_sampler._target_={DOORS}.Pairs", "train.last_batch=keep", "data.length=32"],
    "stream": [
        *(f"data._target_={DOORS}.Stream", "train.steps_per_epoch=9", "train.batch_size=16", "loader.streams=4"),
        "loader.shuffle_buffer=20",
    ],
}
FIVE = list(CONFIGS)[:5]
HOW = ["SIGTERM", "SIGINT", "error", "evaluation"]
LOADERS = ["torch 0", "torch 1", "workers 0", "workers 2", "prefetch 1", "threads 2", "resident 0"]


class Stopping(NamedTuple):
    step: int
    how: str


def loader(config: str, name: str) -> list[str]:
    kind, workers = name.split()
    if config == "stream" or (config == "batch sampler" and kind == "resident"):
        kind = "workers"
    return [f"loader={kind}", f"loader.num_workers={workers}"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator:
    """The folder of a run that nothing stops."""

    @cache
    def trained(config: str) -> Path:
        folder = tmp_path_factory.mktemp("whole")
        train(folder, *CONFIGS[config], *loader(config, "torch 0"), f"+callbacks.stop._target_={DOORS}.Stop")
        return folder

    return trained


def check_resume(folder: Path, undisturbed: Path, config: str, stops: list[Stopping], loaders: list[str]) -> None:
    overrides = [*CONFIGS[config], f"+callbacks.stop._target_={DOORS}.Stop", "train.checkpoint_every=4"]
    for (Stop.at, Stop.how), name in zip(stops, loaders, strict=False):
        at, how = Stop.at, Stop.how
        try:
            train(folder, *overrides, *loader(config, name))
        except Stopped:
            assert how.startswith("SIG") and checkpoint(folder)["step"] == at, "a signal loses no step"
        except ZeroDivisionError:
            newest = max((int(path.stem[5:]) for path in folder.glob("checkpoints/step-*.pt")), default=0)
            assert newest >= at - 4, "an error loses few steps"
    Stop.at = 0
    train(folder, *overrides, *loader(config, loaders[len(stops)]))
    found, wanted = checkpoint(folder), checkpoint(undisturbed)
    assert differences(*({**state, "config": None} for state in (found, wanted))) == []
    assert untimed(folder) == untimed(undisturbed)
    assert best(folder) == best(undisturbed)


def best(folder: Path) -> str:
    return (folder / "checkpoints" / "best.pt").resolve().name


PLACES = st.builds(Stopping, st.integers(1, 16), st.sampled_from(HOW))


@settings(max_examples=6, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(
    config=st.sampled_from(list(CONFIGS)),
    stops=st.lists(PLACES, min_size=1, max_size=2).map(sorted),
    loaders=st.lists(st.sampled_from(LOADERS), min_size=3, max_size=3),
)
@example("plain", [Stopping(3, "SIGTERM"), Stopping(8, "SIGINT")], ["workers 2", "torch 0", "threads 2"])
@example(FIVE[1], [Stopping(5, "SIGTERM"), Stopping(13, "error")], ["torch 0", "prefetch 1", "workers 0"])
@example("bf16", [Stopping(8, "evaluation")], ["torch 0", "workers 0", "torch 0"])
@example("fp16, clip", [Stopping(7, "SIGINT"), Stopping(16, "SIGTERM")], ["torch 0", "torch 0", "workers 0"])
@example(FIVE[4], [Stopping(6, "error"), Stopping(14, "SIGTERM")], ["workers 0", "resident 0", "workers 2"])
@example("two optimizers", [Stopping(8, "SIGINT"), Stopping(13, "SIGTERM")], ["torch 0", "workers 0", "torch 0"])
@example("modules beside the network", [Stopping(11, "SIGTERM")], ["torch 0", "workers 0", "torch 0"])
@example(list(CONFIGS)[7], [Stopping(5, "SIGTERM"), Stopping(10, "error")], ["torch 0", "workers 0", "torch 0"])
@example("batch sampler", [Stopping(5, "SIGINT")], ["workers 0", "workers 2", "torch 0"])
@example("stream", [Stopping(5, "SIGTERM"), Stopping(12, "error")], ["workers 2", "workers 0", "workers 1"])
def test_a_run_that_stops_anywhere_is_resumed_to_the_same_bits(tmp_path_factory, whole, config, stops, loaders):
    check_resume(tmp_path_factory.mktemp("stopped"), whole(config), config, stops, loaders)


PLACE = {"SIGTERM": 3, "SIGINT": 11, "error": 7, "evaluation": 8, "SIGTERM at an epoch's end": 8}


@pytest.mark.slow
@pytest.mark.parametrize(("config", "how"), list(product(FIVE, PLACE)))
def test_twenty_five_resumes(tmp_path, whole, config, how):
    stops = [Stopping(PLACE[how], how.split()[0]), Stopping(14, "SIGTERM")]
    for number, loaders in enumerate(
        (["workers 2", "torch 1", "threads 2"], ["threads 2", "prefetch 1", "workers 0"])
    ):
        check_resume(tmp_path / str(number), whole(config), config, stops, loaders)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@settings(max_examples=100, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(
    config=st.sampled_from(list(CONFIGS)),
    stops=st.lists(PLACES, max_size=4).map(sorted),
    loaders=st.lists(st.sampled_from(LOADERS), min_size=5, max_size=5),
)
def test_a_hundred_random_resumes(tmp_path_factory, whole, config, stops, loaders):
    check_resume(tmp_path_factory.mktemp("stopped"), whole(config), config, stops, loaders)
