"""`relay parked` where something stands in its way: passed deadlines, faults, locks, leases, rights."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime, timedelta
from urllib.parse import urlsplit

import asyncpg
import pytest

from relay import migrate, parked, pause
from relay.config import Config
from relay.core.ports.outbox import Held
from relay.errors import DatabaseRefused
from relay.parked_rows import Action, Filter, Listing
from relay.parked_table import ParkedTable, open_parked
from relay.parked_text import details_document, outcome_lines
from relay.refusal import SUPPRESSED
from relay.servers import PostgresServer
from tests.conftest import eventually
from tests.integration.relay import REFUSALS, Relay, configured, id_of, insert, set_aside, set_fault, states

ALL = Filter()

# ---------------------------------------------------------------- deadlines


@pytest.mark.parametrize("has_failed_otherwise", [False, True])
async def test_expired_rows_need_ignore_expiry(
    database: asyncpg.Connection, settings: Config, has_failed_otherwise: bool
) -> None:
    past, future = datetime.now(UTC) - timedelta(hours=1), datetime.now(UTC) + timedelta(hours=1)
    await insert(database, "a", id="late", expires_at=past)
    await insert(database, "b", id="early", expires_at=future)
    await set_aside(database, 1, holds=False, failure_class="unroutable" if has_failed_otherwise else "expired")
    await set_aside(database, 2)
    outcome = await parked.act(settings, Action.REDRIVE, ALL)
    assert (outcome.matched, outcome.done, outcome.expired) == (2, 1, 1)
    assert "--ignore-expiry" in " ".join(outcome_lines(outcome))
    assert await states(database) == ["parked", "deferred+"]
    outcome = await parked.act(settings, Action.REDRIVE, ALL, ignore_expiry=True)
    assert outcome.done == 1
    assert "expires_at" in " ".join(outcome_lines(outcome))
    assert await states(database) == ["deferred+", "deferred+"]
    left = await database.fetch("SELECT expires_at FROM outbox ORDER BY seq")
    assert [record[0] for record in left] == [None, future]


async def test_rows_that_somebody_else_ends_meanwhile_are_told_apart(
    database: asyncpg.Connection, settings: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted, and gone before they are selected; or parked by a transaction that ends only then."""
    await insert(database, "a", "b")
    await set_aside(database, 1, 2)
    look = ParkedTable.look

    async def look_and_lose(table: ParkedTable, chosen: Filter, rows: int = 0, *, with_expired: bool = True) -> Listing:
        found = await look(table, chosen, rows, with_expired=with_expired)
        await database.execute(change)
        return found

    monkeypatch.setattr(ParkedTable, "look", look_and_lose)
    change = "UPDATE outbox SET aside = NULL, sent_at = now() WHERE seq = 1"
    outcome = await parked.act(settings, Action.REDRIVE, ALL)
    assert (outcome.matched, outcome.done, outcome.changed) == (2, 1, 1)
    change = "UPDATE outbox SET aside = 'parked', sent_at = NULL, parked_at = '2020-01-01'"
    outcome = await parked.act(settings, Action.REDRIVE, ALL)
    assert (outcome.matched, outcome.done, outcome.changed) == (2, 2, 0)


# ---------------------------------------------------------------- the fault table (H7)


async def test_redrive_of_an_unmarkable_row_lowers_the_floor_and_unseats_the_owner(
    database: asyncpg.Connection, database_url: str, settings: Config
) -> None:
    await insert(database, "a", "a")
    await set_fault(database, 1)
    relay = await Relay(database_url, "a").start()
    await database.execute("UPDATE outbox_shard SET floor = 2")
    before = dict(relay.epochs)
    (row,) = (await parked.listing(settings, Filter(errors=("unmarkable",)), 10)).rows
    assert (row.state, row.error) == ("unmarkable", "the trigger says no")
    document = details_document(await parked.details(settings, row.id, with_payload=False), with_payload=False)
    assert (document["state"], document["failure_class"], document["attempts"]) == ("unmarkable", "unmarkable", 1)
    outcome = await parked.act(settings, Action.REDRIVE, ALL)
    assert (outcome.done, outcome.republished) == (1, [row.id])
    assert "a second time" in " ".join(outcome_lines(outcome))
    assert await database.fetchval("SELECT count(*) FROM outbox_fault") == 0
    lowered = await database.fetch("SELECT shard, epoch, floor, owner FROM outbox_shard WHERE floor = 0")
    assert [tuple(record) for record in lowered] == [(row.shard, before[row.shard or 0] + 1, 0, "a-1")]
    assert await database.fetchval("SELECT count(*) FROM outbox_shard WHERE floor = 2") == 63
    await relay.release({row.shard or 0: Held(before[row.shard or 0] + 1, None)})
    relay.take(await relay.claim(64))
    assert [row.seq for row in await relay.read()] == [1, 2]
    await relay.close()


@pytest.mark.parametrize(
    ("refuse", "said"), [("RAISE EXCEPTION 'never that one'", "never that one"), ("RETURN NULL", SUPPRESSED)]
)
async def test_discard_of_an_unmarkable_row_deletes_it_or_says_why(
    database: asyncpg.Connection, settings: Config, refuse: str, said: str
) -> None:
    await insert(database, "a", "b", "c")
    for seq in (1, 2, 3):
        await set_fault(database, seq)
    await database.execute("DELETE FROM outbox WHERE seq = 3")
    await database.execute(
        f"CREATE FUNCTION no() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN {refuse}; END $$;"
        "CREATE TRIGGER no BEFORE DELETE ON outbox FOR EACH ROW WHEN (old.seq = 2) EXECUTE FUNCTION no()"
    )
    second = await id_of(database, 2)
    outcome = await parked.act(settings, Action.DISCARD, ALL)
    assert (outcome.matched, outcome.done) == (3, 2)
    ((id_, error),) = outcome.refused
    assert id_ == second
    assert said in error
    assert [record["seq"] for record in await database.fetch("SELECT seq FROM outbox_fault")] == [2]
    assert [record["seq"] for record in await database.fetch("SELECT seq FROM outbox")] == [2]


async def test_a_fault_whose_row_was_marked_by_hand_is_only_forgotten(
    database: asyncpg.Connection, settings: Config
) -> None:
    await insert(database, "a")
    await set_fault(database, 1)
    await database.execute("UPDATE outbox SET sent_at = now()")
    epochs = await database.fetch("SELECT shard, epoch FROM outbox_shard ORDER BY 1")
    outcome = await parked.act(settings, Action.REDRIVE, ALL)
    assert (outcome.done, await states(database)) == (1, ["sent"])
    assert await database.fetch("SELECT shard, epoch FROM outbox_shard ORDER BY 1") == epochs


# ---------------------------------------------------------------- what stands in the way


async def test_a_row_that_a_trigger_refuses_costs_no_other_one(database: asyncpg.Connection, settings: Config) -> None:
    await insert(database, *"abcdefg")
    await set_aside(database, *range(1, 8))
    await database.execute(
        "CREATE FUNCTION no() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'never that one'; END $$;"
        "CREATE CONSTRAINT TRIGGER no AFTER UPDATE ON outbox DEFERRABLE INITIALLY DEFERRED"
        " FOR EACH ROW WHEN (old.seq = 4) EXECUTE FUNCTION no()"
    )
    outcome = await parked.act(settings, Action.REDRIVE, ALL)
    assert (outcome.done, len(outcome.refused)) == (6, 1)
    assert await states(database) == ["deferred+"] * 3 + ["parked+"] + ["deferred+"] * 3


async def test_a_default_of_read_only_stops_no_operator(
    database: asyncpg.Connection, database_url: str, settings: Config
) -> None:
    await insert(database, "a")
    await set_aside(database, 1)
    await database.execute(f'ALTER DATABASE "{urlsplit(database_url).path[1:]}" SET default_transaction_read_only = on')
    assert (await parked.act(settings, Action.REDRIVE, ALL)).done == 1
    assert (await pause.pause(settings)).is_news
    assert (await pause.resume(settings)).is_news


@pytest.mark.parametrize("action", [Action.REDRIVE, Action.DISCARD])
async def test_a_row_whose_change_is_suppressed_costs_no_other_one(
    database: asyncpg.Connection, settings: Config, action: Action
) -> None:
    """A trigger that returns NULL says nothing: the row was said to be locked by somebody."""
    await insert(database, "a")
    await insert(database, "b", event_type="bad")
    await insert(database, "c")
    await set_aside(database, 1, 2, 3)
    await database.execute(REFUSALS["silence"])
    outcome = await parked.act(settings, action, ALL)
    assert (outcome.done, outcome.locked) == (2, 0)
    ((refused, why),) = outcome.refused
    assert refused == await id_of(database, 2)
    assert SUPPRESSED in why
    assert await states(database) == (
        ["deferred+", "parked+", "deferred+"] if action is Action.REDRIVE else ["parked+"]
    )


async def test_a_slow_trigger_makes_smaller_transactions(database: asyncpg.Connection, database_url: str) -> None:
    """Each of the batch's transactions was ended by its own time limit (L7), and tried again as it was until the command failed."""
    await insert(database, *(f"k{number}" for number in range(60)))
    await insert(database, "slow", event_type="slow")
    await insert(database, "last")
    await set_aside(database, *range(1, 63))
    await database.execute(
        "CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
        " PERFORM pg_sleep(CASE WHEN old.event_type = 'slow' THEN 5 ELSE 0.03 END); RETURN new; END $$;"
        "CREATE TRIGGER slow BEFORE UPDATE ON outbox FOR EACH ROW EXECUTE FUNCTION slow()"
    )
    outcome = await parked.act(configured(database_url, RELAY_LEASE="2s"), Action.REDRIVE, ALL)
    ((refused, why),) = outcome.refused
    assert (outcome.done, outcome.locked, outcome.changed, refused) == (61, 0, 0, await id_of(database, 61))
    assert "timeout" in why


async def test_a_row_that_an_application_keeps_locked_is_said(
    database: asyncpg.Connection, database_url: str, settings: Config
) -> None:
    await insert(database, "a", "b")
    await set_aside(database, 1, 2)
    holder = await asyncpg.connect(database_url)
    async with holder.transaction():
        await holder.execute("SELECT FROM outbox WHERE seq = 1 FOR UPDATE")
        outcome = await parked.act(settings, Action.REDRIVE, ALL)
        assert (outcome.done, outcome.locked, outcome.changed) == (1, 1, 0)
    await holder.close()
    assert await states(database) == ["parked+", "deferred+"]


async def test_a_locked_shard_is_waited_for(database: asyncpg.Connection, database_url: str, settings: Config) -> None:
    await insert(database, "a")
    await set_aside(database, 1)
    holder = await asyncpg.connect(database_url)
    transaction = holder.transaction()
    await transaction.start()
    await holder.execute("SELECT FROM outbox_shard FOR KEY SHARE")
    acting = asyncio.create_task(parked.act(settings, Action.REDRIVE, ALL))
    await eventually(lambda: _waits(database))
    await transaction.rollback()
    await holder.close()
    assert (await acting).done == 1


async def _waits(database: asyncpg.Connection) -> bool:
    return bool(
        await database.fetchval(
            "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE application_name = 'outbox-relay parked'"
            " AND wait_event_type = 'Lock' AND datname = current_database())"
        )
    )


async def test_an_operators_transaction_is_bounded_below_the_lease(
    database: asyncpg.Connection, database_url: str
) -> None:
    """L7: a frozen operator must not keep a shard for ever."""
    async with open_parked(configured(database_url, RELAY_LEASE="2s")) as table:
        session = table._session
        session.set_deadline(10)
        async with session.transaction(table._begin):
            bounds = await table._connection.fetchrow(
                "SELECT current_setting('lock_timeout'), current_setting('statement_timeout'),"
                " current_setting('idle_in_transaction_session_timeout')"
            )
            signs = await database.fetchval(
                "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND mode = 'ShareLock' AND granted"
                " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
            )
    assert tuple(bounds) == ("400ms", "1200ms", "1200ms")
    assert signs == 1, "a relay's check would take an operator for a writer"


@pytest.mark.parametrize("actions", [(Action.REDRIVE, Action.REDRIVE), (Action.REDRIVE, Action.DISCARD)])
async def test_two_operators_at_once(
    database: asyncpg.Connection, settings: Config, actions: tuple[Action, Action]
) -> None:
    """Each row is changed by exactly one of them, and neither waits for the other for ever."""
    await database.execute(
        "INSERT INTO outbox (event_type, aggregate_id) SELECT 'e', n % 50 FROM generate_series(1, 400) n"
    )
    await set_aside(database, *range(1, 401))
    first, second = await asyncio.gather(*(parked.act(settings, action, ALL, rate_per_s=4000.0) for action in actions))
    assert first.done + second.done == 400
    assert first.locked == second.locked == 0
    discarded = sum(outcome.done for outcome in (first, second) if outcome.action is Action.DISCARD)
    assert await states(database) == ["deferred+"] * (400 - discarded)


# ---------------------------------------------------------------- rights


@pytest.fixture
async def role_settings(
    database: asyncpg.Connection, database_url: str, postgres_server: PostgresServer
) -> AsyncIterator[Callable[..., Config]]:
    """The configuration of a role that has the least rights."""
    role = f"operator_{os.getpid()}"
    await database.execute(f"CREATE ROLE {role} LOGIN")
    await migrate.run(database_url, role=role)
    name = database_url.rpartition("/")[2]
    yield lambda: configured(postgres_server.url(name, user=role))
    await database.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")


async def test_the_least_role_may_do_all_of_it(
    database: asyncpg.Connection, role_settings: Callable[..., Config]
) -> None:
    settings = role_settings()
    await insert(database, "a", "a", "b", "c", "d", "e")
    await set_aside(database, 1, 3, 6)
    await set_aside(database, 2, aside="held")
    await set_fault(database, 4)
    await set_fault(database, 5)
    await database.execute("UPDATE outbox SET expires_at = now() WHERE seq = 6")
    assert (await parked.listing(settings, ALL, 10)).matched == 5
    await parked.details(settings, await id_of(database, 1), with_payload=True)
    outcome = await parked.act(settings, Action.DISCARD, Filter(keys=("a",)))
    assert (outcome.done, outcome.role) == (1, f"operator_{os.getpid()}")
    assert (await parked.act(settings, Action.DISCARD, Filter(keys=("c",)))).done == 1
    assert (await parked.act(settings, Action.REDRIVE, ALL, ignore_expiry=True)).done == 3
    assert await states(database) == ["deferred+", "deferred+", "pending", "deferred+"]
    assert (await pause.pause(settings)).is_news
    assert (await pause.resume(settings)).is_news


async def test_a_missing_right_is_said(database: asyncpg.Connection, role_settings: Callable[..., Config]) -> None:
    settings = role_settings()
    await insert(database, "a", expires_at=datetime(2020, 1, 1, tzinfo=UTC))
    await set_aside(database, 1)
    await database.execute(f"REVOKE UPDATE (expires_at) ON outbox FROM operator_{os.getpid()}")
    with pytest.raises(DatabaseRefused, match="permission denied") as refused:
        await parked.act(settings, Action.REDRIVE, ALL, ignore_expiry=True)
    assert refused.value.hint == f"grant what is missing: relay migrate --role operator_{os.getpid()}"


@pytest.mark.parametrize(("rate", "waits"), [(None, [0.5, 0.5]), (1000.0, [0.5, 0.5]), (100.0, [5.0 - 0.5, 5.0 - 0.5])])
async def test_a_batch_leaves_the_shards_as_long_as_it_took(rate: float | None, waits: list[float]) -> None:
    """Without the pause a large redrive locks shards all the time, and their renewals starve."""
    now = 100.0
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        slept.append(seconds)

    pace = parked._Pace(rate, lambda: now, sleep)
    for _ in range(3):
        await pace.begin(500)
        now += 0.5
        pace.end()
    assert slept == waits
