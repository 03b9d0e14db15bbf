"""A database with an outbox, and relays on it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import asyncpg
import pytest

from relay import migrate
from relay.config import Config
from tests.integration.relay import Relay, configured


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[asyncpg.Connection]:
    """A superuser's session in a database with an outbox."""
    await migrate.run(database_url)
    connection = await asyncpg.connect(database_url)
    yield connection
    await connection.close(timeout=5)


@pytest.fixture
async def started(database_url: str, database: asyncpg.Connection) -> AsyncIterator[Callable[..., Relay]]:
    """Makes relays; closes them."""
    relays: list[Relay] = []

    def make(instance: str = "a", **changes: Any) -> Relay:
        relays.append(Relay(database_url, instance, **changes))
        return relays[-1]

    yield make
    for relay in relays:
        await relay.close()


@pytest.fixture
def settings(database_url: str) -> Config:
    """Of an operator's command on the database."""
    return configured(database_url)
