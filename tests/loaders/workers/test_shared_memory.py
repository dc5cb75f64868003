"""Shared memory has no name, is freed when it should be, and a machine that has none left says what would help."""

import errno
import os
import re

import numpy as np
import pytest

from loaders.workers import shared_memory
from loaders.workers.shared_memory import (
    ADVICE,
    Forks,
    MachineFull,
    Mapping,
    SharedMemory,
    align,
    create_shared_memory,
    full_machine_explained,
    page_aligned,
    read_shared,
    write_shared,
)

PAGE = page_aligned(1)


@pytest.fixture
def fd():
    fd = create_shared_memory(2 * PAGE)
    yield fd
    os.close(fd)


def pages(fd: int) -> int:
    return os.fstat(fd).st_blocks * 512 // PAGE


def mapped(fd: int) -> int:
    """How often this process has the descriptor's memory mapped."""
    inode = os.fstat(fd).st_ino
    with open("/proc/self/maps") as maps:
        return sum(re.search(rf" {inode} .*loader", line) is not None for line in maps)


@pytest.mark.parametrize(("size", "to", "aligned"), [(0, 64, 0), (1, 64, 64), (64, 64, 64), (65, 64, 128)])
def test_align_rounds_up(size, to, aligned):
    assert align(size, to) == aligned


def test_mappings_of_one_descriptor_share_their_bytes(fd):
    whole, second = Mapping(fd, 2 * PAGE).array(), Mapping(fd, PAGE).array()
    assert (whole.dtype, whole.shape, second.shape) == (np.uint8, (2 * PAGE,), (PAGE,))
    second[0] = 7
    assert whole[0] == 7


def test_a_private_mapping_reads_what_is_shared_and_keeps_its_writes_to_itself():
    fd = write_shared(b"shared")
    private = read_shared(fd, private=True)
    private[0] = 7
    assert private.tobytes() == b"\7hared"
    assert read_shared(fd).tobytes() == b"shared"
    os.close(fd)


def test_memory_is_sparse_until_it_is_provided(fd):
    mapping = Mapping(fd, 2 * PAGE)
    assert pages(fd) == 0
    provided = Mapping(fd, PAGE, provide=True)
    assert pages(fd) == 1
    assert not mapping.array().any()
    assert not provided.array().any()


def test_a_mapping_ends_with_its_last_array(fd):
    array = Mapping(fd, PAGE).array()
    part = array[3:5]
    del array
    assert mapped(fd) == 1
    part[0] = 1
    del part
    assert mapped(fd) == 0
    assert pages(fd) == 1  # others may read them


def test_a_mapping_that_fails_is_an_os_error():
    with pytest.raises(OSError, match="Bad file descriptor") as error:
        Mapping(-1, PAGE)
    assert error.value.errno == errno.EBADF


@pytest.mark.parametrize(
    "data",
    [b"some bytes", bytes(3 * PAGE + 1), np.arange(10), np.arange(12).reshape(3, 4), np.float32(2) * np.ones(5)],
    ids=["bytes", "pages", "array", "rows", "floats"],
)
def test_what_is_written_is_read(data):
    fd = write_shared(data)
    array = read_shared(fd)
    os.close(fd)
    assert array.tobytes() == bytes(data)


def test_writing_that_fails_leaves_no_descriptor_open(monkeypatch):
    before = os.listdir("/proc/self/fd")

    def full(*_) -> None:
        raise OSError(errno.ENOSPC, "no room")

    monkeypatch.setattr(shared_memory.os, "posix_fallocate", full)
    with pytest.raises(OSError, match="no room"):
        write_shared(b"some bytes")
    assert os.listdir("/proc/self/fd") == before


# In a forked child


def in_child(check) -> None:
    """Calls `check` in a forked child; fails if that raises."""
    child = os.fork()
    if not child:
        try:
            check()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0


def test_a_forked_child_keeps_neither_descriptor_nor_mapping(fd):
    watched = os.dup(fd)
    memory = SharedMemory(os.dup(fd))
    array = memory.array()
    array[0] = 7

    def check() -> None:
        assert memory.fd == -1
        assert mapped(watched) == 0

    in_child(check)
    assert os.fstat(memory.fd).st_ino == os.fstat(watched).st_ino
    assert (array[0], mapped(watched)) == (7, 1)
    os.close(watched)


def test_a_forked_child_can_read_what_was_delivered(fd):
    memory = SharedMemory(os.dup(fd))
    memory.is_delivered = True
    array = memory.array()
    array[0] = 7

    def check() -> None:
        assert memory.fd == -1
        assert array[0] == 7

    in_child(check)


def test_forks_are_counted_in_parent_and_child():
    before = Forks.count

    def check() -> None:
        assert Forks.count > before

    in_child(check)
    assert Forks.count > before
    assert Forks.count % 2 == before % 2 == 0, "no fork is under way"


def test_dropped_shared_memory_is_closed_and_mapped_until_its_last_array_dies(fd):
    memory = SharedMemory(os.dup(fd))
    taken = memory.fd
    array = memory.array()
    del memory
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(taken)
    array[0] = 7
    assert mapped(fd) == 1
    del array
    assert mapped(fd) == 0


# A full machine


@pytest.mark.parametrize("number", ADVICE, ids=lambda number: errno.errorcode[number])
def test_a_full_machine_is_explained(number):
    with pytest.raises(MachineFull) as error, full_machine_explained("making a cake"):
        raise OSError(number, "full")
    assert str(error.value) == f"making a cake failed: {ADVICE[number]}"
    assert error.value.__cause__.errno == number


def test_other_errors_come_out_as_they_are():
    error = FileNotFoundError(errno.ENOENT, "not there")
    with pytest.raises(FileNotFoundError) as raised, full_machine_explained("making a cake"):
        raise error
    assert raised.value is error


# Without memfd_create


@pytest.fixture
def old_python(monkeypatch):
    monkeypatch.delattr(shared_memory.os, "memfd_create")


def kind(fd: int) -> str:
    return os.readlink(f"/proc/self/fd/{fd}")


def test_a_python_without_memfd_create_asks_the_system(old_python):
    fd = create_shared_memory(PAGE)
    assert kind(fd).startswith("/memfd:loader")
    assert not os.get_inheritable(fd)
    assert os.fstat(fd).st_size == PAGE
    os.close(fd)


def test_where_the_number_of_memfd_create_is_unknown_an_unlinked_file_is_used(old_python, monkeypatch):
    monkeypatch.setattr(shared_memory.platform, "machine", lambda: "abacus")
    fd = create_shared_memory(PAGE)
    assert kind(fd).endswith("(deleted)")
    assert "memfd" not in kind(fd)
    assert os.fstat(fd).st_size == PAGE
    Mapping(fd, PAGE).array()[:] = 1
    os.close(fd)


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EPERM, errno.EACCES], ids=errno.errorcode.get)
def test_a_sandbox_that_forbids_memfds_gets_an_unlinked_file(number, monkeypatch):
    def forbidden(*_) -> int:
        raise OSError(number, "forbidden")

    monkeypatch.setattr(shared_memory.os, "memfd_create", forbidden)
    fd = create_shared_memory(PAGE)
    assert "memfd" not in kind(fd)
    os.close(fd)


def test_a_process_without_descriptors_gets_no_file_instead(monkeypatch):
    def full(*_) -> int:
        raise OSError(errno.EMFILE, "too many")

    monkeypatch.setattr(shared_memory.os, "memfd_create", full)
    with pytest.raises(OSError, match="too many"):
        create_shared_memory(PAGE)


def test_a_system_call_that_fails_is_told_from_one_that_is_missing(old_python, monkeypatch):
    for number, fails in ((errno.ENOSYS, False), (errno.EMFILE, True)):
        monkeypatch.setattr(shared_memory.ctypes, "get_errno", lambda number=number: number)
        monkeypatch.setattr(shared_memory, "_libc", type("Libc", (), {"syscall": staticmethod(lambda *_: -1)}))
        if fails:
            with pytest.raises(OSError, match="memfd_create"):
                shared_memory._create_memfd()
        else:
            assert shared_memory._create_memfd() is None


@pytest.mark.parametrize("roomier", [0, 1])
def test_the_file_lies_where_there_is_more_room(roomier, tmp_path, monkeypatch):
    folders = ["/dev/shm", str(tmp_path)]
    monkeypatch.setattr(shared_memory.tempfile, "gettempdir", lambda: folders[1])
    monkeypatch.setattr(shared_memory, "_free_bytes", lambda folder: folder == folders[roomier])
    fd = shared_memory._create_unlinked_file()
    assert kind(fd).startswith(f"{folders[roomier]}/")
    os.close(fd)


def test_free_bytes_are_those_that_users_may_take(tmp_path):
    room = os.statvfs(tmp_path)
    assert shared_memory._free_bytes(str(tmp_path)) == pytest.approx(room.f_bavail * room.f_frsize, rel=0.1)
