"""What a network was trained on is known by its identity: classes by their names, samples by their content."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from data.array_dataset import ArrayDataset
from data.subset import split
from tests.configs import IMAGES, checkpoint, differing_weights, train
from tests.data.reading import refused
from training.datasets import numbers_by_class

CLASSIFICATION = "training.tasks.Classification"
BRIGHTNESS = {"apple": 10, "berry": 120, "cherry": 240}


class Fruit(ArrayDataset):
    """Images as bright as their class, whose name may be written in any case."""

    def __init__(self, train, names, test_names=None, **_):
        names = names if train or test_names is None else test_names
        labels = np.arange(48) % len(names)
        pixels = np.array([BRIGHTNESS.get(name.lower(), 0) for name in names], np.uint8)[labels]
        images = np.broadcast_to(pixels[:, None, None, None], (48, 4, 4, 1))
        super().__init__(images, labels, classes=names, mean=[0.5], std=[0.3], train=train)


DATA = f"data._target_={__name__}.Fruit"


def run(folder, names, *settings):
    return train(folder, DATA, f"+data.names=[{names}]", "train.batch_size=16 train.epochs=8 optim.lr=0.1", *settings)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run that tells apples from berries."""
    folder = tmp_path_factory.mktemp("trained")
    assert run(folder, "apple,berry")["test_accuracy"] == 1
    return folder


def test_a_test_set_in_another_order_is_compared_by_name_and_one_with_other_classes_is_refused(tmp_path):
    assert run(tmp_path / "a", "apple,berry", "+data.test_names=[Berry,APPLE]")["test_accuracy"] == 1
    assert run(tmp_path / "b", "apple,berry,cherry", "+data.test_names=[Berry]")["test_accuracy"] == 1
    with refused("test set .*plum: .* Berry, plum, .* apple, berry;"):
        run(tmp_path / "c", "apple,berry", "+data.test_names=[Berry,plum]")


def test_classes_of_a_training_set_that_differ_only_in_case_are_warned_of_once(tmp_path, caplog):
    run(tmp_path, "Berry,apple,berry,'caf\u00e9','cafe\u0301'", "train.epochs=1")
    (said,) = [text for text in caplog.messages if "differ only in" in text]
    assert "Berry, berry, caf\u00e9, 'cafe\\u0301':" in said


def test_classes_that_seem_to_be_lists_of_classes_are_warned_of(tmp_path, caplog):
    run(tmp_path, "apple,berry,apple|berry", "train.epochs=1")
    (said,) = [text for text in caplog.messages if "lists of others" in text]
    assert "apple|berry:" in said and "task=multilabel" in said


def test_a_resume_keeps_the_numbers_of_the_checkpoint_or_names_the_renamed_class(trained, tmp_path):
    assert checkpoint(trained)["classes"] == ["apple", "berry"]
    folder = tmp_path / "new"
    resume = f"train.resume={trained}/checkpoints/last.pt"
    assert run(folder, "Berry,Apple", resume, "train.epochs=9", "optim.lr=0")["test_accuracy"] == 1
    assert checkpoint(folder)["classes"] == ["apple", "berry"]
    with refused("training set .*plum: .* apple, plum, .* apple, berry;"):
        run(tmp_path / "other", "apple,plum", resume, "train.epochs=9")


def test_weights_of_another_run_keep_their_classes_if_these_are_the_same_and_else_a_warning_names_both(
    trained, tmp_path, caplog
):
    begin = ["train.epochs=1", "optim.lr=0", f"train.init_from={trained}"]
    assert run(tmp_path / "a", "Berry,Apple", *begin)["test_accuracy"] == 1
    assert "last layer" not in caplog.text
    folder = tmp_path / "b"
    run(folder, "cherry,plum", *begin)
    assert checkpoint(folder)["classes"] == ["cherry", "plum"]
    assert "trained on the classes apple, berry; this run trains it on cherry, plum" in caplog.text


def test_numbers_by_class_have_names_if_the_network_has_another_order_than_the_dataset(trained, tmp_path):
    def loss(names, setting):
        begin = ["train.epochs=1", "optim.lr=0", f"train.init_from={trained}"]
        return run(tmp_path / f"{names} {setting}", names, *begin, setting)["test_loss"]

    for setting in ("task.class_weights=EACH", "task.loss={_target_: torch.nn.CrossEntropyLoss, weight: EACH}"):
        by_name = setting.replace("EACH", "{apple: 1, BERRY: 10}")
        by_number = setting.replace("EACH", "[1,10]")
        assert loss("apple,berry", by_name) == loss("apple,berry", by_number)
        assert loss("Berry,Apple", by_name) == pytest.approx(loss("apple,berry", by_number))
        with refused(r"=\[1, 10\]: .* Berry, Apple, .* apple, berry: .* by name, {Berry: 1, ...}"):
            loss("Berry,Apple", by_number)
    with refused(r"task.class_weights .*apple: .* each of the classes, apple, berry"):
        loss("apple,berry", "task.class_weights={apple: 1}")


CLASSES = ["apple", "No", "yes", "Äpfel", "0", "7", "true"]
LOSS = {"_target_": "torch.nn.CrossEntropyLoss"}
PLACES = {  # of numbers by class in the section task, by key
    "task.class_weights": lambda numbers: {"_target_": CLASSIFICATION, "class_weights": numbers},
    "task.loss.weight": lambda numbers: {"_target_": CLASSIFICATION, "loss": {**LOSS, "weight": numbers}},
    "task.loss.pos_weight": lambda numbers: {
        "_target_": "training.tasks.Multilabel",
        "loss": {"_target_": "torch.nn.BCEWithLogitsLoss", "pos_weight": numbers},
    },
}
NUMBERS = st.integers(0, 9) | st.floats(0, 9)


@given(st.permutations(CLASSES), st.permutations(CLASSES), st.sampled_from([*PLACES]), st.data())
def test_numbers_by_name_are_in_the_order_of_the_classes_whatever_the_case(classes, names, place, data):
    numbers = {data.draw(st.sampled_from([name, name.upper()])): data.draw(NUMBERS) for name in names}
    folded = {name.lower(): number for name, number in numbers.items()}
    expected = PLACES[place]([folded[name.lower()] for name in classes])
    assert numbers_by_class("task", PLACES[place](numbers), classes, classes) == expected


KEYS = st.sampled_from([*CLASSES, "nein", "ja", 0, 1, 2]) | st.booleans()


@given(st.lists(st.sampled_from(CLASSES), unique=True), st.dictionaries(KEYS, NUMBERS), st.sampled_from([*PLACES]))
def test_numbers_for_other_names_than_the_classes_are_refused_with_both_lists(classes, numbers, place):
    folded = sorted(str(name).lower() for name in numbers)
    if classes and folded == sorted(name.lower() for name in classes):
        return
    with refused(f"^{place}") as info:
        numbers_by_class("task", PLACES[place](numbers), classes, classes)
    assert all(str(name) in str(info.value) for name in [*classes, *numbers])
    assert ("yes and no" in str(info.value)) == any(isinstance(name, bool) for name in numbers) or not classes


def test_a_dict_of_numbers_that_are_of_no_class_stays_as_it_is_where_a_loss_may_take_one():
    section = {"_target_": CLASSIFICATION, "loss": {"_target_": f"{__name__}.Fruit", "weight": {"ce": 1, "dice": 2}}}
    assert numbers_by_class("task", section, CLASSES, CLASSES) == section


def test_a_checkpoint_of_an_earlier_version_goes_on_and_says_once_that_it_has_no_names(trained, tmp_path, caplog):
    state = checkpoint(trained)
    del state["classes"], state["own_rates"], state["altered"], state["data"]["trained"]
    torch.save(state, tmp_path / "earlier.pt")
    caplog.set_level("INFO")
    run(tmp_path / "new", "apple,berry", f"train.resume={tmp_path}/earlier.pt", "train.epochs=9")
    assert caplog.text.count("names of classes") == 1 and differing_weights(tmp_path / "new", trained)


def test_a_run_says_how_many_samples_of_its_validation_set_its_checkpoint_was_trained_on(tmp_path, caplog):
    def said(name, start, fraction=0.1):
        caplog.clear()
        train(tmp_path / name, IMAGES, start, f"data.val_fraction={fraction} train.epochs=2")
        return caplog.text

    train(tmp_path / "run", IMAGES, "data.val_fraction=0.1 train.epochs=1")
    resume = f"train.resume={tmp_path}/run/checkpoints/last.pt"
    assert "validation set has changed" not in said("same", resume)
    before, larger = (len(split(range(64), fraction)[1]) for fraction in (0.1, 0.3))
    sentence = f"trained on {larger - before} of its {larger} samples"
    assert sentence in said("larger", resume, 0.3)
    assert sentence in said("weights", f"train.init_from={tmp_path}/run", 0.3)
    state = checkpoint(tmp_path / "run")
    trained = state["data"].pop("trained")
    changed = tmp_path / "changed.pt"
    torch.save(state, changed)
    assert said("earlier", f"train.resume={changed}").count("chose its samples by position") == 1
    validate = 64 - len(trained)
    for renamed in (1, 5, len(trained)):
        state["data"]["trained"] = torch.sort(torch.cat([trained[renamed:], torch.arange(renamed)])).values
        torch.save(state, changed)
        text = said(f"renamed{renamed}", f"train.resume={changed}")
        assert f"{renamed} samples that the checkpoint's run was trained on are not there" in text
        assert f"up to {min(renamed, validate)} of the {validate} samples that validate" in text


class Patients:
    """Four images of each patient. Those that validate are held by an object that has no names."""

    classes = ("healthy", "ill")

    def __init__(self, train, **_):
        self.val_groups = 7 * np.arange(48 if train else 0) % 12

    def __len__(self):
        return len(self.val_groups)

    def __getitem__(self, index):
        return np.full((1, 4, 4), index, np.float32), int(self.val_groups[index]) % 2

    def without_augmentation(self):
        return Plain(self)


class Plain:
    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        return self.samples[index]


def test_samples_that_validate_are_known_by_the_set_that_they_were_split_off(tmp_path, caplog):
    data = f"data._target_={__name__}.Patients train.batch_size=8 data.val_fraction="
    train(tmp_path, f"{data}0.3 train.epochs=1")
    train(tmp_path, f"{data}0.3 train.epochs=2")
    assert "validation set has changed" not in caplog.text
    train(tmp_path, f"{data}0.6 train.epochs=3")
    before, larger = (len(split(Patients(True), fraction)[1]) for fraction in (0.3, 0.6))
    assert f"trained on {larger - before} of its {larger} samples" in caplog.text
