"""What each part of the table costs its writers: the tables are what they are called, and each is measured."""

from __future__ import annotations

import pytest

from bench import parts
from bench.scenarios.writers import BATCH_ROWS
from relay.servers import PostgresServer


@pytest.mark.parametrize("rows", [1, BATCH_ROWS])
async def test_every_variant_is_made_and_measured(
    postgres_server: PostgresServer, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "WARM_ROWS", 200)
    monkeypatch.setattr(parts, "TURN_ROWS", {rows: 200})
    before = postgres_server.sql("select count(*) from pg_database")
    found = await parts.costs(postgres_server, rows, 2, list(parts.VARIANTS))
    assert list(found) == list(parts.VARIANTS)
    assert all(cost.quartile > 0 for cost in found.values())
    assert postgres_server.sql("select count(*) from pg_database") == before
    text = parts.table(rows, found)
    assert f"| {parts.PLAIN_NAME} | {found[parts.PLAIN_NAME].quartile:.1f} | +0.0 |" in text
