"""The adapter's tests run on uvloop, as the daemon does; those on the stub on asyncio's own loop as well."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping

import pytest
import uvloop

from .stub import StubBroker

LoopFactory = Callable[[], asyncio.AbstractEventLoop]


def pytest_asyncio_loop_factories(item: pytest.Item) -> Mapping[str, LoopFactory]:
    if item.path.name in ("test_stub.py", "test_opening.py", "test_tag_suite.py"):
        return {"uvloop": uvloop.new_event_loop, "asyncio": asyncio.new_event_loop}
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture
async def stub() -> AsyncIterator[StubBroker]:
    async with StubBroker() as stub:
        yield stub
