"""How workers start: as the program has asked for by set_start_method, else forked, whatever Python's default."""

import json
import multiprocessing
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

PROGRAM = """
import json, multiprocessing, os, signal, sys
sys.path.insert(0, "tests/loaders")
from example_datasets import Noisy, contents
from loaders import Preloader, WorkerLoader

is_inherited = 0  # what only a fork carries over from the program

class Inherited(Noisy):
    "Each sample tells whether its worker was forked, and has a draw."
    def __getitem__(self, index):
        return {**super().__getitem__(index), "inherited": is_inherited}

def main():
    global is_inherited
    is_inherited = 1
    method, context = sys.argv[1:]
    if method == "lock":
        multiprocessing.Lock()  # sets Python's default
    elif method != "none":
        multiprocessing.set_start_method(method)
    settings = {"seed": 3, "shuffle": True}
    told = []
    with WorkerLoader(Inherited(40), 4, **settings) as inline:
        expected = [batch["noise"].tolist() for batch in inline]
    loader = WorkerLoader(Inherited(40), 4, num_workers=1, multiprocessing_context=context or None, **settings)
    with Preloader(loader, "cpu", 2) as batches:
        seen = []
        for number, batch in enumerate(batches):
            told += batch["inherited"].tolist()
            seen.append(batch["noise"].tolist())
            if number == 1 and method != "spawn":
                os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)
    print(json.dumps([told, seen == expected, multiprocessing.get_start_method(allow_none=True)]))

if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize(
    ("method", "context", "inherits"),
    [
        ("spawn", "", 0),
        pytest.param("none", "forkserver", 0, marks=pytest.mark.slow),
        ("none", "", 1),
        ("lock", "", 1),
        ("spawn", "fork", 1),
    ],
)
def test_workers_start_as_the_program_has_set_unless_the_loader_is_told_otherwise(
    method, context, inherits, python, tmp_path, bound
):
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    done = python.run(script, method, context, env={"PYTHONPATH": str(ROOT)}, timeout=bound, check=True)
    inherited, is_equal, started_by = json.loads(done.stdout)
    assert inherited == [inherits] * 40 and is_equal
    as_before = {"none": None, "lock": multiprocessing.get_all_start_methods()[0]}
    if context != "forkserver":  # Python itself sets its default, to prepare a process that it does not fork
        assert started_by == as_before.get(method, method), "the loader has set the program's start method"


GUARD = "if __name__ == '__main__':"
WRAPPER = """
class Wrapper:
    def __init__(self): self.base = [0, 1]
    def __getattr__(self, name): return getattr(self.base, name)
    def __len__(self): return 2
    def __getitem__(self, index): return index

class Pair(list):  # the array is more than a pipe holds
    def __init__(self): self.parts = [Wrapper(), bytes(1 << 20)]
"""


@pytest.mark.parametrize(
    ("program", "said"),
    [
        pytest.param("print(list(WorkerLoader(range(8), SETTINGS)))", [f"below {GUARD}"], marks=pytest.mark.slow),
        (f"{GUARD} print(list(WorkerLoader([lambda: 0], SETTINGS)))", ["WorkerFailure", "the dataset, collate_fn or"]),
        (
            f"import sqlite3\n{GUARD} print(list(WorkerLoader([sqlite3.connect(':memory:')], SETTINGS)))",
            ["Connection' object). Open files and connections when a worker reads its first sample"],
        ),
        (
            f"{WRAPPER}{GUARD} print(list(WorkerLoader(Wrapper(), SETTINGS)))",
            ["RecursionError", "WorkerFailure", "unpickled in a worker"],
        ),
        (
            f"{WRAPPER}{GUARD} data = Pair(); data.append(1); print(list(WorkerLoader(data, SETTINGS)))",
            ["RecursionError", "WorkerFailure", "unpickled in a worker"],
        ),
    ],
)
def test_a_program_that_cannot_spawn_fails_at_once_with_an_error_that_names_the_remedy(
    python, program, said, tmp_path, bound
):
    script = tmp_path / "program.py"
    settings = "seed=0, num_workers=1, multiprocessing_context='spawn'"
    script.write_text(f"from loaders import WorkerLoader\n{program.replace('SETTINGS', settings)}\n")
    done = python.run(script, env={"PYTHONPATH": str(ROOT)}, timeout=bound)
    assert done.returncode == 1 and all(text in done.stderr for text in said)
    assert "Restarting it" not in done.stderr
