"""What `relay.core.ports.broker.Broker` and `Link` promise, whichever sink is behind them. One suite for all of them, the simulation's fake included.

A case gets a `Place`: somewhere to publish to, and a look at what arrived there. Faults and a broker's verdicts stand in
`outcome_suite`, single frames in `tag_suite`.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from relay.core.ports.broker import Closed, Link

from .recorder import Recorder, make_row, make_rows


class Place(Protocol):
    async def connect(
        self, recorder: Recorder, *, routing_key: str = "{event_type}", is_mandatory: bool = True
    ) -> Link: ...

    async def arrived(self, count: int) -> Sequence[tuple[str, bytes, dict[str, Any]]]:
        """(message id, body, headers) of the next `count` messages, in the order of their arrival; there are no more."""
        ...


Case = Callable[[Place], Awaitable[None]]
LIVES: list[Case] = []
"""What becomes of rows, whatever they hold: the simulation's fake has to pass these, too."""

CONTENTS: list[Case] = []
"""What arrives of them."""


def life(function: Case) -> Case:
    LIVES.append(function)
    return function


def content(function: Case) -> Case:
    CONTENTS.append(function)
    return function


@life
async def each_row_is_acked_once_and_arrives_in_order(place: Place) -> None:
    recorder = Recorder()
    link = await place.connect(recorder)
    rows = make_rows(500)
    assert await recorder.publish_all(link, rows) == []
    outcomes = await recorder.outcomes_of(500)
    assert sorted(outcomes["acked"]) == [row.seq for row in rows]
    assert [id for id, _, _ in await place.arrived(500)] == [row.id for row in rows]
    await link.close()


@life
async def nothing_is_told_from_within_publish(place: Place) -> None:
    """An engine in the middle of its own turn would be changed under its hands."""
    recorder = Recorder()
    link = await place.connect(recorder)
    for row in make_rows(20):
        link.publish([row])
        assert recorder.events == []
    await recorder.outcomes_of(20)
    await link.close()


@life
async def in_flight_is_what_has_no_outcome(place: Place) -> None:
    recorder = Recorder()
    link = await place.connect(recorder)
    rows = make_rows(3)
    link.publish(rows)
    assert link.in_flight == 3
    assert all(link.is_in_flight(row.id) for row in rows)
    assert not link.is_in_flight("another")
    await recorder.outcomes_of(3)
    assert link.in_flight == 0
    assert not any(link.is_in_flight(row.id) for row in rows)
    await link.close()


@content
async def what_cannot_be_sent_is_rejected_among_bystanders(place: Place) -> None:
    recorder = Recorder()
    link = await place.connect(recorder, routing_key="{event_type}.{correlation_id}")
    good = [make_row(seq, rare={"correlation_id": "c"}) for seq in (1, 3, 5)]
    late = make_row(4, rare={"correlation_id": "c", "expires_at": 1_764_439_999.0})
    publication = link.publish([good[0], make_row(2), good[1], late, good[2]])
    assert publication.taken == 5
    assert [(each.row.seq, each.reason) for each in publication.rejected] == [(2, "invalid"), (4, "expired")]
    assert sorted((await recorder.outcomes_of(3))["acked"]) == [1, 3, 5]
    assert [id for id, _, _ in await place.arrived(3)] == [row.id for row in good]
    await link.close()


@content
async def bodies_and_trace_headers_arrive_byte_for_byte(place: Place) -> None:
    """What a tracing library wrote is its own affair: nothing is parsed, completed or put in lower case."""
    recorder = Recorder()
    link = await place.connect(recorder)
    trace = {
        "traceparent": "00-0AF7651916CD43DD8448EB211C80319C-b7ad6b7169203331-01-what-comes-later",
        "tracestate": "congo=t61rcWkgMzE, rojo=00f067aa0ba902b7 ,,é=1",
    }
    bodies = [b'{"b":1, "a":2,"a":3,"n":1e400,"f":1.10,"u":"\\u00e9","z":"\\u0000"}', b"", b'{\n  "n": 1\r\n}']
    link.publish([make_row(seq, payload=body, rare=trace) for seq, body in enumerate(bodies, 1)])
    await recorder.outcomes_of(3)
    arrived = await place.arrived(3)
    assert [body for _, body, _ in arrived] == bodies
    for _, _, headers in arrived:
        assert {name: headers[name] for name in trace} == trace
    await link.close()


@content
async def headers_keep_values_and_types(place: Place) -> None:
    headers = {
        "null": None,
        "nested": {"list": [1, "é", {"deep": True}]},
        "big": 2**53 + 1,
        "fraction": 1.1,
        "no": False,
    }
    recorder = Recorder()
    link = await place.connect(recorder)
    link.publish(
        [make_row(1, headers=json.dumps(headers | {"aggregate_id": "the row's own gives way"}), aggregate_id="7")]
    )
    await recorder.outcomes_of(1)
    ((_, _, found),) = await place.arrived(1)
    ours = {"schema_version": 1, "aggregate_id": "7", "occurred_at": "2025-11-29T18:00:00.000000Z"}
    assert found == headers | ours
    assert all(type(found[name]) is type(value) for name, value in headers.items())
    await link.close()


@life
async def a_link_takes_what_it_has_room_for_and_says_when_there_is_more(place: Place) -> None:
    recorder = Recorder()
    link = await place.connect(recorder)
    rows = make_rows(60, payload=b'{"x":"' + b"y" * 500_000 + b'"}')
    assert link.publish(rows).taken < len(rows), "memory is bounded"
    await recorder.until(lambda: recorder.writable)
    done = link.in_flight + recorder.count()
    await recorder.publish_all(link, rows[done:])
    await recorder.outcomes_of(60, timeout=60)
    assert len(recorder.outcomes["acked"]) == 60
    await link.close()


@life
async def a_listener_may_publish_from_an_outcome(place: Place) -> None:
    recorder = Recorder()
    link = await place.connect(recorder)
    rows = make_rows(40)
    rest = iter(rows[1:])

    def publish_next() -> None:
        if (row := next(rest, None)) is not None:
            link.publish([row])

    recorder.on_event = publish_next
    link.publish(rows[:1])
    await recorder.until(lambda: recorder.count() == 40)
    assert [id for id, _, _ in await place.arrived(40)] == [row.id for row in rows]
    recorder.on_event = lambda: None
    await link.close()


@life
async def a_close_gives_every_row_its_one_outcome(place: Place) -> None:
    recorder = Recorder()
    link = await place.connect(recorder)
    taken = link.publish(make_rows(200)).taken
    await link.close()
    await recorder.until(lambda: recorder.closed)
    outcomes = await recorder.outcomes_of(taken)
    assert set(outcomes["acked"]) | set(outcomes["lost"]) == set(range(1, taken + 1))
    assert recorder.closed is not None
    assert recorder.closed[0] is Closed.CONNECTION
    assert link.publish([make_row(999)]).taken == 0, "nothing after the last word"
    assert link.in_flight == 0
    await link.close()


@life
async def one_life_after_another(place: Place) -> None:
    """What a dead link had in flight may go again on the next one."""
    rows = make_rows(10)
    for life in (1, 2):
        recorder = Recorder()
        link = await place.connect(recorder)
        link.publish(rows)
        await recorder.outcomes_of(10)
        await link.close()
        assert len(recorder.outcomes["acked"]) == 10, life
    assert [id for id, _, _ in await place.arrived(20)] == [row.id for row in rows] * 2
