"""Takes the messages of one queue one at a time, publishes copies, acknowledges the originals once those are confirmed.

    taken --carry--> in flight --ack, no return--> the original is acknowledged
      |                 |--nack, return, the channel closed over it--> the verdict says why
      '-----------------'--> `close` gives it back, to its place in the queue

Owns: one connection with two channels (one takes, one publishes), the window of unconfirmed copies, and which exchange may be
written to. Invariants: an original is acknowledged only after its own copy's ack with no return for it; whatever ends
the connection before costs a second copy at most, never a message. A return carries no delivery tag: no two copies of one
id are in flight together, and one without an id is alone.

What is not sent is left unacknowledged until the end: no message is seen twice, and all go back together. Why by consumers:
a quorum queue keeps the order of what *one* consumer gives back, as it ends, and of up to 32 of them; it keeps none of many
single `basic.get`s or `basic.nack`s (rabbit_fifo, tried on 3.10). A consumer whose prefetch is full of left messages is
followed by another one, with a larger prefetch; memory holds the bodies that one of them was sent.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from struct import Struct
from typing import Any, Final

from aiormq import Connection, spec
from aiormq.abc import AbstractChannel, DeliveredMessage
from aiormq.exceptions import AMQPError, ChannelClosed
from pamqp.header import ContentHeader

from relay.broker.exchanges import Exchanges, refusal
from relay.broker.opening import first_of, opened
from relay.broker.refusals import read
from relay.broker.wire import Wire
from relay.core.window import ProtocolViolation
from relay.errors import BrokerRefused, BrokerUnavailable
from relay.redrive.choice import Route, Taken

ANSWER_TIMEOUT_S: Final = 30.0
"""For an answer, a confirm, the end of an alarm; then the run ends with an error, and what was not confirmed stays."""

WINDOW: Final = 100
"""Copies in flight: a round trip's worth. What is not acknowledged when the command is killed is there twice."""

WINDOW_BYTES: Final = 16 * 2**20

PREFETCH: Final = 50
PREFETCH_MAX: Final = 1000
"""Doubled from one consumer to the next: 32 of them leave 28,000 messages in their order."""

QUIET_S: Final = 0.5
"""After so long without a message the queue is asked whether it is empty: others may have taken some."""

_CLOSE_TIMEOUT_S: Final = 10.0
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


class Carrier:
    """Made by `Carrier.open`; implements `relay.broker.wire.WireListener` for its publishing channel."""

    def __init__(self, connection: Connection, wire: Wire, queue: str, source: AbstractChannel, ready: int) -> None:
        self.ready = ready
        """Messages that were ready when it was opened."""
        self.user = connection.url.user or "guest"
        self._connection = connection
        self._wire = wire
        self._queue = queue
        self._source = source
        self._exchanges = Exchanges(connection, lambda: None)
        self._writable: set[str] = set()
        self._copies: dict[int, _Copy] = {}
        self._suspects: deque[_Copy] = deque()
        self._tag = 0
        self._bytes = 0
        self._number = 0
        """Of the publishing channel; 0 while there is none."""
        self._carried: deque[Carried] = deque()
        self._sent: deque[int] = deque()
        """Tags of originals that may be acknowledged."""
        self._arrived: deque[Taken] = deque()
        self._prefetch = self._left = self._consumers = 0
        self._is_blocked = False
        self._failure: BrokerUnavailable | BrokerRefused | None = None
        self._changed = asyncio.Event()

    @classmethod
    async def open(cls, urls: Sequence[str], queue: str, name: str) -> Carrier:
        """Over the first URL that works. Raises BrokerUnavailable, BrokerRefused (also: there is no such queue)."""

        async def finish(connection: Connection, wire: Wire) -> Carrier:
            source = await connection.channel(publisher_confirms=False)
            try:
                found = await source.queue_declare(queue, passive=True)
            except ChannelClosed as error:
                raise BrokerRefused(f"the queue {queue!r} cannot be used: {refusal(error)}") from error
            carrier = cls(connection, wire, queue, source, found.message_count or 0)
            await carrier._open_publishing(is_first=True)
            return carrier

        return await first_of(urls, lambda url: opened(url, name, finish))

    @property
    def in_flight(self) -> int:
        """Copies without a verdict."""
        return len(self._copies)

    # ------------------------------------------------------------ taking

    async def take(self) -> Taken | None:
        """The next message of the queue, None where it is empty. Raises BrokerUnavailable, BrokerRefused."""
        quiet_since = time.monotonic()
        while not self._arrived:
            self._check()
            # What was sent makes room for more, once it is acknowledged.
            await self._acknowledge()
            if self._left >= self._prefetch:
                await self._consume()
            if await self._changes(QUIET_S) or self._arrived:
                continue
            found = await self._answered(self._source.queue_declare(self._queue, passive=True), "its messages")
            if not found.message_count:
                return None
            if time.monotonic() - quiet_since > ANSWER_TIMEOUT_S:
                why = "a single active consumer keeps them, or another policy of the queue"
                raise BrokerUnavailable(f"the queue {self._queue!r} has messages and gives none out: {why}")
        return self._arrived.popleft()

    def leave(self, _: Taken) -> None:
        """This one is not carried: it stays as it is until the end."""
        self._left += 1

    async def _consume(self) -> None:
        """One more consumer; those before it have their hands full."""
        self._left = 0
        self._prefetch = min(2 * self._prefetch, PREFETCH_MAX) if self._prefetch else PREFETCH
        self._consumers += 1
        await self._answered(self._source.basic_qos(prefetch_count=self._prefetch), "a prefetch")
        tag = _consumer_tag(self._consumers)
        await self._answered(self._source.basic_consume(self._queue, self._on_message, consumer_tag=tag), "a consumer")

    async def _on_message(self, message: DeliveredMessage) -> None:
        delivery = message.delivery
        assert isinstance(delivery, spec.Basic.Deliver), "of a consumer"
        route = (delivery.exchange or "", delivery.routing_key or "")
        self._arrived.append(Taken(delivery.delivery_tag or 0, *route, message.header.properties, bytes(message.body)))
        self._changed.set()

    async def carry(self, taken: Taken, route: Route, properties: spec.Basic.Properties) -> None:
        """Publish a copy, as soon as there is room; `carried` tells what became of it.

        The first one for an exchange goes alone: where the broker closes the channel over it, no other is in doubt.
        Raises BrokerUnavailable, BrokerRefused.
        """
        copy = _Copy(taken, route, properties)
        await self._mend()
        if route.exchange in self._writable:
            await self._wait(lambda: self._number == 0 or self._has_room(copy))
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

    async def carried(self) -> list[Carried]:
        """What has a verdict and was not told yet; the originals of those that were sent are acknowledged by now."""
        await self._acknowledge()
        found = list(self._carried)
        self._carried.clear()
        return found

    async def _acknowledge(self) -> None:
        while self._sent:
            await self._answered(self._source.basic_ack(self._sent[0], wait=False), "an acknowledgement")
            self._sent.popleft()

    async def rest(self, wait_s: float) -> None:
        """Until a copy has its verdict, or for so long."""
        if not self._carried:
            await self._changes(wait_s)

    async def settle(self) -> None:
        """Wait until every copy has its verdict. Raises BrokerUnavailable, BrokerRefused."""
        await self._wait(lambda: not self._copies)
        while self._number == 0:
            await self._mend()

    async def close(self) -> None:
        """Give back what was taken and not acknowledged, in its order, and end the connection."""
        self._wire.ignore()
        self._exchanges.close()
        try:
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                if not self._source.is_closed:
                    await self._flush()
                    await self._source.close()
                await self._connection.close()
        except (AMQPError, OSError, TimeoutError, RuntimeError):
            # The broker gives everything back by itself when the connection goes.
            if self._wire.transport is not None:
                self._wire.transport.abort()

    async def _flush(self) -> None:
        """Acknowledgements that a channel still holds back for a quorum queue (more than 32 are under way) die with it, and
        their originals would come back. A cancel waits for those under way; at the next question it sends the rest.
        """
        for number in range(1, self._consumers + 1):
            await self._source.basic_cancel(_consumer_tag(number))
        await self._source.queue_declare(self._queue, passive=True)

    # ------------------------------------------------------------ publishing

    async def _open_publishing(self, *, is_first: bool) -> None:
        channel = await self._answered(self._connection.channel(publisher_confirms=True), "a channel")
        self._number, self._tag = channel.number, 0
        if is_first:
            self._wire.listen(self, self._number)
        else:
            self._wire.listen_beside(self, self._number)

    async def _missing(self, exchange: str) -> str | None:
        """The broker's refusal where there is no such exchange; asked aside, so that it closes nothing of ours."""
        if not exchange:
            return None
        found: str | None = await self._answered(self._exchanges.check(exchange), "an exchange")
        return found

    async def _mend(self) -> None:
        """After the broker closed the channel: another one, and what was in flight once more, each alone."""
        self._check()
        while self._number == 0:
            await self._open_publishing(is_first=False)
            while self._suspects and self._number:
                await self._publish_alone(self._suspects.popleft())

    async def _publish_alone(self, copy: _Copy) -> None:
        await self._wait(lambda: not self._copies and self._is_writable)
        self._write(copy)
        await self._wait(lambda: not self._copies)

    @property
    def _is_writable(self) -> bool:
        return self._wire.is_writable and not self._is_blocked

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
        assert self._wire.transport is not None, "connected"
        try:
            frames = self._frames(copy)
        except (TypeError, ValueError, OverflowError) as error:
            self._tell(copy, Verdict.REFUSED, f"cannot be encoded: {error}")
            return
        self._tag += 1
        self._copies[self._tag] = copy
        self._bytes += copy.size
        self._wire.transport.write(frames)

    def _tell(self, copy: _Copy, verdict: Verdict, text: str = "", *, is_of_exchange: bool = False) -> None:
        self._carried.append(Carried(copy.taken, copy.route, verdict, text, is_of_exchange))
        if verdict is Verdict.SENT:
            self._sent.append(copy.taken.tag)
        else:
            self.leave(copy.taken)

    def _frames(self, copy: _Copy) -> bytes:
        """One publish: method, header, body (AMQP 0-9-1, 4.2.3). The driver's own would refuse names it finds odd."""
        body = copy.taken.body
        method = _PUBLISH + _short(copy.route.exchange) + _short(copy.route.routing_key) + _MANDATORY
        header = ContentHeader(body_size=len(body), properties=copy.properties).marshal()
        step = (self._connection.connection_tune.frame_max or 2**31) - _FRAME_OVERHEAD
        if len(header) > step:
            raise ValueError("its headers are larger than a frame")
        parts = [self._frame(1, method), self._frame(2, header)]
        parts += [self._frame(3, body[at : at + step]) for at in range(0, len(body), step)]
        return b"".join(parts)

    def _frame(self, kind: int, payload: bytes) -> bytes:
        return _FRAME(kind, self._number, len(payload)) + payload + b"\xce"

    # ------------------------------------------------------------ waiting

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    async def _wait(self, is_so: Callable[[], bool]) -> None:
        """Until it is so; each confirm and each change of the connection's state gives it new time."""
        self._check()
        while not is_so():
            if not await self._changes(ANSWER_TIMEOUT_S):
                why = "it blocks publishers (an alarm)" if self._is_blocked else "no confirm came"
                raise BrokerUnavailable(f"the broker: {why} for {ANSWER_TIMEOUT_S:g} s")
            self._check()

    async def _changes(self, wait_s: float) -> bool:
        """Whether something was told within so many seconds; who asks has looked at everything before."""
        self._changed.clear()
        try:
            async with asyncio.timeout(wait_s):
                await self._changed.wait()
        except TimeoutError:
            return False
        return True

    async def _answered(self, asked: Awaitable[Any], what: str) -> Any:
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                return await asked
        except TimeoutError as error:
            raise BrokerUnavailable(f"the broker did not give {what} within {ANSWER_TIMEOUT_S:g} s") from error
        except ChannelClosed as error:
            raise BrokerRefused(f"the broker closed the channel: {refusal(error)}") from error
        except (AMQPError, OSError, RuntimeError) as error:
            self._check()
            text = " ".join(map(str, error.args)) or type(error).__name__
            raise BrokerUnavailable(f"the connection was lost: {text}") from error
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # The driver cancels who waits for an answer when its connection goes.
            raise BrokerUnavailable("the connection was lost") from error

    def _fail(self, failure: BrokerUnavailable | BrokerRefused) -> None:
        if self._failure is None:
            self._failure = failure
        self._changed.set()

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
        self._changed.set()

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
        self._changed.set()

    def on_connection_close(self, code: int, text: str) -> None:
        self._fail(BrokerRefused(f"the broker closed the connection: {code} {text}", reply_code=code))

    def on_blocked(self, reason: str) -> None:
        self._is_blocked = True
        self._changed.set()

    def on_unblocked(self) -> None:
        self._is_blocked = False
        self._changed.set()

    def on_read_end(self) -> None:
        """Nothing: each confirm was told by itself."""

    def on_writable(self) -> None:
        self._changed.set()

    def on_violation(self, error: str) -> None:
        self._fail(BrokerUnavailable(error))
        if self._wire.transport is not None:
            self._wire.transport.abort()

    def on_lost(self, error: str) -> None:
        self._fail(BrokerUnavailable(f"the connection was lost: {error}"))


def _consumer_tag(number: int) -> str:
    """What consumers have is given back in the order of their tags."""
    return f"redrive-{number:06}"


def _short(text: str) -> bytes:
    encoded = text.encode()
    if len(encoded) > 255:
        raise ValueError("a name longer than 255 bytes")
    return bytes((len(encoded),)) + encoded
