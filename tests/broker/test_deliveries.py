"""Deliveries put together from frames, also of what pamqp cannot decode, and what is salvaged then."""

from __future__ import annotations

import asyncio
import struct
from typing import Any, cast

import pytest
from aiormq import spec
from aiormq.abc import AbstractChannel, DeliveredMessage
from hypothesis import given
from hypothesis import strategies as st
from pamqp import frame
from pamqp.body import ContentBody
from pamqp.header import ContentHeader

from relay.broker.deliveries import Deliveries, Undecodable
from relay.broker.salvage import salvaged
from relay.broker.wire import Wire
from relay.properties import ExactProperties
from tests import foreign
from tests.foreign import APP_ID, HEADERS, MESSAGE_ID, MICROSECONDS, TIMESTAMP, TYPE, entry, long, short, stamp

CHANNEL = 7


class Transport(asyncio.Transport):
    """As much as a protocol asks for."""

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Nothing is written here."""


class Reader:
    """A wire, its consumer's deliveries, and what is left for aiormq."""

    def __init__(self) -> None:
        self.stream = asyncio.StreamReader()
        self.wire = Wire(self.stream, asyncio.get_running_loop())
        self.wire.connection_made(Transport())
        self.received: list[DeliveredMessage] = []
        self.wire.deliver(Deliveries(cast("AbstractChannel", None), self.received.append), CHANNEL)

    def feed(self, *frames: Any, in_pieces_of: int | None = None) -> None:
        """What comes over the socket, in one read or in several."""
        data = b"".join(each if isinstance(each, bytes) else frame.marshal(each, CHANNEL) for each in frames)
        step = in_pieces_of or len(data)
        for at in range(0, len(data), step):
            self.wire.data_received(data[at : at + step])

    async def passed_on(self) -> list[Any]:
        """The frames for aiormq."""
        self.wire.eof_received()
        data, found = await self.stream.read(), list[Any]()
        while data:
            size, _, value = frame.unmarshal(data)
            found.append(value)
            data = data[size:]
        return found


def header(size: int) -> ContentHeader:
    return ContentHeader(body_size=size, properties=spec.Basic.Properties(message_id="m", headers={"a": 1}))


def deliver(tag: int, **more: Any) -> spec.Basic.Deliver:
    return spec.Basic.Deliver("c", tag, **{"exchange": "e", "routing_key": "k", **more})


@pytest.mark.parametrize("step", [None, 1, 5, 40])
async def test_deliveries_are_put_together_and_everything_else_goes_on_in_order(step: int | None) -> None:
    reader = Reader()
    consuming, cancel = spec.Basic.ConsumeOk("c"), spec.Basic.Cancel("c")
    reader.feed(consuming, deliver(1), header(5), ContentBody(b"ab"), ContentBody(b"cde"), in_pieces_of=step)
    reader.feed(deliver(2, redelivered=True), header(0), deliver(3), header(1), ContentBody(b"x"), cancel)
    found = [(each.delivery_tag, each.redelivered, each.body) for each in reader.received]
    assert found == [(1, False, b"abcde"), (2, True, b""), (3, False, b"x")]
    for each in reader.received:
        assert (each.consumer_tag, each.exchange, each.routing_key) == ("c", "e", "k")
        assert (each.header.properties.message_id, each.header.properties.headers) == ("m", {"a": 1})
        assert not isinstance(each, Undecodable)
    assert [each.name for each in await reader.passed_on()] == [consuming.name, cancel.name]


async def test_a_delivery_that_is_cut_short_is_none() -> None:
    """The channel's number may soon be another channel's, too."""
    reader = Reader()
    reader.feed(deliver(1), header(5), ContentBody(b"ab"), spec.Channel.Close(504, "x", 0, 0))
    reader.feed(deliver(2), header(1), ContentBody(b"x"))
    assert reader.received == []
    assert len(await reader.passed_on()) == 4


async def test_content_that_is_no_deliverys_goes_on() -> None:
    reader = Reader()
    reader.feed(spec.Basic.Return(312, "NO_ROUTE", "e", "k"), header(1), ContentBody(b"x"))
    assert (reader.received, len(await reader.passed_on())) == ([], 3)


def nested(depth: int) -> bytes:
    value = b""
    for _ in range(depth):
        value = entry(b"n", b"F", long(value))
    return value


KEPT = long(entry(b"kept", b"I", struct.pack(">i", 7)) + entry(b"a", b"T", stamp(MICROSECONDS)))
FOREIGN = {
    "a timestamp in microseconds": (
        MESSAGE_ID | TIMESTAMP | TYPE,
        short(b"m") + stamp(MICROSECONDS) + short(b"t"),
        {"message_id": "m", "message_type": "t"},
        "timestamp 1764439200000000: year 57882 is out of range",
    ),
    "one beyond what a double holds": (
        MESSAGE_ID | TIMESTAMP,
        short(b"m") + stamp(2**64 - 1),
        {"message_id": "m"},
        "timestamp 18446744073709551615: year 584556019 is out of range",
    ),
    "one in a header": (
        HEADERS | MESSAGE_ID,
        KEPT + short(b"m"),
        {"headers": {"kept": 7}, "message_id": "m"},
        r"header b'a' b'T\x00\x06D\xbf\x83\xbeh\x00': year 57882 is out of range",
    ),
    "one in an array": (
        HEADERS | MESSAGE_ID,
        long(entry(b"a", b"A", long(b"T" + stamp(2**63)))) + short(b"m"),
        {"headers": {}, "message_id": "m"},
        "year 292278994 is out of range",
    ),
    "a type in Latin-1": (
        MESSAGE_ID | TYPE | APP_ID,
        short(b"m") + short(b"caf\xe9") + short(b"app"),
        {"message_id": "m", "app_id": "app"},
        r"type b'caf\xe9': not UTF-8",
    ),
    "an id in Latin-1": (
        MESSAGE_ID | TYPE,
        short(b"caf\xe9") + short(b"t"),
        {"message_type": "t"},
        r"message_id b'caf\xe9': not UTF-8",
    ),
    "a header's name in Latin-1": (
        HEADERS | MESSAGE_ID,
        long(entry(b"\xe9", b"V", b"") + entry(b"kept", b"V", b"")) + short(b"m"),
        {"headers": {"kept": None}, "message_id": "m"},
        r"header b'\xe9' b'V': not UTF-8",
    ),
    "tables in tables": (
        HEADERS | MESSAGE_ID,
        long(nested(2000)) + short(b"m"),
        {"headers": {}, "message_id": "m"},
        "nested too deeply",
    ),
    "what is no AMQP": (
        HEADERS | MESSAGE_ID,
        long(entry(b"a", b"Z", b"") + b"rest") + short(b"m"),
        {"headers": {}, "message_id": "m"},
        r"the headers from b'\x01aZrest' on",
    ),
    "less than was said": (MESSAGE_ID | TYPE, short(b"m"), {"message_id": "m"}, "the properties end too early"),
}


@pytest.mark.parametrize("name", FOREIGN)
@pytest.mark.parametrize("step", [None, 9])
async def test_what_cannot_be_decoded_is_told_and_the_rest_is_kept(name: str, step: int | None) -> None:
    """One such message used to end the connection, and again whenever it was delivered."""
    flags, properties, kept, fault = FOREIGN[name]
    reader = Reader()
    content = foreign.content(CHANNEL, flags, properties, b"body")
    reader.feed(deliver(1), content, deliver(2), header(1), ContentBody(b"x"), in_pieces_of=step)
    first, second = reader.received
    assert isinstance(first, Undecodable) and not isinstance(second, Undecodable)
    assert first.fault.startswith("cannot be decoded: ") and fault in first.fault
    assert first.header.properties == spec.Basic.Properties(**cast("Any", kept))
    assert (first.delivery_tag, first.body, second.delivery_tag) == (1, b"body", 2)


async def test_a_routing_key_in_latin_1() -> None:
    reader = Reader()
    method = b"\x00\x3c\x00\x3c" + short(b"c") + stamp(1) + b"\x00" + short(b"e") + short(b"caf\xe9")
    reader.feed(foreign.frame(1, CHANNEL, method), header(0))
    (only,) = reader.received
    assert isinstance(only, Undecodable)
    assert only.fault == r"cannot be decoded: the routing key b'caf\xe9': not UTF-8"
    assert (only.exchange, only.routing_key, only.header.properties.message_id) == ("e", r"caf\xe9", "m")


@given(st.integers(0, 0xFFFF), st.binary(max_size=200))
def test_nothing_of_a_header_stops_the_salvage(flags: int, properties: bytes) -> None:
    found, _ = salvaged(foreign.header(3, flags, properties))
    assert found.body_size == 3


values = st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text(max_size=9) | st.binary(max_size=9)
tables = st.dictionaries(
    st.text(max_size=9), st.recursive(values, lambda inner: st.lists(inner, max_size=3)), max_size=4
)


@given(tables, st.text(min_size=1, max_size=9), st.none() | st.text(min_size=1, max_size=9))
def test_what_can_be_decoded_is_salvaged_whole(headers: dict[str, Any], id: str, app: str | None) -> None:
    """The salvage finds every part where pamqp finds it."""
    sent = ExactProperties(headers=headers, message_id=id, app_id=app, priority=3, expiration="9")
    payload = ContentHeader(0, 5, sent).marshal()
    read = ContentHeader()
    read.unmarshal(payload)
    found, faults = salvaged(payload)
    assert (found.properties, faults) == (read.properties, [])
