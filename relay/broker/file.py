"""A file of JSON lines in the place of a broker: rows in, on the disk, acknowledged.

Owns: the thread that writes and syncs, the window of lines that are not synced yet, the link's life.

    open --no room on the disk--> blocked --room again--> open
      |----error of the disk or the stream, close()--> closed

Invariants: a row is acked only after its line was synced; each published row gets one outcome; nothing is told from
within `publish`. The event loop never waits for the disk: lines go to the thread in batches, one sync a batch. A full
disk is what an alarm is at RabbitMQ: the batch is tried again until there is room, and costs no row an attempt.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Final

from relay.broker.appender import NO_ROOM, Abandoned, Appender, Tail
from relay.broker.lines import LineEncoder
from relay.core.ports.broker import Closed, LinkListener, Publication, Rejection
from relay.core.window import Window
from relay.errors import BrokerError, BrokerUnavailable, MessageInvalid
from relay.message import PayloadType, Row
from relay.route import Router

BUFFER_BYTES_MAX: Final = 1024 * 1024
"""Lines that wait for the thread, and one row more: about what a disk takes in one sync."""

OPEN_TIMEOUT_S: Final = 10.0
RETRY_INTERVAL_S: Final = 0.5
"""How often a full disk is tried."""

CLOSE_TIMEOUT_S: Final = 3.0
"""A thread that hangs in the disk for longer is left behind; it holds the file's lock, so nobody else writes there."""


class FileBroker:
    """Implements `relay.core.ports.broker.Broker`; `path` is a file, a pipe, or `-`. The rest as for `AmqpBroker`."""

    def __init__(
        self,
        path: str,
        router: Router,
        *,
        database_now: Callable[[], float],
        envelope_name: str = "none",
        source: str = "",
    ) -> None:
        self._path = path
        self._tail = Tail()
        self._router = router
        self._database_now = database_now
        self._envelope_name = envelope_name
        self._source = source

    async def connect(self, listener: LinkListener, payload_type: PayloadType) -> FileLink:
        """Open the file. Raises BrokerUnavailable, BrokerRefused (a file that is not ours)."""
        encoder = LineEncoder(self._router, payload_type, envelope_name=self._envelope_name, source=self._source)
        link = FileLink(self._path, self._tail, encoder, listener, database_now=self._database_now)
        await link.open()
        return link


class FileLink:
    """Implements `relay.core.ports.broker.Link`; made by `FileBroker.connect`."""

    def __init__(
        self,
        path: str,
        tail: Tail,
        encoder: LineEncoder,
        listener: LinkListener,
        *,
        database_now: Callable[[], float],
    ) -> None:
        self._path = path
        self._encoder = encoder
        self._listener = listener
        self._database_now = database_now
        self._loop = asyncio.get_running_loop()
        self._window = Window()
        self._lines: list[bytes] = []
        self._buffered = 0
        """Bytes of `_lines`."""
        self._is_writing = False
        self._is_full = False
        """`publish` has left rows for want of room."""
        self._is_blocked = False
        self._is_closed = False
        self._opened: asyncio.Future[None] = self._loop.create_future()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._writer = _Writer(path, tail, self)

    async def open(self) -> None:
        """Within OPEN_TIMEOUT_S. Raises BrokerUnavailable, BrokerRefused."""
        self._writer.start()
        try:
            async with asyncio.timeout(OPEN_TIMEOUT_S):
                await self._opened
        except TimeoutError as error:
            raise BrokerUnavailable(f"{self._path} could not be opened within {OPEN_TIMEOUT_S:g} s") from error
        finally:
            if not self._opened.done() or self._opened.cancelled() or self._opened.exception() is not None:
                self._is_closed = True
                self._writer.dismiss()

    # ------------------------------------------------------------ Link

    @property
    def in_flight(self) -> int:
        return len(self._window)

    @property
    def oldest(self) -> Row | None:
        return self._window.oldest

    @property
    def in_doubt(self) -> int:
        """None: a file closes over no row."""
        return 0

    def is_in_flight(self, message_id: str) -> bool:
        return self._window.is_in_flight(message_id)

    def route_of(self, row: Row) -> tuple[str, str]:
        """A file is no route."""
        return "", ""

    def publish(self, rows: Sequence[Row]) -> Publication:
        """See `Link.publish`."""
        rejected: list[Rejection] = []
        taken = 0
        if self._is_closed or self._is_blocked:
            return Publication(0, ())
        for row in rows:
            if self._buffered >= BUFFER_BYTES_MAX:
                self._is_full = True
                break
            taken += 1
            try:
                line = self._encoder.encode(row, self._database_now)
            except MessageInvalid as error:
                rejected.append(Rejection(row, error.failure_class, error.message, *self._encoder.route_of(row)))
                continue
            self._window.add((row,))
            self._lines.append(line)
            self._buffered += len(line)
        self._write()
        return Publication(taken, rejected)

    def probe(self, row: Row) -> Publication:
        """See `Link.probe`; a file closes over no row, so nobody is ever a suspect."""
        return self.publish([row])

    async def close(self) -> None:
        """See `Link.close`. Takes at most `CLOSE_TIMEOUT_S`."""
        self._end("closed by the relay")
        await asyncio.wait([self._ended], timeout=CLOSE_TIMEOUT_S)

    # ------------------------------------------------------------ what the thread tells, on the loop

    def on_opened(self, error: BrokerError | None) -> None:
        if self._opened.done():
            return
        if error is None:
            self._opened.set_result(None)
        else:
            self._opened.set_exception(error)

    def on_written(self, tag: int) -> None:
        """All up to `tag` is synced."""
        if self._is_closed:
            return
        self._is_writing = False
        if self._is_blocked:
            self._is_blocked = False
            self._listener.on_unblocked()
        delivered, _ = self._window.ack(tag, multiple=True)
        self._listener.on_acked(delivered)
        # The listener may have closed meanwhile.
        if not self._is_closed:
            self._is_full = False
            self._listener.on_writable()
        self._write()

    def on_no_room(self, error: str) -> None:
        if not self._is_closed and not self._is_blocked:
            self._is_blocked = True
            self._is_full = True
            self._listener.on_blocked(error)

    def on_failed(self, error: str) -> None:
        self._end(error)

    def on_ended(self) -> None:
        if not self._ended.done():
            self._ended.set_result(None)

    # ------------------------------------------------------------ inside

    def _write(self) -> None:
        """Give the thread what has gathered, if it is idle."""
        if self._lines and not self._is_writing and not self._is_closed:
            lines, self._lines, self._buffered = self._lines, [], 0
            self._is_writing = True
            self._writer.write(b"".join(lines), self._window.last_tag)

    def _end(self, error: str) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._lines.clear()
        self._writer.dismiss()
        self._listener.on_closed(self._window.drain(), Closed.CONNECTION, error)


class _Writer:
    """The thread: opens the file, writes batch after batch, tells the link on its loop.

    A daemon thread of its own rather than an executor's: one that hangs in the disk must not hold up the exit.
    """

    def __init__(self, path: str, tail: Tail, link: FileLink) -> None:
        self._path = path
        self._tail = tail
        self._link = link
        self._loop = asyncio.get_running_loop()
        self._batches: queue.SimpleQueue[tuple[bytes, int] | None] = queue.SimpleQueue()
        """Never more than one batch and the end."""
        self._dismissed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="file-sink", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def write(self, data: bytes, tag: int) -> None:
        self._batches.put((data, tag))

    def dismiss(self) -> None:
        """End soon, the batch in hand included."""
        self._dismissed.set()
        self._batches.put(None)

    # ------------------------------------------------------------ in the thread

    def _run(self) -> None:
        try:
            appender = Appender.open(self._path, self._tail)
        except BrokerError as error:
            self._tell(self._link.on_opened, error)
            return
        try:
            self._tell(self._link.on_opened, None)
            while (batch := self._batches.get()) is not None:
                data, tag = batch
                while not self._append(appender := self._current(appender), data):
                    self._dismissed.wait(RETRY_INTERVAL_S)
                self._tell(self._link.on_written, tag)
        except Abandoned:
            # Whoever dismissed this thread has told what became of the rows.
            pass
        except BrokerError as error:
            self._tell(self._link.on_failed, error.message)
        except OSError as error:
            self._tell(self._link.on_failed, f"{self._path} cannot be written: {error.strerror}")
        finally:
            appender.close()
            self._tell(self._link.on_ended)

    def _current(self, appender: Appender) -> Appender:
        """The same, or that of the file which bears the name now. Raises as `Appender.open`."""
        if not appender.is_moved():
            return appender
        fresh = Appender.open(self._path, self._tail)
        appender.close()
        return fresh

    def _append(self, appender: Appender, data: bytes) -> bool:
        """False where there is no room. Raises Abandoned, and OSError for everything else."""
        if self._dismissed.is_set():
            raise Abandoned
        try:
            appender.append(data, self._dismissed.is_set)
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            self._tell(self._link.on_no_room, f"{self._path}: {error.strerror}")
            return False
        return True

    def _tell(self, callback: Callable[..., None], *arguments: object) -> None:
        try:
            self._loop.call_soon_threadsafe(callback, *arguments)
        except RuntimeError:
            # The loop is closed: the process is on its way out and nobody listens any more.
            assert self._loop.is_closed()
