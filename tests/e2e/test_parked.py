"""`relay parked`, `pause` and `resume` through the installed command, beside relays that work."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

from tests.conftest import eventually
from tests.e2e.bystanders import ONE_OR_TWO, arrived, came_once, insert_among
from tests.e2e.conftest import LADDER, Site
from tests.e2e.operator import FEW_TRIES, arrivals, bind, document, relay, start, state, until_state

# ---------------------------------------------------------------- order


ROWS = [{"id": "A", "event_type": "nope.x", "key": "K"}, {"id": "B", "key": "K"}, {"id": "C", "key": "K"}]
"""Case 29: A has no route, B and C have one."""


@ONE_OR_TWO
async def test_case_29_what_waits_for_a_deferred_row_follows_it(site: Site, relays: int) -> None:
    await start(site, relays, retry_delays=LADDER)
    good = await insert_among(site, ROWS)
    assert await arrived(site, good) == {}
    await until_state(site, "A", "deferred")
    for id_ in "BC":
        await until_state(site, id_, "held")
    await bind(site, "nope.x")
    await site.all_sent()
    assert await arrivals(site, 3) == ["A", "B", "C"]


@ONE_OR_TWO
async def test_case_29_hold_waits_for_the_redrive(site: Site, relays: int) -> None:
    """Under `hold` B and C wait while A is deferred and parked, and follow it."""
    await start(site, relays)
    good = await insert_among(site, ROWS)
    await until_state(site, "A", "parked")
    assert await arrived(site, good) == {}
    for id_ in "BC":
        await until_state(site, id_, "held")
    await site.insert("D", "ok.x", "K")
    await until_state(site, "D", "held")
    shown = await document(site, "parked", "show", "A")
    assert (shown["failure_class"], shown["attempts"], shown["failure_routing_key"]) == ("unroutable", 2, "nope.x")
    await bind(site, "nope.x")
    assert (await document(site, "parked", "redrive", "--id", "A"))["done"] == 1
    await site.all_sent()
    assert await arrivals(site, 4) == ["A", "B", "C", "D"]


@ONE_OR_TWO
async def test_case_29_continue_goes_on_without_it(site: Site, relays: int) -> None:
    """Under `continue` B and C wait only while A is deferred; A arrives after its redrive."""
    await start(site, relays, on_parked="continue")
    good = await insert_among(site, ROWS)
    await until_state(site, "A", "parked")
    await until_state(site, "C", "sent")
    assert list(await arrived(site, good, others=2)) == ["B", "C"]
    parked_at = await site.database.fetchval("SELECT parked_at FROM outbox WHERE id = 'A'")
    assert await site.database.fetchval("SELECT min(sent_at) > $1 FROM outbox WHERE id IN ('B', 'C')", parked_at)
    await bind(site, "nope.x")
    assert (await document(site, "parked", "redrive", "--all"))["done"] == 1
    await site.all_sent()
    assert await arrivals(site, 1) == ["A"]


@ONE_OR_TWO
async def test_two_parked_rows_of_a_key_redriven_out_of_order(site: Site, relays: int) -> None:
    """Under `hold` two rows of a key are parked where the policy was `continue` before; the second is redriven first."""
    (first, *_) = await start(site, 1, on_parked="continue")
    for id_, event_type in (("A", "nope.x"), ("B", "nope.x"), ("C", "nope.y")):
        await site.insert(id_, event_type, "K")
    await until_state(site, "C", "parked")
    assert await first.stop() == 0
    await start(site, relays)
    await bind(site, "nope.x")
    await site.until("(SELECT bool_and(holds) FROM outbox)")
    assert (await document(site, "parked", "redrive", "--id", "B"))["done"] == 1
    await until_state(site, "B", "held")
    assert (await document(site, "parked", "redrive", "--id", "A"))["done"] == 1
    await until_state(site, "B", "sent")
    assert await arrivals(site, 2) == ["A", "B"]
    await site.insert("D", "ok.x", "K")
    await until_state(site, "D", "held")
    done = await relay(site, "parked", "discard", "--id", "C", "--yes")
    assert done.returncode == 0, done.stderr
    await until_state(site, "D", "sent")
    assert await site.database.fetchval("SELECT count(*) FROM outbox WHERE id = 'C'") == 0


@ONE_OR_TWO
async def test_many_keys_through_parking_and_redrive(site: Site, relays: int) -> None:
    """Every key has a head without a route and nine followers; all are redriven while rows keep coming."""
    await start(site, relays)
    await site.database.execute(
        "INSERT INTO outbox (id, event_type, aggregate_id, payload)"
        " SELECT k || '-' || n, CASE WHEN n = 0 THEN 'nope.x' ELSE 'ok.x' END, k, '{}'"
        " FROM generate_series(0, 9) n, generate_series(1, 20) k ORDER BY n, k"
    )
    await site.until("(SELECT count(*) FROM outbox WHERE aside = 'parked') = 20")
    await bind(site, "nope.x")
    redriving = asyncio.create_task(document(site, "parked", "redrive", "--type", "nope.x", "--rate", "40/s"))
    await site.database.execute(
        "INSERT INTO outbox (id, event_type, aggregate_id, payload)"
        " SELECT k || '-10', 'ok.x', k, '{}' FROM generate_series(1, 20) k"
    )
    assert (await redriving)["done"] == 20
    await site.all_sent(30)
    found = await arrivals(site, 220)
    assert len(found) == 220
    for key in range(1, 21):
        assert [id_ for id_ in found if id_.startswith(f"{key}-")] == [f"{key}-{n}" for n in range(11)]


@ONE_OR_TWO
async def test_a_large_redrive_costs_no_lease(site: Site, relays: int) -> None:
    """L2: an operator locks the shards that the relays renew, again and again, and must leave them room."""
    await site.insert_many(15_000, 50)
    await site.database.execute(
        "UPDATE outbox SET aside = 'parked', holds = true, parked_at = now(), failure_class = 'unroutable'"
    )
    daemons = [await site.start(name=f"r{n}", lease="3s").ready() for n in range(relays)]
    await eventually(lambda: all(d.metric("relay_shards_owned") == 64 / relays for d in daemons), 30)
    # Without settlements that take turns with it.
    assert (await relay(site, "pause")).returncode == 0
    for daemon in daemons:
        await daemon.not_ready("paused")
    epochs = await site.database.fetch("SELECT shard, epoch, owner FROM outbox_shard ORDER BY shard")
    assert (await document(site, "parked", "redrive", "--all"))["done"] == 15_000
    assert await site.database.fetch("SELECT shard, epoch, owner FROM outbox_shard ORDER BY shard") == epochs
    assert [daemon.metric("relay_lease_lost_total") for daemon in daemons] == [0] * relays


@ONE_OR_TWO
async def test_case_43_old_parked_rows_are_counted_not_purged_and_delivered_once(site: Site, relays: int) -> None:
    daemons = await start(site, relays, retention="1s", on_parked="continue")
    old = datetime(1970, 1, 1, tzinfo=UTC)
    ids = ("p1", "p2", "p3")
    columns = {"event_type": "nope.x", "key": "K", "created_at": old, "occurred_at": old}
    good = await insert_among(site, [{"id": id_, **columns} for id_ in ids])
    for id_ in ids:
        await until_state(site, id_, "parked")
    # The retention has run when the marked rows are gone.
    await site.until("NOT EXISTS (SELECT FROM outbox WHERE id LIKE 'good%')", 40)
    await eventually(lambda: all(daemon.metric("relay_parked_rows") == 3 for daemon in daemons), 30)
    assert (await document(site, "parked", "list"))["matched"] == 3
    assert (await document(site, "status"))["parked_rows"] == 3
    await bind(site, "nope.x")
    assert (await document(site, "parked", "redrive", "--id", "p2"))["done"] == 1
    await site.until("NOT EXISTS (SELECT FROM outbox WHERE id = 'p2')", 40)
    assert [await state(site, id_) for id_ in ("p1", "p3")] == ["parked", "parked"]
    assert (await came_once(site, good, others=1)).keys() == {"p2"}


async def test_parked_rows_are_discarded_at_their_retention(site: Site) -> None:
    """By the time since they were parked; what waits behind them goes; said and counted."""
    (daemon,) = await start(site, 1, parked_retention="2s")
    await site.insert("A", "nope.x", "K")
    await site.insert("B", "ok.x", "K")
    await until_state(site, "A", "parked")
    await site.until("NOT EXISTS (SELECT FROM outbox WHERE id = 'A')", 40)
    await until_state(site, "B", "sent")
    assert await arrivals(site, 1) == ["B"]
    await eventually(lambda: daemon.metric("relay_rows_discarded_total") == 1)
    said = [event for event in daemon.events() if event["event"] == "parked_discarded"]
    assert [(event["rows"], event["reason"]) for event in said] == [(1, "retention")]


@ONE_OR_TWO
async def test_an_unmarkable_row_is_published_again(site: Site, relays: int) -> None:
    """H7: the floors have long passed it when its fault is deleted."""
    ids = await site.insert_many(30, 6)
    await site.database.execute(
        "INSERT INTO outbox_fault (seq, id, failure_class, failure_error)"
        " SELECT seq, id, 'unmarkable', 'no' FROM outbox WHERE id = 'm7'"
    )
    await start(site, relays)
    await site.until("(SELECT count(*) FROM outbox WHERE sent_at IS NULL) = 1")
    await site.until("(SELECT min(floor) >= 30 FROM outbox_shard)")
    done = await document(site, "parked", "redrive", "--error", "unmarkable")
    assert (done["done"], done["republished"]) == (1, ["m7"])
    await site.all_sent()
    found = await arrivals(site, 30)
    assert sorted(found) == sorted(ids)
    assert found[-1] == "m7"


# ---------------------------------------------------------------- pause


@ONE_OR_TWO
async def test_pause_stops_all_relays_and_survives_a_restart(site: Site, relays: int) -> None:
    daemons = await start(site, relays)
    done = await relay(site, "pause")
    assert (done.returncode, done.stderr) == (0, "")
    assert "paused, by postgres at" in done.stdout
    for daemon in daemons:
        await daemon.not_ready("paused")
        assert daemon.metric("relay_paused") == 1
    await site.insert_many(20, 4)
    assert await daemons[0].stop() == 0
    again = site.start(name="again", **FEW_TRIES)
    await again.not_ready("paused")
    status = await document(site, "status")
    assert (status["is_paused"], status["paused_by"], status["backlog_rows"]) == (True, "postgres", 20)
    assert await site.unsent() == 20
    assert "was paused already" in (await relay(site, "pause")).stdout
    assert "resumed; postgres had paused it" in (await relay(site, "resume")).stdout
    await site.all_sent()
    assert "was not paused" in (await relay(site, "resume")).stdout
    assert len(await arrivals(site, 20)) == 20
