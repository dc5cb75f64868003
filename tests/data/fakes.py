"""Small fakes of the public datasets' files, so that no test needs a network."""

import gzip
import io
import os
import pickle
import struct
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from data.image_folder import ImageFolder


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 1
    path.write_bytes(content)


def write_idx(path: Path, array: np.ndarray) -> None:
    header = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
    with (gzip.open if path.suffix == ".gz" else open)(path, "wb") as file:
        file.write(header + array.tobytes())


def write_fashion(folder: Path, suffix: str = "", per_class: int = 2) -> Path:
    """The four files of Fashion-MNIST with few images. All pixels of image i have the value i."""
    folder.mkdir(parents=True, exist_ok=True)
    for split in ("train", "t10k"):
        labels = np.tile(np.arange(10, dtype=np.uint8), per_class)
        images = np.arange(len(labels), dtype=np.uint8).repeat(28 * 28).reshape(-1, 28, 28)
        write_idx(folder / f"{split}-images-idx3-ubyte{suffix}", images)
        write_idx(folder / f"{split}-labels-idx1-ubyte{suffix}", labels)
    return folder


def write_cifar(root: Path) -> Path:
    """cifar-10-batches-py with ten images per file. All pixels of image i are (i, 100, 200)."""
    folder = root / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    pixels = np.stack([np.repeat([i, 100, 200], 32 * 32) for i in range(10)]).astype(np.uint8)
    for name in [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]:
        (folder / name).write_bytes(pickle.dumps({"data": pixels, "labels": list(range(10))}))
    names = {"label_names": [f"name {i}" for i in range(10)]}
    (folder / "batches.meta").write_bytes(pickle.dumps(names))
    return root


def write_images(root: Path, classes: tuple[str, ...] = ("cat", "dog"), count: int = 2) -> Path:
    """root/train and root/val with `count` JPEG files per class."""
    for split in ("train", "val"):
        for name in classes:
            folder = root / split / name
            folder.mkdir(parents=True)
            for i in range(count):
                Image.new("RGB", (60, 40), (40 * i, 80, 160)).save(folder / f"{i}.jpg")
    return root


def images_in(folder: Path) -> Path:
    """folder/images, which write_images makes if it does not exist."""
    return folder / "images" if (folder / "images").exists() else write_images(folder / "images")


def write_pack(folder: Path, *options: str) -> Path:
    """Packs images_in(folder) into folder/pack."""
    pack_images = pytest.importorskip("scripts.pack_images", reason="a fork may have deleted it")
    pack_images.main([str(images_in(folder)), str(folder / "pack"), "--workers", "0", *options])
    return folder / "pack"


def write_tar(path: Path, files: dict[str, bytes | None]) -> Path:
    """None stands for a link."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.type = tarfile.SYMTYPE if content is None else tarfile.REGTYPE
            member.size = len(content or b"")
            tar.addfile(member, io.BytesIO(content or b""))
    return path


def write_shards(folder: Path) -> dict[str, str]:
    """Packs images_in(folder) into two shards per split."""
    for split in ("train", "val"):
        for number, name in enumerate(sorted(os.listdir(images_in(folder) / split))):
            files: dict[str, bytes | None] = {}
            for index, path in enumerate(sorted((folder / "images" / split / name).iterdir())):
                files[f"{name}/{index:03}{path.suffix}"] = path.read_bytes()
                files[f"{name}/{index:03}.cls"] = f"{name}\n".encode()
            write_tar(folder / "shards" / f"{split}-{number:02}.tar", files)
    return {"urls": f"{folder}/shards/train-{{00..01}}.tar", "test_urls": f"{folder}/shards/val-*.tar"}


def save_images(folder: Path) -> Path:
    """images_in(folder) as the package datasets saves them."""
    datasets = pytest.importorskip("datasets")
    splits = datasets.DatasetDict()
    for split, name in (("train", "train"), ("val", "test")):
        images = ImageFolder(split == "train", images_in(folder))
        files = [images.path(index) for index in range(len(images))]
        features = {"image": datasets.Image(), "label": datasets.ClassLabel(names=list(images.classes))}
        columns = {"image": [{"bytes": Path(file).read_bytes(), "path": None} for file in files]}
        columns["label"] = images.labels.tolist()
        splits[name] = datasets.Dataset.from_dict(columns, datasets.Features(features))
    splits.save_to_disk(folder / "saved")
    return folder / "saved"
