"""Elsewhere than on Linux the loaders import, and read inline or in threads."""

WINDOWS = """
import os, select, signal, socket, sys
import torch, torch.utils.data, torch.multiprocessing, numpy

sys.platform = "win32"
for name in ("register_at_fork", "memfd_create", "pread", "sched_getaffinity", "sysconf", "getppid"):
    delattr(os, name)
del select.poll, signal.pthread_sigmask, socket.AF_UNIX, socket.SOCK_SEQPACKET
for name in ("resource", "fcntl"):
    sys.modules[name] = None  # importing it raises ImportError

from loaders import Preloader, WorkerLoader

for settings in ({"num_workers": 2}, {"num_workers": 2, "worker_method": "thread"}, {"num_workers": 0}):
    with Preloader(WorkerLoader(range(8), 4, seed=0, **settings), "cpu", 2) as loader:
        print([batch.tolist() for batch in loader])
"""


def test_on_another_system_the_loaders_read_inline_or_in_threads(python, bound):
    done = python.run("-c", WINDOWS, timeout=bound, check=True)
    assert done.stdout.count("[[0, 1, 2, 3], [4, 5, 6, 7]]") == 3
