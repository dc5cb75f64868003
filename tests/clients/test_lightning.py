"""Lightning's Trainer with our loaders where a DataLoader was: training, checkpoints and DDP."""

import json
import os
import socket

import pytest

lightning = pytest.importorskip("lightning")

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from points import BATCH_SIZE, KINDS, LENGTH, SEED, Points, check_epochs, indices, seeded, seeded_epoch

from loaders import Preloader, WorkerLoader

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's advice on worker counts and log intervals


class Recorder(lightning.LightningModule):
    """Trains a line on Points and notes which samples each epoch's batches had."""

    def __init__(self):
        super().__init__()
        self.line = torch.nn.Linear(2, 1)
        self.trained = {}
        self.validated = []

    def training_step(self, batch, number):
        self.trained.setdefault(self.current_epoch, []).append(indices(batch))
        return (self.line(batch["x"]).squeeze(1) - batch["labels"]).square().mean()

    def validation_step(self, batch, number):
        self.validated += indices(batch)

    def predict_step(self, batch, number):
        return batch["x"][:, 0]

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-4)


def trainer(**settings):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    return lightning.Trainer(**{"max_epochs": 3, "devices": 1, "enable_checkpointing": False, **quiet, **settings})


@pytest.mark.parametrize("kind", KINDS)
def test_training_gets_every_sample_once_an_epoch_in_the_order_of_the_epoch(kind):
    module = Recorder()
    with KINDS[kind]() as loader:
        trainer().fit(module, loader)
    epochs = list(module.trained.values())
    check_epochs(epochs)
    if kind != "unseeded":
        assert epochs == [seeded_epoch(epoch) for epoch in range(3)]


def test_validation_between_epochs_leaves_the_training_order_alone():
    module = Recorder()
    with seeded() as train, seeded(shuffle=False, pad=False) as validate:
        trainer(max_epochs=2, num_sanity_val_steps=1).fit(module, train, validate)
    assert module.trained == {epoch: seeded_epoch(epoch) for epoch in range(2)}
    assert module.validated == [*range(BATCH_SIZE), *range(LENGTH), *range(LENGTH)]  # the first are the sanity check's


@pytest.mark.parametrize("settings", [{}, {"seed": None, "persistent_workers": False}], ids=str)
def test_predictions_come_for_every_sample_in_order(settings):
    # Lightning makes the loader anew for this, from its attributes, with a batch sampler that keeps the indices.
    with seeded(shuffle=False, **settings) as loader:
        batches = trainer().predict(Recorder(), loader)
    assert torch.cat(batches).tolist() == list(range(LENGTH))


@pytest.mark.parametrize(("kind", "step"), [("seeded", 6), ("preloader", 8)])  # an epoch has 6
def test_a_run_resumed_from_a_checkpoint_gets_the_batches_that_were_left(kind, step, tmp_path):
    whole = Recorder()
    resumed = Recorder()
    saves = ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, every_n_train_steps=step)
    with KINDS[kind]() as loader:
        trainer(enable_checkpointing=True, callbacks=[saves]).fit(whole, loader)
    with KINDS[kind]() as loader:
        trainer().fit(resumed, loader, ckpt_path=str(tmp_path / f"step={step}.ckpt"))
    check_epochs(list(whole.trained.values()))
    assert resumed.trained == {1: whole.trained[1][step - 6 :], 2: whole.trained[2]}


def in_ddp(rank, folder, port):
    """A process of DDP: three runs, of each of which it writes the samples of its batches into a file."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE="2", LOCAL_RANK=str(rank))
    workers = {"shuffle": True, "num_workers": 1, "persistent_workers": True}
    for name in ("unseeded", "seeded", "own_share"):
        module = Recorder()
        runner = trainer(devices=2, strategy="ddp", use_distributed_sampler=name != "own_share")
        settings = {"seed": None if name == "unseeded" else SEED, **workers}
        if name == "own_share":
            settings |= {"rank": runner.global_rank, "world_size": runner.world_size}
        loader = WorkerLoader(Points(), BATCH_SIZE, **settings)
        with Preloader(loader, "cpu") if name == "own_share" else loader as loader:
            runner.fit(module, loader)
        (folder / f"{name}-{rank}.json").write_text(json.dumps(list(module.trained.values())))
        runner.strategy.barrier()


def test_two_processes_train_on_every_sample_once_an_epoch_in_another_order_each(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    # A fork need not import Lightning, which takes seconds. With a GPU autograd has threads, and refuses to be forked.
    method = "spawn" if torch.cuda.is_available() else "fork"
    torch.multiprocessing.start_processes(in_ddp, (tmp_path, port), 2, start_method=method)

    def epochs(name):
        ranks = [json.loads((tmp_path / f"{name}-{rank}.json").read_text()) for rank in range(2)]
        return list(zip(*ranks, strict=True))

    # Lightning deals the samples out itself, by a sampler of its own ...
    for name in ("unseeded", "seeded"):
        check_epochs([first + second for first, second in epochs(name)])
    # ... or leaves it to the loader.
    for epoch, shares in enumerate(epochs("own_share")):
        assert list(shares) == [seeded_epoch(epoch, rank=rank, world_size=2) for rank in range(2)]
