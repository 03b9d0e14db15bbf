"""A TCP proxy for tests: the network's faults at any moment, or at the moment when certain bytes pass.

Stands before the server of a URL and has a URL of its own. What it can do to the connections:

    deaf        one side's bytes vanish (both sides: half-open, nobody learns anything)
    frozen      nothing is read any more: buffers fill, writers stall; undone without loss
    delay_s     each chunk comes so much later      bytes_s     so many bytes a second and direction
    refuses     new connections are closed at once
    cut, reset  every connection ends, in good order or with RST on both sides
    Trap        an action when the n-th occurrence of some bytes is about to pass, or has passed

A connection that lost bytes carries nothing any more: its stream would be garbage. AMQP's acks can be taken out of
a stream that otherwise goes on (`swallows_acks`): a broker that lives and confirms nothing.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from types import TracebackType
from typing import Final
from urllib.parse import urlsplit, urlunsplit

PUBLISH: Final = b"\x00\x3c\x00\x28"
"""Class and method of basic.publish, as they stand in its frame; our payloads hold no zero bytes."""
ACK: Final = b"\x00\x3c\x00\x50"
COMMIT: Final = b"COMMIT\x00"
"""A simple query's text on the way to PostgreSQL, a command tag on the way back."""


class Side(StrEnum):
    """Who speaks."""

    CLIENT = "client"
    SERVER = "server"


@dataclass(slots=True)
class Trap:
    """Runs `action` at the `nth` occurrence of `needle` in what `side` says, on connections whose first bytes hold
    `session`. `is_passed`: after the bytes went on; else they stop in front of the needle, mid-frame."""

    side: Side
    needle: bytes
    action: Callable[[], object]
    nth: int = 1
    is_passed: bool = False
    session: bytes = b""
    sprung: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True, eq=False)
class _Pair:
    """One connection: both sockets, who it is, whether its bytes still mean anything."""

    client: asyncio.StreamWriter
    server: asyncio.StreamWriter
    opening: bytes = b""
    has_lost: set[Side] = field(default_factory=set)
    """What this side said has lost bytes: the rest of it vanishes too."""
    ended: set[Side] = field(default_factory=set)


class Proxy:
    """See above. Attributes may be set at any time; `accepted` counts connections, refused ones included."""

    def __init__(self, direct_url: str) -> None:
        self._direct = urlsplit(direct_url)
        assert self._direct.port is not None, "a URL that names its port"
        self._target_port = self._direct.port
        self._port = 0
        self.accepted = 0
        self.deaf: set[Side] = set()
        self.delay_s = 0.0
        self.bytes_s: float | None = None
        self.refuses = False
        self.swallows_acks = False
        self._thawed = asyncio.Event()
        self._thawed.set()
        self._traps: list[Trap] = []
        self._server: asyncio.Server | None = None
        self._pairs: set[_Pair] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Proxy:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self._port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        self.reset()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def url(self) -> str:
        """The server's URL, led through here."""
        netloc = self._direct.netloc.replace(f":{self._direct.port}", f":{self._port}")
        return urlunsplit(self._direct._replace(netloc=netloc))

    def freeze(self) -> None:
        self._thawed.clear()

    def thaw(self) -> None:
        self._thawed.set()

    def half_open(self) -> None:
        """From now on nothing arrives anywhere, and nobody is told; new connections are accepted into the void."""
        self.deaf = set(Side)

    def heal(self) -> None:
        """No fault any more; connections that lost bytes stay dead until somebody gives them up."""
        self.deaf, self.delay_s, self.bytes_s = set(), 0.0, None
        self.refuses = self.swallows_acks = False
        self.thaw()

    def cut(self) -> None:
        """End every connection with FIN on both sides."""
        for pair in self._take_pairs():
            pair.client.close()
            pair.server.close()

    def reset(self) -> None:
        """Cut every connection with RST on both sides; what was swallowed or waits is lost."""
        for pair in self._take_pairs():
            for writer in (pair.client, pair.server):
                if writer.transport.is_closing():
                    continue
                raw = writer.get_extra_info("socket")
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                writer.transport.abort()

    def lead_to(self, port: int) -> None:
        """New connections reach another server, as behind an address that has moved; the others stay where they are."""
        self._target_port = port

    def trap(self, trap: Trap) -> asyncio.Event:
        """Arm it; occurrences count from now on. The event is set when it has sprung."""
        self._traps.append(trap)
        return trap.sprung

    def disarm(self) -> None:
        """Forget the traps that have not sprung."""
        self._traps.clear()

    # ------------------------------------------------------------ inside

    def _take_pairs(self) -> set[_Pair]:
        pairs, self._pairs = self._pairs, set()
        return pairs

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        if self.refuses:
            writer.transport.abort()
            return
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
        except OSError:
            writer.transport.abort()
            return
        pair = _Pair(writer, far_writer)
        self._pairs.add(pair)
        for source, sink, side in ((reader, far_writer, Side.CLIENT), (far_reader, writer, Side.SERVER)):
            task = asyncio.get_running_loop().create_task(self._pump(pair, source, sink, side))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pump(self, pair: _Pair, source: asyncio.StreamReader, sink: asyncio.StreamWriter, side: Side) -> None:
        acks = _AckFilter() if side is Side.SERVER else None
        tail = b""
        try:
            while data := await source.read(65536):
                await self._thawed.wait()
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                if side is Side.CLIENT and len(pair.opening) < 1024:
                    pair.opening += data
                if side in self.deaf or side in pair.has_lost:
                    pair.has_lost.add(side)
                    continue
                if acks is not None and (self.swallows_acks or acks.is_amid):
                    data = acks.without_acks(data, swallows=self.swallows_acks)
                if self._traps:
                    passes, springs = self._spring(pair, side, tail, data)
                    tail = data[-16:]
                    sink.write(data[:passes])
                    for trap in springs:
                        trap.action()
                        trap.sprung.set()
                    if passes < len(data):
                        pair.has_lost.update(Side)
                else:
                    sink.write(data)
                await sink.drain()
                if self.bytes_s is not None:
                    await asyncio.sleep(len(data) / self.bytes_s)
        except OSError:
            pass
        finally:
            pair.ended.add(side)
            # Deaf: the end is not heard either.
            if side not in self.deaf and side not in pair.has_lost:
                sink.close()
            if pair.ended == set(Side):
                self._pairs.discard(pair)
                pair.client.close()
                pair.server.close()

    def _spring(self, pair: _Pair, side: Side, tail: bytes, data: bytes) -> tuple[int, list[Trap]]:
        """(how many bytes pass, what springs); `tail` are the bytes just before `data`."""
        passes, springs = len(data), []
        for trap in list(self._traps):
            if trap.side is not side or trap.session not in pair.opening:
                continue
            # A needle that began in the chunk before and ends in this one counts here.
            before = tail[-(len(trap.needle) - 1) :] if len(trap.needle) > 1 else b""
            text, at = before + data, -1
            while trap.nth and (at := text.find(trap.needle, at + 1)) >= 0:
                trap.nth -= 1
            if not trap.nth:
                self._traps.remove(trap)
                springs.append(trap)
                if not trap.is_passed:
                    passes = min(passes, max(0, at - len(before)))
        return passes, springs


class _AckFilter:
    """Takes basic.ack frames out of what an AMQP server says, whole frames only."""

    def __init__(self) -> None:
        self._rest = b""

    @property
    def is_amid(self) -> bool:
        """Bytes of a frame wait here for the rest of it."""
        return bool(self._rest)

    def without_acks(self, data: bytes, *, swallows: bool) -> bytes:
        """What of `data` goes on. Begins between two frames: at a moment when the server has just said nothing."""
        text, at, kept = self._rest + data, 0, []
        while len(text) - at >= 7:
            end = at + 8 + int.from_bytes(text[at + 3 : at + 7], "big")
            if end > len(text):
                break
            frame = text[at:end]
            if not (swallows and frame[0] == 1 and frame[7:11] == ACK):
                kept.append(frame)
            at = end
        self._rest = text[at:]
        return b"".join(kept)
