"""A notebook's kernel: cells that iterate over a loader are interrupted in mid-epoch, and run again."""

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

jupyter_client = pytest.importorskip("jupyter_client")
pytest.importorskip("ipykernel")

from points import SEED, flat

from loaders import WorkerLoader

LENGTH, BATCH_SIZE = 2000, 4  # batches are so small that an interrupt often comes within the loader's own code
ROUNDS = 6
ROOT = Path(__file__).parents[2]
SEEDED = f"seed={SEED}, persistent_workers=True"
PRELOADED = f"lambda loader: Preloader(loader, 'cpu'), {SEEDED}"

SETUP = f"""
import json
import torch
from loaders import Preloader, WorkerLoader


class Numbers:
    def __len__(self):
        return {LENGTH}

    def __getitem__(self, index):
        return index


def make(wrap=lambda loader: loader, **settings):
    return wrap(WorkerLoader(Numbers(), {BATCH_SIZE}, shuffle=True, num_workers=2, **settings))


def epoch(loader, tell_at=None):
    global got, whole
    got, whole = [], False
    for batch in loader:
        got.append(batch.tolist())
        if len(got) == tell_at:
            print("now", flush=True)
    whole = True

"""


class Kernel:
    """Runs cells, as a notebook does."""

    def __init__(self, manager, client, bound: float) -> None:
        self._manager, self._client, self._bound = manager, client, bound

    def run(self, cell: str, interrupt: bool = False) -> str:
        """Runs the cell, and returns what it prints; with `interrupt`, interrupts it once it prints something."""
        printed: list[str] = []

        def note(message: dict) -> None:
            content = message["content"]
            if content.get("name") == "stdout":
                printed.append(content["text"])
                if interrupt:  # as interrupt_kernel() does, which would start a thread here, for ever
                    os.killpg(self._manager.provisioner.pgid, signal.SIGINT)
            elif "traceback" in content and (not interrupt or content["ename"] != "KeyboardInterrupt"):
                pytest.fail("\n".join(content["traceback"]))

        self._client.execute_interactive(cell, allow_stdin=False, output_hook=note, timeout=self._bound)
        return "".join(printed)

    def value(self, expression: str) -> Any:
        return json.loads(self.run(f"print(json.dumps({expression}))"))


@pytest.fixture
def kernel(tmp_path: Path, bound: float) -> Iterator[Kernel]:
    paths = {"IPYTHONDIR": str(tmp_path), "JUPYTER_RUNTIME_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    manager, client = jupyter_client.manager.start_new_kernel(
        startup_timeout=60, env={**os.environ, **paths, "JUPYTER_PLATFORM_DIRS": "1"}
    )
    try:
        kernel = Kernel(manager, client, bound)
        kernel.run(SETUP)
        yield kernel
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
        manager.cleanup_resources()


def seeded_epoch(epoch: int) -> list[list[int]]:
    loader = WorkerLoader(range(LENGTH), BATCH_SIZE, shuffle=True, seed=SEED)
    loader.set_epoch(epoch)
    return [batch.tolist() for batch in loader]


def check_seeded(epoch: int, batches: list[list[int]], whole: bool) -> None:
    expected = seeded_epoch(epoch)
    assert batches == (expected if whole else expected[: len(batches)])


def check_unseeded(epoch: int, batches: list[list[int]], whole: bool) -> None:
    assert all(len(batch) == BATCH_SIZE for batch in batches)
    assert len(set(flat(batches))) == len(flat(batches)), "a sample came twice"
    assert not whole or sorted(flat(batches)) == list(range(LENGTH))


@pytest.mark.parametrize(
    ("settings", "check"),
    [(SEEDED, check_seeded), ("", check_unseeded), (PRELOADED, check_seeded)],
    ids=["seeded", "unseeded", "preloader"],
)
def test_a_cell_that_was_interrupted_gives_whole_epochs_when_it_runs_again(
    kernel: Kernel, settings: str, check: Callable[[int, list[list[int]], bool], None]
):
    kernel.run(f"loader = make({settings})")
    interrupted = 0
    for epoch in range(0, 2 * ROUNDS, 2):
        kernel.run(f"epoch(loader, tell_at={1 + 2 * epoch})", interrupt=True)
        batches, whole = kernel.value("[got, whole]")
        check(epoch, batches, whole)
        interrupted += not whole
        kernel.run("epoch(loader)")
        check(epoch + 1, kernel.value("got"), True)
    assert interrupted > 1  # now and then the interrupt comes too late
