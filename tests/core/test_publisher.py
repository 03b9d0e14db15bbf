"""The engine's publisher, without a simulation: one call, one look at what became of it."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Sequence

import pytest

from relay.core.ports.broker import Closed, Link, LinkListener, Rejection
from relay.core.settings import EngineSettings
from relay.core.wariness import WARY_S
from relay.errors import BrokerUnavailable
from relay.message import Aside, PayloadType, Row
from relay.publisher import NACKS_MAX
from tests.core.parts import Parts, TestedLink, eventually, make_row, turns

NOW = 1_764_440_000.0

# ---------------------------------------------------------------- the publisher


async def test_an_orphans_return_lets_its_row_go_at_once() -> None:
    """The row was kept back behind its orphan (P1); the orphan's last word must wake the publisher."""
    parts = Parts()
    old = make_row(1)
    parts.engine.admit([old])
    parts.turn()
    parts.engine.chains.forget(old)
    again = make_row(1)
    parts.engine.admit([again])
    async with parts.running(parts.publisher.run()):
        await turns()
        assert parts.link.sent == [old]
        parts.link.give_back(old)
        await eventually(lambda: parts.link.sent == [old, again])


async def test_what_the_link_does_not_take_goes_first_when_it_has_room() -> None:
    parts = Parts()
    rows = [make_row(seq, f"k{seq}") for seq in range(1, 6)]
    parts.engine.admit(rows)
    parts.link.takes_max = 2
    parts.turn()
    parts.link.takes_max = 10
    parts.publisher.on_writable()
    parts.turn()
    assert parts.link.sent == rows


async def test_a_keys_next_message_goes_out_within_the_confirm_of_the_one_before() -> None:
    """A hot key has one message in flight: each turn of the loop in between is idle time of the broker."""
    parts = Parts()
    rows = [make_row(1), make_row(2)]
    parts.engine.admit(rows)
    parts.turn()
    assert parts.link.sent == rows[:1]
    parts.link.ack(rows[0])
    assert parts.link.sent == rows


async def test_nacks_use_no_attempt_and_make_room_in_the_end() -> None:
    """P2: again after a backoff, in memory; nacked time and again the row goes aside, attempts unchanged."""
    parts = Parts()
    row, follower = make_row(1, attempts=1), make_row(2)
    parts.engine.admit([row, follower])
    for _ in range(NACKS_MAX):
        parts.pass_time(60.0)
        parts.turn()
        parts.link.nack(row)
    decisions = parts.engine.decisions
    assert [(each.row, each.aside, each.attempts) for each in decisions.setbacks] == [(row, Aside.DEFERRED, 1)]
    assert decisions.followers == [follower]
    assert parts.link.ids == ["m1"] * NACKS_MAX


async def test_rows_that_were_nacked_together_do_not_come_back_together() -> None:
    """A full queue nacks by the hundred; all of them were due again in the same moment, half a minute later."""
    parts = Parts()
    rows = [make_row(seq, f"k{seq}") for seq in range(1, 21)]
    parts.engine.admit(rows)
    for _ in range(NACKS_MAX):
        parts.pass_time(60.0)
        parts.turn()
        parts.link.nack(*rows)
    delays_s = [each.delay_s for each in parts.engine.decisions.setbacks]
    assert len(set(delays_s)) == len(rows)
    assert all(24.0 <= delay_s <= 36.0 for delay_s in delays_s)


async def test_the_age_of_a_scheduled_row_counts_from_its_time() -> None:
    """One that was scheduled for longer than RELAY_MAX_AGE was parked at its first return, without one retry."""
    parts = Parts(EngineSettings(age_max_s=60.0))
    rare = {"available_at": NOW - 5.0}
    rows = [make_row(1, "a"), make_row(2, "b", rare=rare)]
    for row in rows:
        row.created_at = NOW - 3600.0
    parts.engine.database_time.observe(NOW, parts.clock.now())
    parts.engine.admit(rows)
    parts.turn()
    parts.link.give_back(*rows)
    setbacks = parts.engine.decisions.setbacks
    assert [(each.aside, each.reason) for each in setbacks] == [
        (Aside.PARKED, "max_age"),
        (Aside.DEFERRED, "unroutable"),
    ]


async def test_a_row_without_any_time_spoils_no_sum() -> None:
    parts = Parts()
    rows = [make_row(1, "a"), make_row(2, "b")]
    rows[0].created_at, rows[1].created_at = math.nan, NOW - 2.0
    parts.engine.database_time.observe(NOW, parts.clock.now())
    parts.engine.admit(rows)
    parts.turn()
    parts.link.ack(*rows)
    parts.publisher.watch()
    delivery = parts.engine.metrics.delivery_seconds
    assert (sum(delivery.counts), round(delivery.sum, 3)) == (1, 2.0)


async def test_a_returned_row_climbs_the_ladder_and_parks_at_its_end() -> None:
    parts = Parts(EngineSettings(retry_delays_s=(1.0,)))
    first, last = make_row(1, "a", attempts=0), make_row(2, "b", attempts=1)
    parts.engine.admit([first, last])
    parts.turn()
    parts.link.give_back(first, last)
    setbacks = parts.engine.decisions.setbacks
    assert [(each.aside, each.attempts, each.reason) for each in setbacks] == [
        (Aside.DEFERRED, 1, "unroutable"),
        (Aside.PARKED, 2, "unroutable"),
    ]
    assert 0.8 <= setbacks[0].delay_s <= 1.2
    assert all(each.holds for each in setbacks)


async def test_a_row_that_cannot_be_encoded_parks_at_once_and_harms_nobody() -> None:
    parts = Parts()
    bad, good = make_row(1, "a"), make_row(2, "b")
    parts.link.rejects = {"m1": "invalid"}
    parts.engine.admit([bad, good])
    parts.turn()
    assert parts.link.sent == [good]
    assert [(each.row, each.aside) for each in parts.engine.decisions.setbacks] == [(bad, Aside.PARKED)]


async def test_an_expired_row_holds_nobody() -> None:
    """docs/schema.md: its followers go on, once its park is committed (H7)."""
    parts = Parts()
    late, follower = make_row(1), make_row(2)
    parts.link.rejects = {"m1": "expired"}
    parts.engine.admit([late, follower])
    parts.turn()
    parts.turn()
    assert parts.link.sent == []
    parts.engine.chains.finish([late])
    parts.turn()
    assert parts.link.sent == [follower]


async def test_blocked_publishes_nothing_and_settles_late_confirms() -> None:
    parts = Parts()
    rows = [make_row(1, "a"), make_row(2, "b")]
    parts.engine.admit(rows[:1])
    parts.turn()
    parts.publisher.on_blocked("low on memory")
    parts.engine.admit(rows[1:])
    parts.turn()
    assert parts.link.sent == rows[:1]
    parts.link.ack(rows[0])
    assert parts.engine.decisions.sent == rows[:1]
    parts.pass_time(3600.0)
    parts.publisher.watch()
    assert "stalled" not in dict(parts.engine.readiness.reasons), "blocked is no timeout"
    parts.publisher.on_unblocked()
    parts.turn()
    assert parts.link.sent == rows


async def test_paused_publishes_nothing_of_what_was_read_before() -> None:
    parts = Parts()
    rows = [make_row(1, "a"), make_row(2, "b")]
    parts.engine.admit(rows)
    parts.engine.is_paused = True
    parts.turn()
    assert parts.link.sent == []
    parts.engine.is_paused = False
    parts.turn()
    assert parts.link.sent == rows


async def test_a_confirms_time_is_the_databases() -> None:
    """Alerts hold it against the time of day; the engine's own clock runs from the machine's start."""
    parts = Parts()
    parts.engine.database_time.observe(1.7e9, parts.clock.now())
    parts.pass_time(50.0)
    parts.confirm(make_row(1))
    parts.publisher.watch()
    assert parts.engine.metrics.last_confirm_timestamp_seconds == pytest.approx(1.7e9 + 50.0)


@pytest.mark.parametrize("is_refused", [True, False], ids=["refused", "closed at once"])
async def test_a_broker_that_stays_away_is_tried_less_and_less(
    is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never a storm: 0.1 s at first, some seconds in the end, whether it takes no connection or ends each one at once."""
    parts = Parts()
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        await asyncio.sleep(0)
        waits.append(seconds)

    async def connect(listener: LinkListener, payload_type: PayloadType) -> Link:
        await asyncio.sleep(0)
        if is_refused:
            raise BrokerUnavailable("nobody listens")
        link = TestedLink(listener)
        asyncio.get_running_loop().call_soon(link.cut)
        return link

    monkeypatch.setattr(parts.clock, "sleep", sleep)
    monkeypatch.setattr(parts.publisher._broker, "connect", connect)
    async with parts.running(parts.publisher.run_link()):
        await eventually(lambda: len(waits) >= 12)
    assert waits[0] < 0.5
    assert min(waits[8:]) >= 2.5


async def test_readiness_does_not_repeat_what_a_broker_says_of_a_row() -> None:
    """Its text may name the row's exchange or routing key, and anybody may ask /readyz."""
    parts = Parts()
    text = "403 ACCESS_REFUSED - access to topic 'patient.4711' in exchange 'events' in vhost '/' refused"
    parts.publisher.on_closed([], Closed.REFUSED, text)
    assert parts.engine.readiness.reasons == (("broker", "closed over a message that it refuses"),)
    parts.publisher.on_closed([], Closed.CONNECTION, "connection reset by peer")
    assert parts.engine.readiness.reasons == (("broker", "connection reset by peer"),)


async def test_spans_are_told_of_every_outcome() -> None:
    told: list[tuple[str, list[str], str]] = []

    class Spans:
        def end(self, outcome: str, rows: Sequence[Row], now: float, error: str = "") -> None:
            assert all(row.published_at <= now for row in rows)
            told.append((outcome, [row.id for row in rows], error))

    parts = Parts()
    parts.engine.spans = Spans()
    rows = [make_row(seq, key=f"k{seq}") for seq in (1, 2, 3, 4)]
    parts.engine.admit(rows)
    parts.turn()
    parts.link.ack(rows[0])
    parts.link.nack(rows[1])
    parts.link.give_back(rows[2])
    parts.link.cut()
    assert told == [
        ("acked", ["m1"], ""),
        ("nacked", ["m2"], "basic.nack"),
        ("returned", ["m3"], "no route"),
        ("lost", ["m4"], "reset"),
    ]


async def test_a_mute_broker_is_stalled_and_much_later_its_link_is_rebuilt_with_doubling() -> None:
    parts = Parts(EngineSettings(confirm_timeout_s=30.0))
    row = make_row(1)
    parts.engine.admit([row])
    parts.turn()
    waited = []
    for _ in range(2):
        began = parts.clock.now()
        parts.link.open = {"m1": row}
        parts.engine.link = parts.link
        while parts.link.open:
            parts.clock.time += 10.0
            parts.publisher.watch()
            await turns(3)
            if parts.clock.now() - began == 30.0:
                assert "stalled" in dict(parts.engine.readiness.reasons)
        waited.append(parts.clock.now() - began)
        assert "stalled" not in dict(parts.engine.readiness.reasons)
    assert waited == [300.0, 600.0]


async def test_a_mute_broker_is_stalled_under_a_maximum_rate_too() -> None:
    """What goes out at the rate's pace is owed an answer like anything else; what waits for the rate is not late."""
    parts = Parts(EngineSettings(confirm_timeout_s=30.0, rate_max=2.0))
    rows = [make_row(seq, f"k{seq}") for seq in range(1, 400)]
    parts.engine.admit(rows)
    stalled = []
    for second in range(80):
        parts.turn()
        parts.turn()
        assert parts.engine.metrics.backpressure.is_active("rate")
        if second < 40:
            for row in list(parts.link.open.values()):
                parts.link.ack(row)
        parts.pass_time(1.0)
        parts.publisher.watch()
        stalled.append("stalled" in dict(parts.engine.readiness.reasons))
    assert 69 <= stalled.index(True) <= 71 and all(stalled[71:])


async def test_a_broker_that_only_nacks_is_stalled_until_it_takes_something(caplog: pytest.LogCaptureFixture) -> None:
    """Its one queue was full: due rows went nowhere for hours, and /readyz said that all was well."""
    caplog.set_level(logging.INFO, "tests.parts")
    parts = Parts(EngineSettings(confirm_timeout_s=30.0))
    row = make_row(1)
    parts.engine.admit([row])
    parts.turn()
    for second in range(40):
        if row.id in parts.link.open:
            parts.link.nack(row)
        parts.pass_time(1.0)
        parts.publisher.watch()
        parts.turn()
        assert ("stalled" in dict(parts.engine.readiness.reasons)) == (second >= 29), second
    assert dict(parts.engine.readiness.reasons)["stalled"] == "nothing but nacks for 40 s", (
        "so far, not when it was noticed"
    )
    assert caplog.messages.count("confirms_stalled") == 1
    parts.engine.link = parts.link
    parts.publisher.on_returned([])
    assert "stalled" not in dict(parts.engine.readiness.reasons)


async def test_nacked_rows_that_another_relay_took_stall_this_one_no_longer() -> None:
    parts = Parts(EngineSettings(confirm_timeout_s=30.0))
    parts.publisher.on_nacked([])
    stalled = []
    for _ in range(80):
        parts.pass_time(1.0)
        parts.publisher.watch()
        await turns(3)
        parts.engine.link = parts.link
        stalled.append("stalled" in dict(parts.engine.readiness.reasons))
    assert (stalled.index(True), stalled.count(True), stalled[-1]) == (30, 30, False)


async def test_due_rows_that_may_not_be_published_stall_too() -> None:
    """The window was full of rows whose marks the database refused: nothing in flight, nothing confirmed, and ready."""
    parts = Parts(EngineSettings(confirm_timeout_s=30.0))
    parts.link.takes_max = 0
    parts.engine.admit([make_row(1)])
    for _ in range(31):
        parts.pass_time(1.0)
        parts.publisher.watch()
    assert dict(parts.engine.readiness.reasons)["stalled"] == "no confirm for 30 s"
    parts.engine.is_paused = True
    parts.publisher.watch()
    assert "stalled" not in dict(parts.engine.readiness.reasons), "said by `paused`"


async def test_a_link_on_which_everything_is_nacked_is_rebuilt_with_doubling_and_without_copies() -> None:
    """RabbitMQ 3.10 nacks all that a channel sends which met a quorum queue without a leader, long after it has one."""
    parts = Parts()
    waited = []

    def has_link() -> bool:
        return parts.engine.link is not None

    for _ in range(2):
        parts.engine.link = parts.link
        began = parts.clock.now()
        parts.publisher.on_nacked([])
        parts.link.open = {"m1": make_row(1)}
        for _ in range(30):
            parts.pass_time(1.0)
            parts.publisher.watch()
            parts.publisher.on_nacked([])
        await turns(3)
        assert has_link(), "a message is in flight"
        parts.link.open = {}
        parts.publisher.watch()
        await turns(3)
        assert not has_link()
        waited.append(parts.publisher._nacked_rebuild_s)
        assert parts.clock.now() - began == 30.0
    assert waited == [20.0, 40.0]
    parts.engine.link = parts.link
    parts.publisher.on_nacked([])
    parts.publisher.on_acked([])
    parts.pass_time(1000.0)
    parts.publisher.watch()
    await turns(3)
    assert has_link(), "it confirms something"
    assert parts.publisher._nacked_rebuild_s == 10.0


async def test_an_exchange_that_is_refused_again_and_again_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """Without the right to write, each link opens and is closed over its first message: two lines a try, for ever."""
    caplog.set_level(logging.INFO, "tests.parts")
    parts = Parts()
    for _ in range(3):
        parts.publisher._note_up(is_trusted=True)
        parts.publisher.on_closed([], Closed.EXCHANGE, "403 ACCESS_REFUSED")
    parts.publisher._note_up(is_trusted=True)
    parts.publisher._note_outcome("acked", [make_row(1, rare={"exchange": "another"})])
    assert parts.engine.readiness.reasons == (("exchange", "403 ACCESS_REFUSED"),)
    parts.publisher._note_outcome("acked", [make_row(2)])
    assert [record.getMessage() for record in caplog.records] == [
        "broker_connected",
        "broker_lost",
        "exchange_accepted",
    ]
    parts.publisher.on_closed([], Closed.EXCHANGE, "403 ACCESS_REFUSED")
    assert caplog.records[-1].getMessage() == "broker_lost"


@pytest.mark.parametrize("proof", ["returned", "nacked", "passed"])
async def test_whatever_becomes_of_a_message_its_exchange_takes_it(proof: str) -> None:
    """It was made again without bindings, all came back, and /readyz went on about an exchange that does not exist."""
    parts = Parts()
    parts.publisher.on_closed([], Closed.EXCHANGE, "404 NOT_FOUND")
    parts.publisher._note_up(is_trusted=True)
    assert parts.engine.readiness.reasons == (("exchange", "404 NOT_FOUND"),)
    parts.engine.link = parts.link
    row = make_row(1)
    parts.engine.admit([row])
    parts.turn()
    if proof == "passed":
        parts.publisher.on_passed(row)
    elif proof == "nacked":
        parts.link.nack(row)
    else:
        parts.link.give_back(row)
    assert not parts.engine.readiness.reasons


async def test_a_way_to_the_broker_that_opens_and_breaks_counts_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each link shook hands and broke at its first message: the shards stayed with a relay that could send nothing (L6)."""
    parts = Parts()
    lost_at: list[float | None] = []
    answers = False

    async def connect(listener: LinkListener, payload_type: PayloadType) -> Link:
        await asyncio.sleep(0)
        link = TestedLink(listener)

        def end() -> None:
            if answers:
                parts.publisher._note_outcome("acked", [make_row(1)])
            lost_at.append(parts.engine.broker_lost_at)
            link.cut()

        asyncio.get_running_loop().call_soon(end)
        return link

    monkeypatch.setattr(parts.publisher._broker, "connect", connect)
    async with parts.running(parts.publisher.run_link()):
        await eventually(lambda: len(lost_at) >= 8)
        assert lost_at[:3] == [None] * 3
        since = lost_at[4]
        assert since is not None and lost_at[4:8] == [since] * 4, "not anew with each"
        answers = True
        seen = len(lost_at)
        await eventually(lambda: len(lost_at) > seen + 1)
        assert lost_at[-1] is None


async def test_an_idle_link_that_lives_is_a_way_to_the_broker() -> None:
    parts = Parts()
    parts.publisher._connected_at = parts.clock.now()
    parts.engine.broker_lost_at = parts.clock.now()
    parts.pass_time(11.0)
    parts.publisher.watch()
    assert parts.engine.broker_lost_at is None


async def test_a_row_without_an_answer_beside_others_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """Its queue is mute: the relay was ready, and nothing named the row."""
    caplog.set_level(logging.INFO, "tests.parts")
    parts = Parts()
    rows = [make_row(seq, f"k{seq}") for seq in range(1, 101)]
    parts.engine.admit(rows)
    parts.turn()
    for row in rows[1:]:
        parts.pass_time(1.0)
        parts.link.ack(row)
        parts.publisher.watch()
    told = [record.__dict__ for record in caplog.records if record.getMessage() == "confirm_overdue"]
    assert len(told) == 1
    assert "m1" in str(told[0])


async def test_what_ends_each_link_is_found_though_nobody_says_so() -> None:
    """A message at which the connection ends, with a code that blames nothing that was sent: all went again with it, for ever."""
    parts = Parts()
    rows = [make_row(seq, f"k{seq}") for seq in range(1, 6)]
    bad = rows[2]
    parts.engine.admit(rows)
    failed: list[str] = []
    done: list[Row] = []
    for _ in range(20):
        parts.turn()
        if bad.id in parts.link.open:
            parts.link.cut()
            parts.engine.link = parts.link
        elif parts.link.open:
            (row,) = parts.link.open.values()
            parts.publisher.on_passed(row)
            done.append(row)
            parts.link.ack(row)
        failed += [setback.row.id for setback in parts.engine.decisions.setbacks if setback.row.id not in failed]
    assert sorted(row.id for row in done) == ["m1", "m2", "m4", "m5"]
    assert failed == ["m3"]
    (setback,) = parts.engine.decisions.setbacks
    assert (setback.aside, setback.attempts, setback.reason) == (Aside.DEFERRED, 1, "unknown")
    assert parts.link.ids.count("m1") <= 5


async def test_rows_that_went_down_with_many_links_are_sent_by_the_first_that_holds() -> None:
    """A network that breaks again and again is no row's fault: tried by themselves, and gone."""
    parts = Parts()
    rows = [make_row(seq, f"k{seq}") for seq in range(1, 6)]
    parts.engine.admit(rows)
    for _ in range(3):
        parts.turn()
        parts.link.cut()
        parts.engine.link = parts.link
    for _ in range(5):
        parts.turn()
        (row,) = parts.link.open.values()
        parts.publisher.on_passed(row)
        parts.link.ack(row)
    assert not parts.engine.decisions.setbacks
    parts.engine.admit([make_row(6, "k6"), make_row(7, "k7")])
    parts.turn()
    assert list(parts.link.open) == ["m6", "m7"]


def relink(parts: Parts) -> None:
    """A new link where the last one was closed, as `run_link` makes it."""
    if parts.engine.link is None:
        parts.publisher._is_rebuilding = False
        parts.engine.link = parts.link = TestedLink(parts.publisher)
        parts.engine.chains.on_verified()


async def test_a_mute_queue_does_not_keep_the_window_from_others() -> None:
    """Its rows filled the window, went first again on each link that was built anew for the silence, and filled it again."""
    parts = Parts(EngineSettings(in_flight_max=50, read_ahead_max=1000))
    bad = [make_row(seq, f"b{seq}", event_type="mute") for seq in range(1, 301)]
    good = [make_row(seq, f"g{seq}") for seq in range(301, 401)]
    parts.engine.admit(bad + good)
    acked = 0
    is_mute = True
    for _ in range(500):
        relink(parts)
        parts.turn()
        for row in list(parts.link.open.values()):
            if row.event_type != "mute" or not is_mute:
                parts.link.ack(row)
                acked += 1
        parts.engine.decisions.sent.clear()
        parts.pass_time(1.0)
        parts.publisher.watch()
        await turns(3)
        if acked == 100 and is_mute:
            assert 0 < parts.link.in_flight < 10, "one now and then"
            setbacks = parts.engine.decisions.setbacks
            assert {setback.reason for setback in setbacks} <= {"unanswered"}
            assert all(setback.attempts == 0 for setback in setbacks)
            is_mute = False
    assert not is_mute
    assert acked == 400 - len(parts.engine.decisions.setbacks), "the others were waiting here"
    assert not parts.publisher._mute


async def test_a_silent_broker_sets_hardly_anything_aside() -> None:
    """All routes are silent: nothing would be gained, and each row would be written."""
    parts = Parts(EngineSettings(in_flight_max=50, read_ahead_max=1000))
    parts.engine.admit([make_row(seq, f"k{seq}") for seq in range(1, 1001)])
    for _ in range(305):
        relink(parts)
        parts.turn()
        parts.pass_time(1.0)
        parts.publisher.watch()
        await turns(3)
    assert parts.link.in_flight == 1, "the probe of its one route"
    sent = 0
    for _ in range(100):
        parts.turn()
        parts.link.ack(*parts.link.open.values())
        sent += len(parts.engine.decisions.sent)
        parts.engine.decisions.sent.clear()
    assert sent + len(parts.engine.decisions.setbacks) == 1000
    assert len(parts.engine.decisions.setbacks) < 500


async def test_the_rate_is_kept() -> None:
    parts = Parts(EngineSettings(rate_max=100.0))
    parts.engine.admit([make_row(seq, f"k{seq}") for seq in range(1, 400)])
    start = parts.clock.now()
    while parts.clock.now() < start + 2.0:
        parts.turn()
        parts.pass_time(0.01)
    assert 180 <= len(parts.link.sent) <= 210


async def test_after_a_refusal_rows_with_an_exchange_of_their_own_are_tried_by_themselves() -> None:
    """Several that are refused come together, each for another exchange: each closed everybody's channel once more.
    Alone in the outbox, such a row must not wait for a signal that nothing gives."""
    parts = Parts()
    link, publisher = parts.link, parts.publisher
    bad, own, plain, later = (make_row(seq, f"k{seq}") for seq in range(1, 5))
    for row in (bad, own, later):
        row.rare = {"exchange": f"x{row.seq}"}
    async with parts.running(publisher.run()):
        parts.engine.admit([bad])
        await eventually(lambda: link.sent == [bad])
        link.open.clear()
        publisher.on_refused(Rejection(bad, "refused", "403", "x1", "k"), ())
        parts.engine.admit([own])
        await eventually(lambda: link.probes == [own])
        parts.engine.admit([plain])
        await eventually(lambda: plain in link.sent)
        assert link.probes == [own]
        publisher.on_passed(own)
        link.ack(own, plain)
        parts.pass_time(WARY_S)
        parts.engine.admit([later])
        await eventually(lambda: later in link.sent)
    assert link.probes == [own]


def test_behind_one_that_passed_the_rows_of_its_exchange_go_with_everybody() -> None:
    """One forbidden exchange had the rows of all others tried one by one: a backlog that never went down."""
    parts = Parts()
    link, publisher = parts.link, parts.publisher
    rows = [make_row(seq, f"k{seq}") for seq in range(1, 7)]
    for row in rows:
        row.rare = {"exchange": "other" if row.seq == 5 else "good"}
    bad, first, second, third, other, late = rows
    bad.rare = {"exchange": "bad"}
    parts.engine.admit([bad])
    parts.turn()
    link.open.clear()
    publisher.on_refused(Rejection(bad, "refused", "403", "bad", "k"), ())
    parts.engine.admit([first, second, third, other])
    parts.turn()
    parts.turn()
    assert (link.sent, link.probes) == ([bad, first], [first])
    publisher.on_passed(first)
    parts.engine.admit([late])
    parts.turn()
    assert link.probes == [first, other]
    assert link.sent == [bad, first, other, second, third, late]


def test_a_row_whose_exchange_is_being_asked_for_keeps_nobody_back() -> None:
    """A question that is never answered (no connection to ask it on is to be had) stopped everything behind its row."""
    parts = Parts()
    link = parts.link
    rows = [make_row(seq, f"k{seq}") for seq in range(1, 6)]
    link.unverified = {rows[0].id: "x", rows[2].id: "y"}
    parts.engine.admit(rows)
    parts.turn()
    assert link.sent == [rows[1], rows[3], rows[4]]
    link.unverified = {rows[2].id: "y"}
    parts.publisher.on_verified("x")
    parts.turn()
    assert link.sent[3:] == [rows[0]]
    link.unverified = {}
    parts.turn()
    assert len(link.sent) == 4
    parts.publisher.on_verified("y")
    parts.turn()
    assert link.sent[4:] == [rows[2]]


def test_while_a_suspects_exchange_is_asked_for_everybody_else_goes() -> None:
    """Those that closed a whole connection stop everything only as long as one of them can be tried."""
    parts = Parts()
    link, publisher = parts.link, parts.publisher
    one, two, other = rows = [make_row(seq, f"k{seq}") for seq in range(1, 4)]
    parts.engine.admit(rows[:2])
    parts.turn()
    link.open.clear()
    publisher.on_suspected([one, two], "541", alone=True)
    link.unverified = {two.id: "x"}
    link.sent.clear()
    parts.engine.admit([other])
    parts.turn()
    assert link.sent == [other]
    link.unverified = {}
    publisher.on_verified("x")
    parts.turn()
    assert link.sent == [other], "in doubt until it is confirmed"
    link.ack(other)
    parts.turn()
    assert link.sent == [other, two]
    publisher.on_passed(two)
    link.ack(two)
    parts.turn()
    assert link.sent == [other, two, one]
