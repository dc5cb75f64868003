"""Later: a module that is imported when a test first uses it.

Each fork of a process takes twice as long once it has imported torchvision, timm or datasets, and every process of
`./scripts/test` collects all tests.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any


class Later:
    def __init__(self, module: str) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # pytest looks for its marks on all objects of a test file
            raise AttributeError(name)
        return getattr(import_module(self._module), name)
