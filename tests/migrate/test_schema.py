"""The schema that `relay migrate` makes: its columns, its indexes, its shards, its doorbell."""

from __future__ import annotations

import asyncio
from typing import Any

import asyncpg
import pytest

from relay import migrate
from relay.database import connect
from relay.errors import (
    UsageError,
)
from relay.message import PayloadType
from relay.rows import shard_sql
from tests.conftest import eventually
from tests.migrate.given import ARTICLE, WRITERS_COLUMNS

KEY_HASH = "hashtextextended((coalesce(aggregate_type, '') || chr(31) || aggregate_id) COLLATE \"C\", 0)"

# ---------------------------------------------------------------- what it makes


async def test_the_articles_insert_works_word_for_word(database: asyncpg.Connection) -> None:
    done = await migrate.migrate(database)
    assert (done.version_before, done.schema.version) == (0, migrate.SCHEMA_VERSION)
    await database.execute(ARTICLE)
    row = await database.fetchrow("SELECT * FROM outbox")
    assert (row["seq"], row["id"], row["event_type"]) == (1, "01K0ORDERCREATED", "order.created")
    assert (row["payload"], row["headers"], row["schema_version"]) == ('{"order_id":"42"}', "{}", 1)
    assert (row["sent_at"], row["aside"], row["holds"], row["attempts"]) == (None, None, None, 0)
    assert row["occurred_at"] == row["created_at"]


async def test_columns_and_defaults_are_the_contracts(database: asyncpg.Connection) -> None:
    await migrate.migrate(database)
    columns = await database.fetch(
        "SELECT attname, format_type(atttypid, atttypmod) AS type, attnotnull, "
        "pg_get_expr(adbin, adrelid) AS value FROM pg_attribute "
        "LEFT JOIN pg_attrdef ON adrelid = attrelid AND adnum = attnum "
        "WHERE attrelid = 'outbox'::regclass AND attnum > 0"
    )
    found = {column["attname"]: (column["type"], column["value"]) for column in columns}
    assert {name: found[name] for name in WRITERS_COLUMNS} == WRITERS_COLUMNS
    required = {column["attname"] for column in columns if column["attnotnull"]}
    assert required == {"seq", "attempts", "id", "event_type"}


@pytest.mark.parametrize("payload", PayloadType)
async def test_each_payload_type_is_kept_and_read_back(database: asyncpg.Connection, payload: PayloadType) -> None:
    await migrate.migrate(database, payload=payload)
    kind = await database.fetchval(
        "SELECT format_type(atttypid, -1) FROM pg_attribute WHERE attrelid = 'outbox'::regclass AND attname = 'payload'"
    )
    assert kind == payload
    assert (await migrate.migrate(database)).schema.payload_type == payload
    other = PayloadType.TEXT if payload != PayloadType.TEXT else PayloadType.JSON
    with pytest.raises(UsageError, match=f"is {payload}, not {other}"):
        await migrate.migrate(database, payload=other)


async def test_a_writers_null_or_odd_value_never_fails_its_transaction(database: asyncpg.Connection) -> None:
    await migrate.migrate(database)
    await database.execute(
        "INSERT INTO outbox (event_type, payload, headers, schema_version, created_at, occurred_at, "
        "priority, expires_at, aggregate_version, exchange) "
        "VALUES ('', NULL, NULL, NULL, NULL, NULL, -1, '-infinity', -5, '')"
    )


async def test_the_shard_is_the_hash_of_the_key_or_of_the_id(database: asyncpg.Connection) -> None:
    await migrate.migrate(database)
    await database.execute(
        "INSERT INTO outbox (id, event_type, aggregate_type, aggregate_id) VALUES "
        "('a', 'e', 'order', '7'), ('b', 'e', 'order', '7'), ('c', 'e', NULL, '7'), ('d', 'e', NULL, NULL)"
    )
    rows = await database.fetch(
        f"SELECT id, {shard_sql()} AS shard, hashtextextended(CASE id WHEN 'd' THEN 'd' ELSE '7' END, "
        "hashtext(CASE WHEN id < 'c' THEN 'order' ELSE '' END)) & 63 AS wanted FROM outbox o"
    )
    assert [row["shard"] for row in rows] == [row["wanted"] for row in rows]


async def test_keys_that_are_one_are_of_one_shard_and_ids_spread_over_all(database: asyncpg.Connection) -> None:
    """No type and an empty one are the same key; and an operator's command finds the shard by the key alone."""
    await migrate.migrate(database)
    await database.execute(
        "INSERT INTO outbox (event_type, aggregate_type, aggregate_id)"
        " SELECT 'e', t, i::text FROM generate_series(1, 2000) i, unnest(ARRAY['', NULL, 'order']) t"
    )
    rows = await database.fetch(
        f"SELECT count(DISTINCT {shard_sql()}) AS shards, count(*) AS rows FROM outbox o"
        " GROUP BY coalesce(aggregate_type, ''), aggregate_id"
    )
    assert all(row["shards"] == 1 for row in rows)
    of_order = f"SELECT count(*) FROM outbox o WHERE aggregate_type = 'order' GROUP BY {shard_sql()}"
    shares = [row["count"] for row in await database.fetch(of_order)]
    assert len(shares) == 64
    assert min(shares) > 2000 / 64 / 3


async def test_there_are_64_free_shards_and_no_cache_on_the_sequence(database: asyncpg.Connection) -> None:
    await migrate.migrate(database)
    shards = await database.fetch("SELECT * FROM outbox_shard ORDER BY shard")
    assert [row["shard"] for row in shards] == list(range(64))
    assert all((row["epoch"], row["floor"], row["owner"], row["leased_until"]) == (0, 0, None, None) for row in shards)
    assert await database.fetchval("SELECT seqcache FROM pg_sequence WHERE seqrelid = 'outbox_seq_seq'::regclass") == 1
    assert await database.fetchval("SELECT pg_get_serial_sequence('outbox', 'seq')") == "public.outbox_seq_seq"


async def test_marks_are_hot(database: asyncpg.Connection) -> None:
    """A mark that changed an indexed column, or found no room on its page, would write every index anew."""
    await migrate.migrate(database)
    await database.execute(
        "INSERT INTO outbox (event_type, aggregate_type, aggregate_id, payload) "
        "SELECT 'order.created', 'order', (i % 500)::text, json_build_object('pad', repeat('x', 230)) "
        "FROM generate_series(1, 5000) i"
    )
    for first in range(1, 5001, 500):
        await database.execute(
            "WITH t AS (SELECT ctid c, seq s FROM outbox WHERE seq >= $1 AND seq < $1 + 500 "
            "           FOR NO KEY UPDATE SKIP LOCKED) "
            "UPDATE outbox o SET sent_at = now() FROM t WHERE o.ctid = t.c AND o.seq = t.s",
            first,
        )

    async def updates() -> Any:
        row = await database.fetchrow(
            "SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables WHERE relname = 'outbox'"
        )
        return row if row["n_tup_upd"] >= 5000 else None

    seen: Any = await eventually(updates)
    assert seen["n_tup_hot_upd"] >= 0.99 * seen["n_tup_upd"]


async def test_case_24_keys_of_9_kb_are_inserted_and_set_aside(database: asyncpg.Connection) -> None:
    """A btree entry holds 2,700 bytes: an index over the key would fail the insert or the move aside."""
    await migrate.migrate(database)
    await database.execute(
        "INSERT INTO outbox (event_type, aggregate_type, aggregate_id) "
        "SELECT 'e', string_agg(md5(random()::text), ''), string_agg(md5(random()::text), '') "
        "FROM generate_series(1, 288)"
    )
    await database.execute("INSERT INTO outbox (event_type, aggregate_id) VALUES ('e', 'plain'), ('e', NULL)")
    for aside, holds in (("scheduled", False), ("held", True), ("deferred", True), ("parked", True)):
        await database.execute(
            "UPDATE outbox SET aside = $1, holds = $2, due_at = now(), failure_error = repeat('x', 9000)",
            aside,
            holds,
        )
    plan = await database.fetch(
        f"EXPLAIN SELECT seq FROM outbox WHERE {KEY_HASH} = $1 AND seq < $2 AND aside IS NOT NULL", 1, 1
    )
    assert any("outbox_aside_key" in line[0] for line in plan)


async def test_reads_and_due_times_have_their_index(database: asyncpg.Connection) -> None:
    await migrate.migrate(database)
    await database.execute("SET enable_seqscan = off")
    for query, index in (
        ("seq > 9 AND aside IS NULL ORDER BY seq", "outbox_read"),
        ("due_at <= now() AND aside IN ('deferred', 'scheduled') ORDER BY due_at", "outbox_aside_due"),
        ("holds AND parked_at < now() AND aside = 'parked' ORDER BY parked_at", "outbox_aside_parked"),
    ):
        lines = await database.fetch(f"EXPLAIN SELECT seq FROM outbox o WHERE {shard_sql()} = 3 AND {query} LIMIT 5")
        plan = "\n".join(line[0] for line in lines)
        assert f"using {index}" in plan
        assert "Sort" not in plan


# ---------------------------------------------------------------- the doorbell


async def triggers(database: asyncpg.Connection) -> list[str]:
    rows = await database.fetch("SELECT tgname FROM pg_trigger WHERE tgrelid = 'outbox'::regclass")
    return [row["tgname"] for row in rows]


async def test_the_doorbell_goes_and_comes_and_stays_as_chosen(database: asyncpg.Connection) -> None:
    for wanted, expected in ((None, True), (False, False), (None, False), (True, True), (None, True)):
        schema = (await migrate.migrate(database, doorbell=wanted)).schema
        assert schema.has_doorbell == expected
        assert await triggers(database) == (["outbox_ring"] if expected else [])


async def test_an_insert_rings_only_while_a_relay_sleeps(database: asyncpg.Connection, database_url: str) -> None:
    schema = (await migrate.migrate(database)).schema
    rings: asyncio.Queue[str] = asyncio.Queue()
    sleeper, listener = await connect(database_url), await connect(database_url)
    try:
        await listener.add_listener(schema.bell_channel, lambda *said: rings.put_nowait(str(said[3])))
        await database.execute(ARTICLE)
        assert await sleeper.fetchval("SELECT outbox_bell_wait(2000)")
        await database.execute("INSERT INTO outbox (event_type) VALUES ('e')")
        assert await asyncio.wait_for(rings.get(), 30) == ""
        assert rings.empty()
        await sleeper.fetchval("SELECT pg_advisory_unlock($1::int, $2::int)", *schema.bell)
        transaction = database.transaction()
        await transaction.start()
        await database.execute("INSERT INTO outbox (event_type) VALUES ('e')")
        assert not await sleeper.fetchval("SELECT outbox_bell_wait(50)")
        await transaction.commit()
        await database.execute(f"NOTIFY {schema.bell_channel}, 'last'")
        assert await asyncio.wait_for(rings.get(), 30) == "last"
    finally:
        await sleeper.close()
        await listener.close()


async def test_the_search_path_of_a_writer_does_not_matter(database: asyncpg.Connection) -> None:
    await migrate.migrate(database)
    await database.execute("SET search_path = ''")
    await database.execute("INSERT INTO public.outbox (event_type) VALUES ('e')")
    assert await database.fetchval("SELECT public.outbox_bell_wait(10)")
    await database.execute("INSERT INTO public.outbox (event_type) VALUES ('e')")
