"""Appending whole lines to a file, so that they are on the disk when `append` returns.

Owns: the file descriptor, the lock that keeps a second relay out of the file, and what becomes of half a line.

    open --no other writer, ends with a line break--> appending --append--> appending, synced
      |--a torn last line of ours: cut off             |--no room, or an error--> cut back to the last synced byte

Invariants: what `append` has returned from is synced; what it raised over is not in the file, unless the cut failed
too: then it is cut off before the next `append`, or at the next `open`. A stream (a pipe, a terminal, whatever the standard output is) is not cut: a
torn line is ended there, by this appender or the next one (`Tail`), and is one that is no JSON. No threads, no event loop:
`append` blocks.
"""

from __future__ import annotations

import errno
import fcntl
import os
import select
import stat
import threading
from collections.abc import Callable
from typing import Final

from relay.errors import BrokerRefused, BrokerUnavailable

STANDARD_OUTPUT: Final = "-"

LINE_BEGIN: Final = b'{"id":'
"""How every line of ours begins: what else stands at the end of a file is not ours to cut off."""

NO_ROOM: Final = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG))
"""The disk, the owner's share of it, or the file is full: an operator makes room, or rotates, while the rows wait."""

_TAIL_BYTES: Final = 64 * 1024
_STREAM_PIECE_BYTES: Final = 4096
"""PIPE_BUF on Linux: a pipe that polls as writable takes so much without blocking (pipe(7))."""

_STREAM_POLL_S: Final = 0.2
_HAND_OVER_S: Final = 1.0
"""A stream's appender that is abandoned has let go of it by then, unless it hangs in a write."""


class Abandoned(Exception):
    """Nobody waits for this append any more; it ended half-way."""


class Tail:
    """The end of one stream, over the appenders that come one after the other; `lock` is that of the one who writes.

    `is_torn`: half a line may stand there, so the next one begins on a line of its own. `None`: nobody knows yet.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.is_torn: bool | None = None


class Appender:
    """One opened file; made by `open`. Not safe from several threads at once."""

    def __init__(self, path: str, descriptor: int, stream: Tail | None = None) -> None:
        self._path = path
        self._descriptor = descriptor
        self._stream = stream
        """Of a stream: locked by us."""
        self._whole: int | None = None
        """How long the file was before half a line that could not be cut off; it is before anything else is appended."""

    @classmethod
    def open(cls, path: str, tail: Tail) -> Appender:
        """Open, or create, the file, and cut off a torn last line; `tail` is the path's, should it be a stream.

        Raises BrokerUnavailable where another writer has it, its disk or its reader is missing; BrokerRefused where
        it cannot be ours to write.
        """
        try:
            descriptor = _descriptor(path)
        except OSError as error:
            raise _unavailable(path, error) from error
        try:
            status = os.fstat(descriptor)
            if path == STANDARD_OUTPUT or not stat.S_ISREG(status.st_mode):
                _expect_reader(path, descriptor)
                _take(tail, path, status)
                return cls(path, descriptor, tail)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _repair(path, descriptor)
            return cls(path, descriptor)
        except BlockingIOError as error:
            os.close(descriptor)
            raise BrokerUnavailable(
                f"{path} is being written by somebody else", hint="give each relay a file of its own"
            ) from error
        except OSError as error:
            os.close(descriptor)
            raise _unavailable(path, error) from error
        except BaseException:
            os.close(descriptor)
            raise

    def append(self, data: bytes, is_abandoned: Callable[[], bool]) -> None:
        """Write and sync whole lines. Raises OSError; Abandoned when `is_abandoned` says so while a stream is full."""
        if self._stream is not None:
            self._append_to_stream(self._stream, data, is_abandoned)
            return
        # Nobody else writes here, but somebody may have truncated it.
        size = os.fstat(self._descriptor).st_size
        if self._whole is not None and size > self._whole:
            os.ftruncate(self._descriptor, self._whole)
            size = self._whole
        self._whole = None
        try:
            _write_all(self._descriptor, data)
            os.fdatasync(self._descriptor)
        except OSError:
            # Why it failed is what is raised.
            try:
                os.ftruncate(self._descriptor, size)
            except OSError:
                self._whole = size
            raise

    def is_moved(self) -> bool:
        """Whether the path names another file by now, or none: it was rotated."""
        if self._stream is not None:
            return False
        try:
            there = os.stat(self._path)
        except FileNotFoundError:
            return True
        here = os.fstat(self._descriptor)
        return (there.st_dev, there.st_ino) != (here.st_dev, here.st_ino)

    def close(self) -> None:
        os.close(self._descriptor)
        if self._stream is not None:
            self._stream.lock.release()

    def _append_to_stream(self, stream: Tail, data: bytes, is_abandoned: Callable[[], bool]) -> None:
        if stream.is_torn:
            data = b"\n" + data
        poll = select.poll()
        poll.register(self._descriptor, select.POLLOUT)
        rest = memoryview(data)
        while rest:
            if not poll.poll(_STREAM_POLL_S * 1000):
                if is_abandoned():
                    raise Abandoned
                continue
            try:
                rest = rest[os.write(self._descriptor, rest[:_STREAM_PIECE_BYTES]) :]
            except BlockingIOError:
                # Another writer of this pipe was faster.
                continue
            stream.is_torn = True
        stream.is_torn = False
        try:
            os.fdatasync(self._descriptor)
        except OSError as error:
            # A pipe or a terminal has nothing to sync (fdatasync(2)).
            if error.errno != errno.EINVAL:
                raise


def _descriptor(path: str) -> int:
    if path == STANDARD_OUTPUT:
        return os.dup(1)
    is_file = not os.path.exists(path) or os.path.isfile(path)
    # Without O_NONBLOCK the opening of a pipe that nobody reads would never end; a file does not care.
    flags = (os.O_RDWR if is_file else os.O_WRONLY) | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o640)
    if is_file:
        _sync_directory(path)
    return descriptor


def _sync_directory(path: str) -> None:
    """A file is there after a crash only once its directory is synced, too (fsync(2))."""
    directory = os.open(os.path.dirname(path) or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _expect_reader(path: str, descriptor: int) -> None:
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    for _, events in poll.poll(0):
        if events & select.POLLERR:
            raise BrokerUnavailable(f"{_named(path)} has no reader", hint="start what reads it")


def _take(tail: Tail, path: str, status: os.stat_result) -> None:
    """The stream is ours to write. Raises BrokerUnavailable."""
    if not tail.lock.acquire(timeout=_HAND_OVER_S):
        raise BrokerUnavailable(f"{_named(path)} is still being written to by the link that was closed")
    if tail.is_torn is None:
        # A supervisor's pipe outlives the relay that was killed in the middle of a line. A device has no past, nor has an empty file.
        tail.is_torn = not stat.S_ISCHR(status.st_mode) and not (stat.S_ISREG(status.st_mode) and status.st_size == 0)


def _repair(path: str, descriptor: int) -> None:
    """Cut off what stands behind the last line break. Raises BrokerRefused if it is not ours."""
    size = os.fstat(descriptor).st_size
    end = size
    tail = b""
    while end > 0 and b"\n" not in tail:
        begin = max(0, end - _TAIL_BYTES)
        piece = os.pread(descriptor, end - begin, begin)
        # Of a line longer than one piece only its beginning and where it begins are of interest.
        tail = piece + tail[: len(LINE_BEGIN)]
        end = begin
    torn = tail[tail.rfind(b"\n") + 1 :]
    kept = end + tail.rfind(b"\n") + 1
    if kept == size:
        return
    # After a power failure some file systems show bytes that were never written as zeros.
    torn = torn[: len(LINE_BEGIN)].rstrip(b"\0")
    if not LINE_BEGIN.startswith(torn):
        raise BrokerRefused(
            f"{path} does not end with a line break and was not written by the relay",
            hint="name another file in RELAY_SINK_PATH, or end its last line",
        )
    os.ftruncate(descriptor, kept)
    os.fsync(descriptor)


def _write_all(descriptor: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def _named(path: str) -> str:
    return "the standard output" if path == STANDARD_OUTPUT else path


def _unavailable(path: str, error: OSError) -> BrokerUnavailable:
    if error.errno == errno.ENXIO:
        return BrokerUnavailable(f"{path} has no reader", hint="start what reads it")
    return BrokerUnavailable(
        f"{_named(path)} cannot be written: {error.strerror}",
        hint="RELAY_SINK_PATH needs an existing directory in which the relay may write",
    )
