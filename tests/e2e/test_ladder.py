"""The settings and columns that say how long a row at fault is tried, among bystanders, end to end."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tests.conftest import eventually
from tests.e2e.bystanders import ONE_OR_TWO, arrived, insert_among, start
from tests.e2e.conftest import LADDER, Daemon, Site
from tests.e2e.operator import arrivals, document, until_state

LOST = {"id": "lost", "event_type": "nope.x", "key": "l"}
BEHIND = {"id": "behind", "key": "l"}

ODD = """
import relay.broker.encode as encode
whole = encode.own_headers
def own_headers(text):
    if "odd" in text:
        return {}["nobody thought of this"]
    return whole(text)
encode.own_headers = own_headers
"""
"""A fault of the relay's own, over one row."""


async def parked(site: Site, id_: str) -> tuple[str, int]:
    """Its class and attempts."""
    await until_state(site, id_, "parked")
    shown = await document(site, "parked", "show", id_)
    return shown["failure_class"], shown["attempts"]


def counted(daemons: list[Daemon], name: str, reason: str) -> float:
    return sum(daemon.metrics().get(f'{name}{{reason="{reason}"}}', 0.0) for daemon in daemons)


# ---------------------------------------------------------------- the ladder


@ONE_OR_TWO
async def test_every_step_of_the_ladder_is_taken(site: Site, relays: int) -> None:
    """Two delays are three attempts; a jitter of a fifth, so never sooner than four fifths of them."""
    daemons = await start(site, relays, retry_delays="200ms,600ms")
    good = await insert_among(site, [LOST, BEHIND])
    assert await parked(site, "lost") == ("unroutable", 3)
    assert await arrived(site, good) == {}
    row = await site.database.fetchrow("SELECT * FROM outbox WHERE id = 'lost'")
    assert row is not None
    assert row["last_failed_at"] - row["first_failed_at"] >= 0.8 * timedelta(seconds=0.8)
    await eventually(lambda: counted(daemons, "relay_rows_parked_total", "unroutable") == 1)
    assert counted(daemons, "relay_rows_deferred_total", "unroutable") == 2
    await until_state(site, "behind", "held")


@ONE_OR_TWO
async def test_what_nobody_thought_of_is_that_rows_failure(site: Site, relays: int) -> None:
    """The ladder, then parked with the full text; it ended the relay, and the next one, for ever."""
    daemons = await start(site, relays, prelude=ODD, retry_delays="100ms")
    good = await insert_among(site, [{"id": "odd", "key": "l", "headers": '{"odd": 1}'}, BEHIND])
    assert await parked(site, "odd") == ("unknown", 2)
    assert await arrived(site, good) == {}
    shown = await document(site, "parked", "show", "odd")
    assert shown["failure_error"].startswith("KeyError: 'nobody thought of this' (<string>:")
    assert (shown["failure_exchange"], shown["failure_routing_key"]) == ("events", "ok.x")
    await until_state(site, "behind", "held")
    for daemon in daemons:
        assert await daemon.stop() == 0, daemon.text()
    await start(site, relays)
    assert (await document(site, "parked", "redrive", "--error", "unknown"))["done"] == 1
    await site.all_sent()
    assert await arrivals(site, 2) == ["odd", "behind"]


@ONE_OR_TWO
async def test_an_old_row_is_not_tried_again(site: Site, relays: int) -> None:
    """RELAY_MAX_AGE: by `created_at` and the database's clock; an old row that can go goes."""
    await start(site, relays, retry_delays=LADDER, max_age="1h")
    old = {"created_at": datetime.now(UTC) - timedelta(hours=2)}
    young = {**LOST, "id": "young", "key": "y"}
    good = await insert_among(site, [{**LOST, **old}, young, {"id": "old", "key": "o", **old}])
    assert await parked(site, "lost") == ("max_age", 1)
    await until_state(site, "young", "deferred")
    await until_state(site, "old", "sent")
    assert (await arrived(site, good, others=1)).keys() == {"old"}
    shown = await document(site, "parked", "show", "lost")
    assert "NO_ROUTE" in shown["failure_error"]


@ONE_OR_TWO
async def test_a_deadline_that_passes_on_the_ladder_ends_it(site: Site, relays: int) -> None:
    """`expired` holds nobody, though the row held its key while it was deferred."""
    await start(site, relays, retry_delays=",".join(["500ms"] * 32))
    expires_at = await site.database.fetchval("SELECT clock_timestamp() + interval '6 s'")
    good = await insert_among(site, [{**LOST, "expires_at": expires_at}, BEHIND])
    await until_state(site, "behind", "held")
    failure, attempts = await parked(site, "lost")
    assert (failure, attempts > 1) == ("expired", True)
    await until_state(site, "behind", "sent")
    assert (await arrived(site, good, others=1)).keys() == {"behind"}


# ---------------------------------------------------------------- no route


@ONE_OR_TWO
async def test_without_a_route_a_row_parks_at_once_where_that_is_wanted(site: Site, relays: int) -> None:
    await start(site, relays, retry_delays=LADDER, unroutable="park")
    good = await insert_among(site, [LOST, BEHIND])
    assert await parked(site, "lost") == ("unroutable", 1)
    assert await arrived(site, good) == {}
    await until_state(site, "behind", "held")


@ONE_OR_TWO
@pytest.mark.parametrize("unroutable", ["retry", "drop"])
async def test_a_rows_own_mandatory_wins_over_the_setting(site: Site, relays: int, unroutable: str) -> None:
    """True: returned, also under `drop`. False: no route is fine. Null: as the setting says."""
    await start(site, relays, retry_delays="100ms", unroutable=unroutable)
    rows: list[dict[str, Any]] = [
        {**LOST, "id": f"{mandatory}", "key": f"{mandatory}", "mandatory": mandatory}
        for mandatory in (True, False, None)
    ]
    good = await insert_among(site, rows)
    assert await parked(site, "True") == ("unroutable", 2)
    await until_state(site, "False", "sent")
    await until_state(site, "None", "parked" if unroutable == "retry" else "sent")
    assert await arrived(site, good) == {}


# ---------------------------------------------------------------- scheduled rows


@ONE_OR_TWO
async def test_a_scheduled_row_holds_nobody_and_goes_when_it_is_due(site: Site, relays: int) -> None:
    """Its key's later rows do not wait for it; what comes before it does hold it."""
    await start(site, relays, retry_delays=LADDER)
    now = await site.database.fetchval("SELECT clock_timestamp()")
    rows = [
        {"id": "much later", "key": "s", "available_at": now + timedelta(hours=1)},
        {"id": "now", "key": "s"},
        LOST,
        {**BEHIND, "id": "later too", "available_at": now + timedelta(seconds=3)},
    ]
    good = await insert_among(site, rows)
    assert (await arrived(site, good, others=1)).keys() == {"now"}
    await until_state(site, "much later", "scheduled")
    now = await site.database.fetchval("SELECT clock_timestamp()")
    await site.insert("later", key="s", available_at=now + timedelta(seconds=3))
    await until_state(site, "later", "sent")
    assert await site.database.fetchval("SELECT sent_at >= available_at FROM outbox WHERE id = 'later'")
    assert await arrivals(site, 1) == ["later"]
    await until_state(site, "later too", "held")
    await until_state(site, "much later", "scheduled")
