"""One relay's connection to the fake RabbitMQ of `broker.py`: the server's side of it, and the client's.

The client's side keeps the relay's own confirm windows (`relay/core/window.py`): what the broker says are its frames,
`basic.return` before its confirm, acks and nacks by tag, alone or `multiple`.
"""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from relay.core.ports.broker import Closed, LinkListener, Publication, Rejection, Returned
from relay.core.window import ProtocolViolation, Window
from relay.errors import BrokerUnavailable, ExchangeMissing
from relay.message import PayloadType, Row

from . import oracle as judge
from .broker import NO_EXCHANGE, Rabbit
from .loop import OUTSIDE, Process
from .oracle import Outcome

REFUSAL = "403 ACCESS_REFUSED - it says so"
UNSENDABLE = ("invalid", "too_large", "expired", "unknown")
"""Event types that the encoder refuses, named after the failure class."""


@dataclass(frozen=True, slots=True)
class Frame:
    """A confirm on its way to the client: acked or nacked, on the probes' channel or the ordinary one."""

    verdict: str
    is_probe: bool
    tag: int
    multiple: bool = False


@dataclass(slots=True, eq=False)
class Message:
    """A published row on its way. `verdict`: acked, nacked or returned, once the broker has decided."""

    tag: int
    row: Row
    publication: judge.Publication
    is_probe: bool
    verdict: str = ""


class FakeBroker:
    """One relay's way to the broker. `mandatory` is false under RELAY_UNROUTABLE=drop; `in_flight_max` is the
    relay's bound."""

    def __init__(
        self,
        rabbit: Rabbit,
        relay: str,
        process: Process,
        *,
        mandatory: bool = True,
        in_flight_max: int = 1 << 30,
    ) -> None:
        self.in_flight_max = in_flight_max
        self.rabbit = rabbit
        self.relay = relay
        self.process = process
        self.mandatory = mandatory
        self.link: FakeLink | None = None
        self.is_refused = False

    async def connect(self, listener: LinkListener, payload_type: PayloadType) -> FakeLink:
        rabbit = self.rabbit
        await asyncio.sleep(rabbit.draw(rabbit.options.latency))
        if not rabbit.is_up or self.is_refused or self.process.is_dead:
            raise BrokerUnavailable("connection refused")
        if not rabbit.has_exchange:
            raise ExchangeMissing(NO_EXCHANGE, reply_code=404)
        self.link = FakeLink(self, listener)
        rabbit.links.append(self.link)
        rabbit.history.note(self.relay, "connects")
        return self.link

    def vanish(self) -> None:
        """The process was killed: what lies in the socket may still arrive, nobody hears the answer."""
        if self.link is not None:
            self.link.vanish()


class FakeLink:
    def __init__(self, broker: FakeBroker, listener: LinkListener) -> None:
        self.relay = broker.relay
        self._rabbit = broker.rabbit
        self._process = broker.process
        self._mandatory = broker.mandatory
        self._in_flight_max = broker.in_flight_max
        self._listener = listener
        # The client's side.
        self._window = Window()
        self._probe_window = Window()
        self._messages: dict[str, Message] = {}
        """In flight, by id."""
        self._is_blocked = False
        self._is_closed = False
        self._wants_room = False
        self._probing = False
        self._exchanges: dict[str, bool] = {}
        """Whether there is a verdict on it; each row has one of its own, named after it."""
        # The server's side.
        self._pipe: collections.deque[Message] = collections.deque()
        self._arrived: collections.deque[Message] = collections.deque()
        self._stuck: list[Message] = []
        """Taken, for queues that do nothing."""
        self._decided: dict[str, Message] = {}
        """Not confirmed yet, by id, in the order of arrival."""
        self._is_cut = False
        self._is_deaf = False
        self._is_told_of_block = False
        self._heard_at = 0.0
        self._arrives_at = 0.0
        self._confirms_at = 0.0

    # -------------------------------------------------------- the port

    def publish(self, rows: Sequence[Row]) -> Publication:
        if self._is_blocked or self._is_closed or self._process.is_dead:
            return Publication(0, [])
        return self._write(rows, is_probe=False)

    def probe(self, row: Row) -> Publication:
        if self._is_blocked or self._is_closed or self._process.is_dead:
            return Publication(0, [])
        assert not self._probing, f"{self.relay} probes two rows at a time"
        if self._rabbit.random.random() < 0.2:
            # Its channel is being opened.
            self._hear(self._on_writable)
            return Publication(0, [])
        publication = self._write([row], is_probe=True)
        self._probing = publication.taken > len(publication.rejected)
        return publication

    def _write(self, rows: Sequence[Row], *, is_probe: bool) -> Publication:
        rabbit = self._rabbit
        rejected: list[Rejection] = []
        taken = 0
        unverified: str | None = None
        written: list[Message] = []
        for row in rows:
            if len(self._pipe) + len(written) >= rabbit.options.pipe_rows:
                self._wants_room = True
                break
            if not self._is_verified(row):
                unverified = row.id
                break
            taken += 1
            if row.event_type in UNSENDABLE:
                rejected.append(Rejection(row, row.event_type, "cannot be encoded"))
                rabbit.oracle.failed(row.id)
                continue
            assert row.is_loaded, f"{row!r} has no body"
            assert row.id not in self._messages, f"{row!r} is in flight on this link already"
            rabbit.oracle.one_of_a_key(self.relay, row, [each.row for each in self._messages.values()])
            publication = rabbit.oracle.published(self.relay, row, rabbit.loop.time())
            window = self._probe_window if is_probe else self._window
            window.add((row,))
            message = Message(window.last_tag, row, publication, is_probe)
            self._messages[row.id] = message
            written.append(message)
        if len(self._messages) > self._in_flight_max:
            rabbit.oracle.blame(f"I6: {self.relay} has {len(self._messages)} messages in flight")
        if written:
            rabbit.history.note(self.relay, "probes" if is_probe else "publishes", [each.row.id for each in written])
        if written and not self._is_cut:
            self._pipe += written
            self._arrives_at = max(rabbit.loop.time() + rabbit.draw(rabbit.options.latency), self._arrives_at + 1e-6)
            rabbit.loop.call_at(self._arrives_at, self._arrive, len(written), context=OUTSIDE)
        return Publication(taken, rejected, unverified)

    def _is_verified(self, row: Row) -> bool:
        rabbit = self._rabbit
        if not rabbit.options.unverified:
            return True
        if row.id not in self._exchanges:
            self._exchanges[row.id] = rabbit.random.random() >= rabbit.options.unverified
            if not self._exchanges[row.id]:
                rabbit.history.note(self.relay, "asks for", row.id)
                self._hear(partial(self._on_verified, row.id), rabbit.draw(rabbit.options.confirm))
        return self._exchanges[row.id]

    def is_in_flight(self, message_id: str) -> bool:
        return self._window.is_in_flight(message_id) or self._probe_window.is_in_flight(message_id)

    @property
    def in_flight(self) -> int:
        return len(self._window) + len(self._probe_window)

    def route_of(self, row: Row) -> tuple[str, str]:
        return "events", row.event_type

    @property
    def oldest(self) -> Row | None:
        return self._window.oldest

    @property
    def in_doubt(self) -> int:
        return len(self._window) + self._probing

    async def close(self) -> None:
        if self._is_closed:
            return
        self._close(Closed.CONNECTION, "closed by the relay")
        await asyncio.sleep(self._rabbit.draw(self._rabbit.options.latency))
        if not self._is_cut:
            self._end_server_side(arrives=True)

    # -------------------------------------------------------- the server's side

    def _arrive(self, count: int) -> None:
        """`count` more messages have reached the server (fewer after a cut: it took them already)."""
        for _ in range(min(count, len(self._pipe))):
            self._arrived.append(self._pipe.popleft())
        self.serve()

    def serve(self) -> None:
        """Take what has arrived, unless an alarm or silence stops that."""
        rabbit = self._rabbit
        if rabbit.is_mute:
            return
        self._tell_of_block()
        if rabbit.is_blocked:
            return
        self._arrived.extendleft(reversed([each for each in self._stuck if each.row.event_type not in rabbit.silent]))
        self._stuck = [each for each in self._stuck if each.row.event_type in rabbit.silent]
        while self._arrived:
            message = self._arrived.popleft()
            if not rabbit.has_exchange:
                self._shut(partial(self._close, Closed.EXCHANGE, NO_EXCHANGE))
                return
            if message.row.event_type in rabbit.silent:
                self._stuck.append(message)
                if message.is_probe:
                    self._hear(partial(self._on_passed, message))
                continue
            if message.row.event_type in ("refused", "refused_all"):
                self._refuse(message)
                continue
            self._decide(message)
            if message.is_probe:
                self._hear(partial(self._on_passed, message))
            if not self._is_deaf:
                self._decided[message.row.id] = message
        if self._decided and not self._is_deaf:
            self._confirms_at = max(rabbit.loop.time() + rabbit.draw(rabbit.options.confirm), self._confirms_at)
            rabbit.loop.call_at(self._confirms_at, self._confirm, context=OUTSIDE)
        if self._wants_room and len(self._pipe) <= rabbit.options.pipe_rows // 2 and not self._is_cut:
            self._wants_room = False
            self._hear(self._on_writable)

    def _tell_of_block(self) -> None:
        """`connection.blocked` goes to a connection that publishes, `unblocked` to those that had it."""
        is_blocked = self._rabbit.is_blocked and (self._is_told_of_block or bool(self._arrived))
        if is_blocked != self._is_told_of_block and not self._is_deaf:
            self._is_told_of_block = is_blocked
            self._hear(partial(self._on_block, is_blocked))

    def _shut(self, tell: Callable[[], None]) -> None:
        """The server closes: what has arrived behind the message at fault is not looked at."""
        self._arrived.clear()
        self._stuck.clear()
        self._pipe.clear()
        if not self._is_deaf:
            self._end_server_side(arrives=True)
            self._hear(tell)

    def _decide(self, message: Message) -> None:
        rabbit = self._rabbit
        row = message.row
        message.verdict = Outcome.ACKED
        if rabbit.scripted:
            message.verdict = rabbit.scripted.popleft()
        elif row.event_type in rabbit.unroutable or self._strays(row):
            message.verdict = Outcome.RETURNED if self._mandatory else Outcome.ACKED
        elif row.event_type in rabbit.full:
            message.verdict = Outcome.NACKED
            return
        elif rabbit.options.nacks and rabbit.random.random() < rabbit.options.nacks:
            message.verdict = Outcome.NACKED
        if message.verdict == Outcome.RETURNED:
            if not self._is_deaf:
                self._hear(partial(self._on_return, message))
        elif row.event_type in rabbit.unroutable and message.verdict == Outcome.ACKED:
            rabbit.oracle.taken_in(self.relay, row)
            rabbit.history.note("broker", "drops", f"{row.id} seq {row.seq} from {self.relay}, which has no route")
        elif message.verdict == Outcome.ACKED or rabbit.random.random() < rabbit.options.nacked_and_kept:
            rabbit.oracle.delivered(self.relay, row, rabbit.loop.time())
            rabbit.history.note("queue", "gets", f"{row.id} seq {row.seq} from {self.relay}")
        if message.verdict == Outcome.ACKED:
            rabbit.oracle.accepted(row.id)

    def _strays(self, row: Row) -> bool:
        returns = self._rabbit.options.returns
        return returns > 0 and row.event_type == "flaky" and self._rabbit.random.random() < returns

    def _refuse(self, message: Message) -> None:
        rabbit = self._rabbit
        rabbit.history.note("broker", "refuses", f"{message.row.id} seq {message.row.seq} of {self.relay}")
        if message.is_probe and message.row.event_type == "refused":
            self._decided = {id_: each for id_, each in self._decided.items() if not each.is_probe}
            if not self._is_deaf:
                rabbit.oracle.failed(message.row.id)
                self._hear(partial(self._on_refused, message))
            return
        self._shut(partial(self._close_over, message.row.event_type == "refused_all"))

    def _confirm(self) -> None:
        """Say what is decided: a share of it, as `multiple` up to a tag or one by one in any order."""
        rabbit = self._rabbit
        if self._is_cut or rabbit.is_mute or rabbit.is_hushed or not self._decided:
            return
        decided = list(self._decided.values())
        count = rabbit.random.randint(1, len(decided))
        if rabbit.random.random() < rabbit.options.multiple and not self._stuck:
            said = decided[:count]
            frames = _covering([each for each in said if not each.is_probe])
            frames += _covering([each for each in said if each.is_probe])
        else:
            said = rabbit.random.sample(decided, count)
            frames = [Frame(_confirm_of(each), each.is_probe, each.tag) for each in said]
        for message in said:
            del self._decided[message.row.id]
            if message.verdict == Outcome.RETURNED:
                rabbit.oracle.failed(message.row.id)
        self._hear(partial(self._take, frames))
        if self._decided:
            rabbit.loop.call_later(rabbit.draw(rabbit.options.confirm), self._confirm, context=OUTSIDE)

    def say(self, tag: int, *, verdict: str = Outcome.ACKED, multiple: bool = False) -> None:
        """A confirm that a script chose, right or wrong; `Rabbit.hush` keeps the others back."""
        self._hear(partial(self._take, [Frame(verdict, False, tag, multiple)]))

    def give_back(self, message_id: str) -> None:
        """`basic.return` of a script; its confirm is another matter."""
        self._hear(partial(self._on_return, self._messages[message_id]))

    def refuse(self, *, is_whole: bool) -> None:
        """A script has the broker close the channel, or the connection, over something that was published."""
        self._shut(partial(self._close_over, is_whole))

    def cut(self, noticed_s: float | None = None, closed: Closed = Closed.CONNECTION) -> None:
        """The connection breaks: a part of the pipe has arrived, the rest has not."""
        if self._is_cut:
            return
        self._end_server_side(arrives=False)
        rabbit = self._rabbit
        rabbit.history.note(self.relay, "link cut", f"{len(self._messages)} in flight")
        after = rabbit.draw(rabbit.options.cut_noticed) if noticed_s is None else noticed_s
        self._hear(lambda: self._close(closed, "connection reset"), after)

    def vanish(self) -> None:
        if not self._is_cut:
            self._end_server_side(arrives=False)

    def _end_server_side(self, *, arrives: bool) -> None:
        rabbit = self._rabbit
        self._is_cut = self._is_deaf = True
        if self in rabbit.links:
            rabbit.links.remove(self)
        left = len(self._pipe) if arrives else rabbit.random.randint(0, len(self._pipe))
        late = rabbit.draw(rabbit.options.latency) if rabbit.random.random() < 0.5 else 0.0
        while len(self._pipe) > left:
            self._pipe.pop()
        self._decided.clear()
        rabbit.loop.call_later(late, self._arrive, left, context=OUTSIDE)

    # -------------------------------------------------------- the client's side

    def _hear(self, what: Callable[[], None], after_s: float = 0.0) -> None:
        """Something reaches the client, in the order in which it was said."""
        rabbit = self._rabbit
        latency = rabbit.draw(rabbit.options.latency)
        self._heard_at = max(rabbit.loop.time() + latency + after_s, self._heard_at + 1e-6)
        rabbit.loop.call_at(self._heard_at, what, context=self._process.context)

    def _on_return(self, message: Message) -> None:
        if not self._is_closed:
            window = self._probe_window if message.is_probe else self._window
            window.mark_returned(message.row.id, "312 NO_ROUTE", "events", message.row.event_type)

    def _take(self, frames: list[Frame]) -> None:
        """What the windows make of the frames; the state is whole before anybody is told."""
        if self._is_closed:
            return
        told: list[tuple[str, list[Row], list[Returned]]] = []
        violation = ""
        for frame in frames:
            window = self._probe_window if frame.is_probe else self._window
            settle = window.ack if frame.verdict == Outcome.ACKED else window.nack
            try:
                rows, returned = settle(frame.tag, frame.multiple)
            except ProtocolViolation as error:
                violation = error.message
                break
            self._end_messages(rows, frame.verdict)
            self._end_messages([each.row for each in returned], Outcome.RETURNED)
            if rows:
                _gather(told, frame.verdict, rows, [])
            if returned:
                _gather(told, Outcome.RETURNED, [], returned)
        for verdict, rows, returned in told:
            ids = [row.id for row in rows] or [each.row.id for each in returned]
            self._rabbit.history.note(self.relay, f"hears {verdict}", ids)
            if verdict == Outcome.ACKED:
                self._listener.on_acked(rows)
            elif verdict == Outcome.NACKED:
                self._listener.on_nacked(rows)
            else:
                self._listener.on_returned(returned)
        if violation:
            self._end_server_side(arrives=True)
            self._close(Closed.CONNECTION, violation)
        self._on_writable()

    def _end_messages(self, rows: Sequence[Row], outcome: str) -> None:
        for row in rows:
            self._messages.pop(row.id).publication.outcome = outcome

    def _on_block(self, on: bool) -> None:
        if self._is_closed or self._is_blocked == on:
            return
        self._is_blocked = on
        if on:
            self._listener.on_blocked("low on memory")
        else:
            self._listener.on_unblocked()
            self._listener.on_writable()

    def _on_verified(self, exchange: str) -> None:
        self._exchanges[exchange] = True
        if not self._is_closed:
            self._listener.on_verified(exchange)
            self._on_writable()

    def _on_writable(self) -> None:
        if not self._is_closed:
            self._listener.on_writable()

    def _on_passed(self, message: Message) -> None:
        if not self._is_closed:
            self._probing = False
            self._listener.on_passed(message.row)

    def _on_refused(self, message: Message) -> None:
        """The probes' channel is gone; so are the confirms of those that it had taken in."""
        if self._is_closed:
            return
        self._probing = False
        probes = self._probe_window.drain()
        self._probe_window = Window()
        self._end_messages(probes, Outcome.LOST)
        lost = [row for row in probes if row is not message.row]
        self._listener.on_refused(_refusal(message.row), lost)

    def _close_over(self, is_whole: bool) -> None:
        """The link is gone over one of those in flight: a probe that was taken in is not suspected."""
        if self._is_closed:
            return
        suspects = list(self._window.rows())
        if is_whole and self._probing:
            suspects += self._probe_window.rows()[-1:]
        self._end_messages(suspects, Outcome.LOST)
        if len(suspects) == 1:
            self._rabbit.oracle.failed(suspects[0].id)
            self._listener.on_refused(_refusal(suspects[0]), ())
        elif suspects:
            self._listener.on_suspected(suspects, REFUSAL, alone=is_whole)
        self._close(Closed.REFUSED, REFUSAL)

    def _close(self, closed: Closed, error: str) -> None:
        """`lost`: all that nobody was told about before."""
        if self._is_closed:
            return
        self._is_closed = True
        lost = [row for row in (*self._window.drain(), *self._probe_window.drain()) if row.id in self._messages]
        self._end_messages(lost, Outcome.LOST)
        self._rabbit.history.note(self.relay, "link closed", f"lost {[row.id for row in lost]}")
        self._listener.on_closed(lost, closed, error)


def _refusal(row: Row) -> Rejection:
    return Rejection(row, "refused", REFUSAL, "events", row.event_type)


def _confirm_of(message: Message) -> str:
    """A returned message is acked behind its return."""
    return Outcome.NACKED if message.verdict == Outcome.NACKED else Outcome.ACKED


def _covering(said: list[Message]) -> list[Frame]:
    """As few frames as can say it, of one channel: a nack that came first stays a nack under the ack that covers it."""
    if not said:
        return []
    is_probe = said[0].is_probe
    kinds = {_confirm_of(each) for each in said}
    if len(kinds) == 1:
        return [Frame(kinds.pop(), is_probe, said[-1].tag, multiple=True)]
    acked = [each.tag for each in said if _confirm_of(each) == Outcome.ACKED]
    frames = [Frame(Outcome.NACKED, is_probe, each.tag) for each in said if _confirm_of(each) == Outcome.NACKED]
    return [*frames, Frame(Outcome.ACKED, is_probe, acked[-1], multiple=True)]


def _gather(
    told: list[tuple[str, list[Row], list[Returned]]], verdict: str, rows: list[Row], returned: list[Returned]
) -> None:
    if not told or told[-1][0] != verdict:
        told.append((verdict, [], []))
    told[-1][1].extend(rows)
    told[-1][2].extend(returned)
