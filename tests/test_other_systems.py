"""A system with none of Linux's features, as macOS: train.py runs with worker threads, and says so once."""

import json

# The libraries are imported first: some choose compiled parts for the platform.
PROGRAM = """
import os, runpy, sys
import hydra, matplotlib.pyplot, multiprocessing.util, numpy, psutil, torch, torch._dynamo, torch.utils.data, tqdm

sys.platform = "darwin"
for name in ("memfd_create", "pidfd_open", "posix_fallocate", "eventfd", "sched_getaffinity"):
    vars(os).pop(name, None)
sys.path.insert(0, os.getcwd())
runpy.run_path("train.py", run_name="__main__")
"""


def test_without_linux_train_py_reads_in_threads_and_says_so_once(tmp_path, python):
    data = ["data=synthetic", "data.length=64", "data.test_length=16", "data.image_size=8", "model=linear"]
    settings = [*data, "train.batch_size=16", "train.epochs=1", "loader.num_workers=2", f"hydra.run.dir={tmp_path}"]
    python.run("-c", PROGRAM, *settings, timeout=100, check=True)
    assert (tmp_path / "train.log").read_text().count("samples are read in a thread") == 1
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["num_workers"] == 2
