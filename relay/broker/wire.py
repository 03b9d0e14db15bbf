"""The socket, shared with aiormq: what the broker says about our publishes never passes through the library.

aiormq opens connection and channels, and answers heartbeats and closes; its way of reading costs some 100 µs
of Python per confirm (a stream, a queue, a frame object, a future). So the connection is given a transport of
ours, through aiormq's own `transport_factory`: a protocol that splits what arrives into frames and takes
those of the publishing channel that speak of publishes (`basic.ack`, `basic.nack`, `basic.return` with its
content), and the deliveries of a consuming one. All else goes on to aiormq's stream, whole frames in their order;
a few of them are read in passing (closes, blocked).

In the other direction aiormq writes whole frames with one `write` each, and so do we: nothing is torn apart.

This is the one module that relies on how aiormq works inside; `tests/broker/test_wire.py` fails when an
upgrade changes that. What it relies on:
  - `transport_factory.create(url, ssl_context_provider=...)` gives the reader and writer that it uses;
  - it writes whole frames; it reads through `StreamReader` only;
  - it judges the connection dead when its stream brings no frame for three heartbeats, so it is shown one
    (`_HEARTBEAT`) now and then while only our frames arrive.
"""

from __future__ import annotations

import asyncio
from struct import Struct
from typing import Any, Final, Protocol, cast

from aiormq.connection import TransportFactory
from aiormq.exceptions import AMQPConnectionError
from yarl import URL

from relay.core.window import ProtocolViolation

WRITE_BUFFER_BYTES: Final = 1 << 20
"""Above this much unsent data the transport says stop; it says go on at a quarter."""

_FRAME: Final = Struct(">BHI").unpack_from
_CONFIRM: Final = Struct(">QB").unpack_from
_CLOSE_CODE: Final = Struct(">H").unpack_from
_FRAME_MIN: Final = 8
_ACK_BYTES: Final = 21
_FRAME_MAX: Final = 1 << 24
"""Before it is negotiated (128 KiB with RabbitMQ, unless an operator made it more): beyond this it is no AMQP."""
_TUNE: Final = b"\x00\x0a\x00\x1e"
_TUNE_FRAME_MAX: Final = Struct(">2xI").unpack_from
_END: Final = 0xCE
_HEARTBEAT: Final = b"\x08\x00\x00\x00\x00\x00\x00\xce"
_HEARTBEAT_INTERVAL_S: Final = 1.0
_NOTHING: Final = b"\xff"
"""Begins no frame: the prefix of acks while nobody publishes."""

_ACK, _NACK, _RETURN = b"\x00\x3c\x00\x50", b"\x00\x3c\x00\x78", b"\x00\x3c\x00\x32"
_SELECT_OK = b"\x00\x55\x00\x0b"
_CHANNEL_CLOSE, _CONNECTION_CLOSE = b"\x00\x14\x00\x28", b"\x00\x0a\x00\x32"
_CLOSES: Final = (_CHANNEL_CLOSE, _CONNECTION_CLOSE)
_BLOCKED, _UNBLOCKED = b"\x00\x0a\x00\x3c", b"\x00\x0a\x00\x3d"


class ChannelListener(Protocol):
    """Told what arrives on a channel about its publishes, in its order; all but `on_close` may raise
    ProtocolViolation, which ends in `WireListener.on_violation`.
    """

    def on_ack(self, tag: int, multiple: bool) -> None: ...
    def on_nack(self, tag: int, multiple: bool) -> None: ...
    def on_return(self, message_id: str, error: str, exchange: str, routing_key: str) -> None: ...
    def on_selected(self) -> None:
        """`confirm.select-ok`: what was published before the `confirm.select` has been looked at."""
        ...

    def on_close(self, code: int, text: str) -> None:
        """The broker closes this channel."""
        ...


class WireListener(ChannelListener, Protocol):
    """The publishing channel's listener, told of the connection too; `on_read_end` after each read of the socket."""

    def on_connection_close(self, code: int, text: str) -> None:
        """The broker closes the connection."""
        ...

    def on_blocked(self, reason: str) -> None: ...
    def on_unblocked(self) -> None: ...
    def on_read_end(self) -> None: ...
    def on_writable(self) -> None: ...
    def on_violation(self, error: str) -> None: ...
    def on_lost(self, error: str) -> None:
        """The connection is gone; may be told more than once."""
        ...


class DeliveryListener(Protocol):
    """Told of the frames of a channel that consumes."""

    def take(self, kind: int, payload: bytes) -> bool:
        """Whether the frame is a delivery's, and not for aiormq."""
        ...


class Wire(asyncio.StreamReaderProtocol):
    """The protocol of one connection; hears for its listener from `listen` on."""

    def __init__(self, reader: asyncio.StreamReader, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(reader, loop=loop)
        self._clock = loop.time
        self._listener: WireListener | None = None
        self._channels: dict[int, ChannelListener] = {}
        self._consumers: dict[int, DeliveryListener] = {}
        self._ack_prefix = _NOTHING
        self._pieces: list[bytes] = []
        """Of a frame of which so much is missing."""
        self._missing = 0
        self._frame_max = _FRAME_MAX
        self.is_amqp = True
        """What came so far can be read as frames."""
        self._returns: dict[int, tuple[str, str, str]] = {}
        self._forwarded_at = 0.0
        self.transport: asyncio.Transport | None = None
        self.is_writable = True
        self.lost: str | None = None
        """Why the connection is gone, once it is."""
        self.refused: tuple[int, str] | None = None
        """Code and text with which the broker closed the connection, once it did."""
        self.read_at = loop.time()
        """When the last bytes came, by the loop's clock."""

    def listen(self, listener: WireListener, channel: int) -> None:
        """From now on the frames about publishes on `channel` are the listener's."""
        self._listener = listener
        self._channels[channel] = listener
        self._ack_prefix = b"\x01" + channel.to_bytes(2, "big") + b"\x00\x00\x00\x0d" + _ACK

    def listen_beside(self, listener: ChannelListener, channel: int) -> None:
        """The same for one more channel, until the broker closes it."""
        self._channels[channel] = listener

    def deliver(self, listener: DeliveryListener, channel: int) -> None:
        """From now on, until the broker closes it, the deliveries on `channel` are the listener's."""
        self._consumers[channel] = listener

    def ignore(self) -> None:
        """No publisher is told anything more; their frames go to aiormq."""
        self._listener = None
        self._channels.clear()
        self._ack_prefix = _NOTHING

    # ------------------------------------------------------------ asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES, low=WRITE_BUFFER_BYTES // 4)
        super().connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._lose((str(exc) or type(exc).__name__) if exc else "connection closed")

    def eof_received(self) -> bool | None:
        stays_open = super().eof_received()
        self._lose("connection closed by the broker's side")
        return stays_open

    def pause_writing(self) -> None:
        super().pause_writing()
        self.is_writable = False

    def resume_writing(self) -> None:
        super().resume_writing()
        self.is_writable = True
        if self._listener is not None:
            self._listener.on_writable()

    def data_received(self, data: bytes) -> None:
        self.read_at = self._clock()
        if not self.is_amqp:
            super().data_received(data)
            return
        if self._pieces:
            self._pieces.append(data)
            self._missing -= len(data)
            if self._missing > 0:
                return
            # Joined once: a large one comes in hundreds of pieces.
            data = b"".join(self._pieces)
            self._pieces.clear()
        try:
            self._split(data)
        except ProtocolViolation as error:
            if self._listener is None:
                raise
            self._listener.on_violation(error.message)
            return
        if self._listener is not None:
            self._listener.on_read_end()

    def _lose(self, error: str) -> None:
        if self.lost is None:
            self.lost = error
        if self._listener is not None:
            self._listener.on_lost(error)

    # ------------------------------------------------------------ frames

    def _split(self, data: bytes) -> None:
        """Deal out the frames of `data`; data[start:at] is what aiormq has to see and was not given yet."""
        start = at = 0
        size = len(data)
        self._missing = 1
        while size - at >= _FRAME_MIN:
            if data.startswith(self._ack_prefix, at) and self._listener is not None:
                if size - at < _ACK_BYTES:
                    break
                if start < at:
                    self._forward(data[start:at])
                tag, bits = _CONFIRM(data, at + 11)
                at += _ACK_BYTES
                start = at
                self._listener.on_ack(tag, bool(bits & 1))
                continue
            kind, channel, length = _FRAME(data, at)
            if kind not in (1, 2, 3, 8) or length > self._frame_max:
                # The answer to another protocol version begins with `AMQP`; aiormq knows what to say to it.
                self.is_amqp = False
                break
            end = at + _FRAME_MIN + length
            if end > size:
                self._missing = end - size
                break
            if data[end - 1] != _END:
                self.is_amqp = False
                break
            if channel == 0:
                if kind == 1:
                    self._overhear(data[at + 7 : at + 11], data, at + 11)
            elif self._is_taken(channel, kind, data, at + 7, end - 1):
                if start < at:
                    self._forward(data[start:at])
                start = end
            if kind == 1 and start <= at and data[at + 7 : at + 11] in _CLOSES:
                # One that aiormq can read. (Rare, so the copies do not matter.)
                self._forward(data[start:at] + _with_whole_text(data[at:end]))
                start = end
            at = end
        if start < at:
            self._forward(data[start:at])
        if self.is_amqp:
            if at < size:
                self._pieces.append(data[at:])
            if start and self.read_at - self._forwarded_at > _HEARTBEAT_INTERVAL_S:
                self._forward(_HEARTBEAT)
            return
        if at < size:
            self._forward(data[at:])
        if self._listener is not None:
            raise ProtocolViolation("what the broker sends is not AMQP any longer")

    def _forward(self, frames: bytes) -> None:
        self._forwarded_at = self.read_at
        super().data_received(frames)

    def _is_taken(self, channel: int, kind: int, data: bytes, at: int, end: int) -> bool:
        """A frame's payload (data[at:end]); whether it is ours alone."""
        if (consumer := self._consumers.get(channel)) is not None:
            if data.startswith(_CHANNEL_CLOSE, at) and kind == 1:
                del self._consumers[channel]
            return consumer.take(kind, data[at:end])
        listener = self._channels.get(channel)
        return listener is not None and self._take(listener, channel, kind, data, at, end)

    def _take(self, listener: ChannelListener, channel: int, kind: int, data: bytes, at: int, end: int) -> bool:
        """A frame's payload (data[at:end]) on a publishing channel; whether it is ours alone."""
        if kind == 2:
            # The only content that such a channel brings is that of returns; its bodies are skipped below.
            if channel not in self._returns:
                raise ProtocolViolation("the broker sent content that belongs to no return")
            error, exchange, routing_key = self._returns.pop(channel)
            listener.on_return(message_id(data, at, end), error, exchange, routing_key)
            return True
        if kind != 1:
            return kind == 3
        method = data[at : at + 4]
        if method in (_ACK, _NACK):
            if end - at != 13:
                raise ProtocolViolation("the broker sent a confirm of a wrong size")
            tag, bits = _CONFIRM(data, at + 4)
            (listener.on_ack if method == _ACK else listener.on_nack)(tag, bool(bits & 1))
            return True
        if method == _RETURN:
            (code,) = _CLOSE_CODE(data, at + 4)
            text, at = _short(data, at + 6)
            exchange, at = _short(data, at)
            routing_key, at = _short(data, at)
            self._returns[channel] = (f"{code} {text}", exchange, routing_key)
            return True
        if method == _SELECT_OK:
            listener.on_selected()
            return True
        if method == _CHANNEL_CLOSE:
            self._channels.pop(channel, None)
            listener.on_close(*_close(data, at + 4))
        return False

    def _overhear(self, method: bytes, data: bytes, at: int) -> None:
        """A method on channel 0: aiormq's business, which we have to know too."""
        if method == _CONNECTION_CLOSE:
            self.refused = _close(data, at)
        elif method == _TUNE:
            # aiormq takes what is offered; 0 is as much as the frame's own field can say.
            self._frame_max = _TUNE_FRAME_MAX(data, at)[0] or 0xFFFFFFFF
        if self._listener is None:
            return
        if self.refused is not None:
            self._listener.on_connection_close(*self.refused)
        elif method == _BLOCKED:
            self._listener.on_blocked(_short(data, at)[0])
        elif method == _UNBLOCKED:
            self._listener.on_unblocked()


class WireFactory(TransportFactory):
    """aiormq's way to its transport; `wire` is the protocol of the connection that it made."""

    def __init__(self) -> None:
        self.wire: Wire | None = None

    async def create(self, url: URL, **kwargs: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Raises AMQPConnectionError."""
        provider = kwargs.pop("ssl_context_provider")
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(loop=loop)
        if url.host is None or url.port is None:
            raise AMQPConnectionError("the URL names no host")
        try:
            tls = await provider.get_context() if url.scheme == "amqps" else None
            transport, wire = await loop.create_connection(
                lambda: Wire(reader, loop), host=url.host, port=url.port, ssl=tls, **kwargs
            )
        except OSError as error:
            raise AMQPConnectionError(*error.args) from error
        self.wire = wire
        return reader, asyncio.StreamWriter(transport, wire, reader, loop)


def message_id(data: bytes, at: int, end: int) -> str:
    """The message id in a content header's payload, data[at:end]; empty where there is none. Raises ProtocolViolation.

    Property flags and their order: AMQP 0-9-1, 4.2.6.1.
    """
    flags = int.from_bytes(data[at + 12 : at + 14], "big")
    at += 14
    if flags & 1:
        raise ProtocolViolation("the broker returned a message with unknown properties")
    if not flags & 1 << 7:
        return ""
    for bit in (15, 14):  # content type, content encoding
        if flags & 1 << bit:
            at += 1 + data[at]
    if flags & 1 << 13:  # headers
        at += 4 + int.from_bytes(data[at : at + 4], "big")
    for bit in (12, 11):  # delivery mode, priority
        if flags & 1 << bit:
            at += 1
    for bit in (10, 9, 8):  # correlation id, reply-to, expiration
        if flags & 1 << bit:
            at += 1 + data[at]
    text, at = _short(data, at)
    if at > end:
        raise ProtocolViolation("the broker returned a message whose header is cut off")
    return text


def _close(data: bytes, at: int) -> tuple[int, str]:
    """(code, text) of a close's arguments."""
    return _CLOSE_CODE(data, at)[0], _short(data, at + 2)[0]


def _with_whole_text(frame: bytes) -> bytes:
    """A close with dots for what is no character of its text.

    RabbitMQ cuts a text off after 255 bytes, in the middle of a character too; aiormq would fail on it and never
    tell who waits.
    """
    text_at = 7 + 4 + 2 + 1
    end = text_at + frame[text_at - 1]
    text = frame[text_at:end].decode("utf-8", "ignore").encode()
    return frame[:text_at] + text + b"." * (end - text_at - len(text)) + frame[end:]


def _short(data: bytes, at: int) -> tuple[str, int]:
    """(short string, where it ends). Raises ProtocolViolation where the data ends before it."""
    end = at + 1 + (data[at] if at < len(data) else 0)
    if end > len(data):
        raise ProtocolViolation("the broker sent a method that is cut off")
    return data[at + 1 : end].decode("utf-8", "replace"), end
