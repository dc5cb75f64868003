"""Runs of train.py whose bottleneck is known by construction; ten others are in verdict_cases_held_out.py.

All run on 2 cores. In the comments, the time of a batch is that of one worker. The overrides in `without` remove the
bottleneck and change nothing else: `bench_verdict.py --check` measures how much faster the run then is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# Bottlenecks for which training waits for data, and which more workers, other workers or another loader can remove.
DATA_BOUND = {"decoding", "gil", "loader", "reading", "uneven"}


@dataclass(frozen=True)
class Case:
    """A run of train.py with a dataset and a model of verdict_parts.py."""

    truth: set[str]  # the bottlenecks that a right verdict may name
    data: dict[str, Any]  # a class of verdict_parts.py ("of"), and its arguments
    model: dict[str, Any]  # the arguments of Timed, or a choice of conf/model/ ("of")
    overrides: str
    without: str  # overrides that remove the bottleneck
    speedup: float  # how many times as fast the run is then, at least
    others: int = 0  # other programs, each of which keeps a core busy during the run

    @property
    def is_data_bound(self) -> bool:
        return self.truth <= DATA_BOUND


CASES = {
    # A batch takes 32 * 2 = 64 ms and a step 10: the only worker is always busy, and the second core mostly idle.
    "python_too_few_workers": Case(
        {"decoding"},
        {"of": "Costly", "length": 6400, "python_ms": 2.0},
        {"step_ms": 10},
        "loader=workers loader.num_workers=1 train.batch_size=32 train.epochs=1",
        "data.python_ms=0",
        3.0,
    ),
    # A batch sleeps for 32 * 10 = 320 ms, so two workers deliver one every 160 ms, and a step takes 5. No CPU is used.
    "slow_disk": Case(
        {"reading"},
        {"of": "Costly", "length": 3200, "wait_ms": 10.0},
        {"step_ms": 5},
        "loader=workers loader.num_workers=2 train.batch_size=32 train.epochs=1",
        "data.wait_ms=0",
        8.0,
    ),
    # Every 100th sample sleeps for 400 ms. With 16 samples in a batch that is one batch in six, and at most 8 batches
    # are loaded ahead, so four workers mostly wait for one another. The same sleep in equal parts keeps all four busy.
    "one_in_a_hundred": Case(
        {"uneven"},
        {"of": "Uneven", "length": 4000, "every": 100, "wait_ms": 4.0},
        {"step_ms": 5},
        "loader=workers loader.num_workers=4 train.batch_size=16 train.epochs=1",
        "data.every=1",
        1.6,
    ),
    # Samples of Python code in threads of one process: the threads take turns, so together they need 32 ms per batch.
    "python_in_threads": Case(
        {"gil"},
        {"of": "Costly", "length": 9600, "python_ms": 1.0},
        {"step_ms": 5},
        "loader=threads loader.num_workers=4 train.batch_size=32 train.epochs=1",
        "loader=workers",
        1.4,
    ),
    # A batch takes 64 ms of one core, a step 30 ms of both. Eight workers always have a batch ready, so training never
    # waits, but the two cores need (64 + 60) / 2 = 62 ms per step, which takes 30 without the samples' work.
    "too_many_workers": Case(
        {"cores"},
        {"of": "Costly", "length": 12800, "native_ms": 1.0},
        {"step_ms": 30, "threads": 2},
        "loader=workers loader.num_workers=8 train.batch_size=64 train.epochs=1",
        "data.native_ms=0",
        1.5,
    ),
    # 24 small tensors per batch. The stock loader sends a file descriptor for each: a batch takes 4 ms of CPU time in
    # a worker and 4 in the training process, although reading and collating take 0.1 each. With loader=workers, which
    # runs the same code of the dataset and of collate, a batch takes 1 and 0.5.
    "stock_loader_many_fields": Case(
        {"loader"},
        {"of": "ManyFields", "length": 24000, "fields": 24},
        {"step_ms": 0.5},
        "loader=torch loader.num_workers=2 train.batch_size=16 train.epochs=1",
        "loader=workers",
        1.6,
    ),
    # A real network: reading a batch takes 1 ms, and a step 50 or more.
    "slow_step": Case(
        {"step"},
        {"of": "Costly", "length": 32000, "image_size": 32},
        {"of": "small_cnn", "width": 16},
        "loader=prefetch loader.num_workers=1 train.batch_size=128 train.epochs=1",
        "model.width=1",
        1.4,
    ),
    # Reading takes no time, collating 60 ms per batch in each of two workers, and a step 5.
    "slow_collate": Case(
        {"collate"},
        {"of": "SlowCollate", "length": 12800, "collate_ms": 60.0},
        {"step_ms": 5},
        "loader=workers loader.num_workers=2 train.batch_size=32 train.epochs=1",
        "data.collate_ms=0",
        3.0,
    ),
    # Three epochs, each of 1 s of training and 4 s of evaluation.
    "slow_evaluation": Case(
        {"evaluation"},
        {"of": "SlowTest", "length": 3200, "wait_ms": 4.0, "test_length": 2000},
        {"step_ms": 10},
        "loader=workers loader.num_workers=2 train.batch_size=32 train.epochs=3",
        "data.wait_ms=0",
        1.5,
    ),
    # Each worker needs 7 s of CPU time to open the data, then training takes 3 s.
    "slow_start": Case(
        {"start-up"},
        {"of": "Opening", "length": 9600, "open_ms": 7000.0},
        {"step_ms": 10},
        "loader=workers loader.num_workers=2 train.batch_size=32 train.epochs=1",
        "data.open_ms=0",
        1.5,
    ),
    # Batches of 4 to 8 pixels in width: a step on one of them does not tell how long a step takes.
    "widths_vary": Case(
        {"not measurable"},
        {"of": "Costly", "length": 6400, "python_ms": 0.5},
        {"step_ms": 10},
        "loader=workers loader.num_workers=1 train.batch_size=32 train.epochs=1 "
        "'data.collate={_target_: scripts.verdict_parts.narrowed}'",
        "data.collate=null",
        0.8,
    ),
    # Two other programs get half of the two cores.
    "busy_machine": Case(
        {"not measurable"},
        {"of": "Costly", "length": 3200, "python_ms": 0.5},
        {"step_ms": 10},
        "loader=workers loader.num_workers=1 train.batch_size=32 train.epochs=1",
        "",
        0.8,
        others=2,
    ),
    # The same with a real network: of the two threads of a step, one waits whenever another program has its core.
    "threads_wait": Case(
        {"not measurable"},
        {"of": "Costly", "length": 1280, "image_size": 32},
        {"of": "small_cnn", "width": 4},
        "loader=workers loader.num_workers=1 train.batch_size=32 train.epochs=1",
        "train.num_threads=1",
        1.3,
        others=2,
    ),
}
