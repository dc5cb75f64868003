"""Files that the dataset opened before its workers were forked: each worker has positions of its own."""

import os
import zipfile

import pytest
import torch
from example_datasets import Numbers

from loaders import TorchLoader, WorkerLoader

COUNT = 48  # samples
SIZE = 20_000  # bytes of a sample: more than a file object reads ahead


class Opened(Numbers):
    """Sample i is SIZE bytes of value i, from a file that the constructor opened. Every worker reads at once."""

    def __init__(self, folder):
        super().__init__(COUNT)
        self.open(folder / "samples", [bytes([index]) * SIZE for index in range(COUNT)])

    def open(self, path, bodies):
        """Writes the file, and opens it."""
        path.write_bytes(b"".join(bodies))
        self.file = path.open("rb")

    def read(self, index):
        self.file.seek(index * SIZE)
        return b"".join(self.file.read(SIZE // 100) for _ in range(100))

    def __getitem__(self, index):
        return torch.frombuffer(bytearray(self.read(index)), dtype=torch.uint8)


class Deleted(Opened):
    def open(self, path, bodies):
        super().open(path, bodies)
        path.unlink()


class Descriptor(Opened):
    """A C library may keep a descriptor alone."""

    def open(self, path, bodies):
        path.write_bytes(b"".join(bodies))
        self.file = os.open(path, os.O_RDONLY)

    def read(self, index):
        os.lseek(self.file, index * SIZE, os.SEEK_SET)
        return b"".join(os.read(self.file, SIZE // 100) for _ in range(100))


class Zipped(Opened):
    def open(self, path, bodies):
        with zipfile.ZipFile(path, "w") as file:
            for index, body in enumerate(bodies):
                file.writestr(str(index), body)
        self.file = zipfile.ZipFile(path)

    def read(self, index):
        return self.file.read(str(index))


@pytest.mark.parametrize("kind", [Opened, Deleted, Descriptor, Zipped])
def test_workers_read_right_samples_from_a_file_that_was_open_before_they_were_forked(kind, tmp_path):
    dataset = kind(tmp_path)
    for make in (WorkerLoader, TorchLoader) if kind is Zipped else (WorkerLoader,):
        with make(dataset, 1, num_workers=2, seed=0) as loader:
            wrong = [index for index, batch in enumerate(loader) if not (batch == index).all()]
        assert wrong == []


class Logged(Numbers):
    """Reading a sample reads a line of one file, from where it is, and writes a line of another."""

    def __init__(self, folder):
        super().__init__(8)
        (folder / "lines").write_text("".join(f"{number}\n" for number in range(20)))
        self.lines = (folder / "lines").open()
        self.log = (folder / "log").open("w")
        self.lines.readline()  # the file's object has read ahead of it

    def __getitem__(self, index):
        self.log.write(f"{index}\n")
        self.log.flush()
        return os.getpid(), int(self.lines.readline())


def test_a_worker_begins_at_its_parents_position_which_stays_and_what_workers_write_is_whole(tmp_path):
    dataset = Logged(tmp_path)
    with WorkerLoader(dataset, None, num_workers=2, seed=0) as loader:
        seen = list(loader)
    for worker in {pid for pid, _ in seen}:
        lines = [line for pid, line in seen if pid == worker]
        assert sorted(lines) == list(range(1, 1 + len(lines)))
    assert dataset.lines.readline() == "1\n"
    written = (tmp_path / "log").read_text().split()
    assert sorted(written) == [str(index) for index in range(8)]
