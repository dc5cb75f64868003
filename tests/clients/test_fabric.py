"""Lightning Fabric makes loaders anew around a distributed sampler, whether it knew our class before or not."""

import pytest

pytest.importorskip("lightning")

PROGRAM = """
import torch
from lightning.fabric import Fabric

def main(fabric):
    from loaders import WorkerLoader
    for seed in (None, 0):
        for loader in (
            WorkerLoader(range(16), 4, seed=seed, num_workers=1),
            WorkerLoader(range(16), batch_size=4, seed=seed, shuffle=True),
        ):
            ready = fabric.setup_dataloaders(loader)
            batches = [batch.tolist() for batch in ready]
            assert getattr(ready._dataloader, "seed", None) == seed
            everything = fabric.all_gather(torch.tensor(batches)).flatten().tolist()
            assert sorted(everything) == list(range(16)), everything
    if fabric.global_rank == 0:
        print("shared")

if __name__ == "__main__":
    IMPORT
    Fabric(accelerator="cpu", devices=2, strategy="ddp_fork").launch(main)
"""


@pytest.mark.parametrize("before", ["import loaders", "pass"], ids=["known", "unknown"])
def test_two_processes_share_the_samples(before, script):
    assert "shared" in script(PROGRAM.replace("IMPORT", before))
