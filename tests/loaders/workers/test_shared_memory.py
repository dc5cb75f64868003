"""Shared memory has no name, is freed when it should be, and a machine that has none left says what would help."""

import errno
import os
import re
import weakref

import numpy as np
import pytest

from loaders.workers import shared_memory
from loaders.workers.shared_memory import (
    ADVICE,
    MachineFull,
    Mapping,
    align,
    create_shared_memory,
    drop_shared,
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
    whole, second = Mapping(fd, 0, 2 * PAGE).array(), Mapping(fd, PAGE, PAGE).array()
    assert (whole.dtype, whole.shape, second.shape) == (np.uint8, (2 * PAGE,), (PAGE,))
    second[0] = 7
    assert whole[PAGE] == 7


def test_memory_is_sparse_until_it_is_provided(fd):
    mapping = Mapping(fd, 0, 2 * PAGE)
    assert pages(fd) == 0
    provided = Mapping(fd, PAGE, PAGE, provide=True)
    assert pages(fd) == 1
    assert not mapping.array().any()
    assert not provided.array().any()


def test_a_mapping_ends_with_its_last_array(fd):
    array = Mapping(fd, 0, PAGE).array()
    part = array[3:5]
    del array
    assert mapped(fd) == 1
    part[0] = 1
    del part
    assert mapped(fd) == 0
    assert pages(fd) == 1  # others may read them


def test_the_end_of_the_last_mapping_frees_its_pages_and_no_others(fd):
    Mapping(fd, 0, 2 * PAGE).array()[:] = 1
    last = Mapping(fd, PAGE, PAGE, is_last=True)
    assert pages(fd) == 2
    del last
    assert pages(fd) == 1


def test_a_forked_child_frees_no_pages(fd, monkeypatch):
    last = Mapping(fd, 0, PAGE, is_last=True)
    last.array()[:] = 1
    parent = os.getpid()
    monkeypatch.setattr(shared_memory.os, "getpid", lambda: parent + 1)
    del last
    assert pages(fd) == 1


def test_freed_pages_read_as_zeros_everywhere(fd):
    mapping, other = Mapping(fd, 0, PAGE), Mapping(fd, 0, PAGE).array()
    other[:] = 1
    mapping.free_pages()
    assert not other.any()


def test_a_mapping_that_fails_is_an_os_error():
    with pytest.raises(OSError, match="Bad file descriptor") as error:
        Mapping(-1, 0, PAGE)
    assert error.value.errno == errno.EBADF


@pytest.mark.parametrize(
    "data",
    [b"some bytes", bytes(3 * PAGE + 1), np.arange(10), np.arange(12).reshape(3, 4), np.float32(2) * np.ones(5)],
    ids=["bytes", "pages", "array", "rows", "floats"],
)
def test_what_is_written_is_read(data):
    fd = write_shared(data)
    array = read_shared(fd)
    assert array.tobytes() == bytes(data)
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(fd)


def test_reading_as_the_last_frees_the_pages():
    fd = write_shared(b"some bytes")
    ours = os.dup(fd)
    array = read_shared(fd, is_last=True)
    assert pages(ours) == 1
    del array
    assert pages(ours) == 0
    os.close(ours)


def test_writing_that_fails_leaves_no_descriptor_open(monkeypatch):
    before = os.listdir("/proc/self/fd")

    def full(*_) -> None:
        raise OSError(errno.ENOSPC, "no room")

    monkeypatch.setattr(shared_memory.os, "posix_fallocate", full)
    with pytest.raises(OSError, match="no room"):
        write_shared(b"some bytes")
    assert os.listdir("/proc/self/fd") == before


def test_reading_that_fails_closes_the_descriptor():
    fd = create_shared_memory(0)
    with pytest.raises(OSError, match="Invalid argument"):
        read_shared(fd)
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(fd)


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
    Mapping(fd, 0, PAGE).array()[:] = 1
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


def test_reading_leaves_the_memory_to_others_that_read_it_later():
    fd = write_shared(b"for two")
    read = [read_shared(one).tobytes() for one in (os.dup(fd), fd)]  # the first array is gone before the second
    assert read == [b"for two"] * 2


def test_the_interpreters_exit_ends_no_mapping_because_arrays_may_still_be_used(fd, monkeypatch):
    made: list = []
    finalize = weakref.finalize
    with monkeypatch.context() as patch:
        patch.setattr(shared_memory.weakref, "finalize", lambda *given: made.append(finalize(*given)) or made[-1])
        mapping = Mapping(fd, 0, PAGE)
    assert mapping.size == PAGE
    assert [end.atexit for end in made] == [False]


def test_dropped_memory_is_freed_though_another_holds_its_descriptor():
    fd = write_shared(bytes(1 << 20))
    inherited = os.dup(fd)
    drop_shared(fd)
    assert os.fstat(inherited).st_blocks == 0
    os.close(inherited)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
