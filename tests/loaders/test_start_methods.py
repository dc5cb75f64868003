"""How workers are started: as the program has asked for by set_start_method, else forked."""

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

PROGRAM = """
import atexit, json, multiprocessing, os, sys, threading
from loaders import Preloader, WorkerLoader

is_inherited = 0  # what only a fork carries over from the program

class Inherited:
    "Each sample tells whether its worker was forked; a worker's exit work takes most of a second."
    def __init__(self, folder):
        self.folder = folder
        self.is_registered = False
    def __len__(self):
        return 8
    def __getitem__(self, index):
        if not self.is_registered:
            self.is_registered = True
            atexit.register(self.finish)  # runs in spawned processes only, before Python 3.14
        return is_inherited
    def finish(self):
        threading.Event().wait(0.8)
        open(os.path.join(self.folder, str(os.getpid())), "w").close()

def main():
    global is_inherited
    is_inherited = 1
    folder, method, context = sys.argv[1:]
    if method != "none":
        multiprocessing.set_start_method(method)
    told = []
    kinds = {"spawn": [(None, False)], "forkserver": [(0, True)]}  # each worker imports torch
    for seed, persistent in kinds.get(context or method, [(0, True), (None, False)]):
        settings = {"seed": seed, "persistent_workers": persistent, "multiprocessing_context": context or None}
        loader = WorkerLoader(Inherited(folder), 4, num_workers=1, **settings)
        with loader if seed is None else Preloader(loader, "cpu", 2) as batches:
            told.append([value for batch in batches for value in batch.tolist()])
    print(json.dumps([told, multiprocessing.get_start_method(allow_none=True), len(os.listdir(folder))]))

if __name__ == "__main__":
    main()
"""

FORKED, NOT_FORKED = [1] * 8, [0] * 8


@pytest.fixture(scope="module")
def told(python, tmp_path_factory):
    """What each program told, by (method that it sets, multiprocessing_context); all run at once."""
    folder = tmp_path_factory.mktemp("programs")
    script = folder / "program.py"
    script.write_text(PROGRAM)
    running = {}
    for case in CASES:
        exits = folder / "-".join(case)
        exits.mkdir()
        running[case] = python.start(script, exits, *case, env={"PYTHONPATH": str(ROOT)})
    yield running
    for program in running.values():
        program.kill()
        program.communicate()


CASES = {("spawn", ""): NOT_FORKED, ("forkserver", ""): NOT_FORKED, ("none", ""): FORKED, ("spawn", "fork"): FORKED}


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"set_{case[0]}-context_{case[1] or 'none'}")
def test_workers_start_as_the_program_has_set_unless_the_loader_is_told_otherwise(case, told, bound):
    output, errors = told[case].communicate(timeout=bound)
    assert told[case].returncode == 0, errors
    inherited, method, exits = json.loads(output)
    assert inherited == [CASES[case]] * (2 if CASES[case] is FORKED else 1)
    assert method == (None if case[0] == "none" else case[0]), "the loader has set the program's start method"
    assert exits == 1 or case != ("spawn", ""), "a worker's exit work was cut off"


def test_a_program_without_a_main_guard_fails_with_an_error_that_names_it(python, tmp_path, bound):
    script = tmp_path / "program.py"
    settings = "num_workers=1, multiprocessing_context='spawn'"
    script.write_text(f"from loaders import WorkerLoader\nprint(list(WorkerLoader(range(8), {settings})))\n")
    program = python.start(script, env={"PYTHONPATH": str(ROOT)})
    _, errors = program.communicate(timeout=bound)
    assert program.returncode == 1 and "needs `if __name__ == '__main__':`" in errors
