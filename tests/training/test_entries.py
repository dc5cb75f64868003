"""Where something of a user's enters: a file, a folder, a setting, a variable, an object. Each with its worst inputs.

A run with any of them works, or ends with exit code 1 and one sentence that has the value, and without a traceback.
"""

import os
import pwd
import re
import shlex
import shutil

import pytest
import torch
import yaml

from tests.configs import CONF, EXTENSIONS, FAST, complete
from tests.data.fakes import write_images
from tests.training.conftest import call

SYNTHETIC = [*FAST, "train.max_steps=1", "hydra.run.dir=out", "callbacks/standard=[best]"]


def run(folder, *settings, ends_with=1):
    """Runs train.py, and returns the line of its error, or of its last output."""
    shown = call(folder, *complete(SYNTHETIC, settings), ends_with=ends_with)
    assert len(shown) < 3000, "short enough to be read"
    return shown


# Config files

YAMLS = {
    "an open brace": b"# @package _global_\ntrain: {epochs: 2\n",
    "no text": b"\xff\xfe\x00train",
    "a list": b"- 1\n- 2\n",
    "a key twice": b"train:\n  epochs: 1\n  epochs: 2\n",
    "a number as a section": b"# @package _global_\ntrain: 3\n",
    "an interpolation of nothing": b"# @package _global_\noptim:\n  lr: ${no.such}\n",
    "an interpolation without an end": b"# @package _global_\noptim:\n  lr: ${oc.env:\n",
    "a number as defaults": b"defaults: 3\n",
    "no package": b"train:\n  epochs: 2\n",
    "an unknown section": b"# @package _global_\ntrian:\n  epochs: 1\n",
}


@pytest.mark.parametrize("content", YAMLS.values(), ids=YAMLS)
def test_a_config_file(tmp_path, content):
    (tmp_path / "conf" / "experiment").mkdir(parents=True)
    (tmp_path / "conf" / "experiment" / "spoilt.yaml").write_bytes(content)
    shown = run(tmp_path, f"--config-dir={tmp_path}/conf", "experiment=spoilt")
    assert re.search("error|Error|Could not|spoilt", shown)
    assert ("not UTF-8" in shown) == (content == YAMLS["no text"])
    assert ("@package" in shown) == ("Key 'experiment' not in 'Config'" in shown)


CHOICES = {"model": "small_cnn", "data": "cifar10", "loader": "workers", "optim": "adamw", "task": "own"}
FORMS = ["/{}", "{}", "override {}", "a key"]


@pytest.mark.parametrize("form", FORMS)
def test_a_recipe_that_chooses_without_override_is_told_what_to_write_and_that_works(tmp_path, form):
    folder = tmp_path / "conf" / "experiment"
    folder.mkdir(parents=True)
    arguments = [f"--config-dir={tmp_path}/conf", "experiment=recipe", "--cfg=job"]
    recipe = CHOICES if form == "a key" else {"defaults": [{form.format(key): name} for key, name in CHOICES.items()]}
    (folder / "recipe.yaml").write_text(f"# @package _global_\n{yaml.safe_dump(recipe, sort_keys=False)}")
    shown = call(tmp_path, *arguments, ends_with=1)
    remedies = re.findall("write '(- override .*?)'", shown)
    assert remedies == [f"- override /{key}: {name}" for key, name in CHOICES.items()]
    (folder / "recipe.yaml").write_text("# @package _global_\ndefaults:\n  " + "\n  ".join(remedies))
    assert "adamw" in call(tmp_path, *arguments, ends_with=0).lower()


TARGET = f"_target_: {EXTENSIONS}.Spy\n"
WRONG = {
    "a recipe": ("experiment/mine", "train: {epochs: 1}\n", "'# @package _global_'"),
    "a logger": ("logger/mine", TARGET, "'# @package callbacks', and put its keys below a name"),
    "a section": ("+paths/mine", "root: /data\n", "`paths: Section = field"),
    "a callback": ("callbacks/mine", TARGET, f"'callbacks={{NAME: {{_target_: {EXTENSIONS}.Spy"),
}


@pytest.mark.parametrize(("name", "content", "remedy"), WRONG.values(), ids=WRONG)
def test_a_file_of_a_group_is_told_what_it_needs(tmp_path, name, content, remedy):
    file = tmp_path / "conf" / f"{name.lstrip('+')}.yaml"
    file.parent.mkdir(parents=True)
    file.write_text(content)
    assert remedy in run(tmp_path, f"--config-dir={tmp_path}/conf", name.replace("/", "="))


def test_a_group_of_ours_is_chosen_without_a_plus_and_without_a_comma(tmp_path):
    assert "write experiment=data_bound" in run(tmp_path, "+experiment=data_bound")
    assert "remove the comma" in run(tmp_path, "data=cifar10,")


def test_a_job_that_fails_is_told_nothing_of_command_lines_that_hydra_refuses(tmp_path):
    shown = run(tmp_path, "debug=fast", "task.metric=nothing")
    assert "it is one of loss, accuracy" in shown and "Config" not in shown


# Settings: values of another type than their parameter takes

SETTINGS = {
    "trian.epochs=1": "trian",
    "loader=prefech": "prefech",
    "train.epochs=two": r"train\.epochs(.|\n)*two|two(.|\n)*train\.epochs",
    "train.epochs=[": r"train\.epochs=\[",
    "": "''|empty|override",
    "=3": "=3: there is no key",
    "train.init_from=": "train.init_from=: there is no value",
    "train.epochs=2\r": "train.epochs=2 ends with a carriage return",
    "optim.lr=~nobody": "optim.lr=~nobody",
    "train.batch_size=20000": "(?m)^error: train.batch_size=20000.*\n$",
    "train.resume=nowhere": "=/.+/nowhere: there is no such",
    "train.init_from=nowhere": "/.+/nowhere",
    "data=image_folder data.root=photos": "error: /.+/photos is not a folder",
    "data=image_table data.table=photos.csv": "error: /.+/photos.csv cannot be read",
    "data=fashion_mini data.root=photos": "error: /.+/photos/",
    "+callbacks.x={_target_: numpy.load, file: mean.npy}": "mean.npy', in the folder /.+",
    f"train.resume={CONF}": "conf is no run's folder",
    "data=image_folder data.root=/no/a=b": re.escape(shlex.quote("data.root='/no/a=b'")),
    "train.resume=out,lr=0.1": re.escape(shlex.quote("train.resume='out,lr=0.1'")),
    "hydra/job_logging=disabled train.batch_size=0": "train.batch_size=0",
    "-m train.resume=one,two": r"train\.resume",
    "data=fashion_mini data.policy=trivial": r"(?m)^error: data.policy=trivial: .*trivial\]",
    "data=fashion_mini data.transform={_target_:my.Blur}": "(?m)^error: data.transform={_target_:my.Blur}: ",
    "-m data.transform=[crop],[flip]": r"\A(?s:(?!.*it is a list).*data.transform)",  # Synthetic has none
    "epochs=3": r"\A(?s:(?!.*@package).*'epochs')",  # which is no file
    "experiment=none": r"\A(?s:(?!.*@package).*experiment/none)",
    "optim.lr=fast": "optim.lr=fast",
    "model.size=large": "model",
    "model=small_cnn model.width=wide": "model.width=wide",
    "model=small_cnn model.width=-3": "width=-3",
    "model._target_=torchvision.models.resnet18": "error: model: torchvision.models.resnet18 cannot be built .*size",
    "model=3": "int",
    "model._target_=builtins.dict": "model",
    "optim._target_=builtins.dict": "optim",
    "schedule._target_=builtins.dict": "schedule",
    "trainer._target_=builtins.dict": "trainer",
    "data._target_=models.blocks.Mine": "models is this project's folder",
    "data._target_=builtins.dict": "dict",
    "data.length=many": "data.length=many",
    "data.val_fraction=some": "data.val_fraction='some'",
    "data.val_fraction=2": "data.val_fraction=2",
    "data.folds=5": "data.folds=5 data.fold=None",
    "data.folds=1 data.fold=0": "at least 2 folds",
    "data.folds=5 data.fold=5": "data.fold=5",
    "data.folds=5 data.fold=0 data.val_fraction=0.1": "no val_fraction",
    "optim.layer_decay=2": "optim.layer_decay=2: give a number from 0 to 1",
    "train.unfreeze_after=1": "nothing is frozen",
    "data.streaming=never": "data.streaming=never",
    "data.streaming=true": "data.streaming=true: data.synthetic.Synthetic has no stream",
    "data.collate=3": "data.collate=3",
    "data.collate={_target_: builtins.list}": "data.collate",
    "data.collate={_target_: builtins.len, _partial_: true}": "int",
    "train.freeze=3": "train.freeze=3",
    "train.checkpoint_every=often": "train.checkpoint_every=often",
    "task.loss=mse": "task.loss=mse",
    "task.scores=mse": "task.scores=mse",
    "task.scores=[mse]": "task.scores=",
    "task.metrics=mse": "task.metrics=mse",
    "task.metrics={_target_: builtins.dict}": r"task.metrics=\{NAME: \{_target_: builtins.dict",
    "task.metrics={a: {_target_: builtins.dict}}": "task.metrics.a",
    "task.inputs=3": "task",
    "task.label=[a]": "task.label",
    "task.class_weights=[a,b]": "class_weights",
    "task.class_weights={a: 1}": "class_weights",
    "task.class_weights=[]": "class_weights",
    "+callbacks.x=3": "callbacks.x=3",
    "task.class_weights=[1,2]": "weight tensor should be defined .* all 10 classes",
    "callbacks.best._target_=training.callbacks.ema.EMA": "~callbacks.best.KEY",
    "+callbacks.best._target_=my.Best": "error: .*_target_=my.Best: there is a callback 'best'",
    "hydra/launcher=ray": "pip install",
    "callbacks.best.early_stop=late": "early_stop=late",
    "augment.mixup=much": "augment.mixup='much'",
    "augment.transform=much": "augment.transform=much",
    "device=abacus": "abacus",
    "device=99": "device='cuda:99', but torch finds",
    "loader.num_workers=many": "loader.num_workers=many",
    "data=mix data.parts=none": "parts",
    "data=mix +data@data.parts.one=synthetic data.weights={one: heavy}": "heavy",
    "data=image_folder data.root=3": "3",
    "data=image_folder data.root=[1,2]": r"\[1, 2\]",
    f"data=image_folder data.root={'long' * 100}": "longlong",
}


@pytest.mark.parametrize("text", SETTINGS)
def test_a_wrong_setting_is_named_before_anything_is_written(tmp_path, text):
    shown = run(tmp_path, *re.split(r" (?=\+?[\w.@]+=)", text))
    assert re.search(SETTINGS[text], re.sub(r"\[[-\d :,]+\]\[\w+\]\[\w+\] - ", "", shown)), shown
    assert not (tmp_path / "outputs").exists() and not (tmp_path / "out" / "metrics.jsonl").exists()


@pytest.mark.parametrize(("text", "ends_with"), [("32", 0), ("many", 1)])
@pytest.mark.parametrize("key", ["optim.lr", "model.size", "data.length", "train.batch_size"])
def test_a_variable_as_a_setting_is_the_number_in_it(tmp_path, monkeypatch, key, text, ends_with):
    monkeypatch.setenv("MINE", text)
    shown = run(tmp_path, f"{key}=${{oc.env:MINE}}", ends_with=ends_with)
    assert ends_with == 0 or text in shown


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE=two"),
        ({"WORLD_SIZE": "2", "RANK": "first"}, "RANK=first"),
        ({"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}, "MASTER_ADDR"),
    ],
)
def test_variables_of_torchrun(tmp_path, monkeypatch, variables, said):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert re.search(said, run(tmp_path, "train.process_timeout=2"))


# Folders and files

FOLDER = ["data=image_folder", "data.image_size=8", "train.batch_size=4"]


@pytest.mark.parametrize("what", ["data.root", "hydra.run.dir"])
def test_a_folder_whose_name_is_not_utf8(tmp_path, what):
    name = os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9")
    write_images(tmp_path / "images", count=4)
    if what == "data.root":
        os.rename(tmp_path / "images", name)
        run(tmp_path, *FOLDER, f"data.root='{name}'", ends_with=0)
    else:
        run(tmp_path, f"hydra.run.dir='{name}'", ends_with=0)


def test_a_class_and_a_file_whose_names_are_not_utf8(tmp_path):
    images = write_images(tmp_path / "images", count=4)
    for part in ("train", "val"):
        os.rename(images / part / "cat", os.fsencode(images / part) + b"/cat\xe9")
    first = sorted((images / "train" / "dog").iterdir())[0]
    os.rename(first, os.fsencode(first.parent) + b"/\xe9" + os.fsencode(first.suffix))
    run(tmp_path, *FOLDER, f"data.root={images}", ends_with=0)


@pytest.mark.parametrize(
    "settings",
    ["data.cache=ram", "data.root=~/images", "train.resume=~/earlier", "train.init_from=~/weights.pt"],
)
def test_no_home_folder(tmp_path, monkeypatch, settings):
    """As in a container whose user is a number."""

    def none(_):
        raise KeyError

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", none)
    images = write_images(tmp_path / "images", count=4)
    key, _, value = settings.partition("=")
    of_data = [*FOLDER, f"data.root={images}"] if key.startswith("data") else []
    assert "~" in run(tmp_path, *of_data, f"{key}='{value}'")


def replace_by_a_file(folder):
    shutil.rmtree(folder)
    folder.touch()


def cut_all(images):
    for path in images.rglob("*.jpg"):
        path.write_bytes(path.read_bytes()[:50])


def spoil_one(images):
    next((images / "train").rglob("*.jpg")).write_bytes(b"hello")


SPOILS = {  # what is done to a folder of images, and how the run ends
    "a file as the folder": (replace_by_a_file, 1),
    "a file as train/": (lambda images: replace_by_a_file(images / "train"), 1),
    "a text as an image": (spoil_one, 1),
    "the beginnings of images": (cut_all, 1),
    "a folder as an image": (lambda images: (images / "train" / "cat" / "z.jpg").mkdir(), 0),
    "a link to nothing": (lambda images: (images / "train" / "cat" / "9.jpg").symlink_to("nothing"), 1),
}


@pytest.mark.parametrize(("spoil", "ends_with"), SPOILS.values(), ids=SPOILS)
def test_a_folder_of_images(tmp_path, spoil, ends_with):
    images = write_images(tmp_path / "images", count=4)
    spoil(images)
    all_steps = ["train.epochs=4", "train.max_steps=null"]
    shown = run(tmp_path, *FOLDER, f"data.root={images}", *all_steps, ends_with=ends_with)
    assert str(images) in shown or not ends_with


# Checkpoints and folders of runs

WEIGHTS = {
    "empty": b"",
    "a text": b"hello",
    "a tensor": torch.zeros(3),
    "an empty module": {"model": {}},
    "a list": [1, 2],
    "numbers as names": {1: 2, 3: torch.zeros(2)},
    "numbers as modules": {"model": 3, "callbacks": 4},
    "a tensor as a module": {"model": torch.zeros(3)},
    "complex numbers": {"1.weight": torch.zeros(10, 192, dtype=torch.complex64)},
}


@pytest.mark.parametrize("key", ["train.init_from", "train.resume"])
@pytest.mark.parametrize("content", WEIGHTS.values(), ids=WEIGHTS)
def test_a_file_of_weights(tmp_path, key, content):
    path = tmp_path / "weights.pt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    assert "weights.pt" in run(tmp_path, f"{key}={path}")


HYDRA = b"hydra:\n  runtime: {config_sources: [{provider: main, path: conf}], cwd: /project}\n"
HYDRA += b"  job: {config_name: config}\n  overrides: {hydra: []}\n"


@pytest.mark.parametrize(
    ("overrides", "hydra"),
    [(b"\xff\xfe", HYDRA), (b"", HYDRA), (b"a: 1", HYDRA), (b"- 1", HYDRA), (b"- 'a=['", HYDRA), (b"- a=1", b"[]")],
)
def test_the_settings_of_a_run_to_resume(tmp_path, overrides, hydra):
    (tmp_path / "run" / ".hydra").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints").mkdir()
    (tmp_path / "run" / ".hydra" / "overrides.yaml").write_bytes(overrides)
    (tmp_path / "run" / ".hydra" / "hydra.yaml").write_bytes(hydra)
    run(tmp_path, f"train.resume={tmp_path}/run")


@pytest.mark.parametrize(
    "name", ["summary.json", "metrics.jsonl", "train.log", "checkpoints/last.pt", ".hydra/config.yaml"]
)
def test_a_folder_in_the_place_of_a_file_of_the_run(tmp_path, name):
    (tmp_path / "out" / name / "below").mkdir(parents=True)
    assert name.rpartition("/")[2] in run(tmp_path)


@pytest.mark.parametrize("name", ["checkpoints", ".hydra", ""])
def test_a_file_in_the_place_of_a_folder_of_the_run(tmp_path, name):
    path = tmp_path / "out" / name
    path.parent.mkdir(exist_ok=True)
    path.touch()
    assert str(path.name) in run(tmp_path)
