"""A publisher that is none of ours: it writes frames as its library, or its author, will have them."""

from __future__ import annotations

import struct

import aiormq
from aiormq.abc import ChannelFrame

MICROSECONDS = 1_764_439_200_000_000
"""Where AMQP means seconds: a moment of the year 57882."""

HEADERS, MESSAGE_ID, TIMESTAMP, TYPE, APP_ID = 1 << 13, 1 << 7, 1 << 6, 1 << 5, 1 << 3
"""Property flags, in their order (AMQP 0-9-1, 4.2.6.1)."""


def short(text: bytes) -> bytes:
    """A short string."""
    return bytes((len(text),)) + text


def long(data: bytes) -> bytes:
    """A long string, or what follows a table's or an array's type."""
    return struct.pack(">I", len(data)) + data


def entry(name: bytes, kind: bytes, value: bytes) -> bytes:
    """A header."""
    return short(name) + kind + value


def stamp(value: int) -> bytes:
    """A timestamp."""
    return struct.pack(">Q", value)


def header(size: int, flags: int, properties: bytes) -> bytes:
    """A content header's payload."""
    return struct.pack(">HHQH", 60, 0, size, flags) + properties


def content(channel: int, flags: int, properties: bytes, body: bytes) -> bytes:
    """Header and body, a frame each."""
    return frame(2, channel, header(len(body), flags, properties)) + (frame(3, channel, body) if body else b"")


def frame(kind: int, channel: int, payload: bytes) -> bytes:
    """Any frame."""
    return struct.pack(">BHI", kind, channel, len(payload)) + payload + b"\xce"


async def publish(
    amqp_url: str, exchange: bytes, key: bytes, flags: int, properties: bytes, body: bytes = b"{}"
) -> None:
    """One message, once the broker has it in a queue."""
    connection = await aiormq.connect(amqp_url)
    try:
        channel = await connection.channel(publisher_confirms=False)
        method = b"\x00\x3c\x00\x28\x00\x00" + short(exchange) + short(key) + b"\x00"
        frames = frame(1, channel.number, method) + content(channel.number, flags, properties, body)
        await channel.tx_select()
        await connection.write_queue.put(ChannelFrame(payload=frames, should_close=False, drain_future=None))
        await channel.tx_commit()
    finally:
        await connection.close()
