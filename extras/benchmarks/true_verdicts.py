"""Checks verdicts against the truth: loops whose bottleneck was built in, on an idle machine and beside busy programs.

    python extras/benchmarks/true_verdicts.py                    # all situations, three times each: about 10 minutes
    python extras/benchmarks/true_verdicts.py --rounds 1 --only torch

A verdict may be withheld ("not measured"), but not wrong: the exit code is the number of wrong ones. A step and a
batch cost given seconds of CPU time, or of sleep, whatever else runs: so the truth is that of an idle machine. Where a
step and the workers share the cores or the interpreter, two words are true: steps wait, or are slower.
"""

import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from data.synthetic import Synthetic
from loaders import Preloader, ResidentLoader, StepTimer, WorkerLoader, available_cores
from scripts.bench_harness import ROUNDS
from training.script import parser, run_script
from training.trainer import Trainer

FORK = multiprocessing.get_context("fork")
SECONDS = 2.5  # how long a loop runs
LONGEST = 180  # seconds of a situation, on a busy machine; then the verdict counts as withheld
WARM_UP = 10
COMPUTE = ("compute-bound",)
DATA = ("data-bound",)
HOST = ("host-bound",)
EITHER = ("data-bound", "loader-bound")
TRAINED = (
    "data=synthetic data.image_size=28 data.channels=1 data.length=12800 data.test_length=64 train.batch_size=32 "
    "train.epochs=1 callbacks/standard=[] +callbacks.report._target_=extras.report.report.Report"
)


FEW = "train.max_steps=25 timing.warmup_steps=5"
SLOW = "extras.benchmarks.true_verdicts.SlowPython"


class SlowPython(Trainer):
    """Its steps keep the host for at least 150 milliseconds."""

    def training_step(self, batch: dict[str, Any]) -> Any:
        time.sleep(0.15)
        return super().training_step(batch)


@dataclass(frozen=True)
class Situation:
    """A loop with one sample per batch. step, cost: milliseconds; see STEPS, LOADERS, and Synthetic for the cost."""

    name: str
    truth: tuple[str, ...]
    loader: str = "workers"
    workers: int = 1
    step: float = 20.0
    kind: str = "parallel"
    cost: str = "native"
    cost_ms: float = 0.0
    neighbours: int = 0  # other programs that keep a core busy

    def run(self) -> str:
        loader = LOADERS[self.loader](self.dataset(), self.workers)
        step = STEPS[self.kind](self.step)
        return verdict_of(loader, torch.device("cpu"), lambda batch: step())

    def dataset(self) -> Synthetic:
        return Synthetic(True, length=10**6, image_size=8, cost=self.cost, cost_ms=self.cost_ms)


def verdict_of(loader: Any, device: torch.device, step: Callable[[Any], object]) -> str:
    """The verdict on a loop that takes SECONDS."""
    timer = StepTimer(device, WARM_UP)
    until = time.monotonic() + SECONDS
    for batch in timer.batches(loader):
        step(batch)
        if time.monotonic() > until and timer.whole().steps > 2 * WARM_UP:
            break
    verdict = timer.verdict(loader).sentence()
    if hasattr(loader, "close"):
        loader.close()
    return verdict


@dataclass(frozen=True)
class Training(Situation):
    """A run of train.py, whose report measures steps with and without loading.

    kernel: milliseconds of each operation of the simulated accelerator of the tests, on average; None: on the CPU.
    """

    settings: str = "train.max_steps=150"
    kernel: float | None = None

    def run(self) -> str:
        from hydra import compose, initialize_config_dir

        from train import train_model
        from training.config import ROOT

        settings = f"{TRAINED} {self.settings}"
        if self.kernel is not None:
            simulate(self.kernel)
            settings += " device=sim:0 model=linear loader.num_workers=1"
        with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
            config = compose("config", overrides=settings.split())
        with tempfile.TemporaryDirectory() as folder:
            return str(train_model(config, Path(folder))["verdict"])


@dataclass(frozen=True)
class Simulated(Situation):
    """A loop on the simulated accelerator of the tests. kernel: its milliseconds on average; step: Python's."""

    kernel: float = 0.0
    synchronizes: bool = False

    def run(self) -> str:
        simulated_streams = simulate(self.kernel)
        device = torch.device("sim:0")

        def step(batch: Any) -> None:
            batch["image"] + 1
            time.sleep(self.step / 1000)
            if self.synchronizes:
                simulated_streams.current_stream().synchronize()

        loader = WorkerLoader[Any](self.dataset(), 1, num_workers=self.workers, seed=0)
        return verdict_of(Preloader(loader, device, depth=2), device, step)


def simulate(kernel: float) -> Any:
    """Makes the tests' simulated accelerator, whose operations take `kernel` milliseconds on average. Its streams."""
    simulated: Any = import_module("tests.infrastructure.simulated_gpu")
    simulated.kernel_seconds = 2 * kernel / 1000  # the longest
    return simulated.simulated_streams


# Steps, by the milliseconds that one takes alone on an idle machine.


def computing(ms: float, threads: int) -> Callable[[], None]:
    """Products of matrices; how many is found by their CPU time in one thread, which others do not change."""
    matrix = torch.randn(256, 256)
    torch.set_num_threads(1)
    for _ in range(20):
        matrix @ matrix
    began = time.thread_time()
    for _ in range(100):
        matrix @ matrix
    count = max(1, int(ms / 1000 * threads * 100 / (time.thread_time() - began)))
    torch.set_num_threads(threads)

    def step() -> None:
        for _ in range(count):
            matrix @ matrix

    return step


def python(ms: float) -> Callable[[], None]:
    def step() -> None:
        until = time.thread_time() + ms / 1000
        while time.thread_time() < until:
            pass

    return step


STEPS: dict[str, Callable[[float], Callable[[], None]]] = {
    "parallel": lambda ms: computing(ms, available_cores()),
    "single": lambda ms: computing(ms, 1),
    "python": python,
}


class InMemory(Synthetic):
    """Has all samples as arrays."""

    def arrays(self) -> dict[str, Any]:
        return {"image": torch.zeros(len(self), 8, 8, 3, dtype=torch.uint8)}


LOADERS: dict[str, Callable[[Any, int], Any]] = {
    "torch": lambda dataset, workers: DataLoader(dataset, 1, num_workers=workers),
    "workers": lambda dataset, workers: WorkerLoader(dataset, 1, num_workers=workers, seed=0),
    "drop-in": lambda dataset, workers: WorkerLoader(dataset, 1, num_workers=workers),
    "threads": lambda dataset, workers: WorkerLoader(dataset, 1, num_workers=workers, worker_method="thread", seed=0),
    "preloader": lambda dataset, _: Preloader(WorkerLoader(dataset, 1, num_workers=0, seed=0), "cpu", depth=2),
    "resident": lambda *_: ResidentLoader(InMemory(True, length=10**6, image_size=8), 1, device="cpu"),
    "list": lambda *_: [torch.zeros(1, 3)] * 10**6,
}

# Samples that sleep for longer than a step takes, that compute for longer, and that cost next to nothing:
SLEEPING: dict[str, Any] = {"truth": DATA, "cost": "wait", "cost_ms": 60}
COMPUTING: dict[str, Any] = {"truth": EITHER, "step": 10, "kind": "single", "cost_ms": 40}
CHEAP: dict[str, Any] = {"truth": COMPUTE, "step": 40, "cost_ms": 0.5}

SITUATIONS = [
    Situation("torch, samples sleep", loader="torch", **SLEEPING),
    Situation("workers, samples sleep", **SLEEPING),
    Situation("drop-in, samples sleep", loader="drop-in", **SLEEPING),
    Situation("threads, samples sleep", loader="threads", **SLEEPING),
    Situation("inline, samples sleep", DATA, workers=0, cost="wait", cost_ms=20),
    Situation("preloader, samples sleep", loader="preloader", **SLEEPING),
    Situation("torch, samples sleep, 2 neighbours", loader="torch", neighbours=2, **SLEEPING),
    Situation("workers, samples sleep, 2 neighbours", DATA, cost="wait", cost_ms=200, neighbours=2),
    Situation("workers, samples sleep, 4 neighbours", neighbours=4, **SLEEPING),
    Situation("torch, samples compute", loader="torch", **COMPUTING),
    Situation("workers, samples compute", **COMPUTING),
    Situation("threads, samples compute", loader="threads", **COMPUTING),
    Situation("inline, samples compute", DATA, workers=0, kind="single", cost_ms=20),
    Situation("torch, samples compute, 1 neighbour", EITHER, "torch", step=10, cost_ms=60, neighbours=1),
    Situation("workers, samples compute, 2 neighbours", EITHER, step=10, cost_ms=60, neighbours=2),
    Situation("torch, cheap samples", loader="torch", workers=2, **CHEAP),
    Situation("workers, cheap samples", workers=2, **CHEAP),
    Situation("threads, cheap samples", loader="threads", **CHEAP),
    Situation("inline, cheap samples", workers=0, **CHEAP),
    Situation("preloader, cheap samples", loader="preloader", **CHEAP),
    Situation("resident", COMPUTE, "resident", step=40),
    Situation("a list of batches", COMPUTE, "list", step=40),
    Situation("torch, cheap samples, 1 neighbour", loader="torch", workers=2, neighbours=1, **CHEAP),
    Situation("workers, cheap samples, 1 neighbour", workers=2, neighbours=1, **CHEAP),
    Situation("workers, cheap samples, 4 neighbours", workers=2, neighbours=4, **CHEAP),
    # Workers that sleep long, but are many:
    Situation("torch, 6 workers that sleep", COMPUTE, "torch", 6, step=40, cost="wait", cost_ms=60),
    Situation("workers, 6 that sleep", COMPUTE, workers=6, step=40, cost="wait", cost_ms=60),
    # A step of Python code, which holds the interpreter:
    Situation("a Python step, workers", COMPUTE, step=30, kind="python", cost_ms=0.5),
    Situation(
        "a Python step, threads of Python", EITHER, "threads", step=20, kind="python", cost="python", cost_ms=20
    ),
    # Steps that share the cores with workers:
    Situation("all cores in the step and in workers", EITHER, workers=2, step=20, cost_ms=40),
    Situation("torch, all cores in both", EITHER, "torch", 2, step=20, cost_ms=40),
    # Runs of train.py, whose report measures steps with and without loading:
    Training("train, prefetch", COMPUTE),
    Training("train, cached", COMPUTE, settings="train.max_steps=150 loader=cached"),
    Training("train, resident", COMPUTE, settings="train.max_steps=150 loader=resident"),
    Training("train, samples sleep", DATA, settings="train.max_steps=150 data.cost=wait data.cost_ms=4"),
    Training("train, samples compute", EITHER, settings="train.max_steps=150 data.cost_ms=0.5"),
    Training("train, prefetch, 2 neighbours", COMPUTE, neighbours=2),
    Training("train, accelerator, slow kernels", COMPUTE, settings=FEW, kernel=5),
    Training("train, accelerator, slow Python", HOST, settings=f"{FEW} trainer._target_={SLOW}", kernel=0),
    # The simulated accelerator:
    Simulated("accelerator, slow kernels", COMPUTE, step=0, kernel=20),
    Simulated("accelerator, slow Python", HOST, step=20),
    Simulated("accelerator, the step waits for it", (*COMPUTE, *HOST), step=0, kernel=20, synchronizes=True),
    Simulated("accelerator, samples sleep", DATA, step=5, cost="wait", cost_ms=60),
]


@contextmanager
def neighbours(count: int) -> Iterator[None]:
    """Keeps cores busy in other processes, which this process has not started itself, as far as it can tell."""
    pids = []
    for _ in range(count):
        pid = os.fork()
        if pid == 0:
            while os.getppid() != 1:
                sum(range(10_000))
            os._exit(0)
        pids.append(pid)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, 9)
            os.waitpid(pid, 0)


def in_child(situation: Situation, results: Any) -> None:
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    try:
        results.put(situation.run())
    except BaseException as error:
        results.put(f"failed: {error!r}")


def measured(situation: Situation) -> str:
    """The verdict on a situation, in a new process."""
    results = FORK.Queue()
    child = FORK.Process(target=in_child, args=(situation, results))
    with neighbours(situation.neighbours):
        child.start()
        try:
            return str(results.get(timeout=LONGEST))
        except Exception:
            return "not measured: it took too long"
        finally:
            child.join(10)
            child.kill()


def main(arguments: list[str]) -> int:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=ROUNDS, help="how often each situation is run")
    options.add_argument("--only", default="", help="only situations whose names contain this text")
    given = options.parse_args(arguments)
    chosen = [situation for situation in SITUATIONS if given.only in situation.name]
    right = withheld = wrong = 0
    for situation in chosen:
        for _ in range(given.rounds):
            sentence = measured(situation)
            word = sentence.partition(":")[0].partition(",")[0]
            if word in situation.truth:
                right += 1
                mark = "right"
            elif word == "not measured":
                withheld += 1
                mark = "withheld"
            else:
                wrong += 1
                mark = "WRONG"
            print(f"{mark:8} {situation.name} ({' or '.join(situation.truth)}): {sentence}", flush=True)
    print(f"{len(chosen)} situations: {right} right, {withheld} withheld, {wrong} wrong")
    return wrong


if __name__ == "__main__":
    run_script(lambda: sys.exit(main(sys.argv[1:])))
