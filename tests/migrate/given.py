"""What the tests of the migrations share: the writers' columns, the article's insert, PostgreSQL's own programs."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import AsyncIterator

import asyncpg
import pytest

from relay.servers import find_postgres

WRITERS_COLUMNS = {
    "id": ("text", "(gen_random_uuid())::text"),
    "aggregate_type": ("text", None),
    "aggregate_id": ("text", None),
    "aggregate_version": ("bigint", None),
    "event_type": ("text", None),
    "schema_version": ("integer", "1"),
    "payload": ("json", None),
    "content_type": ("text", None),
    "content_encoding": ("text", None),
    "headers": ("jsonb", "'{}'::jsonb"),
    "exchange": ("text", None),
    "routing_key": ("text", None),
    "correlation_id": ("text", None),
    "causation_id": ("text", None),
    "producer": ("text", None),
    "traceparent": ("text", None),
    "tracestate": ("text", None),
    "priority": ("smallint", None),
    "expires_at": ("timestamp with time zone", None),
    "mandatory": ("boolean", None),
    "available_at": ("timestamp with time zone", None),
    "occurred_at": ("timestamp with time zone", "now()"),
    "created_at": ("timestamp with time zone", "now()"),
}

ARTICLE = (
    "INSERT INTO outbox (id, event_type, payload, created_at) "
    "VALUES ('01K0ORDERCREATED', 'order.created', '{\"order_id\":\"42\"}', now())"
)


@contextlib.asynccontextmanager
async def acting_as(database: asyncpg.Connection, name: str) -> AsyncIterator[None]:
    await database.execute("SET ROLE " + '"' + name.replace('"', '""') + '"')
    try:
        yield
    finally:
        await database.execute("RESET ROLE")


def psql(url: str, text: str) -> subprocess.CompletedProcess[str]:
    command = [str(find_postgres() / "psql"), "-X", "-q", "-v", "ON_ERROR_STOP=1", url]
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=60, check=False)


def dump(url: str) -> str:
    """The schema as pg_dump writes it, without the lines that differ from run to run."""
    command = [str(find_postgres() / "pg_dump"), "--schema-only", url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if "server version mismatch" in done.stderr and "RELAY_TEST_DATABASE_URL" in os.environ:
        # Never with a server of the tests' own: that is of the same installation.
        pytest.skip("the given server is newer than the pg_dump that is here")
    assert done.returncode == 0, done.stderr
    return "\n".join(line for line in done.stdout.splitlines() if not line.startswith(("--", "\\")))
