"""`relay check --deep` on a real PostgreSQL: the steps, their bound in time, what they find."""

from __future__ import annotations

import asyncpg
import pytest

from relay import migrate
from relay.config import Config
from relay.database import connect
from relay.outbox_sql import fingerprint_sql
from relay.preflight import deep
from relay.preflight.finding import Level
from relay.rows import shard_sql


async def fill(database: asyncpg.Connection) -> None:
    """1,000 rows with gaps, all sent but every tenth, every shard's floor at 900."""
    await database.execute(
        "INSERT INTO outbox (aggregate_id, event_type, sent_at)"
        " SELECT 'k' || n % 50, 'e', CASE WHEN n % 10 > 0 THEN now() END FROM generate_series(1, 1000) n;"
        "DELETE FROM outbox WHERE seq < 100 OR seq BETWEEN 300 AND 500"
    )
    schema = await migrate.read_schema(database)
    await database.execute(
        f"UPDATE outbox_shard SET floor = 900, last_seq = 1000, fingerprint = {fingerprint_sql(schema, '')}"
    )


@pytest.mark.parametrize("step", [1, 7, 20_000])
async def test_every_row_is_looked_at_once(
    database: asyncpg.Connection, settings: Config, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """Whatever the size of a step, over gaps, from below the lowest row to the floors and not beyond."""
    monkeypatch.setattr(deep, "STEP_SEQS", step)
    monkeypatch.setattr(deep, "BREATH_S", 0.0)
    await fill(database)
    said: list[str] = []
    findings = await deep.check(settings, said.append)
    wanted = await database.fetch(
        f"SELECT {shard_sql()} AS shard, count(*) AS rows, min(seq) AS lowest_seq FROM outbox o"
        " WHERE sent_at IS NULL AND seq <= 900 GROUP BY 1 ORDER BY 1"
    )
    assert all(finding.level is Level.ERROR and finding.details and finding.mend for finding in findings)
    found = [finding.details or {} for finding in findings]
    assert [(each["shard"], each["rows"], each["lowest_seq"]) for each in found] == [tuple(each) for each in wanted]
    assert sum(record["rows"] for record in wanted) == 60
    assert said[0] == "seq 100 of 900, 0 rows found"


async def test_a_step_that_takes_too_long_is_made_smaller(
    database: asyncpg.Connection, settings: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cancelled by the server, and tried again with half of it, down to a size that passes."""
    await fill(database)
    widths: list[int] = []
    step = deep._Walk._step

    async def slow(self: deep._Walk, text: str, above: int, up_to: int, shards: list[int]) -> object:
        widths.append(up_to - above)
        if up_to - above > 200:
            text = f"WITH d AS MATERIALIZED (SELECT pg_sleep(60)) SELECT d.*, x.* FROM d, ({text}) x"
        return await step(self, text, above, up_to, shards)

    monkeypatch.setattr(deep, "STEP_SEQS", 1600)
    monkeypatch.setattr(deep, "STEP_TIMEOUT_S", 0.3)
    monkeypatch.setattr(deep._Walk, "_step", slow)
    findings = await deep.check(settings, lambda _: None)
    assert widths[:5] == [0, 1600, 800, 400, 200]
    assert sum(int(str((finding.details or {})["rows"])) for finding in findings) == 60


async def test_a_schema_that_relay_does_not_work_with_is_a_finding(
    database: asyncpg.Connection, settings: Config
) -> None:
    """As it is for the rest of `relay check`, which says more of it."""
    await database.execute("DROP TABLE outbox_meta")
    (finding,) = await deep.check(settings, lambda _: None)
    assert (finding.check, finding.level) == ("floors", Level.NOT_CHECKED)
    assert "outbox" in finding.text


async def test_a_step_uses_the_reading_index(database: asyncpg.Connection, settings: Config) -> None:
    """With statistics that are out of date."""
    await fill(database)
    connection = await connect(settings.database())
    try:
        walk = deep._Walk(connection, await migrate.read_schema(connection), lambda _: None)
        text = f"EXPLAIN {walk._text('deep')}"
        plan = "\n".join(record[0] for record in await walk._step(text, 0, 100, [1, 2]))
    finally:
        await connection.close(timeout=5)
    assert "outbox_read" in plan
    assert "Seq Scan on outbox o" not in plan
