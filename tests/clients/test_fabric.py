"""Lightning Fabric makes loaders anew around a distributed sampler, also of a class that it did not know before."""

import pytest

pytest.importorskip("lightning")

PROGRAM = """
import torch
from lightning.fabric import Fabric

def main(fabric):
    from loaders import WorkerLoader
    for seed in (None, 0):
        ready = fabric.setup_dataloaders(WorkerLoader(range(16), 4, seed=seed, num_workers=1))
        batches = [batch.tolist() for batch in ready]
        assert getattr(ready._dataloader, "seed", None) == seed
        everything = fabric.all_gather(torch.tensor(batches)).flatten().tolist()
        assert sorted(everything) == list(range(16)), everything
    if fabric.global_rank == 0:
        print("shared")

if __name__ == "__main__":
    Fabric(accelerator="cpu", devices=2, strategy="ddp_fork").launch(main)
"""


@pytest.mark.timeout(300)  # on a busy machine
def test_two_processes_share_the_samples(script):
    assert "shared" in script(PROGRAM)
