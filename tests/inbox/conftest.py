"""The consumer's site as a fixture."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.inbox.site import Site, open_site


@pytest.fixture
async def inbox(database_url: str, amqp_url: str) -> AsyncIterator[Site]:
    async with open_site(database_url, amqp_url) as site:
        yield site
