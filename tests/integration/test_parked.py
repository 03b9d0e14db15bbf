"""`relay parked` on a real PostgreSQL: what an operator's transactions do to the table, beside relays that are not there
(the relays' half of O1 is in tests/e2e/test_parked.py)."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime, timedelta

import asyncpg
import pytest

from relay import migrate, parked, pause
from relay.config import Config
from relay.core.ports.outbox import Settlement
from relay.errors import NothingMatched, UsageError
from relay.parked_rows import Action, Filter, Listing, Outcome
from relay.parked_text import _parsed, details_document, details_lines, listing_lines, read_filter, read_rate
from tests.integration.relay import Relay, configured, id_of, insert, set_aside, states
from tests.integration.relay import parked as park

ALL = Filter()


async def seqs_of(settings: Config, chosen: Filter) -> list[int]:
    return [row.seq for row in (await parked.listing(settings, chosen, 1000)).rows]


# ---------------------------------------------------------------- the filter


async def test_filters_select_and_combine(database: asyncpg.Connection, settings: Config) -> None:
    await insert(database, "a", "b", None, event_type="order.created")
    await insert(database, "a", event_type="order.paid")
    await insert(database, "a", event_type="order.paid")
    await set_aside(database, 1, 2)
    await set_aside(database, 3, holds=False, failure_class="invalid", failure_error="header X: 100%_ too long")
    await set_aside(database, 4, failure_error=None)
    await database.execute("UPDATE outbox SET parked_at = now() - interval '2 h' WHERE seq = 1")
    assert await seqs_of(settings, ALL) == [1, 2, 3, 4]
    assert await seqs_of(settings, Filter(types=("order.paid",))) == [4]
    assert await seqs_of(settings, Filter(types=("order.paid", "order.created"))) == [1, 2, 3, 4]
    assert await seqs_of(settings, Filter(keys=("a",))) == [1, 4]
    assert await seqs_of(settings, Filter(keys=("order/b",))) == [2]
    assert await seqs_of(settings, Filter(keys=("other/b",))) == []
    assert await seqs_of(settings, Filter(errors=("invalid",))) == [3]
    assert await seqs_of(settings, Filter(errors=("no_route",))) == [1, 2]
    assert await seqs_of(settings, Filter(errors=("100%_",))) == [3]
    assert await seqs_of(settings, Filter(since_s=3600)) == [2, 3, 4]
    assert await seqs_of(settings, Filter(since_at=datetime.now(UTC) - timedelta(hours=3))) == [1, 2, 3, 4]
    assert await seqs_of(settings, Filter(keys=("a",), types=("order.created",), since_s=3600)) == []
    assert await seqs_of(settings, Filter(ids=(await id_of(database, 2), await id_of(database, 4)))) == [2, 4]
    found = await parked.listing(settings, ALL, 2)
    assert ([row.seq for row in found.rows], found.matched) == ([1, 2], 4)
    assert found.by_class == {"invalid": 1, "unroutable": 3}
    assert listing_lines(found)[-1] == "4 rows: invalid 1, unroutable 3; the first 2, --limit N shows more"


@pytest.mark.parametrize("text", ["50", "50/", "/s", "0/s", "-1/s", "50/d", "fast", "1e3/s", " 50/s", ""])
def test_a_rate_that_cannot_be_read(text: str) -> None:
    with pytest.raises(UsageError, match="allowed: a number and a unit: 50/s 600/m"):
        read_rate(text)


def test_options_are_read() -> None:
    assert (read_rate("50/s"), read_rate("600/m"), read_rate("1800/h"), read_rate(None)) == (50, 10, 0.5, None)
    assert read_filter([], [], [], [], "2h").since_s == 7200
    assert read_filter([], [], [], [], "2026-01-31").since_at == datetime(2026, 1, 31, tzinfo=UTC)
    at = read_filter([], [], [], [], "2026-01-31T08:00:00+01:00").since_at
    assert at is not None
    assert at == datetime(2026, 1, 31, 7, tzinfo=UTC)
    assert read_filter([], [], [], [], None).is_empty()
    with pytest.raises(UsageError, match="--since soon: not a time; allowed: a duration"):
        read_filter([], [], [], [], "soon")
    with pytest.raises(UsageError, match="--id: an empty text"):
        read_filter([], [], [], [""], None)


@pytest.mark.parametrize(
    ("since", "count"),
    [
        ("0001-01-01T00:00:00+00:00", 1),
        ("0001-01-01T00:00:00-23:59", 1),
        ("36500d", 1),
        ("9999-12-31T23:59:59.999999Z", 0),
        ("9999-12-31T23:59:59.999999+23:59", 0),
    ],
)
async def test_the_database_takes_every_time_that_the_option_takes(
    database: asyncpg.Connection, settings: Config, since: str, count: int
) -> None:
    """A time that UTC has no year for was the driver's error, of the kind that is a fault of ours."""
    await insert(database, "a")
    await set_aside(database, 1)
    found = await parked.listing(settings, read_filter([], [], [], [], since), 10**18 - 1)
    assert found.matched == len(found.rows) == count


# ---------------------------------------------------------------- show


async def test_show_gives_everything_but_the_payload(database: asyncpg.Connection, settings: Config) -> None:
    await insert(
        database, "a", id="m", schema_version=3, producer="shop", correlation_id="c", causation_id="d",
        traceparent="00-1", payload='{"secret":1}', headers='{"h":[1]}', expires_at=datetime(2020, 1, 1, tzinfo=UTC),
    )  # fmt: skip
    await set_aside(database, 1)
    await database.execute("UPDATE outbox SET created_at = '-infinity'")
    document = details_document(await parked.details(settings, "m", with_payload=False), with_payload=False)
    assert document.items() >= {
        "id": "m", "seq": 1, "state": "parked", "event_type": "order.created", "schema_version": 3, "attempts": 5,
        "failure_class": "unroutable", "failure_error": "312 NO_ROUTE", "failure_exchange": "events",
        "failure_routing_key": "order.created", "producer": "shop", "correlation_id": "c", "traceparent": "00-1",
        "failure_relay": "r", "failure_relay_version": "0.9", "aggregate_type": "order", "aggregate_id": "a",
        "holds": True, "created_at": "-infinity", "expires_at": "2020-01-01T00:00:00+00:00", "is_deleted": False,
    }.items()  # fmt: skip
    for name in ("first_failed_at", "last_failed_at", "parked_at"):
        assert datetime.fromisoformat(str(document[name])).tzinfo is not None
    assert "secret" not in str(document)
    shown = details_document(await parked.details(settings, "m", with_payload=True), with_payload=True)
    assert (shown["payload"], shown["payload_encoding"], shown["headers"]) == ('{"secret":1}', "utf-8", {"h": [1]})
    assert any(line.split() == ["failure_class", "unroutable"] for line in details_lines(document))


def test_a_number_that_would_come_out_otherwise_is_shown_as_text() -> None:
    """Python reads no integer of 5,001 digits, as which the database gives 1e5000, and rounds long fractions."""
    long, fine = "1" + 5000 * "0", "0.12345678901234567890123"
    text = f'{{"a": {long}, "b": {fine}, "c": 0.5, "d": -12, "e": 1e999}}'
    assert _parsed(text) == {"a": long, "b": fine, "c": 0.5, "d": -12, "e": "1e999"}


async def test_show_of_a_body_that_is_no_text(database_url: str) -> None:
    await migrate.run(database_url, payload="bytea")
    connection = await asyncpg.connect(database_url)
    await insert(connection, None, id="m", payload=b"\xff\x00")
    await set_aside(connection, 1, holds=False)
    await connection.close()
    document = details_document(
        await parked.details(configured(database_url), "m", with_payload=True), with_payload=True
    )
    assert (document["payload"], document["payload_encoding"]) == ("/wA=", "base64")


async def test_texts_that_would_command_a_terminal_do_not(database: asyncpg.Connection, settings: Config) -> None:
    await insert(database, None, id="m\x1b[2J")
    await set_aside(database, 1, holds=False, failure_error="two\nlines")
    text = "\n".join(listing_lines(await parked.listing(settings, ALL, 10)))
    assert "m\\x1b[2J" in text
    assert "two\\nlines" in text


# ---------------------------------------------------------------- redrive


async def test_redrive_makes_a_row_due_and_keeps_what_it_is(database: asyncpg.Connection, settings: Config) -> None:
    await insert(database, "a", None, "a")
    await set_aside(database, 1)
    await set_aside(database, 2, holds=False)
    await set_aside(database, 3, aside="held")
    before = await database.fetch("SELECT id, seq, attempts, failure_class, first_failed_at FROM outbox ORDER BY seq")
    outcome = await parked.act(settings, Action.REDRIVE, ALL)
    assert (outcome.matched, outcome.done) == (2, 2)
    assert await states(database) == ["deferred+", "deferred", "held+"]
    assert await database.fetchval("SELECT count(*) FROM outbox WHERE due_at <= now()") == 2
    after = await database.fetch("SELECT id, seq, attempts, failure_class, first_failed_at FROM outbox ORDER BY seq")
    assert after == before


async def test_redrive_rings(database: asyncpg.Connection, settings: Config) -> None:
    rung = asyncio.Event()
    channel = (await migrate.read_schema(database)).bell_channel
    await database.add_listener(channel, lambda *_: rung.set())
    await insert(database, "a")
    await set_aside(database, 1)
    await parked.act(settings, Action.REDRIVE, ALL)
    await asyncio.wait_for(rung.wait(), 30)


@pytest.mark.parametrize(
    ("change", "state"),
    [
        ("", "pending"),
        ("sent_at = now()", "sent"),
        ("aside = 'deferred', holds = true, due_at = now()", "deferred"),
        ("aside = 'held', holds = true", "held"),
        ("aside = 'scheduled', holds = false, due_at = now() + interval '1 h'", "scheduled"),
        ("available_at = now() + interval '1 h'", "scheduled"),
        (None, "unknown id"),
    ],
)
@pytest.mark.parametrize("action", list(Action))
async def test_an_id_that_is_not_parked_is_refused_by_its_state(
    database: asyncpg.Connection, settings: Config, action: Action, change: str | None, state: str
) -> None:
    await insert(database, "b", id="parked")
    await set_aside(database, 1)
    if change is not None:
        await insert(database, "a", id="m")
    if change:
        await database.execute(f"UPDATE outbox SET {change} WHERE id = 'm'")
    for call in (
        lambda: parked.act(settings, action, Filter(ids=("parked", "m"))),
        lambda: parked.listing(settings, Filter(ids=("m",)), 10),
        lambda: parked.details(settings, "m", with_payload=False),
    ):
        with pytest.raises(NothingMatched, match=f"^m is not parked: {state}") as refused:
            await call()
        assert refused.value.exit_code == 4
    assert (await states(database))[0] == "parked+"


async def test_the_selection_is_what_was_parked_when_it_began(database: asyncpg.Connection, settings: Config) -> None:
    """A row that parks again at once must not be redriven round and round."""
    await insert(database, "a", "b")
    await set_aside(database, 1, 2)
    found = await parked.listing(settings, ALL, 0)
    await database.execute("UPDATE outbox SET parked_at = clock_timestamp() WHERE seq = 2")
    outcome = await parked.act(settings, Action.DISCARD, ALL, until=found.observed_at)
    assert (outcome.matched, outcome.done) == (1, 1)
    assert await states(database) == ["parked+"]


async def test_limit_and_rate(database: asyncpg.Connection, settings: Config) -> None:
    await insert(database, *"abcdefghij")
    await set_aside(database, *range(1, 11))
    assert (await parked.act(settings, Action.REDRIVE, ALL, limit=3)).done == 3
    assert await states(database) == ["deferred+"] * 3 + ["parked+"] * 7
    seen: list[int] = []
    began = time.monotonic()
    outcome = await parked.act(settings, Action.REDRIVE, ALL, rate_per_s=20, on_progress=lambda o: seen.append(o.done))
    assert outcome.done == 7
    assert seen == [5, 7]
    assert time.monotonic() - began >= 0.25


async def test_many_rows_go_in_batches(database: asyncpg.Connection, settings: Config) -> None:
    await database.execute(
        "INSERT INTO outbox (event_type, aggregate_id) SELECT 'e', n % 300 FROM generate_series(1, 1200) n"
    )
    await set_aside(database, *range(1, 1201))
    seen: list[int] = []
    await parked.act(settings, Action.REDRIVE, ALL, on_progress=lambda o: seen.append(o.done))
    assert seen == [500, 1000, 1200]
    await set_aside(database, *range(1, 1201))
    assert (await parked.act(settings, Action.DISCARD, ALL)).done == 1200
    assert await states(database) == []


# ---------------------------------------------------------------- order: promotion (H3)


async def test_discard_of_the_head_promotes_its_follower(database: asyncpg.Connection, settings: Config) -> None:
    await insert(database, "a", "a", "a", "b")
    await set_aside(database, 1)
    await set_aside(database, 2, 3, aside="held")
    outcome = await parked.act(settings, Action.DISCARD, Filter(keys=("a",)))
    assert outcome.done == 1
    assert await states(database) == ["deferred+", "held+", "pending"]


async def test_discard_between_two_parked_rows_promotes_nobody(database: asyncpg.Connection, settings: Config) -> None:
    """The lower one still holds the key, whatever this command's own RELAY_ON_PARKED says."""
    await insert(database, "a", "a", "a")
    await set_aside(database, 1, 2)
    await set_aside(database, 3, aside="held")
    loose = configured(settings.database().dsn, RELAY_ON_PARKED="continue")
    await parked.act(loose, Action.DISCARD, Filter(ids=(await id_of(database, 2),)))
    assert await states(database) == ["parked+", "held+"]
    await parked.act(loose, Action.DISCARD, ALL)
    assert await states(database) == ["deferred+"]


async def test_two_rows_of_a_key_redriven_out_of_order_go_in_order(
    database: asyncpg.Connection, database_url: str, settings: Config
) -> None:
    await insert(database, "a", "a")
    await set_aside(database, 1, 2)
    relay = await Relay(database_url, "a").start()
    cursors = dict.fromkeys(relay.epochs, 100)
    await parked.act(settings, Action.REDRIVE, Filter(ids=(await id_of(database, 2),)))
    due = await relay.due(cursors, 10)
    assert ([row.seq for row in due.released], [row.seq for row in due.blocked]) == ([], [2])
    await relay.settle(Settlement(fences=dict(relay.epochs), tested=list(due.blocked)))
    assert await states(database) == ["parked+", "held+"]
    await parked.act(settings, Action.REDRIVE, Filter(ids=(await id_of(database, 1),)))
    due = await relay.due(cursors, 10)
    assert [row.seq for row in due.released] == [1]
    await relay.settle(Settlement(fences=dict(relay.epochs), sent=list(due.released)))
    assert [row.seq for row in (await relay.due(cursors, 10)).released] == [2]
    await relay.close()


async def test_a_settlement_that_parks_and_an_operator_exclude_each_other(
    database: asyncpg.Connection, database_url: str, settings: Config
) -> None:
    """Parked by a relay's own settlement, redriven, sent: the whole circle over the real statements."""
    await insert(database, "a", "a")
    relay = await Relay(database_url, "a").start()
    first, second = await relay.read()
    await relay.settle(relay.settlement(setbacks=[park(first)], followers=[second]))
    assert await states(database) == ["parked+", "held+"]
    assert (await parked.act(settings, Action.REDRIVE, ALL)).done == 1
    (row,) = (await relay.due(dict.fromkeys(relay.epochs, 100), 10)).released
    assert (row.seq, row.attempts) == (1, 1)
    await relay.settle(relay.settlement(sent=[row]))
    assert await states(database) == ["sent", "deferred+"]
    await relay.close()


# ---------------------------------------------------------------- ends


async def test_the_end_is_told_also_when_it_is_cut_short(database: asyncpg.Connection, settings: Config) -> None:
    await insert(database, *"abc")
    await set_aside(database, 1, 2, 3)
    ends: list[int] = []
    began = asyncio.Event()
    acting = asyncio.create_task(
        parked.act(
            settings, Action.REDRIVE, ALL, rate_per_s=0.1,
            on_progress=lambda _: began.set(), on_end=lambda outcome: ends.append(outcome.done),
        )
    )  # fmt: skip
    await asyncio.wait_for(began.wait(), 10)
    acting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await acting
    assert ends == [1]


async def test_nothing_matched(settings: Config, database: asyncpg.Connection) -> None:
    found: Listing = await parked.listing(settings, ALL, 10)
    outcome: Outcome = await parked.act(settings, Action.REDRIVE, Filter(types=("none",)))
    assert (found.matched, outcome.matched, outcome.done) == (0, 0, 0)


async def test_pause_and_resume_are_states(settings: Config, database: asyncpg.Connection) -> None:
    assert (await pause.resume(settings)).is_news is False
    first = await pause.pause(settings)
    assert (first.is_news, first.by) == (True, await database.fetchval("SELECT current_user::text"))
    again = await pause.pause(settings)
    assert (again.is_news, again.since) == (False, first.since)
    ended = await pause.resume(settings)
    assert (ended.is_news, ended.since, ended.by) == (True, first.since, first.by)
    assert await database.fetchval("SELECT paused_at IS NULL AND paused_by IS NULL FROM outbox_meta")
