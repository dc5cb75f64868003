"""What the loggers share, and the real ones without a network: what they have kept is read back from their files."""

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace

import pytest

from extras.loggers.logger import Logger
from tests.configs import SMALL, composed_by_hydra, metrics, train
from tests.data.reading import refused
from tests.infrastructure.later import Later
from train import train_model

wandb = Later("wandb")
mlflow = Later("mlflow.tracking")
events = Later("tensorboard.backend.event_processing.event_accumulator")
HERE = __name__.rpartition(".")[2]
RECORDER = f"+callbacks.recorder={{_target_: {HERE}.Recorder, fails_at: %s}}"
SMALLER = [*SMALL, "data.length=128", "callbacks/standard=[best]"]


class Recorder(Logger):
    """Keeps what it is told, and fails at one of its methods."""

    package = "json"

    def __init__(self, fails_at):
        super().__init__(fails_at=fails_at)
        Recorder.made = self
        self.calls = []

    def _note(self, name, *values):
        self.calls.append((name, *values))
        if self.options["fails_at"] == name:
            raise OSError(f"the network is down\nat the {name}")

    def start(self, run):
        self._note("start", run.progress.step, self.earlier_id)
        self.save_id("id")

    def metrics(self, step, values):
        self._note("metrics", step, values)

    def finish(self, summary):
        self._note("finish", summary)


def test_a_logger_gets_the_lines_of_metrics_jsonl_and_the_summary_and_a_job_of_a_sweep_continues_its_own(tmp_path):
    (tmp_path / "multirun.yaml").touch()
    summary = train(tmp_path / "1", RECORDER % "nothing", "train.epochs=1")
    start, *lines, finish = Recorder.made.calls
    recorder = Recorder.made
    assert start == ("start", 0, None) and finish[1]["test_accuracy"] == summary["test_accuracy"]
    steps = [step for _, step, _ in lines]
    assert steps == sorted(steps) and "loss" in lines[0][2] and "step" not in lines[0][2]
    assert (recorder.sweep, recorder.run_name) == (tmp_path, f"{tmp_path.name}/1")
    train(tmp_path / "1", RECORDER % "nothing", "train.epochs=2")
    assert Recorder.made.calls[0] == ("start", 8, "id")


@pytest.mark.parametrize("at", ["start", "metrics", "finish"])
def test_a_logger_that_fails_is_left_out_with_one_warning(tmp_path, caplog, at):
    train(tmp_path, RECORDER % at, "train.epochs=1")
    said = [text for text in caplog.messages if text.startswith("logger=")]
    assert said == [f"logger=recorder failed and is left out from here on: OSError: the network is down at the {at}"]
    assert Recorder.made.calls[-1][0] == at


@pytest.mark.parametrize("name", ["TensorBoard", "WandB", "MLflow", "Trackio"])
def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch, name):
    monkeypatch.setitem(sys.modules, name.lower(), None)
    kind = getattr(import_module(f"extras.loggers.{name.lower()}"), name)
    with refused(f"logger={name.lower()} needs another package: pip install {name.lower()}"):
        kind()


class FakeTrackio(ModuleType):
    """What trackio's API has that we call, without its database. A run whose name is taken gets another."""

    def __init__(self):
        super().__init__("trackio")
        self.__spec__ = ModuleSpec("trackio", None)
        self.runs = {}
        self.finished = []

    def init(self, project, name=None, group=None, config=None, resume="never"):
        taken = name in self.runs and resume == "never"
        run = SimpleNamespace(name=f"{name}-2" if taken else name, project=project, group=group, config=config)
        lines = self.runs.setdefault(run.name, [])
        run.log = lambda metrics, step=None: lines.append((step, metrics))
        run.finish = lambda: self.finished.append(run.name)
        return run


def test_trackio_gets_each_line_at_its_step_and_a_resumed_run_under_its_name(tmp_path, monkeypatch):
    fake = FakeTrackio()
    monkeypatch.setitem(sys.modules, "trackio", fake)
    for folder, epochs in (("one", 1), ("two/one", 1), ("two/one", 2)):
        run = composed_by_hydra(*SMALLER, "logger=trackio", f"train.epochs={epochs}")
        summary = train_model(run, tmp_path / folder)
    assert [*fake.runs] == ["one", "one-2"]
    lines = fake.runs["one-2"]
    assert {step: line["loss"] for step, line in lines if "loss" in line} == numbers_of(tmp_path / "two/one", "loss")
    step, last = lines[-1]
    assert (step, last["summary/test_accuracy"]) == (8, summary["test_accuracy"])
    assert fake.finished == [*fake.runs, "one-2"]


class FakeWandB(ModuleType):
    """What wandb's API has that we call. Its run has the id that it was given."""

    def __init__(self):
        super().__init__("wandb")
        self.__spec__ = ModuleSpec("wandb", None)
        self.summary = {}

    def login(self, **_):
        return False

    def Settings(self, **settings):
        return settings

    def init(self, **options):
        self.options = options
        return SimpleNamespace(
            id=options["id"],
            summary=self.summary,
            log=lambda line: None,
            finish=lambda exit_code: None,
            define_metric=lambda *_, **__: None,
        )


def test_wandb_gets_the_options_and_what_its_environment_says_before_ours(tmp_path, monkeypatch, caplog):
    fake = FakeWandB()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    for variable in ("WANDB_RUN_GROUP", "WANDB_DIR", "WANDB_MODE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("WANDB_RUN_ID", "theirs")
    monkeypatch.setenv("WANDB_NAME", "by the environment")
    added = ["+callbacks.wandb.dir=/elsewhere", "+callbacks.wandb.settings={console: wrap}"]
    for options, identifier in ((added, "theirs"), (["+callbacks.wandb.id=mine"], "mine")):
        folder = tmp_path / identifier
        train_model(composed_by_hydra(*SMALLER, "logger=wandb", "train.epochs=1", *options), folder)
        assert (folder / "wandb_run_id.txt").read_text() == f"{identifier}\n" and "name" not in fake.options
        assert fake.options["settings"]["console"] == ("wrap" if options is added else "off")
        assert fake.options["dir"] == ("/elsewhere" if options is added else str(folder))
    assert "`wandb sync /elsewhere/wandb/" in caplog.text and "left out" not in caplog.text
    assert fake.summary["test_accuracy"]


def needs(*packages):
    return pytest.mark.skipif(not all(map(find_spec, packages)), reason=f"needs {', '.join(packages)}")


class Odd:
    def on_step(self, run):
        run.log(**{"acc@1": 0.5})


def numbers_of(folder, key):
    return pytest.approx({line["step"]: line[key] for line in metrics(folder) if key in line})


@needs("tensorboard")
@pytest.mark.parametrize("folder", [None, "elsewhere"])
def test_tensorboard_has_the_lines_of_metrics_jsonl_and_the_summary(tmp_path, folder):
    options = [f"+callbacks.tensorboard.log_dir={tmp_path}/{folder}"] if folder else []
    summary = train_model(composed_by_hydra(*SMALLER, "logger=tensorboard", *options), tmp_path)
    found = events.EventAccumulator(str(tmp_path / (folder or ""))).Reload()
    for key in ("loss", "images_per_second", "test_accuracy"):
        assert {event.step: event.value for event in found.Scalars(key)} == numbers_of(tmp_path, key), key
    (speed,) = found.Scalars("summary/images_per_second")
    assert speed.value == pytest.approx(summary["images_per_second"])


@needs("wandb", "mlflow", "sqlalchemy")
@pytest.mark.slow
@pytest.mark.timeout(300)  # mlflow makes its tables
def test_a_resumed_run_without_a_login_continues_in_wandbs_and_mlflows_files(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("NETRC", str(tmp_path / "nobody"))
    settings = [*SMALLER, "logger=[wandb,mlflow]", f"+callbacks.odd._target_={HERE}.Odd"]
    for epochs in (1, 2):
        summary = train_model(composed_by_hydra(*settings, f"train.epochs={epochs}"), tmp_path)
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    (found,) = client.search_runs(["0"])
    for key in ("loss", "test_accuracy"):
        history = client.get_metric_history(found.info.run_id, key)
        assert {one.step: one.value for one in history} == numbers_of(tmp_path, key), key
    assert found.info.status == "FINISHED" and found.data.params["data.length"] == "128"
    assert found.data.metrics["summary/images_per_second"] == pytest.approx(summary["images_per_second"])
    assert found.data.metrics["acc_1"] == 0.5, "mlflow refuses acc@1"
    offline = sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    assert offline and all((tmp_path / "wandb_run_id.txt").read_text().strip() in one.name for one in offline)
    assert f"`wandb sync {tmp_path}/wandb/offline-run-*`" in caplog.text and "left out" not in caplog.text
    wandb.teardown()  # else its threads are left
