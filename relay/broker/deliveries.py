"""Deliveries put together from the frames of a wire, past aiormq: its queue, tasks and reading cost three fifths of the CPU
of a message (docs/decisions).

And no message ends a connection: RabbitMQ hands on what a foreign publisher wrote (a timestamp of the year 57882, a type in
Latin-1), pamqp cannot decode it, and aiormq's reader would go with everything that all workers have in hand. Here such a
message is an `Undecodable`, with what can be read of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from struct import Struct

from aiormq import spec
from aiormq.abc import AbstractChannel, DeliveredMessage
from pamqp.header import ContentHeader

from relay.broker.salvage import salvaged, text_of

_DELIVER = b"\x00\x3c\x00\x3c"
_TAG_AND_BITS = Struct(">QB").unpack_from


@dataclass(frozen=True)
class Undecodable(DeliveredMessage):
    """One of which `fault` cannot be decoded: properties and headers have the rest, the body is whole."""

    fault: str


async def not_by_the_driver(_: DeliveredMessage) -> None:
    """What a consumer is called by aiormq, which brings it nothing."""
    raise AssertionError("the wire takes every delivery")


class Deliveries:
    """Of one channel that only consumes; `receive` gets each of them whole and must not raise."""

    __slots__ = ("_bodies", "_channel", "_deliver", "_faults", "_header", "_missing", "_receive")

    def __init__(self, channel: AbstractChannel, receive: Callable[[DeliveredMessage], None]) -> None:
        self._channel = channel
        self._receive = receive
        self._deliver: spec.Basic.Deliver | None = None
        self._header: ContentHeader | None = None
        self._bodies: list[bytes] = []
        self._missing = 0
        self._faults: list[str] = []

    def take(self, kind: int, payload: bytes) -> bool:
        """A frame of the channel, in the order of the wire; whether it is a delivery's, and nobody else's."""
        if kind == 1:
            # AMQP 0-9-1, 4.2.6: nothing comes between a delivery's frames; what did not end will not.
            self._deliver, self._faults = None, []
            if not payload.startswith(_DELIVER):
                return False
            self._deliver = self._method(payload)
        elif self._deliver is None:
            return False
        elif kind == 2:
            self._header, self._bodies = self._content_header(payload), []
            self._missing = self._header.body_size
            self._end_if_whole()
        else:
            self._bodies.append(payload)
            self._missing -= len(payload)
            self._end_if_whole()
        return True

    def _method(self, payload: bytes) -> spec.Basic.Deliver:
        at = 5 + payload[4]
        tag, is_redelivered = _TAG_AND_BITS(payload, at)
        exchange_at = at + 9
        key_at = exchange_at + 1 + payload[exchange_at]
        deliver = spec.Basic.Deliver(payload[5:at].decode(), tag, bool(is_redelivered & 1))
        # Not by the constructor, which has its own idea of a name.
        deliver.exchange = self._name("the exchange", payload[exchange_at + 1 : key_at])
        deliver.routing_key = self._name("the routing key", payload[key_at + 1 :])
        return deliver

    def _name(self, what: str, data: bytes) -> str:
        try:
            return data.decode()
        except UnicodeDecodeError:
            self._faults.append(f"{what} {text_of(data)}: not UTF-8")
            return data.decode(errors="backslashreplace")

    def _content_header(self, payload: bytes) -> ContentHeader:
        header = ContentHeader()
        try:
            header.unmarshal(payload)
        except Exception:  # noqa: BLE001 - whatever pamqp meets: ValueError, OverflowError, RecursionError, struct.error
            header, faults = salvaged(payload)
            self._faults += faults
        return header

    def _end_if_whole(self) -> None:
        if self._missing > 0:
            return
        deliver, header = self._deliver, self._header
        assert deliver is not None, "content of no delivery"
        assert header is not None, "content without a header"
        self._deliver = None
        body = self._bodies[0] if len(self._bodies) == 1 else b"".join(self._bodies)
        if self._faults:
            fault = f"cannot be decoded: {'; '.join(self._faults)}"
            self._receive(Undecodable(deliver, header, body, self._channel, fault))
        else:
            self._receive(DeliveredMessage(deliver, header, body, self._channel))
