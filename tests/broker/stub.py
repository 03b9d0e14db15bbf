"""A broker that speaks just enough AMQP 0-9-1 for a publisher; about publishes it says what a test wants.

    async with StubBroker() as stub:
        link = await AmqpBroker(lambda: [stub.url], ...).connect(...)
        peer = await stub.peer()
        await peer.published(3)
        peer.ack(2, multiple=True)
        peer.cut()

Opening, channels, confirm.select, passive declares and orderly closes are answered at once; `missing` names
exchanges that do not exist. pamqp, which reads and writes the frames here, is an implementation of its own.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self, cast

import pamqp.frame
from pamqp import commands
from pamqp.body import ContentBody
from pamqp.header import ContentHeader
from pamqp.heartbeat import Heartbeat

WAIT_S = 30.0


@dataclass(frozen=True, slots=True)
class Published:
    """A message that arrived whole."""

    tag: int
    exchange: str
    routing_key: str
    is_mandatory: bool
    properties: commands.Basic.Properties
    body: bytes

    @property
    def message_id(self) -> str:
        assert self.properties.message_id is not None
        return self.properties.message_id


class Peer:
    """One client's connection, as the broker sees it."""

    def __init__(self, stub: StubBroker, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._stub = stub
        self._reader = reader
        self._writer = writer
        self._changed = asyncio.Event()
        self._partial: tuple[commands.Basic.Publish, ContentHeader | None, bytes] | None = None
        self.messages: list[Published] = []
        self.client_properties: dict[str, Any] = {}
        self.publish_channel = 0
        self.channels: set[int] = set()
        """Those that are open."""
        self.heartbeats = 0
        self.heartbeat_s: int | None = None
        """As the client wants it."""
        self.is_gone = False

    # ------------------------------------------------------------ what tests wait for

    async def published(self, count: int) -> list[Published]:
        """Wait until that many messages have come."""
        await self._until(lambda: len(self.messages) >= count)
        return self.messages

    async def gone(self) -> None:
        """Wait until the client has closed the socket."""
        await self._until(lambda: self.is_gone)

    async def until_heartbeats(self, count: int) -> None:
        await self._until(lambda: self.heartbeats >= count)

    # ------------------------------------------------------------ what tests let it say

    def ack(self, tag: int, multiple: bool = False) -> None:
        self.say(commands.Basic.Ack(tag, multiple), self.publish_channel)

    def nack(self, tag: int, multiple: bool = False) -> None:
        self.say(commands.Basic.Nack(tag, multiple, requeue=False), self.publish_channel)

    def give_back(self, message: Published, code: int = 312, text: str = "NO_ROUTE") -> None:
        """basic.return with its content; the confirm is another matter."""
        method = commands.Basic.Return(code, text, message.exchange, message.routing_key)
        header = ContentHeader(0, len(message.body), message.properties)
        bodies = [ContentBody(message.body[at : at + 4000]) for at in range(0, len(message.body), 4000)]
        self.write(frames([method, header, *bodies], self.publish_channel))

    def block(self, reason: str = "low on memory") -> None:
        self.say(commands.Connection.Blocked(reason), 0)

    def unblock(self) -> None:
        self.say(commands.Connection.Unblocked(), 0)

    def close_channel(self, code: int, text: str) -> None:
        self.say(commands.Channel.Close(code, text, 60, 40), self.publish_channel)

    def close_connection(self, code: int, text: str) -> None:
        self.say(commands.Connection.Close(code, text, 0, 0), 0)

    def heartbeat(self) -> None:
        self.say(Heartbeat(), 0)

    def say(self, frame: Any, channel: int) -> None:
        self.write(frames([frame], channel))

    def write(self, data: bytes) -> None:
        self._writer.write(data)

    def cut(self) -> None:
        """Reset the connection: what was not sent yet is lost."""
        self._writer.transport.abort()

    async def drained(self) -> None:
        await self._writer.drain()

    def hang_up(self) -> None:
        """Close the socket after what was written; no AMQP close."""
        self._writer.close()

    def stop_reading(self) -> None:
        """The client's bytes pile up in its own socket from now on."""
        self._reader_transport.pause_reading()

    def go_on_reading(self) -> None:
        self._reader_transport.resume_reading()

    # ------------------------------------------------------------ the protocol

    @property
    def _reader_transport(self) -> asyncio.ReadTransport:
        return cast(asyncio.ReadTransport, self._writer.transport)

    async def run(self) -> None:
        try:
            assert await self._reader.readexactly(8) == b"AMQP\x00\x00\x09\x01"
            self.say(commands.Connection.Start(server_properties=_SERVER_PROPERTIES, mechanisms="PLAIN"), 0)
            while True:
                head = await self._reader.readexactly(7)
                (length,) = struct.unpack_from(">I", head, 3)
                rest = await self._reader.readexactly(length + 1)
                _, channel, frame = pamqp.frame.unmarshal(head + rest)
                self._answer(channel, frame)
                self._changed.set()
        except (asyncio.IncompleteReadError, ConnectionError):
            self.is_gone = True
            self._changed.set()
        finally:
            self._writer.close()

    def _answer(self, channel: int, frame: Any) -> None:
        name = frame.name.split(".")[-1]
        if name == self._stub.cut_at:
            self.cut()
        if name in (self._stub.cut_at, self._stub.mute_at):
            self._stub.stopped.set()
            return
        match frame:
            case commands.Connection.StartOk():
                self.client_properties = dict(frame.client_properties or {})
                self.say(commands.Connection.Tune(2047, self._stub.frame_max, 60), 0)
            case commands.Connection.Open():
                if self._stub.refusal is None:
                    self.say(commands.Connection.OpenOk(), 0)
                else:
                    self.close_connection(*self._stub.refusal)
            case commands.Connection.Close():
                self.say(commands.Connection.CloseOk(), 0)
            case commands.Connection.CloseOk():
                self.hang_up()
            case commands.Channel.Open() if len(self.channels) >= self._stub.channels_max:
                self.close_connection(530, f"NOT_ALLOWED - number of channels opened for user 'guest' is {channel}")
            case commands.Channel.Open():
                self.channels.add(channel)
                self.say(commands.Channel.OpenOk(), channel)
            case commands.Channel.Close():
                self.channels.discard(channel)
                self.say(commands.Channel.CloseOk(), channel)
            case commands.Confirm.Select():
                self.publish_channel = channel
                self.say(commands.Confirm.SelectOk(), channel)
            case commands.Exchange.Declare():
                self._stub.asked.append(frame.exchange)
                if self._stub.is_mute_about_exchanges:
                    return
                if frame.exchange in self._stub.missing:
                    text = f"NOT_FOUND - no exchange '{frame.exchange}' in vhost '/'"
                    self.say(commands.Channel.Close(404, text, 40, 10), channel)
                else:
                    self.say(commands.Exchange.DeclareOk(), channel)
            case commands.Basic.Publish():
                assert self._partial is None, "a publish amid another's content"
                self._partial = (frame, None, b"")
            case ContentHeader():
                assert self._partial is not None
                self._gather(self._partial[0], frame, b"")
            case ContentBody():
                assert self._partial is not None
                assert self._partial[1] is not None
                self._gather(self._partial[0], self._partial[1], self._partial[2] + frame.value)
            case Heartbeat():
                self.heartbeats += 1
            case commands.Connection.TuneOk():
                self.heartbeat_s = frame.heartbeat
            case commands.Channel.CloseOk():
                pass
            case _:
                raise AssertionError(f"the stub does not know {frame!r}")

    def _gather(self, method: commands.Basic.Publish, header: ContentHeader, body: bytes) -> None:
        if len(body) < header.body_size:
            self._partial = (method, header, body)
            return
        self._partial = None
        self.messages.append(
            Published(
                len(self.messages) + 1,
                method.exchange,
                method.routing_key,
                bool(method.mandatory),
                header.properties,
                body,
            )
        )

    async def _until(self, predicate: Any) -> None:
        async with asyncio.timeout(WAIT_S):
            while not predicate():
                self._changed.clear()
                await self._changed.wait()


class StubBroker:
    """Listens on a free port of 127.0.0.1 within its `async with` block."""

    def __init__(self, frame_max: int = 131_072) -> None:
        self.frame_max = frame_max
        self.channels_max = 2047
        """So many a connection may have open at once; it is closed over one more."""
        self.missing: set[str] = set()
        self.refusal: tuple[int, str] | None = None
        """Code and text with which connections are refused, after the login."""
        self.is_mute_about_exchanges = False
        self.cut_at: str | None = None
        """The method upon which a connection is reset instead of answered, such as `Open` or `Select`."""
        self.mute_at: str | None = None
        """The method that is not answered."""
        self.asked: list[str] = []
        """Exchanges that were declared passively, in order."""
        self.stopped = asyncio.Event()
        """Set when `cut_at` or `mute_at` was reached."""
        self._peers: asyncio.Queue[Peer] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    @property
    def port(self) -> int:
        assert self._server is not None
        return int(self._server.sockets[0].getsockname()[1])

    @property
    def url(self) -> str:
        return f"amqp://guest:guest@127.0.0.1:{self.port}/"

    async def peer(self) -> Peer:
        """The next connection that a client has made, in order."""
        async with asyncio.timeout(WAIT_S):
            return await self._peers.get()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = Peer(self, reader, writer)
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._peers.put_nowait(peer)
        await peer.run()


def frames(values: Iterable[Any], channel: int) -> bytes:
    return b"".join(pamqp.frame.marshal(value, channel) for value in values)


_SERVER_PROPERTIES: dict[str, Any] = {
    "product": "stub",
    "capabilities": {"publisher_confirms": True, "basic.nack": True, "connection.blocked": True},
}
