"""Ten further cases for bench_verdict.py, not to be looked at while the verdict is tuned: see verdict_cases.py."""

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
    # Four workers deliver a batch every 64 ms in the first epoch, and at once in the four others, in which a step
    # takes 10 ms. So the first epoch takes 6 of 10 s: reading bounds the run, though the typical step does not wait.
    "cold_cache": Case(
        {"reading"},
        {"of": "Cold", "length": 3200, "wait_ms": 8.0},
        {"step_ms": 10},
        "loader=workers loader.num_workers=4 train.batch_size=32 train.epochs=5",
        "data.wait_ms=0",
        1.6,
    ),
    # 20 steps. The Python code of a batch takes 614 ms, in turns; on two cores all of the work could take 380.
    "large_batches_in_threads": Case(
        {"gil"},
        {"of": "Costly", "length": 20480, "python_ms": 0.6, "native_ms": 0.1},
        {"step_ms": 50},
        "loader=threads loader.num_workers=3 train.batch_size=1024 train.epochs=1",
        "loader=workers",
        1.3,
    ),
    # One batch in 19 takes 300 ms and the others almost nothing; six are loaded ahead, so two of three workers, and a
    # core, are mostly idle. The same CPU time in equal parts keeps both cores busy.
    "one_slow_native_sample": Case(
        {"uneven"},
        {"of": "Uneven", "length": 4800, "every": 150, "native_ms": 2.0},
        {"step_ms": 4},
        "loader=prefetch loader.num_workers=3 train.batch_size=8 train.epochs=1",
        "data.every=1",
        1.3,
    ),
    # A batch takes 32 ms of a core and a step 30 ms of both: together (32 + 60) / 2 = 46 ms instead of 30.
    "shared_cores": Case(
        {"cores"},
        {"of": "Costly", "length": 16000, "native_ms": 0.5},
        {"step_ms": 30, "threads": 2},
        "loader=prefetch loader.num_workers=2 train.batch_size=64 train.epochs=1",
        "data.native_ms=0",
        1.3,
    ),
    # Two tiny images a batch: in the training process, receiving one from the stock loader takes 0.6 ms of CPU time,
    # from loader=workers 0.1, and a step 0.3. Reading takes 0.02.
    "tiny_batches": Case(
        {"loader"},
        {"of": "Costly", "length": 20000},
        {"step_ms": 0},
        "loader=torch loader.num_workers=2 train.batch_size=2 train.epochs=1",
        "loader=workers",
        1.4,
    ),
    # Four workers sleep 32 ms for a batch and a step takes 40: they are busy for 80 % of the time, and always in time.
    "balanced": Case(
        {"step"},
        {"of": "Costly", "length": 9600, "wait_ms": 4.0},
        {"step_ms": 40},
        "loader=workers loader.num_workers=4 train.batch_size=32 train.epochs=1",
        "model.step_ms=20",
        1.15,
    ),
    # Erasing and mixing float images of 224 x 224 after normalising them takes 50 to 80 ms a batch in the training
    # process, reading a batch 1 and a step 2.
    "slow_transform": Case(
        {"transform"},
        {"of": "Costly", "length": 9600, "image_size": 224},
        {"step_ms": 2},
        "loader=workers loader.num_workers=1 train.batch_size=64 train.epochs=1 augment.erase=1 augment.mixup=0.2",
        "augment.erase=0 augment.mixup=0",
        1.3,
    ),
    # 40 samples of 12,800 kill the worker, and the next one takes 0.3 s to open the data again, in which the other
    # gets at most four batches ahead: 12 s for restarts, against 2 in which steps and samples compute.
    "crashing_workers": Case(
        {"restarts"},
        {"of": "Opening", "length": 12800, "open_ms": 300.0, "crash_every": 320, "native_ms": 0.3},
        {"step_ms": 5},
        "loader=workers loader.num_workers=2 train.batch_size=32 train.epochs=1",
        "data.crash_every=0",
        2.0,
    ),
    # A checkpoint of 128 MB every fifth step, that is every 50 ms: writing one takes at least 250 ms.
    "frequent_checkpoints": Case(
        {"checkpoint"},
        {"of": "Costly", "length": 4800},
        {"step_ms": 10, "ballast_mb": 128},
        "loader=workers loader.num_workers=1 train.batch_size=32 train.epochs=1 train.checkpoint_every=5",
        "train.checkpoint_every=null",
        1.5,
    ),
}
