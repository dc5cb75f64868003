"""scripts/evaluate.py and predict.py on runs with losses, scores, trainers and networks of a fork's own."""

import pytest
import torch
from torch import nn

from data.synthetic import Synthetic
from scripts import evaluate, predict
from tests.configs import NO_TRIALS, composed
from train import run
from training.config import ConfigError
from training.finished.finished_run import CPU_BATCH
from training.tasks import Classification
from training.trainer import Trainer

HERE = "test_evaluate_own"
LENGTH = 3 * CPU_BATCH


class Pairs(Classification):
    """Its loss compares each sample with all others of its batch, as contrastive losses do."""

    def _loss(self, outputs, labels):
        return nn.functional.cross_entropy(outputs @ outputs.T, torch.arange(len(outputs)))


class Margins(Trainer):
    def evaluation_step(self, batch):
        outputs = self.model(batch["image"])
        return {"margin": outputs.max(1).values - outputs.min(1).values}


class Noise(Trainer):
    """Its score depends on a module beside the network, on dropout there, and on random numbers."""

    def configure_optimizers(self):
        self.head = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
        return torch.optim.SGD([*self.model.parameters(), *self.head.parameters()], 0.1)

    def training_step(self, batch):
        return self.task.loss(self.head(self.model(batch["image"])), batch["label"])

    def evaluation_step(self, batch):
        return {"noise": self.head(self.model(batch["image"])).mean(1) + torch.randn(len(batch["label"]))}


class Scans(Synthetic):
    """Its fields have other names, its images random noise, also in the test set, and one cannot be read."""

    read_batch = None

    def __getitem__(self, index):
        if index == 3:
            raise OSError("damaged")
        sample = super().__getitem__(index)
        return {"scan": sample["image"] ^ torch.randint(128, (8, 8, 3), dtype=torch.uint8), "kind": sample["label"]}


class Failing(Margins):
    """Its scores need what an earlier training step left."""

    def training_step(self, batch):
        self.seen = {"teacher": batch["label"]}
        return super().training_step(batch)

    def evaluation_step(self, batch):
        if self.step == 0 and len(batch["label"]) <= 2:  # the first samples, before training
            return super().evaluation_step(batch)
        return {"margin": getattr(self, "seen", {})["teacher"].float().mean()}


class Raw(Margins):
    def training_step(self, batch):
        return self.model(batch["image"]).square().mean()


class Share:
    """An epoch's metric: the share of the most frequent prediction."""

    def __init__(self):
        self.reset()

    def reset(self):
        self.counts = torch.zeros(4)

    def update(self, outputs, labels):
        self.counts += torch.bincount(outputs.argmax(1), minlength=4)

    def compute(self):
        return (self.counts.max() / self.counts.sum()).item()


class Embedding(nn.Sequential):
    """Returns 7 numbers, not one for each of the 4 classes."""

    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(8 * 8 * 3, 7))


class Wordless(Classification):
    def predictions(self, outputs):
        raise NotImplementedError


def trained(folder, *overrides):
    small = ["data=synthetic", "data.length=128", f"data.test_length={LENGTH}", "data.image_size=8", "model=linear"]
    small += ["data.num_classes=4", f"train.batch_size={2 * CPU_BATCH}", "train.epochs=1", "loader=torch"]
    return run(composed(*small, "loader.num_workers=0", *NO_TRIALS, *overrides), folder)


def evaluated(folder, *overrides):
    return evaluate.main([str(folder), "loader.num_workers=0", "--trust", HERE, "device=cpu", *overrides])


WORKER = ["loader=workers", "loader.num_workers=1"]  # in a worker process, samples draw from seeded generators
SCANS = [f"data._target_={HERE}.Scans", "task.inputs=scan", "task.label=kind", "loader.on_error=skip", *WORKER]
SCANS += ["train.max_steps=3"]  # in the middle of an epoch
MARGINS = [f"trainer._target_={HERE}.Margins", "task.metric=margin"]


@pytest.mark.parametrize(
    ("overrides", "names", "absent"),
    [
        ([f"+task.metrics.share._target_={HERE}.Share"], {"loss", "accuracy", "share", "classes"}, set()),
        ([f"task._target_={HERE}.Pairs"], {"loss"}, set()),  # which depends on the batch
        (MARGINS, {"margin"}, {"accuracy", "classes"}),
        (SCANS, {"loss", "accuracy", "classes"}, set()),
        ([f"trainer._target_={HERE}.Noise", "task.metric=noise"], {"noise"}, {"accuracy"}),
    ],
)
def test_all_scores_are_those_of_the_run(tmp_path, overrides, names, absent):
    summary = trained(tmp_path, *overrides, "train.epochs=2")
    result = evaluated(tmp_path / "checkpoints" / "last.pt", *(WORKER[1:] if WORKER[0] in overrides else ()))
    assert names <= result.keys() and not absent & result.keys()
    for name in names - {"classes"}:
        assert result[name] == pytest.approx(summary[f"test_{name}"], rel=1e-5), name


def test_balanced_weights_which_need_the_training_set_leave_out_the_loss(tmp_path):
    trained(tmp_path, "task.class_weights=[1,2,1,1]")
    assert "loss" in evaluated(tmp_path)
    path = (tmp_path / "checkpoints" / "best.pt").resolve()
    state = torch.load(path, weights_only=True)
    state["config"]["task"]["class_weights"] = "balanced"
    torch.save(state, path)
    result = evaluated(tmp_path)
    assert "loss" not in result and "accuracy" in result


def test_a_run_whose_scores_fail_later_ends_in_a_sentence(tmp_path):
    trained(tmp_path, f"trainer._target_={HERE}.Failing", "task.metric=margin")
    with pytest.raises(ConfigError, match=r"best\.pt \(step 2\) cannot be evaluated: KeyError: 'teacher' \("):
        evaluated(tmp_path)


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            [f"trainer._target_={HERE}.Raw", "task.metric=margin", f"model._target_={HERE}.Embedding", "~model.size"],
            r"returns outputs of shape \(32, 7\), and Classification needs 4 for each image: its predictions would",
        ),
        ([f"task._target_={HERE}.Wordless"], r"^Sequential of \S+ \(step 2\) cannot be used for predictions: Not"),
    ],
)
def test_a_run_that_cannot_predict_ends_in_a_sentence(tmp_path, overrides, sentence):
    trained(tmp_path, *overrides)
    with pytest.raises(ConfigError, match=sentence):
        predict.main([str(tmp_path), "--trust", HERE, "loader.num_workers=0", "--out", str(tmp_path / "p.csv")])
    assert not list(tmp_path.glob("p*")), "a refusal leaves no file"
