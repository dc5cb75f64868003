"""Training sets that are streams: epochs of train.steps_per_epoch steps, resumes to the same bits, and refusals."""

import random
import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from loaders import LoaderConfig, LoaderConfigError, build_loader
from tests.configs import NO_TRIALS, composed
from tests.test_train import metrics
from tests.training.streams import Images
from tests.training.test_resume import differences, newest_step, state, stop
from tests.training.test_torchrun import TWO_OPTIMIZERS, Run, same_bits
from train import run
from training.launch import EXPECTED
from training.stopping import Stopped
from training.trainer import Trainer

IMAGES = [
    "data._target_=tests.training.streams.Images",
    "train.batch_size=16",
    "train.steps_per_epoch=9",
    "train.epochs=2",
]
SMALL = [*IMAGES, "train.log_interval=4", "train.checkpoint_every=4", "loader=workers", "loader.streams=4", *NO_TRIALS]


def train(folder: Path, *overrides: str) -> dict:
    given = {text.partition("=")[0]: text for text in (*SMALL, *overrides)}
    return run(composed(*given.values()), folder)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The folder of a run that nothing stops, by the size of its shuffle buffer."""
    folders = {}
    for size in (0, 20):
        folders[size] = tmp_path_factory.mktemp("whole")
        train(folders[size], "loader.num_workers=0", f"loader.shuffle_buffer={size}")
    return folders


def test_epochs_have_the_given_number_of_steps_and_evaluations_all_samples_or_some_steps(
    tmp_path, undisturbed, monkeypatch
):
    tests = [line for line in metrics(undisturbed[0]) if "test_accuracy" in line]
    assert [(line["step"], line["epoch"]) for line in tests] == [(9, 1), (18, 2)], "203 samples are a pass of 16 steps"
    assert differences(state(undisturbed[0])["model"], state(undisturbed[20])["model"]) != [], "it was shuffled"
    evaluated, step = [], Trainer.evaluation_step
    monkeypatch.setattr(
        Trainer, "evaluation_step", lambda *given: evaluated.append(len(given[1]["label"])) or step(*given)
    )
    for steps, samples in (("null", [13, 13, 12, 12]), ("1", [13])):
        evaluated.clear()
        train(tmp_path / steps, "loader.num_workers=1", "train.epochs=1", f"train.eval_steps={steps}")
        assert evaluated[1:] == samples, "the first is a check of the samples"


@settings(max_examples=3, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(
    size=st.sampled_from([0, 20]),
    stops=st.lists(
        st.tuples(st.integers(1, 17), st.sampled_from(["SIGINT", "SIGTERM", "error", "evaluation"])), max_size=2
    ).map(sorted),
    workers=st.lists(st.sampled_from([0, 1, 3]), min_size=3, max_size=3),
)
@example(0, [(5, "SIGTERM"), (12, "error")], [1, 3, 0])
@example(20, [(9, "SIGTERM"), (9, "evaluation")], [3, 0, 1])
def test_a_run_that_stops_anywhere_is_resumed_with_other_workers_to_the_same_bits(
    tmp_path_factory, undisturbed, size, stops, workers
):
    folder, given = tmp_path_factory.mktemp("stopped"), [f"loader.shuffle_buffer={size}"]
    for (step, how), number in zip(stops, workers, strict=False):
        with pytest.MonkeyPatch.context() as patch:
            stop(patch, step, how)
            try:
                train(folder, *given, f"loader.num_workers={number}")
            except Stopped:
                assert state(folder)["step"] == step, "a signal loses no step"
            except ZeroDivisionError:
                assert newest_step(folder) >= step - 9, "an error loses few"
    train(folder, *given, f"loader.num_workers={workers[len(stops)]}")
    assert differences(state(undisturbed[size]), state(folder)) == []


def test_the_stock_loader_trains_and_says_that_a_resume_begins_the_stream_anew(tmp_path, caplog):
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Stopped):
        stop(patch, 5, "SIGTERM")
        train(tmp_path, "loader=torch", "loader.num_workers=1")
    train(tmp_path, "loader=torch", "loader.num_workers=1")
    assert "loader=torch does not know where it was in the stream: it begins anew" in caplog.text
    assert state(tmp_path)["step"] == 18


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["train.steps_per_epoch=null"],
            r"train\.steps_per_epoch=null: Images is a stream of unknown length: set it to the",
        ),
        (
            ["data._target_=data.fashion.FashionMini"],
            r"train\.steps_per_epoch=9: FashionMini has a length: set it to null",
        ),
        (["data.val_fraction=0.1"], r"data\.val_fraction=0\.1: Images is a stream, and cannot be split: set it to 0"),
        (
            ["sampler._target_=torch.utils.data.RandomSampler"],
            "sampler: Images is a stream, whose samples come in its",
        ),
        (["loader=threads"], "loader=threads needs a map-style dataset, and Images is not one"),
        (["+data.fault=empty"], "Images has no samples, or none of the first 100 can be read"),
        (["+data.fault=no label"], r"a sample of Images is of type Tensor: return \(image, label\)"),
        (["+data.fault=cannot be pickled"], "cannot be pickled, and each stream reads a copy of it"),
    ],
)
def test_what_cannot_train_ends_in_a_sentence(tmp_path, overrides, words):
    with pytest.raises(EXPECTED, match=words):
        train(tmp_path, *overrides, "loader.num_workers=1")


def test_streams_that_ranks_cannot_share_are_a_wrong_setting():
    with pytest.raises(LoaderConfigError, match="streams=3 cannot be shared evenly by world_size=2"):
        build_loader(LoaderConfig(streams=3), Images(True), batch_size=2, seed=0, world_size=2)
    with pytest.raises(LoaderConfigError, match="loader=torch gives each of 2 processes the whole stream"):
        build_loader(LoaderConfig("torch"), Images(True), batch_size=2, seed=0, world_size=2)


OF_PROCESSES = [
    *IMAGES,
    *TWO_OPTIMIZERS,
    "train.steps_per_epoch=30",
    "train.checkpoint_every=5",
    "loader.streams=4",
    "+data.fault=one test shard",
]


def test_processes_save_the_places_of_all_streams_and_go_on_there_with_other_workers(python, tmp_path):
    whole = Run(python, tmp_path / "whole", *OF_PROCESSES).finish()
    stopped = Run(python, tmp_path / "stopped", *OF_PROCESSES)
    stopped.wait_for_step(5)
    stopped.send_signal(signal.SIGTERM)
    assert set(stopped.wait()) == {75}, stopped.text()
    again = Run(python, tmp_path / "stopped", *OF_PROCESSES, "loader.num_workers=0").finish()
    assert same_bits(again, whole)
    assert [line["step"] for line in again.metrics() if "test_loss" in line] == [30, 60]


@pytest.fixture(scope="module")
def whole(python, tmp_path_factory) -> Run:
    return Run(python, tmp_path_factory.mktemp("whole"), *OF_PROCESSES, processes=1).finish()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_a_run_that_is_stopped_at_a_random_moment_ends_with_the_same_bits(python, tmp_path, whole, seed):
    draw = random.Random(seed)
    workers = [f"loader.num_workers={number}" for number in draw.sample([0, 1, 3], 2)]
    stopped = Run(python, tmp_path, *OF_PROCESSES, workers[0], processes=1)
    stopped.wait_for_step(5 * draw.randrange(1, 9))
    stopped.send_signal(signal.SIGTERM)
    assert stopped.wait() == [75], stopped.text()
    assert same_bits(Run(python, tmp_path, *OF_PROCESSES, workers[1], processes=1).finish(), whole)
