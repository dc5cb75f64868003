import re
import sys
from itertools import zip_longest

import pytest
import torch
from hydra.utils import get_object as locate
from omegaconf import OmegaConf

from data.errors import DataError
from loaders import LoaderConfigError
from tests.configs import CONF, composed, composed_by_hydra
from training.command_line import check_overrides
from training.config import ConfigError, checked
from training.datasets import open_dataset
from training.targets import accepted, build, function_of


def config(*overrides: str):
    return checked(composed(*overrides))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["loader=prefech"], r"loader=prefech: did you mean prefetch\? it is one of .*torch"),
        (["callbacks/standard=[bst]"], r"callbacks/standard=bst: did you mean best\?"),
        (["-m", "loader=torch,tortch"], r"loader=tortch: did you mean torch\?"),
        (["laoder=torch"], r"laoder=torch: there is no key laoder; did you mean loader\?"),
        (["data.rot=x"], r"data\.rot=x: there is no key data\.rot; did you mean data\.root\?"),
        (["lr=0.1"], r"lr=0\.1: there is no key lr; did you mean optim\.lr\?"),
        (["train.lr=0.1"], r"train\.lr=0\.1: there is no key train\.lr; did you mean optim\.lr\?"),
        (["data.pad=two"], r"data\.pad=two: it takes an integer, such as data\.pad=1"),
        (["data.flip=1"], r"data\.flip=1: it takes true or false, such as data\.flip=true"),
        (["train.epochs=1.5"], r"train\.epochs=1\.5: it takes an integer"),
        (["-m", "train.epochs=1,two"], r"train\.epochs=two: it takes an integer"),
        (["train.clip_norm=much"], r"train\.clip_norm=much: .*could not be converted to Float"),
        (["train.trust=foo"], r"train\.trust=foo: .*str is not a ListConfig, list or tuple"),
        (["task.loss._target_=my.Loss"], r"task\.loss\._target_=my\.Loss: there is no key .*; write 'task\.loss=\{"),
        (["train=1"], r"train=1: train is a section: give one of its keys$"),
        (["callbacks.best=null"], r"callbacks\.best=null: callbacks\.best is a section: ~callbacks\.best leaves"),
        (["epochs"], r"'epochs' cannot be read as key=value"),
        (["train.epochs=["], r"'train\.epochs=\[' cannot be read"),
    ],
)
def test_a_wrong_override_is_refused_in_one_sentence(arguments, sentence):
    with pytest.raises(ConfigError, match=f"^{sentence}") as error:
        check_overrides(arguments, CONF)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["loader=torch", "loader.num_workers=0", "optim=adamw", "optim.lr=1", "train.clip_norm=1", "seed=3"],
        ["data=synthetic", "data.cost_ms=2", "data.cost=wait"],
        ["-m", "loader=torch,prefetch", "loader.num_workers=0,auto,2", "train.epochs=range(1,3)"],
        ["loader=torch", "loader.num_workers=auto", "loader.prefetch_factor=auto"],
        ["debug=fast", "train.max_steps=5", "train.resume=null"],
        ["debug=fast", "train.max_steps=null"],
        ["sampler._target_=my.Sampler", "+callbacks.mine._target_=my.Callback", "schedule._target_=my.Schedule"],
        ["-m", "data.root='a b','c'"],
        ["+model.anything=1", "hydra.run.dir=/tmp/x", "hydra/job_logging=disabled"],
        ["--cfg", "job", "no.such.key=1"],
        ["--help"],
    ],
)
def test_correct_overrides_and_hydras_own_flags_pass(arguments):
    check_overrides(arguments, CONF)


@pytest.mark.parametrize(
    "override",
    [
        "train.epochs=0",
        "train.max_steps=0",
        "train.warmup_epochs=-1",
        "train.channels_last=maybe",
        "train.clip_norm=0",
        "train.precision=fp8",
        "train.checkpoint_every=0min",
        "loader.num_workers=-1",
        "loader.num_workers=two",
        "loader.prefetch_factor=0",
        "loader.preload_depth=-1",
        "loader.timeout=-1",
        "loader.on_error=ignore",
        "seed=-1",
    ],
)
def test_a_value_out_of_bounds_is_refused_with_key_and_value(override):
    with pytest.raises((ConfigError, LoaderConfigError), match=f"^{re.escape(override)}(\\.0)?: .+") as error:
        config(override)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("device=gpu", "device='gpu' is unknown to torch: use 'cpu', 'cuda'"),
        ("task.scores=my.f", r"task\.scores=my\.f: write 'task\.scores=\{NAME: \{_target_: my\.f\}\}'"),
        ("+train.epoch=1", r"train\.epoch: no callback of this run has this key; ~train\.epoch leaves it out"),
        ("device=cuda", "device='cuda', but torch finds no CUDA device"),
    ],
)
def test_a_setting_that_cannot_work_is_refused_in_a_sentence(monkeypatch, override, sentence):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match=sentence):
        checked(composed_by_hydra(override))


def test_every_choice_of_every_group_composes():
    groups = [[f"{group.name}={file.stem}" for file in sorted(group.glob("*.yaml"))] for group in CONF.iterdir()]
    for choices in zip_longest(*groups):
        config(*filter(None, choices))


def test_every_line_of_every_yaml_has_a_comment():
    for file in CONF.rglob("*.yaml"):
        for line in file.read_text().splitlines():
            opens_a_section = re.fullmatch(r"\s*[a-z_]+:", line)
            assert not line.strip() or "#" in line or opens_a_section, f"{file} has no comment on: {line}"


def test_every_loader_has_the_same_keys():
    assert len({frozenset(OmegaConf.load(path)) for path in (CONF / "loader").glob("*.yaml")}) == 1


@pytest.mark.parametrize(
    ("code", "target", "sentence"),
    [
        ("class Broken\n    pass", "Broken", r"SyntaxError: expected ':' \(broken\.py line 1; "),
        ("import math\nimport no_such_thing", "Broken", r".*No module named 'no_such_thing' \(broken\.py line 2; "),
        ("class Plankton: pass", "Plancton", r"broken has no Plancton: did you mean Plankton\?$"),
        ("def f():\n    return {}['labels']", "f", r"KeyError: 'labels' \(broken\.py line 2; "),
        ("def f():\n    raise NotImplementedError", "f", r"NotImplementedError \(broken\.py line 2; "),
        ("def f():\n    1 / 0", "f", r"ZeroDivisionError: division by zero \(broken\.py line 2; "),
    ],
)
def test_an_error_in_the_users_file_is_named_with_its_type_and_line(tmp_path, monkeypatch, code, target, sentence):
    (tmp_path / "broken.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("training.targets.CONF", tmp_path / "conf")
    monkeypatch.delitem(sys.modules, "broken", raising=False)
    with pytest.raises(ConfigError, match=rf"^data: broken\.{target}\(\): {sentence}") as error:
        build("data", {"_target_": f"broken.{target}"})
    assert "\n" not in str(error.value) and str(error.value).count("HYDRA_FULL_ERROR") <= 1


@pytest.mark.parametrize(("section", "named"), [("my.loss", "my.loss"), ({"a": 1}, "MODULE.NAME")])
def test_a_function_without_a_target_is_refused_with_an_override_that_works(section, named):
    with pytest.raises(ConfigError, match=f"write '{re.escape(advice := f'task.loss={{_target_: {named}}}')}'"):
        function_of("task.loss", section)
    check_overrides([advice], CONF)


@pytest.mark.parametrize(
    ("name", "section", "sentence"),
    [
        ("data", {"_target_": None}, r"data has no _target_: its file in conf/data/ needs the line '_target_: MOD"),
        ("model", {"_target_": "models.nope.Net"}, r"model: models\.nope\.Net"),
        ("data", {"_target_": "data.fashon.Mini"}, r"data: .*: data has no fashon: did you mean fashion\?$"),
        ("model", {"_target_": "models.small_cnn.SmallCNN", "width": 0}, r"model: .*\(width=0\): width=0: give a"),
        ("optim", {"_target_": "torch.optim.SGD", "lr": -1}, r"optim: torch\.optim\.SGD\(lr=-1\): Invalid learning"),
        (
            "data",
            {"_target_": "data.fashion.FashionMini", "mean": [0.5]},
            r"data: data\.fashion\.FashionMini\(.*unexpected keyword argument 'mean'",
        ),
    ],
)
def test_a_target_that_cannot_be_called_is_reported_in_one_sentence(name, section, sentence):
    arguments = {"optim": [[torch.zeros(1)]], "model": [10, 3], "data": [True]}[name]
    with pytest.raises(ConfigError, match=f"^{sentence}") as error:
        build(name, section, *arguments)
    assert "\n" not in str(error.value)


def test_a_target_gets_lists_and_dicts_of_python():
    got = build("mine", {"_target_": "builtins.dict", "betas": [0.9, 0.95], "nested": {"names": ["a"]}})
    assert [type(value) for value in (got["betas"], got["nested"], got["nested"]["names"])] == [list, dict, list]


def test_a_data_error_is_raised_unchanged():
    loaded = config("data=image_folder", "data.root=/no/such/folder")
    with pytest.raises(DataError, match=r"^[^(]*/no/such/folder"):
        open_dataset(loaded.data, train=True, seed=0)


@pytest.mark.parametrize(
    ("path", "names"),
    [
        ("models.resnet.resnet", {"num_classes", "in_channels", "image_size"}),
        ("models.small_cnn.SmallCNN", {"num_classes", "in_channels"}),
        ("torchvision.models.resnet18", {"num_classes"}),
        ("torch.nn.Flatten", set()),
    ],
)
def test_a_network_is_told_only_what_it_asks_for(path: str, names: set[str]) -> None:
    found = accepted(locate(path), {"num_classes": 10, "in_channels": 1, "image_size": 8})
    assert set(found) == names
