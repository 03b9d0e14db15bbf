"""A disk that fills up, breaks or hangs, for the file sink's tests."""

from __future__ import annotations

import errno
import os
import threading
from typing import Any

from .recorder import WAIT_S


class Disk:
    """`os` as the appender sees it, with a disk that fills up or breaks after some bytes."""

    def __init__(self, room: int, error: int = errno.ENOSPC, sync_error: int | None = None) -> None:
        self.room = room
        self.error = error
        self.sync_error = sync_error
        self.syncs = 0
        self.answers = threading.Event()
        self.answers.set()
        """Cleared: a sync hangs."""

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def write(self, descriptor: int, data: bytes) -> int:
        if self.room <= 0:
            raise OSError(self.error, os.strerror(self.error))
        written = os.write(descriptor, data[: self.room])
        self.room -= written
        return written

    def fail_sync(self) -> None:
        """From now on, one that hangs included."""
        self.sync_error = errno.EIO
        self.answers.set()

    def fdatasync(self, descriptor: int) -> None:
        self.syncs += 1
        assert self.answers.wait(WAIT_S), "a disk that hung for the whole test"
        if self.sync_error is not None:
            raise OSError(self.sync_error, os.strerror(self.sync_error))
        os.fdatasync(descriptor)
