"""A full disk is one sentence, not a traceback for each line of the log."""

import errno
import logging
import os
import tempfile
from contextlib import suppress

from tests.data.reading import refused
from training.command_line import check_folder
from training.launch import LogFile


def test_a_log_that_cannot_be_written_is_said_once(capsys):
    handler = LogFile("/dev/full")
    log = logging.Logger("full")
    log.addHandler(handler)
    for _ in range(3):
        log.info("a line")
    with suppress(OSError):  # the lines are still in the file's buffer
        handler.close()
    said = capsys.readouterr().err
    assert said == "/dev/full cannot be written (No space left on device): make room there\n"


def test_a_folder_without_room_is_named_before_anything_is_done(tmp_path, monkeypatch):
    def full(**_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    with refused(r"No space left on device"):
        check_folder(tmp_path / "run")
