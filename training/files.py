"""Files that are written whole or not at all: a reader finds the old content or the new, never a part."""

import os
from pathlib import Path


def write_whole(path: Path, content: str | bytes) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_bytes(content.encode() if isinstance(content, str) else content)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
