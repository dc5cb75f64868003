"""What the tests of runs share."""

import logging
import os
import re
import runpy
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.configs import CONF, SMALL
from training.launch import EXPECTED


class Ended(NamedTuple):
    code: int
    output: str
    errors: str

    @property
    def shown(self) -> str:
        return self.output + self.errors


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> Callable[..., Ended]:
    """Does what `python train.py ARGUMENTS` does in the folder tmp_path, in this process: quickly."""

    def run(*arguments: str, environment: dict[str, str] | None = None) -> Ended:
        root = logging.getLogger()
        handlers, level = root.handlers[:], root.level
        with monkeypatch.context() as patch:
            patch.chdir(tmp_path)
            patch.setattr(sys, "argv", ["train.py", *map(str, arguments)])
            for name, value in (environment or {}).items():
                patch.setitem(os.environ, name, value)
            code = 0
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
                for handler in [one for one in root.handlers if one not in handlers]:
                    handler.close()
                root.handlers[:] = handlers
                root.setLevel(level)
        return Ended(code, *capsys.readouterr())

    return run


@pytest.fixture(scope="session")
def fast() -> list[str]:
    """Settings of a run of two steps in an epoch, with a network whose `size` shows which settings it has."""
    return [*SMALL, "model=linear", "data.length=64", "data.test_length=16", "train.epochs=1", "train.log_interval=1"]


@pytest.fixture
def error() -> Callable[..., AbstractContextManager[None]]:
    """Checks that the block raises an error that is shown as a sentence, and that it has all patterns."""

    @contextmanager
    def raised(*patterns: str) -> Iterator[None]:
        with pytest.raises(EXPECTED) as caught:
            yield
        missing = [pattern for pattern in patterns if not re.search(pattern, str(caught.value))]
        assert not missing, f"{missing} not in: {caught.value}"

    return raised
