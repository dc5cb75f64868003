"""What the tests of runs share."""

import gc
import io
import logging
import resource
import runpy
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hydra._internal.hydra import Hydra
from hydra.core.hydra_config import HydraConfig

from loaders import ExpectedError
from tests.configs import CONF, FAST
from tests.training.extensions import Stop


def call(folder: Path, *arguments: str, ends_with: int = 0, has_traceback: bool = False) -> str:
    """Does what `python train.py ARGUMENTS` does in the folder, in this process: quickly.

    Checks its exit code, and whether it shows a traceback. Returns what it shows on stdout and stderr.
    """
    root = logging.getLogger()
    handlers = root.handlers[:]
    level = root.level
    code = 0
    shown = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(shown), redirect_stderr(shown):
        patch.chdir(folder)
        patch.setattr(sys, "argv", ["train.py", *arguments])
        patch.setattr(sys, "excepthook", sys.excepthook)  # which launch replaces
        patch.setattr(HydraConfig.instance(), "cfg", None)  # which Hydra sets, and a new process has not
        patch.setattr(Hydra, "get_mode", lambda *_, **__: None)  # composes all to read hydra.mode, which no test sets
        try:
            runpy.run_path(str(CONF.parent / "train.py"), run_name="__main__")
        except SystemExit as end:
            code = end.code or 0
            if isinstance(code, str):  # as the interpreter does
                print(code, file=sys.stderr)
                code = 1
        except Exception:
            code = 1
            traceback.print_exc()  # as the interpreter does
        finally:
            for handler in root.handlers:
                if handler not in handlers:
                    handler.close()
            root.handlers[:] = handlers
            root.setLevel(level)
            for name in list(root.manager.loggerDict):  # hydra/job_logging=disabled disables them all
                logging.getLogger(name).disabled = False
            Stop.at = 0  # which arguments set
            gc.freeze()  # as in configs.train
    text = shown.getvalue()
    assert (code, "Traceback" in text) == (ends_with, has_traceback), text
    return text


@contextmanager
def full_disk(room: int = 4000) -> Iterator[None]:
    """In the block no file may become larger than so many bytes; by default than a checkpoint's first part."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture
def command(tmp_path: Path) -> Callable[..., str]:
    """`python train.py ARGUMENTS` in the folder tmp_path."""
    return partial(call, tmp_path)


@pytest.fixture(scope="session")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of one epoch, with settings that are not the defaults. No test changes it."""
    folder = tmp_path_factory.mktemp("before")
    call(folder, *FAST, "model.size=7", "optim.lr=0.125", "hydra.run.dir=earlier")
    return folder / "earlier"


@pytest.fixture
def error() -> Callable[..., Any]:
    """Checks that the block raises an error that is shown as a sentence, and that the sentence has all patterns."""

    def raises(*patterns: str) -> Any:
        lookaheads = [f"(?=.*?(?:{pattern}))" for pattern in patterns]
        return pytest.raises(ExpectedError, match="(?s)" + "".join(lookaheads))

    return raises
