"""Shared memory has no name, is freed when it should be, and a machine that has none left says what would help."""

import errno
import os
import re
from contextlib import suppress
from types import SimpleNamespace

import numpy as np
import pytest

from loaders.timeline import WorkClock
from loaders.workers import shared_memory
from loaders.workers.process_main import Setup
from loaders.workers.shared_memory import (
    ADVICE,
    MachineFull,
    SharedMemory,
    array_on,
    create_shared_memory,
    full_machine_explained,
    map_memory,
    page_aligned,
    write_shared,
)
from loaders.workers.spawning import SpawnedSetup

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


def test_memory_is_provided_when_that_is_asked_for_and_mapped_until_its_last_array_dies(fd):
    array = array_on(map_memory(fd))
    assert (array.dtype, array.shape, pages(fd)) == (np.uint8, (2 * PAGE,), 0)
    part = array_on(map_memory(fd, provide=True))[3:5]
    assert pages(fd) == 2
    del array
    assert mapped(fd) == 1
    part[0] = 1
    del part
    assert mapped(fd) == 0


def test_what_fails_is_an_os_error_and_leaves_no_descriptor_open(monkeypatch):
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match="Bad file descriptor"):
        map_memory(-1)

    def full(*_) -> None:
        raise OSError(errno.ENOSPC, "no room")

    for function in ("posix_fallocate", "ftruncate"):
        with monkeypatch.context() as patch, pytest.raises(OSError, match="no room"):
            patch.setattr(os, function, full)
            write_shared(b"some bytes")
    assert os.listdir("/proc/self/fd") == before


@pytest.mark.parametrize("is_delivered", [True, False])
def test_a_forked_child_keeps_only_the_mapping_of_what_was_delivered(fd, is_delivered):
    memory = SharedMemory(os.dup(fd))
    array = memory.array()
    array[0] = 7
    memory.is_delivered = is_delivered
    child = os.fork()
    if not child:
        kept = False
        try:
            kept = memory.fd == -1 and mapped(fd) == is_delivered and (not is_delivered or array[0] == 7)
        finally:  # never back into pytest
            os._exit(not kept)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert (os.fstat(memory.fd).st_ino, array[0], mapped(fd)) == (os.fstat(fd).st_ino, 7, 1)
    own = memory.fd
    del memory
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(own)
    assert (array[0], mapped(fd)) == (7, 1)


@pytest.mark.parametrize("number", ADVICE, ids=errno.errorcode.get)
def test_a_full_machine_is_explained(number):
    with pytest.raises(MachineFull) as error, full_machine_explained("making a cake"):
        raise OSError(number, "full")
    assert str(error.value) == f"making a cake failed: {ADVICE[number]}"
    with pytest.raises(FileNotFoundError), full_machine_explained("making a cake"):
        raise FileNotFoundError(errno.ENOENT, "not there")


@pytest.mark.parametrize("roomier", [0, 1])
@pytest.mark.parametrize("lacks", [AttributeError(), OSError(errno.ENOSYS, "old"), OSError(errno.EPERM, "forbidden")])
def test_without_memfds_an_unlinked_file_serves_where_there_is_more_room(lacks, roomier, tmp_path, monkeypatch):
    def refuse(*_) -> int:
        raise lacks

    folders = ["/dev/shm", str(tmp_path)]
    monkeypatch.setattr(os, "memfd_create", refuse)
    monkeypatch.setattr(shared_memory.tempfile, "gettempdir", lambda: folders[1])
    usage = {folder: SimpleNamespace(free=number == roomier) for number, folder in enumerate(folders)}
    monkeypatch.setattr(shared_memory.shutil, "disk_usage", usage.__getitem__)
    fd = create_shared_memory(PAGE)
    place = os.readlink(f"/proc/self/fd/{fd}")
    assert place.startswith(f"{folders[roomier]}/") and place.endswith("(deleted)")
    assert os.fstat(fd).st_size == PAGE and not os.get_inheritable(fd)
    os.close(fd)
    lacks = OSError(errno.EMFILE, "too many")
    with pytest.raises(OSError, match="too many"):
        create_shared_memory(PAGE)


@pytest.mark.parametrize("what", ["memory", "arrays", "clock"])
def test_a_close_that_is_interrupted_closes_no_descriptor_twice(what, monkeypatch):
    """Another file may have its number by then."""
    spawned, clock = SpawnedSetup(Setup(None, 1, 0, None)), WorkClock()
    memory = SharedMemory(os.dup(0))
    spawned._shared = {(number, 1): (np.empty(0), os.dup(0)) for number in range(3)}
    clock.begin()
    closes = {"memory": memory.close, "arrays": spawned.close, "clock": clock._scheduler._close}[what]
    close, closed = os.close, []

    def interrupted(fd: int) -> None:
        closed.append(fd)
        close(fd)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "close", interrupted)
        for _ in range(5):
            with suppress(KeyboardInterrupt):
                closes()
    assert len(closed) == len(set(closed)) == (3 if what == "arrays" else 1)
    memory.close(), spawned.close()
