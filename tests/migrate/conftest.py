"""A database without an outbox, and a role that owns nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator

import asyncpg
import pytest

from relay.database import connect


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[asyncpg.Connection]:
    connection = await connect(database_url)
    yield connection
    await connection.close()


@pytest.fixture
async def role(database: asyncpg.Connection, request: pytest.FixtureRequest) -> AsyncIterator[str]:
    """A role of the test's own, with a name that needs quoting."""
    name = f'o\'Neil "{request.node.name}" %s'[:60]
    quoted = '"' + name.replace('"', '""') + '"'
    await database.execute(f"CREATE ROLE {quoted} LOGIN")
    yield name
    await database.execute(f"RESET ROLE; DROP OWNED BY {quoted}; DROP ROLE {quoted}")
