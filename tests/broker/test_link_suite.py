"""The suites of links on RabbitMQ and on a file; the simulation's fake passes them in `tests/sim/test_fake_broker.py`."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiormq
import pytest

from relay.broker import appender as appender_module
from relay.servers import RabbitServer
from tests.proxy import Proxy

from . import link_suite, outcome_suite
from .disk import Disk
from .places import ROOM, FilePlace, RabbitPlace

CASES = [*link_suite.LIVES, *link_suite.CONTENTS]


@pytest.fixture
async def rabbit(amqp_url: str, request: pytest.FixtureRequest) -> AsyncIterator[RabbitPlace]:
    server: RabbitServer | None = None
    if "RELAY_TEST_AMQP_URL" not in os.environ:
        server = request.getfixturevalue("rabbit_server")
    connection = await aiormq.connect(amqp_url)
    async with Proxy(amqp_url) as proxy:
        place = RabbitPlace(amqp_url, await connection.channel(), proxy, server)
        await place.set_up()
        yield place
        await place.heal()
    await connection.close()


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FilePlace]:
    disk = Disk(ROOM)
    monkeypatch.setattr(appender_module, "os", disk)
    yield FilePlace(tmp_path / "events.jsonl", disk)
    disk.answers.set()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
async def test_on_rabbitmq(rabbit: RabbitPlace, case: link_suite.Case) -> None:
    await case(rabbit)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
async def test_on_a_file(file: FilePlace, case: link_suite.Case) -> None:
    await case(file)


@pytest.mark.parametrize("case", outcome_suite.FAULTS, ids=lambda case: case.__name__)
async def test_faults_on_rabbitmq(
    rabbit: RabbitPlace, rabbit_server: RabbitServer, case: outcome_suite.FaultCase
) -> None:
    await case(rabbit)


@pytest.mark.parametrize("case", outcome_suite.FAULTS, ids=lambda case: case.__name__)
async def test_faults_on_a_file(file: FilePlace, case: outcome_suite.FaultCase) -> None:
    await case(file)


@pytest.mark.parametrize("case", outcome_suite.VERDICTS, ids=lambda case: case.__name__)
async def test_verdicts_on_rabbitmq(
    rabbit: RabbitPlace, rabbit_server: RabbitServer, case: outcome_suite.VerdictCase
) -> None:
    await case(rabbit)
