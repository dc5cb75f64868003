"""Ten further cases for bench_verdict.py, as in verdict_cases.py. Do not tune the verdict to these."""

from scripts.verdict_cases import Case

CASES = {
    # A batch takes 64 * 0.6 = 38 ms and a step 20, each on one core: the step waits almost half of the time.
    "cheap_native_one_worker": Case(
        {"decoding"},
        {"of": "Costly", "length": 19200, "native_ms": 0.6},
        {"step_ms": 20},
        "loader=prefetch loader.num_workers=1 train.batch_size=64 train.epochs=1",
        "data.native_ms=0",
        1.5,
    ),
    # Four workers deliver a batch every 64 ms in the first epoch and without delay in the four others, where only the
    # step takes time, 10 ms. The first epoch takes 6 of 10 s: reading bounds the run, though the typical step does not
    # wait.
    "cold_cache": Case(
        {"reading"},
        {"of": "Cold", "length": 3200, "wait_ms": 8.0},
        {"step_ms": 10},
        "loader=workers loader.num_workers=4 train.batch_size=32 train.epochs=5",
        "data.wait_ms=0",
        1.6,
    ),
    # 20 steps. The threads take turns with the Python code of a batch, 614 ms. In processes, two cores could do all of
    # the work of a step in 380.
    "large_batches_in_threads": Case(
        {"gil"},
        {"of": "Costly", "length": 20480, "python_ms": 0.6, "native_ms": 0.1},
        {"step_ms": 50},
        "loader=threads loader.num_workers=3 train.batch_size=1024 train.epochs=1",
        "loader=workers",
        1.3,
    ),
    # One batch in 19 takes 300 ms and the others almost nothing. Only six are loaded ahead, so two of three workers
    # and one core are mostly idle. The same CPU time in equal parts keeps both cores busy.
    "one_slow_native_sample": Case(
        {"uneven"},
        {"of": "Uneven", "length": 4800, "every": 150, "native_ms": 2.0},
        {"step_ms": 4},
        "loader=prefetch loader.num_workers=3 train.batch_size=8 train.epochs=1",
        "data.every=1",
        1.3,
    ),
    # A batch takes 32 ms of one core and a step 30 ms of both: together (32 + 60) / 2 = 46 ms instead of 30.
    "shared_cores": Case(
        {"cores"},
        {"of": "Costly", "length": 16000, "native_ms": 0.5},
        {"step_ms": 30, "threads": 2},
        "loader=prefetch loader.num_workers=2 train.batch_size=64 train.epochs=1",
        "data.native_ms=0",
        1.3,
    ),
    # Two tiny images per batch: the training process needs 0.6 ms of CPU time to receive a batch from the stock
    # loader, 0.1 from loader=workers, and 0.3 for a step. Reading takes 0.02.
    "tiny_batches": Case(
        {"loader"},
        {"of": "Costly", "length": 20000},
        {"step_ms": 0},
        "loader=torch loader.num_workers=2 train.batch_size=2 train.epochs=1",
        "loader=workers",
        1.4,
    ),
    # Each of four workers sleeps 4 * 32 = 128 ms per batch, so they deliver one every 32 ms. A step takes 40: it never
    # waits, though the workers are busy for 80 % of the time.
    "balanced": Case(
        {"step"},
        {"of": "Costly", "length": 9600, "wait_ms": 4.0},
        {"step_ms": 40},
        "loader=workers loader.num_workers=4 train.batch_size=32 train.epochs=1",
        "model.step_ms=20",
        1.15,
    ),
    # The training process normalises, erases and mixes images of 224 x 224: 50 to 80 ms per batch. Reading a batch
    # takes 1 ms and a step 2.
    "slow_transform": Case(
        {"transform"},
        {"of": "Costly", "length": 9600, "image_size": 224},
        {"step_ms": 2},
        "loader=workers loader.num_workers=1 train.batch_size=64 train.epochs=1 augment.erase=1 augment.mixup=0.2",
        "augment.erase=0 augment.mixup=0",
        1.3,
    ),
    # 40 of 12,800 samples kill the worker that reads them. Its replacement needs 0.3 s to open the data, during which
    # the other worker loads at most four batches: 12 s of restarts, against 2 s of steps and reading.
    "crashing_workers": Case(
        {"restarts"},
        {"of": "Opening", "length": 12800, "open_ms": 300.0, "crash_every": 320, "native_ms": 0.3},
        {"step_ms": 5},
        "loader=workers loader.num_workers=2 train.batch_size=32 train.epochs=1",
        "data.crash_every=0",
        2.0,
    ),
    # A checkpoint of 128 MB every fifth step, that is every 50 ms. Writing it takes at least 250 ms.
    "frequent_checkpoints": Case(
        {"checkpoint"},
        {"of": "Costly", "length": 4800},
        {"step_ms": 10, "ballast_mb": 128},
        "loader=workers loader.num_workers=1 train.batch_size=32 train.epochs=1 train.checkpoint_every=5",
        "train.checkpoint_every=null",
        1.5,
    ),
}
