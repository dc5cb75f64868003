"""Writes files whole or not at all: a reader finds the old content or the new, never half of it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO
from uuid import uuid4


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A temporary file to write to. It replaces `path` at the end of the block, unless the block raises."""
    partial = path.with_name(f".{path.name}.{uuid4().hex}")  # processes on other machines may write `path` too
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def write_whole(path: Path, content: str | bytes) -> None:
    with replacing(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)
