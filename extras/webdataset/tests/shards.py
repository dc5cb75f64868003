"""Writes tar shards for the tests."""

import io
import tarfile

from tests.data.fakes import write_images


def write_tar(path, files):
    """None stands for a link."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.type = tarfile.SYMTYPE if content is None else tarfile.REGTYPE
            member.size = len(content or b"")
            tar.addfile(member, io.BytesIO(content or b""))
    return path


def write_shards(folder, count=2):
    """folder/images, and two shards of each split with the same images: `urls` and `test_urls`."""
    write_images(folder / "images", count=count)
    for split in ("train", "val"):
        for number, name in enumerate(("cat", "dog")):
            files = {}
            for path in sorted((folder / "images" / split / name).iterdir()):
                files |= {f"{name}/{path.name}": path.read_bytes(), f"{name}/{path.stem}.cls": f"{name}\n".encode()}
            write_tar(folder / "shards" / f"{split}-{number:02}.tar", files)
    return {"urls": f"{folder}/shards/train-{{00..01}}.tar", "test_urls": f"{folder}/shards/val-*.tar"}
