"""Publishes what is ready and takes the broker's word on it (P1-P3 of `docs/protocol.md`).

Owns the link: connecting, the window, nacks' backoff, what a return or a rejection means. Nothing here waits for a
single message; a turn takes what may go, hands it to the link, and comes back when something changed.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

from relay.core.failures import Failure, may_hold
from relay.core.ladder import jittered, nack_backoff, reconnect_backoff
from relay.core.mute import Mute, Route, Verdict
from relay.core.pace import Pace
from relay.core.ports.broker import Broker, Closed, Link, Publication, Rejection, Returned
from relay.core.ports.outbox import Setback
from relay.core.rate import TokenBucket
from relay.core.wariness import own_exchange
from relay.engine import Engine, Signal
from relay.errors import BrokerError, BrokerRefused, ExchangeMissing
from relay.message import Aside, Row, State, due_since
from relay.quarantine import Quarantine
from relay.stall import Stall

TURN_ROWS = 256
"""Rows a turn of the loop: encoding them takes a few milliseconds at most."""

TURN_BYTES = 4 * 1024 * 1024
NACKS_MAX = 8
"""Nacked so many times in a row (some ten seconds), a row makes room for others (P2)."""

NACKS_CROWDED = 3
"""Less than a second; where nacked rows, and what waits behind them, leave others no room in memory."""


NACK_DEFERRAL_S = 30.0
RATE_WAIT_S_MIN = 0.002
"""Tokens are waited for by the handful: a turn for each would cost more than its message."""

STALL_REBUILD_FACTOR = 10
NACKED_REBUILD_S = 10.0
"""Nothing but nacks for so long, and the link is built anew. RabbitMQ 3.10: a channel that first came to a quorum queue
while that had no leader is nacked as long as the dead node is away, though a new leader takes what other channels send."""

NACKED_REBUILD_S_MAX = 300.0
"""The wait doubles up to this: a queue that is full for hours costs a connect each five minutes. It is the shortest again when
there was none for twice as long."""

STILLBORN_MAX = 3
STILLBORN_S = 10.0
"""After so many links that ended within so long of their opening, without an answer, opening one says nothing any more (L6)."""

LOSSES_MAX = 3
"""A row that was lost with so many links, with no answer in between, may be what ends them."""


class Publisher:
    """The link's listener and the loop that feeds it."""

    def __init__(self, engine: Engine, broker: Broker) -> None:
        self._engine = engine
        self._broker = broker
        self._quarantine = Quarantine(engine)
        self._pace = Pace(engine.settings.in_flight_max)
        self._unobserved: list[tuple[list[Row], float]] = []
        """Confirmed rows, and when, that the metrics do not have yet."""
        self._is_exchange_refused = False
        """The last link was closed over the configured exchange, and no confirm came since."""
        self._has_been_connected = False
        self._closed = Signal()
        self._connected_at = math.inf
        self._last_progress_at = 0.0
        self._nacked_since: float | None = None
        """Since when this link has had nothing but nacks."""
        self._nacked_rebuild_s = NACKED_REBUILD_S
        self._nacked_rebuilt_at = -math.inf
        self._has_answered = False
        """This link has had an outcome of a message."""
        self._losses: dict[int, int] = {}
        """By seq, with how many links in a row each row was lost that the last one lost."""
        self._is_overdue = False
        """A row has had no answer for long while others have theirs, and the log has it."""
        self._is_rebuilding = False
        """This link is being closed by ourselves."""
        self._rebuild_after_s = STALL_REBUILD_FACTOR * engine.settings.confirm_timeout_s
        self._stall = Stall(engine)
        self._mute = Mute(engine.settings.confirm_timeout_s)
        rate = engine.settings.rate_max
        self._bucket = None if rate is None else TokenBucket(rate, engine.clock.now())

    # ------------------------------------------------------------ connecting

    async def run_link(self) -> None:
        """Keep a link: connect, wait until it closes, back off, again; for ever."""
        engine = self._engine
        failures = stillborn = 0
        while True:
            info = engine.info
            if info is None:
                # The payload's type is the table's; without a database there is nothing to publish either.
                await engine.clock.sleep(0.05)
                continue
            try:
                link = await self._broker.connect(self, info.payload_type)
            except BrokerError as error:
                failures += 1
                self._note_down(error, failures)
                await engine.clock.sleep(reconnect_backoff(failures, engine.random.random()))
                continue
            engine.metrics.reconnects["broker"] += self._has_been_connected
            self._has_been_connected = True
            self._note_up(is_trusted=stillborn < STILLBORN_MAX)
            self._last_progress_at = engine.clock.now()
            self._has_answered = self._is_rebuilding = False
            engine.link = link
            self._nacked_since = None
            engine.chains.offer_again()
            # Nobody answers any more what the last link asked.
            engine.chains.on_verified()
            self._quarantine.on_verified()
            engine.to_publish.set()
            engine.to_renew.set()
            self._connected_at = engine.clock.now()
            acked_before = engine.metrics.published["acked"]
            await self._closed.wait(None)
            # A link that lived for a while is no storm; one that closes at once is.
            has_lived = engine.clock.now() - self._connected_at > STILLBORN_S
            has_worked = has_lived or engine.metrics.published["acked"] > acked_before
            failures = 1 if has_worked else failures + 1
            stillborn = 0 if has_lived or self._has_answered else stillborn + 1
            await engine.clock.sleep(reconnect_backoff(failures, engine.random.random()))

    def _note_up(self, *, is_trusted: bool) -> None:
        engine = self._engine
        if is_trusted:
            engine.broker_lost_at = None
        engine.metrics.connected["broker"] = True
        engine.metrics.backpressure.set("broker_down", False, engine.clock.now())
        engine.readiness.remove("broker")
        if not self._is_exchange_refused:
            engine.readiness.remove("exchange")
            engine.log.info("broker_connected")

    def _note_down(self, error: BrokerError, failures: int) -> None:
        engine = self._engine
        if engine.broker_lost_at is None:
            engine.broker_lost_at = engine.clock.now()
        self._stall.end()
        engine.metrics.connected["broker"] = False
        engine.metrics.backpressure.set("broker_down", True, engine.clock.now())
        reason = "exchange" if isinstance(error, ExchangeMissing) else "broker"
        is_news = (reason, error.message) not in engine.readiness.reasons
        engine.readiness.remove("exchange" if reason == "broker" else "broker")
        engine.readiness.add(reason, error.message)
        if is_news:
            engine.log.warning(
                "broker_refused" if isinstance(error, BrokerRefused) else "broker_unavailable",
                error=error.message,
                hint=error.hint,
                tries=failures,
            )

    # ------------------------------------------------------------ publishing

    async def run(self) -> None:
        """The publishing loop; for ever."""
        engine = self._engine
        while True:
            wait_s = self._turn()
            self._observe()
            if wait_s is not None and wait_s <= 0:
                await asyncio.sleep(0)
                continue
            await engine.to_publish.wait(wait_s)

    def _turn(self) -> float | None:
        """Publish what may go now; returns when to look again without a signal (0: at once)."""
        engine = self._engine
        chains = engine.chains
        link = engine.link
        now = engine.clock.now()
        chains.wake_backoff(now)
        pressure = engine.metrics.backpressure
        if link is None or engine.is_blocked or engine.is_paused or engine.is_stopping:
            # Something else holds it back.
            pressure.set("in_flight", False, now)
            pressure.set("rate", False, now)
            return self._until_backoff(now)
        # Confirmed and not yet settled counts too: a kill repeats what is published and not settled (I4).
        unsettled = len(engine.decisions.sent) + engine.settling
        window = self._pace.window - link.in_flight - unsettled
        room = min(window, TURN_ROWS, self._allowance(now))
        pressure.set("in_flight", window <= 0 and chains.ready > 0, now)
        if room > 0 and self._probe(link, now):
            room -= 1
        if room <= 0 or not chains.ready or self._quarantine.is_alone(now):
            wait_s = self._until_backoff(now)
            if window > 0 and (chains.ready or self._quarantine) and self._bucket is not None:
                return max(RATE_WAIT_S_MIN, self._bucket.wait_s)
            return wait_s
        awaited = len(chains.wanted)
        batch = chains.take(room, TURN_BYTES, engine.leases.writable(now))
        if len(chains.wanted) > awaited:
            engine.to_read.set()
        if chains.has_orphans:
            apart = [row for row in batch if link.is_in_flight(row.id)]
            if apart:
                chains.set_apart(apart)
                batch = [row for row in batch if row.state is State.IN_FLIGHT]
        batch = self._quarantine.without_suspects(batch, now)
        if self._mute:
            batch = self._without_mute(link, batch, now)
            if not batch and chains.ready:
                # Others stand behind those that make room.
                return 0.0
        if not batch:
            return self._until_backoff(now)
        self._stall.on_due(now)
        if link.in_flight == 0:
            self._last_progress_at = now
        for row in batch:
            row.published_at = now
        if not self._publish(link, batch):
            return self._until_backoff(now)
        return 0.0 if chains.ready else self._until_backoff(now)

    def _probe(self, link: Link, now: float) -> bool:
        """Try the next suspect, if there is one; whether it is in flight."""
        while (row := self._quarantine.next(link, now)) is not None:
            if link.in_flight == 0:
                self._last_progress_at = now
            publication = link.probe(row)
            self._quarantine.take(row, publication)
            self._spend(publication.taken)
            for rejection in publication.rejected:
                self._fail(rejection)
            if publication.unverified is None:
                return publication.taken > len(publication.rejected)
        return False

    def _publish(self, link: Link, batch: Sequence[Row]) -> bool:
        """Whether the link has room for more. A row whose exchange it has to ask for is put off, and the others go."""
        while batch:
            publication = link.publish(batch)
            self._take_publication(batch, publication)
            rest = batch[publication.taken :]
            if not rest:
                break
            if publication.unverified is None:
                self._engine.chains.untake(rest)
                return False
            batch = self._engine.chains.put_off(rest, publication.unverified)
        return True

    def _without_mute(self, link: Link, batch: Sequence[Row], now: float) -> list[Row]:
        """Rows of a route at which nothing is answered make room for others (P2): all but one at a time."""
        engine = self._engine
        going: list[Row] = []
        rest = batch
        while rest:
            row = rest[0]
            route = link.route_of(row)
            match self._mute.judge(route, now):
                case Verdict.GO:
                    going.append(row)
                    rest = rest[1:]
                case Verdict.WAIT:
                    rest = engine.chains.put_off(rest, _waiting(route))
                case Verdict.ASIDE:
                    error = "the broker answers no message of this route"
                    self._defer(row, "unanswered", error, route, NACK_DEFERRAL_S + self._mute.aside_s)
                    rest = rest[1:]
        return going

    def _defer(
        self, row: Row, reason: str, error: str, route: Route = ("", ""), delay_s: float = NACK_DEFERRAL_S
    ) -> None:
        """So that rows for other queues flow; no attempt is used up (P2)."""
        engine = self._engine
        delay_s = jittered(delay_s, engine.random.random())
        holds = may_hold(row, engine.settings)
        engine.set_back(Setback(row, Aside.DEFERRED, holds, delay_s, row.attempts, reason, error, *route))

    def _take_publication(self, batch: Sequence[Row], publication: Publication) -> None:
        self._spend(publication.taken)
        for rejection in publication.rejected:
            self._fail(rejection)

    def _until_backoff(self, now: float) -> float | None:
        due = self._engine.chains.backoff.next_due
        return None if due is None else max(0.001, due - now)

    def _allowance(self, now: float) -> int:
        """`RELAY_MAX_RATE`: messages that may go now."""
        if self._bucket is None:
            return TURN_ROWS
        allowed = self._bucket.allowance(now)
        self._engine.metrics.backpressure.set("rate", allowed == 0 and self._engine.chains.ready > 0, now)
        return allowed

    def _spend(self, messages: int) -> None:
        if self._bucket is not None:
            self._bucket.take(messages)

    # ------------------------------------------------------------ outcomes (the link's listener)

    def on_acked(self, rows: Sequence[Row]) -> None:
        engine = self._engine
        confirmed = engine.chains.on_confirmed(rows)
        self._note_outcome("acked", rows)
        if len(confirmed) < len(rows):
            engine.chains.offer_again()
        # Not now: what waits for these confirms is published first, in `on_writable`. `run` comes to it when their settlement wakes
        # it, for many at once, or `watch` within a second.
        self._unobserved.append((confirmed, self._last_progress_at))
        unsettled = len(engine.decisions.sent)
        engine.decisions.sent.extend(confirmed)
        if not unsettled or unsettled + len(confirmed) >= engine.batch_rows:
            engine.to_settle.set()

    def on_nacked(self, rows: Sequence[Row]) -> None:
        engine = self._engine
        self._note_outcome("nacked", rows, "basic.nack")
        now = engine.clock.now()
        for row in rows:
            if row.state is not State.IN_FLIGHT:
                engine.chains.offer_again()
                continue
            row.nacks += 1
            if engine.is_stopping:
                engine.chains.forget(row)
            elif row.nacks >= NACKS_MAX or self._is_crowded(row):
                self._defer(row, "nacked", "the broker refused to take responsibility (basic.nack)")
            else:
                engine.chains.on_nacked(row, now + nack_backoff(row.nacks, engine.random.random()))
        engine.to_publish.set()
        engine.changed.set()

    def _is_crowded(self, row: Row) -> bool:
        """Whether nacked rows, or soon what waits behind them, are a good part of what memory may hold, in all or of this
        one's shard: what others could send has no room then. A queue that is full for a moment is no reason to set thousands
        aside."""
        chains, read_ahead_max = self._engine.chains, self._engine.settings.read_ahead_max
        if len(chains.backoff) >= read_ahead_max // 4:
            return True
        if row.nacks < NACKS_CROWDED:
            return False
        here, backoff = chains.kept_back_by(row), chains.backoff
        in_all, of_shard = here + backoff.kept_back_in_all(), here + backoff.kept_back(row.shard)
        return in_all >= read_ahead_max // 4 or of_shard >= read_ahead_max // 8

    def on_returned(self, returned: Sequence[Returned]) -> None:
        engine = self._engine
        self._note_outcome("returned", [back.row for back in returned], "no route")
        for back in returned:
            if back.row.state is not State.IN_FLIGHT:
                engine.chains.offer_again()
                continue
            self._fail(Rejection(back.row, Failure.UNROUTABLE, back.error, back.exchange, back.routing_key))
        # The window has room, and an orphan may have kept its row back.
        engine.to_publish.set()

    def on_blocked(self, reason: str) -> None:
        engine = self._engine
        engine.is_blocked = True
        engine.metrics.backpressure.set("blocked", True, engine.clock.now())
        engine.readiness.add("blocked", reason)
        engine.log.warning("broker_blocked", reason=reason)

    def on_unblocked(self) -> None:
        engine = self._engine
        self._end_block()
        self._last_progress_at = engine.clock.now()
        engine.log.info("broker_unblocked")
        engine.to_publish.set()

    def on_writable(self) -> None:
        # At once, not when the loop comes round to `run`: a key's next message waits for nothing but this.
        if self._turn() is not None:
            self._engine.to_publish.set()

    def on_verified(self, exchange: str) -> None:
        self._engine.chains.on_verified(exchange)
        self._quarantine.on_verified(exchange)

    def _observe(self) -> None:
        """How long confirmed rows took, for the window and the metrics."""
        engine = self._engine
        metrics, database_time = engine.metrics, engine.database_time
        for confirmed, now in self._unobserved:
            waits = [now - row.published_at for row in confirmed]
            self._pace.on_confirmed(sum(waits), len(waits), now)
            metrics.confirm_seconds.observe_many(waits)
            if database_time.is_known:
                time = database_time.now() - (engine.clock.now() - now)
                metrics.last_confirm_timestamp_seconds = time
                waits = [time - (row.created_at if row.rare is None else due_since(row)) for row in confirmed]
                if math.isnan(sum(waits)):
                    # Rows without any time of their own (`Row.created_at`).
                    waits = [each for each in waits if not math.isnan(each)]
                metrics.delivery_seconds.observe_many(waits)
        self._unobserved.clear()

    def on_suspected(self, rows: Sequence[Row], error: str, *, alone: bool) -> None:
        self._note_outcome("lost", rows, error)
        self._quarantine.suspect(rows, error, alone=alone)

    def on_passed(self, row: Row) -> None:
        self._note_accepted([row])
        self._last_progress_at = self._engine.clock.now()
        self._stall.on_answered(self._last_progress_at)
        self._quarantine.take_in(row, self._last_progress_at)

    def on_refused(self, refusal: Rejection, lost: Sequence[Row]) -> None:
        engine = self._engine
        self._note_outcome("lost", [refusal.row, *lost], refusal.error)
        self._quarantine.refuse(refusal, engine.clock.now())
        if engine.is_stopping:
            engine.chains.finish([row for row in lost if row.state is State.IN_FLIGHT])
        else:
            engine.chains.on_lost(lost)
        if refusal.row.state is State.IN_FLIGHT:
            self._fail(refusal)
        # An orphan may have kept its row back.
        engine.chains.offer_again()
        engine.to_publish.set()
        engine.changed.set()

    def on_closed(self, lost: Sequence[Row], closed: Closed, error: str) -> None:
        engine = self._engine
        self._observe()
        self._note_outcome("lost", lost, error)
        link, engine.link = engine.link, None
        engine.chains.has_orphans = False
        self._end_block()
        if engine.is_stopping:
            engine.chains.finish([row for row in lost if row.state is State.IN_FLIGHT])
        else:
            self._take_back(lost, error, link)
        # A link opens and is closed over the exchange again and again: said once, until it takes a message (I8).
        is_news = closed is not Closed.EXCHANGE or not self._is_exchange_refused
        if closed is Closed.EXCHANGE:
            self._is_exchange_refused = True
            engine.readiness.add("exchange", error)
        elif closed is Closed.REFUSED:
            self._quarantine.beware(engine.clock.now())
        if engine.broker_lost_at is None:
            engine.broker_lost_at = engine.clock.now()
        engine.metrics.connected["broker"] = False
        if not engine.is_stopping:
            engine.metrics.backpressure.set("broker_down", True, engine.clock.now())
            # The text of a refusal may name a row's route, which is nobody's business who asks /readyz.
            detail = "closed over a message that it refuses" if closed is Closed.REFUSED else error
            engine.readiness.add("broker", detail)
            if is_news:
                engine.log.warning("broker_lost", closed=closed.value, error=error, unconfirmed=len(lost))
        engine.changed.set()
        self._closed.set()

    def _take_back(self, lost: Sequence[Row], error: str, link: Link | None) -> None:
        """They go again. Those that were lost time and again are tried by themselves: one of them may be what ends the links,
        though the broker, or who cuts in between, does not say so. One that was alone when it was lost once more goes the ladder."""
        chains, quarantine = self._engine.chains, self._quarantine
        if self._is_rebuilding:
            # By ourselves, so no row did it.
            if link is not None:
                self._mute.add({link.route_of(row) for row in lost})
            chains.on_lost(quarantine.lose(lost))
            return
        self._losses = {row.seq: self._losses.get(row.seq, 0) + 1 for row in lost}
        culprit = quarantine.lose_alone([row for row in lost if self._losses[row.seq] >= LOSSES_MAX])
        if culprit is not None:
            del self._losses[culprit.seq]
            what = f"lost with {LOSSES_MAX} links and more, at last with nothing else in flight: {error}"
            self._fail(Rejection(culprit, Failure.UNKNOWN, what))
        rest = quarantine.lose([row for row in lost if row is not culprit])
        # The oldest is tried first, for who is suspected goes from the last on: nothing was refused, and `pipelined` keeps its order.
        again = [row for row in reversed(rest) if self._losses[row.seq] >= LOSSES_MAX]
        quarantine.suspect(again, error, alone=True)
        # Those that are kept apart are in flight no more.
        chains.on_lost(rest)

    def _end_block(self) -> None:
        engine = self._engine
        engine.is_blocked = False
        engine.metrics.backpressure.set("blocked", False, engine.clock.now())
        engine.readiness.remove("blocked")

    def _note_outcome(self, outcome: str, rows: Sequence[Row], error: str = "") -> None:
        engine = self._engine
        engine.metrics.published[outcome] += len(rows)
        now = self._last_progress_at = engine.clock.now()
        if outcome != "lost":
            self._note_accepted(rows)
        if outcome == "acked":
            self._nacked_since = None
        elif outcome == "nacked" and self._nacked_since is None:
            self._nacked_since = now
        match outcome:
            case "nacked":
                self._stall.on_nacked(now)
            case "lost" if rows:
                self._stall.on_lost(now)
            case "acked" | "returned":
                self._stall.on_answered(now)
        if engine.spans is not None:
            engine.spans.end(outcome, rows, now, error)
        if outcome != "lost":
            self._rebuild_after_s = STALL_REBUILD_FACTOR * engine.settings.confirm_timeout_s

    def _note_accepted(self, rows: Sequence[Row]) -> None:
        """The broker has looked at these and closed nothing over them: it takes what it is sent, whatever becomes of it."""
        engine = self._engine
        if not self._has_answered:
            self._has_answered = True
            engine.broker_lost_at = None
        if self._mute and engine.link is not None:
            for route in self._mute.on_answered(map(engine.link.route_of, rows)):
                engine.chains.on_verified(_waiting(route))
                engine.to_publish.set()
        if self._is_exchange_refused and any(own_exchange(row) is None for row in rows):
            self._is_exchange_refused = False
            engine.readiness.remove("exchange")
            engine.log.info("exchange_accepted")

    # ------------------------------------------------------------ failures

    def _fail(self, failed: Rejection) -> None:
        self._stall.on_answered(self._engine.clock.now())
        self._engine.fail(failed)

    # ------------------------------------------------------------ a mute broker

    def watch(self) -> None:
        """Once a second: the link of a broker that owes confirms for very long is built anew. So is one on which everything
        is nacked, at a moment when nothing is in flight: no copies (I4)."""
        engine = self._engine
        link = engine.link
        now = engine.clock.now()
        self._observe()
        self._stall.look(link, now)
        self._look_for_overdue(link, now)
        for route in self._mute:
            # To be judged anew.
            engine.chains.on_verified(_waiting(route))
            engine.to_publish.set()
        if link is not None and now - self._connected_at > STILLBORN_S:
            engine.broker_lost_at = None
        if now - self._nacked_rebuilt_at > 2 * NACKED_REBUILD_S_MAX:
            self._nacked_rebuild_s = NACKED_REBUILD_S
        nacked_s = 0.0 if self._nacked_since is None else now - self._nacked_since
        if link is not None and link.in_flight == 0 and nacked_s >= self._nacked_rebuild_s:
            self._rebuild(link, nacked_s, "nacked")
            self._nacked_since, self._nacked_rebuild_s = None, min(2 * self._nacked_rebuild_s, NACKED_REBUILD_S_MAX)
            self._nacked_rebuilt_at = now
            return
        if link is None or link.in_flight == 0 or engine.is_blocked:
            self._last_progress_at = now
            return
        silent_s = now - self._last_progress_at
        if silent_s >= self._rebuild_after_s:
            doubled = self._rebuild_after_s * 2
            self._rebuild(link, silent_s, "silent")
            self._last_progress_at = now
            self._rebuild_after_s = doubled

    def _look_for_overdue(self, link: Link | None, now: float) -> None:
        """Others have their answers, and one row has none: its queue is mute. Where nothing is answered, `Stall` says so."""
        row = None if link is None else link.oldest
        waited_s = 0.0 if row is None else now - row.published_at
        if row is None or waited_s < self._engine.settings.confirm_timeout_s:
            self._is_overdue = False
        elif not self._is_overdue and not self._engine.is_blocked and not self._stall.is_told:
            self._is_overdue = True
            self._engine.log.warning("confirm_overdue", seq=row.seq, id=row.id, seconds=round(waited_s))

    def _rebuild(self, link: Link, seconds: float, because: str) -> None:
        self._is_rebuilding = True
        self._engine.log.error("link_rebuilt", seconds=round(seconds), because=because)
        self._engine.start(link.close())


def _waiting(route: Route) -> str:
    """What rows wait for whose route is mute, among the exchanges that are being asked for: no name has a zero byte."""
    return "\0".join(route)
