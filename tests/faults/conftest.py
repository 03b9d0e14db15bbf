"""A stage for each test: an outbox, a queue, a writer; the test starts the relays."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable

import pytest

from relay.servers import PostgresServer, RabbitServer
from tests.e2e.conftest import Site
from tests.e2e.conftest import site as site
from tests.faults.load import Load
from tests.faults.stage import Stage


@pytest.fixture
async def stage(
    site: Site,
    rabbit_server: RabbitServer,
    postgres_server: PostgresServer,
    record_property: Callable[[str, object], None],
    pytestconfig: pytest.Config,
) -> AsyncIterator[Stage]:
    async with contextlib.AsyncExitStack() as stack:
        load = await stack.enter_async_context(Load(site.database_url))
        here = Stage(site, load, rabbit_server, postgres_server, record_property, stack)
        # As `make test` has it; `make test-long` and `make faults` choose otherwise.
        here.is_short = pytestconfig.getoption("markexpr") == "not long"
        try:
            yield here
        finally:
            for post in here.posts:
                if post.daemon is not None:
                    post.daemon.close()
