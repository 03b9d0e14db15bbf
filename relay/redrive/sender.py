"""Publishes copies of taken messages, mandatory, and tells what became of each.

    in flight --ack, no return--> SENT      --nack--> NACKED      --ack after a return--> RETURNED
        '--the broker closes the channel--> REFUSED where it was the only one, else each once more, alone

Owns: the publishing channel, the window of unconfirmed copies, and which exchange may be written to. Invariants: a copy is SENT
only by an ack of its own with no return for it. A return carries no delivery tag: no two copies of one id are in flight
together, and one without an id is alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from struct import Struct
from typing import Final

from aiormq import spec
from pamqp.header import ContentHeader

from relay.broker.exchanges import Exchanges
from relay.broker.refusals import read
from relay.core.window import ProtocolViolation
from relay.errors import BrokerRefused, BrokerUnavailable
from relay.redrive.choice import Route, Taken
from relay.redrive.session import Session

WINDOW: Final = 100
"""Copies in flight: a round trip's worth. What is not acknowledged when the command is killed is there twice."""

WINDOW_BYTES: Final = 16 * 2**20

_PUBLISH: Final = b"\x00\x3c\x00\x28\x00\x00"
_MANDATORY: Final = b"\x01"
_FRAME: Final = Struct(">BHI").pack
_FRAME_OVERHEAD: Final = 8


class Verdict(StrEnum):
    """What became of a copy."""

    SENT = "sent"
    RETURNED = "returned"
    NACKED = "nacked"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Carried:
    """A message, its route, and what became of it; `text` in the broker's words where it did not arrive.

    `is_of_exchange`: nothing that is sent to that exchange would arrive.
    """

    taken: Taken
    route: Route
    verdict: Verdict
    text: str = ""
    is_of_exchange: bool = False


@dataclass(slots=True)
class _Copy:
    taken: Taken
    route: Route
    properties: spec.Basic.Properties
    returned: str | None = None

    @property
    def size(self) -> int:
        return len(self.taken.body)


class Sender:
    """Implements `relay.broker.wire.WireListener` for its channel, which `open` makes."""

    def __init__(self, session: Session) -> None:
        self.carried: deque[Carried] = deque()
        """Copies with a verdict; whoever reads them takes them out."""
        self._session = session
        self._exchanges = Exchanges(session.connection, lambda _: None)
        self._writable: set[str] = set()
        """Exchanges that took a copy."""
        self._copies: dict[int, _Copy] = {}
        self._suspects: deque[_Copy] = deque()
        self._bytes = 0
        self._tag = 0
        self._number = 0
        """Of the channel; 0 while there is none."""
        self._is_blocked = False

    async def open(self) -> None:
        """A channel to publish on. Raises BrokerUnavailable, BrokerRefused."""
        channel = await self._session.answer(self._session.connection.channel(publisher_confirms=True), "a channel")
        self._number, self._tag = channel.number, 0
        self._session.wire.listen(self, self._number)

    async def carry(self, taken: Taken, route: Route, properties: spec.Basic.Properties) -> None:
        """Publish a copy, as soon as there is room; `carried` tells what became of it.

        The first one for an exchange goes alone: where the broker closes the channel over it, no other is in doubt.
        Raises BrokerUnavailable, BrokerRefused.
        """
        copy = _Copy(taken, route, properties)
        await self._mend()
        if route.exchange in self._writable:
            await self._until(lambda: self._number == 0 or self._has_room(copy))
            await self._mend()
            self._write(copy)
            return
        await self.settle()
        if (text := await self._missing(route.exchange)) is not None:
            self._tell(copy, Verdict.REFUSED, text, is_of_exchange=True)
            return
        await self._publish_alone(copy)
        if self._number:
            self._writable.add(route.exchange)

    async def settle(self) -> None:
        """Wait until every copy has its verdict. Raises BrokerUnavailable, BrokerRefused."""
        await self._until(lambda: not self._copies)
        await self._mend()

    def close(self) -> None:
        """Nobody is told anything more."""
        self._session.wire.ignore()
        self._exchanges.close()

    # ------------------------------------------------------------ publishing

    async def _missing(self, exchange: str) -> str | None:
        """The broker's refusal where there is no such exchange; asked aside, so that it closes nothing of ours."""
        return await self._session.answer(self._exchanges.check(exchange), "an exchange") if exchange else None

    async def _mend(self) -> None:
        """After the broker closed the channel: another one, and what was in flight once more, each alone."""
        self._session.check()
        while self._number == 0:
            await self.open()
            while self._suspects and self._number:
                await self._publish_alone(self._suspects.popleft())

    async def _publish_alone(self, copy: _Copy) -> None:
        await self._until(lambda: not self._copies and self._is_writable)
        self._write(copy)
        await self._until(lambda: not self._copies)

    async def _until(self, is_so: Callable[[], bool]) -> None:
        await self._session.until(
            is_so, lambda: "it blocks publishers (an alarm)" if self._is_blocked else "no confirm came"
        )

    @property
    def _is_writable(self) -> bool:
        return self._session.wire.is_writable and not self._is_blocked

    def _has_room(self, copy: _Copy) -> bool:
        if not self._copies or not self._is_writable:
            return self._is_writable
        ids = {other.taken.id for other in self._copies.values()}
        return (
            len(self._copies) < WINDOW
            and self._bytes + copy.size <= WINDOW_BYTES
            and copy.taken.id != ""
            and copy.taken.id not in ids
            and "" not in ids
        )

    def _write(self, copy: _Copy) -> None:
        assert self._session.wire.transport is not None, "connected"
        try:
            frames = self._frames(copy)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            self._tell(copy, Verdict.REFUSED, f"cannot be encoded: {error}")
            return
        self._tag += 1
        self._copies[self._tag] = copy
        self._bytes += copy.size
        self._session.wire.transport.write(frames)

    def _tell(self, copy: _Copy, verdict: Verdict, text: str = "", *, is_of_exchange: bool = False) -> None:
        self.carried.append(Carried(copy.taken, copy.route, verdict, text, is_of_exchange))
        self._session.tell()

    def _frames(self, copy: _Copy) -> bytes:
        """One publish: method, header, body (AMQP 0-9-1, 4.2.3). The driver's own would refuse names it finds odd."""
        body = copy.taken.body
        method = _PUBLISH + _short(copy.route.exchange) + _short(copy.route.routing_key) + _MANDATORY
        header = ContentHeader(body_size=len(body), properties=copy.properties).marshal()
        step = (self._session.connection.connection_tune.frame_max or 2**31) - _FRAME_OVERHEAD
        if len(header) > step:
            raise ValueError("its headers are larger than a frame")
        parts = [self._frame(1, method), self._frame(2, header)]
        parts += [self._frame(3, body[at : at + step]) for at in range(0, len(body), step)]
        return b"".join(parts)

    def _frame(self, kind: int, payload: bytes) -> bytes:
        return _FRAME(kind, self._number, len(payload)) + payload + b"\xce"

    # ------------------------------------------------------------ WireListener

    def on_ack(self, tag: int, multiple: bool) -> None:
        self._confirm(tag, multiple, is_ack=True)

    def on_nack(self, tag: int, multiple: bool) -> None:
        self._confirm(tag, multiple, is_ack=False)

    def _confirm(self, tag: int, multiple: bool, *, is_ack: bool) -> None:
        tags = [tag] if not multiple else [open_tag for open_tag in self._copies if not tag or open_tag <= tag]
        for each in tags:
            copy = self._copies.pop(each, None)
            if copy is None:
                raise ProtocolViolation(f"the broker confirmed {each}, which is not in flight")
            self._bytes -= copy.size
            verdict, text = (Verdict.SENT, "") if is_ack else (Verdict.NACKED, "the queue takes no more")
            if copy.returned is not None:
                # A return comes before its confirm, which is an ack: no delivery (RabbitMQ, publisher confirms).
                verdict, text = Verdict.RETURNED, copy.returned
            self._tell(copy, verdict, text)
        self._session.tell()

    def on_return(self, message_id: str, error: str, exchange: str, routing_key: str) -> None:
        for copy in self._copies.values():
            if copy.taken.id == message_id:
                copy.returned = error
                return
        raise ProtocolViolation(f"the broker returned message {message_id!r}, which is not in flight")

    def on_selected(self) -> None:
        """Nothing: aiormq has asked for confirms."""

    def on_close(self, code: int, text: str) -> None:
        """Over the only copy: its verdict. Over one of several: each is tried once more, alone."""
        self._number = 0
        copies = list(self._copies.values())
        self._copies.clear()
        self._bytes = 0
        if len(copies) == 1:
            found = read(code, text)
            is_of_exchange = found is not None and found.is_of_exchange
            self._tell(copies[0], Verdict.REFUSED, f"{code} {text}", is_of_exchange=is_of_exchange)
        else:
            self._suspects.extend(copies)
        self._session.tell()

    def on_connection_close(self, code: int, text: str) -> None:
        self._session.fail(BrokerRefused(f"the broker closed the connection: {code} {text}", reply_code=code))

    def on_blocked(self, reason: str) -> None:
        self._is_blocked = True
        self._session.tell()

    def on_unblocked(self) -> None:
        self._is_blocked = False
        self._session.tell()

    def on_read_end(self) -> None:
        """Nothing: each confirm was told by itself."""

    def on_writable(self) -> None:
        self._session.tell()

    def on_violation(self, error: str) -> None:
        self._session.fail(BrokerUnavailable(error))
        if self._session.wire.transport is not None:
            self._session.wire.transport.abort()

    def on_lost(self, error: str) -> None:
        self._session.fail(BrokerUnavailable(f"the connection was lost: {error}"))


def _short(text: str) -> bytes:
    encoded = text.encode()
    if len(encoded) > 255:
        raise ValueError("a name longer than 255 bytes")
    return bytes((len(encoded),)) + encoded
