"""One life of a connection to RabbitMQ: rows in as encoded frames, outcomes out.

Owns: the confirm window of the publishing channel, what may be written when, the outcome of each row, and who is
suspected when the broker closes (the probes' channel is that of `probes`).

    open --broker closes over a publish--> closed (REFUSED)
      |----the same over a probe, on its channel--> open
      |----cut, heartbeat missed, server stops, protocol broken, close()--> closed (CONNECTION)

Invariants: each published row gets one outcome: acked, nacked, returned, or lost when the link closes.
Outcomes are told in the broker's order, one call per kind for what one read of the socket brought; never from
within `publish`. A close over a publish leaves the rows that its text may mean as suspects, or, where there is one
only, refused; where it names the constant exchange, the configuration is at fault and no row is. Nothing is written while the broker blocks us: such messages would sit in its socket unread,
and ours would be a growing buffer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import Final

from aiormq import Connection
from aiormq.exceptions import AMQPError

from relay.broker.encode import Encoder
from relay.broker.exchanges import Exchanges, Forbidden
from relay.broker.probes import Probes
from relay.broker.refusals import Refusal, read, unsaid
from relay.broker.wire import WRITE_BUFFER_BYTES, Wire
from relay.core.ports.broker import Closed, LinkListener, Publication, Rejection, Returned
from relay.core.window import ProtocolViolation, Settled, Window
from relay.errors import MessageInvalid
from relay.message import Row

SIZE_LIMIT_AGE_S: Final = 60.0
"""How long a size that the broker refused is held against rows, should its configuration change meanwhile."""

CLOSE_TIMEOUT_S: Final = 3.0
"""An orderly close that takes longer is not worth waiting for: the socket is dropped."""


class _Kind(Enum):
    ACKED = auto()
    NACKED = auto()
    RETURNED = auto()


class AmqpLink:
    """Implements `relay.core.ports.broker.Link`; made by `AmqpBroker.connect`.

    `encoder` makes one for a channel. `constant_exchange` is known to exist; other names are asked for in `exchanges` before anything goes
    there. `on_size_limit(bytes)` is told when the broker's refusal gives away the largest body that it takes.
    """

    def __init__(
        self,
        connection: Connection,
        wire: Wire,
        encoder: Callable[[int], Encoder],
        listener: LinkListener,
        *,
        channel: int,
        constant_exchange: str | None,
        forbidden: Forbidden,
        database_now: Callable[[], float],
        on_size_limit: Callable[[int], None],
    ) -> None:
        assert wire.transport is not None, "the wire is connected"
        self._connection = connection
        self._wire = wire
        self._transport = wire.transport
        self._encoder = encoder(channel)
        self._listener = listener
        self._constant_exchange = constant_exchange
        self._database_now = database_now
        self._on_size_limit = on_size_limit
        self._loop = asyncio.get_running_loop()
        self._window = Window()
        self._exchanges = Exchanges(connection, self._tell_verified)
        self._forbidden = forbidden
        self._probes = Probes(connection, wire, encoder, self)
        self._is_closed = False
        self._is_blocked = False
        self._is_told_soon = False
        self._told: frozenset[Row] = frozenset()
        """The rows that the close was told to be about; by themselves, for a seq may be reused beside its orphan."""
        self._kind = _Kind.ACKED
        self._rows: list[Row] = []
        self._returned: list[Returned] = []
        self._has_told = False
        """An outcome was told since the last read's end."""
        self._shutting: asyncio.Task[None] | None = None
        wire.listen(self, channel)

    # ------------------------------------------------------------ Link

    @property
    def in_flight(self) -> int:
        return len(self._window) + len(self._probes)

    @property
    def oldest(self) -> Row | None:
        return self._window.oldest

    @property
    def in_doubt(self) -> int:
        return len(self._window) + (self._probes.probed is not None)

    def is_in_flight(self, message_id: str) -> bool:
        return self._window.is_in_flight(message_id) or self._probes.is_in_flight(message_id)

    def route_of(self, row: Row) -> tuple[str, str]:
        return self._encoder.route_of(row)

    def publish(self, rows: Sequence[Row]) -> Publication:
        """See `Link.publish`. At most about `WRITE_BUFFER_BYTES` wait in the socket, and one row more."""
        if self._is_closed or self._is_blocked:
            return Publication(0, ())
        room = WRITE_BUFFER_BYTES - self._transport.get_write_buffer_size()
        encoder, constant = self._encoder, self._constant_exchange
        out: list[bytes] = []
        sent: list[Row] = []
        rejected: list[Rejection] = []
        taken = 0
        has_large = False
        unverified: str | None = None
        while taken < len(rows):
            if room <= 0:
                self._tell_writable_soon()
                break
            row = rows[taken]
            if (known := self._known_exchange(row)) is not None:
                # Nearly always all of them at once.
                count, size = encoder.encode_run(rows, taken, known, room, out)
                if count:
                    sent += rows[taken : taken + count]
                    taken += count
                    room -= size
                    continue
            try:
                exchange, frames = encoder.encode(row, self._database_now)
            except MessageInvalid as error:
                rejected.append(self._rejection(row, error.failure_class, error.message))
                taken += 1
                continue
            if exchange != constant and (verdict := self._verdict(row, exchange)) is not True:
                if verdict is False:
                    unverified = exchange
                    break
                rejected.append(verdict)
                taken += 1
                continue
            sent.append(row)
            out.append(frames)
            room -= len(frames)
            has_large |= len(frames) > WRITE_BUFFER_BYTES
            taken += 1
        if out:
            self._window.add(sent)
            # One write for all, which copies them; but for a large one.
            if has_large:
                for piece in out:
                    self._transport.write(piece)
            else:
                self._transport.write(b"".join(out))
        return Publication(taken, rejected, unverified)

    def probe(self, row: Row) -> Publication:
        """See `Link.probe`."""
        if self._is_closed or self._is_blocked or (encoder := self._probes.encoder) is None:
            return Publication(0, ())
        if self._transport.get_write_buffer_size() >= WRITE_BUFFER_BYTES:
            self._tell_writable_soon()
            return Publication(0, ())
        try:
            exchange, frames = encoder.encode(row, self._database_now)
        except MessageInvalid as error:
            return Publication(1, (self._rejection(row, error.failure_class, error.message),))
        if exchange != self._constant_exchange and (verdict := self._verdict(row, exchange)) is not True:
            return Publication(0, (), unverified=exchange) if verdict is False else Publication(1, (verdict,))
        self._transport.write(self._probes.publish(row, frames))
        return Publication(1, ())

    async def close(self) -> None:
        """See `Link.close`. Takes at most `CLOSE_TIMEOUT_S`."""
        if not self._is_closed:
            self._end(Closed.CONNECTION, "closed by the relay")
        if self._shutting is not None:
            await asyncio.wait([self._shutting])

    # ------------------------------------------------------------ WireListener

    def on_ack(self, tag: int, multiple: bool) -> None:
        self._settle(_Kind.ACKED, self._window.ack(tag, multiple))

    def on_nack(self, tag: int, multiple: bool) -> None:
        self._settle(_Kind.NACKED, self._window.nack(tag, multiple))

    def on_return(self, message_id: str, error: str, exchange: str, routing_key: str) -> None:
        self._window.mark_returned(message_id, error, exchange, routing_key)

    def on_selected(self) -> None:
        raise ProtocolViolation("the broker answered a confirm.select that was not sent")

    def on_close(self, code: int, text: str) -> None:
        refusal = read(code, text)
        if refusal is not None:
            self._learn(refusal)
            self._refuse(refusal, alone=False)
        self._end(self._closed(refusal), f"{code} {text}")

    def on_connection_close(self, code: int, text: str) -> None:
        refusal = read(code, text) or unsaid(code, text)
        if refusal is not None:
            self._refuse(refusal, alone=True)
            if refusal.is_unsaid and not self._told:
                # The server's own trouble.
                refusal = None
        self._end(self._closed(refusal), f"{code} {text}")

    def on_blocked(self, reason: str) -> None:
        self._flush()
        self._is_blocked = True
        self._listener.on_blocked(reason)

    def on_unblocked(self) -> None:
        self._flush()
        self._is_blocked = False
        self._listener.on_unblocked()
        self._tell_writable_soon()

    def on_read_end(self) -> None:
        self._flush()
        if self._has_told:
            self._has_told = False
            self._tell_writable()

    def on_writable(self) -> None:
        self._tell_writable()

    def on_violation(self, error: str) -> None:
        self._end(Closed.CONNECTION, error)
        self._transport.abort()

    def on_lost(self, error: str) -> None:
        silence_s = self._loop.time() - self._wire.read_at
        if self._connection.heartbeat_timeout and silence_s > 2 * self._connection.heartbeat_timeout:
            error = f"nothing was heard for {silence_s:.0f} s: {error}"
        self._end(Closed.CONNECTION, error)

    # ------------------------------------------------------------ ProbesListener

    def on_probe_open(self) -> None:
        self._tell_writable()

    def on_probe_passed(self, row: Row) -> None:
        self._flush()
        self._listener.on_passed(row)

    def on_probes_acked(self, settled: Settled) -> None:
        self._settle(_Kind.ACKED, settled)

    def on_probes_nacked(self, settled: Settled) -> None:
        self._settle(_Kind.NACKED, settled)

    def on_probes_closed(self, error: str, refusal: Refusal | None) -> None:
        if refusal is None or not self._is_rows_fault(refusal):
            self._end(self._closed(refusal), error)
            return
        self._flush()
        self._learn(refusal)
        probed, passed = self._probes.drain()
        if probed is None:
            # Closed over nothing that we know of: whatever it was, the passed rows go again.
            self._end(Closed.CONNECTION, error, passed)
            return
        self._listener.on_refused(self._refusal(probed, refusal), passed)

    # ------------------------------------------------------------ refusals

    def _known_exchange(self, row: Row) -> str | None:
        """Where the row goes, if that is known to take messages."""
        if self._constant_exchange is not None:
            return self._constant_exchange
        exchange = self._encoder.route_of(row)[0]
        return exchange if self._exchanges.is_known(exchange) and self._forbidden.refusal(exchange) is None else None

    def _verdict(self, row: Row, exchange: str) -> Rejection | bool:
        """True: the exchange takes messages. False: not known yet, `on_verified` follows."""
        if (text := self._forbidden.refusal(exchange)) is not None:
            return self._rejection(row, "refused", text)
        verdict = self._exchanges.verdict(exchange)
        if isinstance(verdict, bool):
            return verdict
        return Rejection(row, "refused", verdict, *self._encoder.route_of(row), is_final=False)

    def _closed(self, refusal: Refusal | None) -> Closed:
        if refusal is None:
            return Closed.CONNECTION
        return Closed.REFUSED if self._is_rows_fault(refusal) else Closed.EXCHANGE

    def _is_rows_fault(self, refusal: Refusal) -> bool:
        return not (refusal.is_of_exchange and refusal.exchange == self._constant_exchange)

    def _learn(self, refusal: Refusal) -> None:
        """What is refused for all rows alike is not sent again soon."""
        if refusal.body_bytes_max is not None:
            self._on_size_limit(refusal.body_bytes_max)
            self._encoder.limit_body(refusal.body_bytes_max)
            self._loop.call_at(self._loop.time() + SIZE_LIMIT_AGE_S, self._encoder.limit_body, None)
        if refusal.is_of_exchange and refusal.exchange is not None and self._is_rows_fault(refusal):
            if refusal.is_missing:
                self._exchanges.forget(refusal.exchange)
            else:
                self._forbidden.add(refusal.exchange, refusal.text)

    def _refuse(self, refusal: Refusal, *, alone: bool) -> None:
        """The broker closes the link over something: tell who is suspected. All others are lost, as with any link."""
        self._flush()
        if self._is_closed or not self._is_rows_fault(refusal) or refusal.body_bytes_max is not None:
            # Bodies above a limit that is known from now on are found by their size.
            return
        rows = self._window.rows()
        suspects = [row for row in rows if refusal.blames(*self._encoder.route_of(row))]
        if not suspects and not refusal.is_unsaid:
            # The text was not what we took it for.
            suspects = list(rows)
        probed = self._probes.probed
        if alone and probed is not None and (not refusal.is_unsaid or refusal.blames(*self._encoder.route_of(probed))):
            suspects.append(probed)
        self._told = frozenset(suspects)
        if len(suspects) == 1:
            self._listener.on_refused(self._refusal(suspects[0], refusal), ())
        elif suspects:
            self._listener.on_suspected(suspects, refusal.text, alone=alone)

    def _refusal(self, row: Row, refusal: Refusal) -> Rejection:
        reason = "refused" if refusal.body_bytes_max is None else "too_large"
        return Rejection(row, reason, refusal.text, *self._encoder.route_of(row), is_final=not refusal.is_missing)

    # ------------------------------------------------------------ inside

    def _rejection(self, row: Row, reason: str, error: str) -> Rejection:
        return Rejection(row, reason, error, *self._encoder.route_of(row))

    def _settle(self, kind: _Kind, settled: Settled) -> None:
        rows, returned = settled
        if rows:
            if self._kind is not kind:
                self._flush()
                self._kind = kind
            self._rows += rows
        if returned:
            if self._kind is not _Kind.RETURNED:
                self._flush()
                self._kind = _Kind.RETURNED
            self._returned += returned

    def _flush(self) -> None:
        """Tell what was gathered. The listener may publish or close meanwhile: the state is whole before the
        call.
        """
        if self._rows:
            self._has_told = True
            rows, self._rows = self._rows, []
            if self._kind is _Kind.ACKED:
                self._listener.on_acked(rows)
            else:
                self._listener.on_nacked(rows)
        elif self._returned:
            self._has_told = True
            returned, self._returned = self._returned, []
            self._listener.on_returned(returned)

    def _tell_writable_soon(self) -> None:
        """After a turn of the loop, unless the transport is full: it tells us when it has drained."""
        if not self._is_told_soon:
            self._is_told_soon = True
            self._loop.call_soon(self._tell_writable_if_so)

    def _tell_writable_if_so(self) -> None:
        self._is_told_soon = False
        if self._wire.is_writable:
            self._tell_writable()

    def _tell_verified(self, exchange: str) -> None:
        if not self._is_closed:
            self._listener.on_verified(exchange)
            self._tell_writable()

    def _tell_writable(self) -> None:
        if not self._is_closed and not self._is_blocked:
            self._listener.on_writable()

    def _end(self, closed: Closed, error: str, passed: Sequence[Row] = ()) -> None:
        """The link's last word, once; the socket is closed behind it."""
        self._flush()
        if self._is_closed:
            return
        self._is_closed = True
        self._wire.ignore()
        self._exchanges.close()
        self._probes.close()
        probed, also_passed = self._probes.drain()
        lost = [row for row in self._window.drain() if row not in self._told]
        lost += [row for row in (*passed, *also_passed) if row not in self._told]
        if probed is not None and probed not in self._told:
            lost.append(probed)
        self._shutting = self._loop.create_task(self._shut())
        _shutting.add(self._shutting)
        self._shutting.add_done_callback(_shutting.discard)
        # Even when nothing was in flight: the last confirm may have come while a close was on its way.
        self._listener.on_closed(lost, closed, error)

    async def _shut(self) -> None:
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._connection.close()
        except (AMQPError, OSError, TimeoutError, asyncio.InvalidStateError):
            # The connection is beyond an orderly end, which `on_closed` has told already.
            pass
        finally:
            self._transport.abort()


_shutting: set[asyncio.Task[None]] = set()
"""Closes under way: the loop itself holds its tasks only weakly."""
