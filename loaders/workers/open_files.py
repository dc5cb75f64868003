"""Gives a forked worker its own positions in the files that its parent had open.

A fork shares open files, and so their positions: workers that seek and read in one of them get each other's bytes.
This is done for descriptors, not for attributes of the dataset, so that it holds for every library and class.
"""

import logging
import os
import stat
from contextlib import suppress

with suppress(ImportError):  # Windows, which has no worker processes of ours
    import fcntl

log = logging.getLogger(__name__)


def reopen_files() -> None:
    """Opens each regular file that is open for reading alone again, with its descriptor's number and position.

    A file that is open for writing stays shared, so that processes which write to it do not overwrite each other.
    """
    with suppress(FileNotFoundError):  # there is no /proc
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):  # the descriptor that listdir used is closed
                _reopen(int(name))


def _reopen(fd: int) -> None:
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    is_read = flags & os.O_ACCMODE == os.O_RDONLY and not flags & os.O_PATH
    if not (is_read and stat.S_ISREG(os.fstat(fd).st_mode)):
        return
    position = os.lseek(fd, 0, os.SEEK_CUR)
    path = f"/proc/self/fd/{fd}"
    try:
        again = os.open(path, flags)
    except OSError as error:
        log.warning(
            "a worker cannot open %s again (%s): it shares the position in it with other workers, so open it in "
            "__getitem__",
            os.readlink(path),
            error.strerror,
        )
        return
    os.lseek(again, position, os.SEEK_SET)
    os.dup2(again, fd, os.get_inheritable(fd))
    os.close(again)
