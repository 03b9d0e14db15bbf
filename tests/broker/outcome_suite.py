"""What every link tells of rows when things go wrong: the same cases on the simulation's fake, on RabbitMQ and on a file.

`FAULTS` need a place that can fall silent, be cut off and run out of room; `VERDICTS` one that routes, rejects and
refuses, as a broker does and a file does not. The ordinary life stands in `link_suite`, single frames in `tag_suite`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

import pytest

from relay.core.ports.broker import Closed, Link
from relay.errors import BrokerUnavailable, ExchangeMissing
from relay.message import Row

from .link_suite import Place
from .recorder import WAIT_S, Recorder, make_row, make_rows


class FaultyPlace(Place, Protocol):
    async def mute(self, on: bool) -> None:
        """Nothing is taken and nothing said; what is published meanwhile is taken afterwards."""
        ...

    async def cut(self) -> None:
        """Every link ends without a word, and what its broker has not yet taken or said is lost."""
        ...

    async def block(self, on: bool) -> None:
        """No room for messages."""
        ...


class BrokerPlace(FaultyPlace, Protocol):
    """`refused` names an event type over which the channel is closed."""

    refused: str

    async def route(self, event_type: str, exists: bool) -> None: ...

    async def fill(self, event_type: str, on: bool) -> None:
        """Its queue rejects what it is given, or has room again; what is in it counts as no arrival."""
        ...

    async def refuse_connections(self, on: bool) -> None: ...
    async def delete_exchange(self) -> None: ...


FaultCase = Callable[[FaultyPlace], Awaitable[None]]
FAULTS: list[FaultCase] = []
VerdictCase = Callable[[BrokerPlace], Awaitable[None]]
VERDICTS: list[VerdictCase] = []


def fault(function: FaultCase) -> FaultCase:
    FAULTS.append(function)
    return function


def verdict(function: VerdictCase) -> VerdictCase:
    VERDICTS.append(function)
    return function


def assert_over(link: Link, recorder: Recorder, closed: Closed) -> None:
    """The link has said its last word and does nothing more."""
    assert recorder.closed is not None
    assert recorder.closed[0] is closed, recorder.closed
    assert link.in_flight == 0
    assert not link.is_in_flight("id-1")
    assert link.publish([make_row(9999)]).taken == 0
    assert link.probe(make_row(9999)).taken == 0


async def probe(link: Link, recorder: Recorder, row: Row) -> bool:
    """Publish it as a probe; whether the broker took it in."""
    while not link.probe(row).taken:
        seen = recorder.writable
        await recorder.until(lambda seen=seen: recorder.writable > seen)  # type: ignore[misc]
    await recorder.until(lambda: ("passed", row.seq) in recorder.events or ("refused", [row.seq]) in recorder.events)
    return ("passed", row.seq) in recorder.events


# ---------------------------------------------------------------- faults


@fault
async def silence_is_no_outcome(place: FaultyPlace) -> None:
    recorder = Recorder()
    link = await place.connect(recorder)
    await place.mute(True)
    rows = make_rows(5)
    assert link.publish(rows[:2]).taken == 2
    assert link.publish(rows[2:]).taken == 3
    await asyncio.sleep(0.05)
    assert recorder.events == []
    assert link.in_flight == 5
    assert all(link.is_in_flight(row.id) for row in rows)
    await place.mute(False)
    assert sorted((await recorder.outcomes_of(5))["acked"]) == [1, 2, 3, 4, 5]
    assert [id for id, _, _ in await place.arrived(5)] == [row.id for row in rows]
    await link.close()


@fault
async def a_cut_loses_what_has_no_outcome_and_nothing_else(place: FaultyPlace) -> None:
    recorder = Recorder()
    link = await place.connect(recorder)
    rows = make_rows(12)
    link.publish(rows[:5])
    await recorder.outcomes_of(5)
    await place.mute(True)
    link.publish(rows[5:10])
    link.publish(rows[10:])
    assert link.in_flight == 7
    await place.cut()
    await recorder.until(lambda: recorder.closed)
    assert sorted(recorder.outcomes["acked"]) == [1, 2, 3, 4, 5]
    assert recorder.outcomes["lost"] == [6, 7, 8, 9, 10, 11, 12], "in the order of their publishing"
    assert_over(link, recorder, Closed.CONNECTION)
    await link.close()
    assert recorder.events[-1][0] == "closed", "and that was all"
    # On the next life they go again, whatever became of the first copies.
    await place.mute(False)
    again = Recorder()
    link = await place.connect(again)
    assert await again.publish_all(link, rows[5:]) == []
    assert sorted((await again.outcomes_of(7))["acked"]) == [row.seq for row in rows[5:]]
    await link.close()


@fault
async def a_blocked_link_takes_nothing_and_loses_nothing(place: FaultyPlace) -> None:
    """Told once at each end; what was published before it waits, and is confirmed afterwards."""
    recorder = Recorder()
    link = await place.connect(recorder)
    await place.block(True)
    rows = make_rows(3)
    assert link.publish(rows[:2]).taken == 2
    await recorder.until(lambda: "blocked" in recorder.kinds())
    assert link.publish(rows[2:]).taken == 0
    assert link.probe(rows[2]).taken == 0
    assert link.in_flight == 2 - recorder.count()
    seen = recorder.writable
    await place.block(False)
    await recorder.until(lambda: "unblocked" in recorder.kinds() and recorder.writable > seen)
    assert await recorder.publish_all(link, rows[2:]) == []
    assert sorted((await recorder.outcomes_of(3))["acked"]) == [1, 2, 3]
    assert [kind for kind in recorder.kinds() if kind != "acked"] == ["blocked", "unblocked"]
    assert recorder.closed is None
    await link.close()


@fault
async def a_close_is_told_at_once_whatever_the_other_side_does(place: FaultyPlace) -> None:
    """Rows in flight are given up by the call, not by an answer to it."""
    recorder = Recorder()
    link = await place.connect(recorder)
    await place.mute(True)
    link.publish(make_rows(4))
    closing = asyncio.ensure_future(link.close())
    await recorder.until(lambda: recorder.closed)
    assert recorder.outcomes == {"acked": [], "nacked": [], "returned": [], "lost": [1, 2, 3, 4]}
    assert_over(link, recorder, Closed.CONNECTION)
    await place.mute(False)
    async with asyncio.timeout(WAIT_S):
        await closing
        await link.close()
    assert recorder.kinds() == ["closed"], "no confirm is heard behind it"


@fault
async def a_blocked_link_may_be_closed(place: FaultyPlace) -> None:
    recorder = Recorder()
    link = await place.connect(recorder)
    await place.block(True)
    link.publish(make_rows(4))
    await recorder.until(lambda: "blocked" in recorder.kinds())
    closing = asyncio.ensure_future(link.close())
    await recorder.until(lambda: recorder.closed)
    assert sorted(recorder.outcomes["acked"] + recorder.outcomes["lost"]) == [1, 2, 3, 4]
    assert_over(link, recorder, Closed.CONNECTION)
    await place.block(False)
    async with asyncio.timeout(WAIT_S):
        await closing
    assert "unblocked" not in recorder.kinds()


# ---------------------------------------------------------------- verdicts on rows


@verdict
async def a_return_is_no_delivery_whatever_is_confirmed(place: BrokerPlace) -> None:
    """Among bystanders, one with an empty body; delivered once there is a route."""
    await place.route("nope.x", False)
    recorder = Recorder()
    link = await place.connect(recorder)
    good = make_rows(3)
    lost = [make_row(10, event_type="nope.x"), make_row(11, event_type="nope.x", payload=b"")]
    assert link.publish([good[0], lost[0], good[1], lost[1], good[2]]).taken == 5
    outcomes = await recorder.outcomes_of(5)
    assert sorted(outcomes["acked"]) == [1, 2, 3]
    assert sorted(outcomes["returned"]) == [10, 11]
    assert {(each.error, each.routing_key) for each in recorder.returned} == {("312 NO_ROUTE", "nope.x")}
    assert link.in_flight == 0
    await place.route("nope.x", True)
    link.publish(lost)
    await recorder.until(lambda: recorder.count() == 7)
    assert sorted(outcomes["acked"]) == [1, 2, 3, 10, 11]
    assert [id for id, _, _ in await place.arrived(5)] == ["id-1", "id-2", "id-3", "id-10", "id-11"]
    await link.close()


@verdict
async def without_mandatory_no_route_is_fine(place: BrokerPlace) -> None:
    await place.route("nope.x", False)
    recorder = Recorder()
    link = await place.connect(recorder, is_mandatory=False)
    link.publish([make_row(1, event_type="nope.x"), make_row(2)])
    assert sorted((await recorder.outcomes_of(2))["acked"]) == [1, 2]
    assert [id for id, _, _ in await place.arrived(1)] == ["id-2"]
    await link.close()


@verdict
async def a_full_queue_nacks_its_own_rows_only(place: BrokerPlace) -> None:
    await place.fill("full.x", True)
    recorder = Recorder()
    link = await place.connect(recorder)
    full = [make_row(2, event_type="full.x"), make_row(4, event_type="full.x")]
    assert link.publish([make_row(1), full[0], make_row(3), full[1], make_row(5)]).taken == 5
    outcomes = await recorder.outcomes_of(5)
    assert sorted(outcomes["acked"]) == [1, 3, 5]
    assert sorted(outcomes["nacked"]) == [2, 4]
    await place.fill("full.x", False)
    link.publish(full[:1])
    await recorder.until(lambda: recorder.count() == 6)
    assert sorted(outcomes["acked"]) == [1, 2, 3, 5]
    assert recorder.closed is None
    await link.close()


@verdict
async def the_exchange_is_deleted_under_a_link(place: BrokerPlace) -> None:
    """The configuration's fault: every row without an outcome is lost, none is blamed, and no new link opens."""
    recorder = Recorder()
    link = await place.connect(recorder)
    link.publish([make_row(1)])
    await recorder.outcomes_of(1)
    await place.delete_exchange()
    link.publish(make_rows(4)[1:])
    await recorder.until(lambda: recorder.closed)
    assert recorder.outcomes["lost"] == [2, 3, 4]
    assert not recorder.refusals
    assert "suspected" not in recorder.kinds()
    assert recorder.closed is not None
    assert recorder.closed[1].startswith("404 NOT_FOUND - no exchange '")
    assert_over(link, recorder, Closed.EXCHANGE)
    await link.close()
    with pytest.raises(ExchangeMissing, match="404 NOT_FOUND - no exchange '"):
        await place.connect(Recorder())


@verdict
async def a_channel_is_closed_over_a_row_with_neighbours_in_flight(place: BrokerPlace) -> None:
    """One outcome each: the row is refused or among the suspects, its neighbours may be suspects, lost or confirmed; what
    came before it has arrived, nothing that comes after it does, however long the link takes to hear of it."""
    recorder = Recorder()
    link = await place.connect(recorder)
    link.publish([*make_rows(2), make_row(3, event_type=place.refused), *make_rows(6)[3:]])
    seq = 6
    async with asyncio.timeout(WAIT_S):
        while recorder.closed is None:
            seq += link.publish([make_row(seq + 1)]).taken
            await asyncio.sleep(0.001)
    outcomes = recorder.outcomes
    blamed = outcomes.get("refused", []) + outcomes.get("suspected", [])
    assert 3 in blamed
    assert blamed == sorted(blamed), "in the order of their publishing"
    assert set(outcomes["acked"]) <= {1, 2}
    everyone = blamed + outcomes["acked"] + outcomes["lost"]
    assert sorted(everyone) == list(range(1, seq + 1)), "each row once"
    assert not recorder.is_alone, "the channel, not the connection"
    assert recorder.kinds()[-1] == "closed"
    assert recorder.closed is not None
    assert recorder.closed[1].startswith("403 ACCESS_REFUSED")
    assert_over(link, recorder, Closed.REFUSED)
    assert [id for id, _, _ in await place.arrived(2)] == ["id-1", "id-2"]
    await link.close()


@verdict
async def who_is_alone_in_flight_is_refused_for_certain(place: BrokerPlace) -> None:
    recorder = Recorder()
    link = await place.connect(recorder)
    link.publish([make_row(1)])
    await recorder.outcomes_of(1)
    link.publish([make_row(2, event_type=place.refused)])
    await recorder.until(lambda: recorder.closed)
    (refusal,) = recorder.refusals
    assert (refusal.row.seq, refusal.reason, refusal.routing_key) == (2, "refused", place.refused)
    assert refusal.error.startswith("403 ACCESS_REFUSED")
    assert recorder.outcomes == {"acked": [1], "nacked": [], "returned": [], "lost": [], "refused": [2]}
    assert_over(link, recorder, Closed.REFUSED)
    await link.close()


# ---------------------------------------------------------------- probes


@verdict
async def a_probe_passes_first_and_has_its_outcome_like_any_other_row(place: BrokerPlace) -> None:
    await place.route("nope.x", False)
    await place.fill("full.x", True)
    recorder = Recorder()
    link = await place.connect(recorder)
    link.publish(make_rows(3))
    kinds = {4: "ok.created", 5: "nope.x", 6: "full.x", 7: "ok.created"}
    for seq, event_type in kinds.items():
        assert await probe(link, recorder, make_row(seq, event_type=event_type))
    outcomes = await recorder.outcomes_of(7)
    assert sorted(outcomes["acked"]) == [1, 2, 3, 4, 7]
    assert (outcomes["returned"], outcomes["nacked"]) == ([5], [6])
    for seq in kinds:
        passed = recorder.events.index(("passed", seq))
        assert all(seq not in event[1] for event in recorder.events[:passed] if isinstance(event[1], list))
    assert link.in_flight == 0
    await link.close()


@verdict
async def a_refused_probe_costs_its_own_channel_only(place: BrokerPlace) -> None:
    recorder = Recorder()
    link = await place.connect(recorder)
    for seq in range(1, 6):
        assert await probe(link, recorder, make_row(seq))
    link.publish([make_row(seq) for seq in range(10, 20)])
    assert not await probe(link, recorder, make_row(30, event_type=place.refused))
    assert recorder.closed is None, "the link lives"
    link.publish([make_row(seq) for seq in range(20, 25)])
    assert await probe(link, recorder, make_row(31)), "on a channel anew"
    outcomes = await recorder.outcomes_of(5 + 15 + 2)
    assert outcomes["refused"] == [30]
    assert set(outcomes["lost"]) <= set(range(1, 6)), "passed probes whose confirms went with their channel"
    assert sorted(outcomes["acked"] + outcomes["lost"]) == [*range(1, 6), *range(10, 25), 31]
    assert link.in_flight == 0
    assert len(recorder.refusals) == 1
    await link.close()


@verdict
async def probes_in_flight_are_counted_and_lost_with_the_link(place: BrokerPlace) -> None:
    recorder = Recorder()
    link = await place.connect(recorder)
    assert await probe(link, recorder, make_row(1))
    await recorder.outcomes_of(1)
    await place.mute(True)
    link.publish(make_rows(4)[1:])
    await offered(link, recorder, make_row(5))
    assert link.in_flight == link.in_doubt == 4
    assert link.is_in_flight("id-5")
    await place.cut()
    await recorder.until(lambda: recorder.closed)
    assert sorted(recorder.outcomes["lost"]) == [2, 3, 4, 5]
    assert "suspected" not in recorder.kinds()
    assert_over(link, recorder, Closed.CONNECTION)
    await place.mute(False)
    await link.close()


async def offered(link: Link, recorder: Recorder, row: Row) -> None:
    """Until it is taken; `mute` keeps its answer back."""
    async with asyncio.timeout(WAIT_S):
        while not link.probe(row).taken:
            await asyncio.sleep(0.001)


# ---------------------------------------------------------------- connections


@verdict
async def a_cut_with_nothing_in_flight_is_told_too(place: BrokerPlace) -> None:
    recorder = Recorder()
    link = await place.connect(recorder)
    await place.cut()
    await recorder.until(lambda: recorder.closed)
    assert recorder.events == [("closed", [])]
    assert_over(link, recorder, Closed.CONNECTION)
    await link.close()


@verdict
async def nobody_answers(place: BrokerPlace) -> None:
    await place.refuse_connections(True)
    with pytest.raises(BrokerUnavailable):
        await place.connect(Recorder())
    await place.refuse_connections(False)
    await (await place.connect(Recorder())).close()


@verdict
async def only_who_publishes_hears_of_an_alarm(place: BrokerPlace) -> None:
    """Before that a link takes rows: they lie in the socket, and no confirm is due for them."""
    quiet, loud = Recorder(), Recorder()
    idle, busy = await place.connect(quiet), await place.connect(loud)
    await place.block(True)
    busy.publish([make_row(1)])
    await loud.until(lambda: "blocked" in loud.kinds())
    assert quiet.events == []
    assert idle.publish([make_row(2)]).taken == 1
    await quiet.until(lambda: "blocked" in quiet.kinds())
    await place.block(False)
    await loud.outcomes_of(1)
    await quiet.outcomes_of(1)
    assert quiet.kinds().count("unblocked") == loud.kinds().count("unblocked") == 1
    await idle.close()
    await busy.close()
