"""`relay demo`: the whole path on throwaway servers, a relay killed midway, and a verdict.

    orders DB -> outbox -> relay (killed, restarted) -> exchange -> queue -> consumer (crashed once) -> inventory DB
                                                                      ^        |
                                                                      +- retry queues, parking (redriven)

Everything is private and removed at the end, also on Ctrl-C: the servers, their directories, the relay's
process.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Final

from relay.demo import process, shop, stock
from relay.demo.process import RelayFailed, RelayProcess
from relay.demo.verdict import Evidence, Line, Verdict, judge
from relay.errors import CheckFailed, explaining
from relay.inbox import Outcome
from relay.servers import PostgresServer, RabbitServer, free_port
from relay.topology import names

__all__ = ["Line", "RelayFailed", "Verdict", "run"]

TRADE_S: Final = 6.0
"""How long the writers write; with servers, drain, redrive and verdict the demo stays well below a minute on two
cores.
"""

KILL_AFTER_PUBLISHED: Final = 500
SCENE_TIMEOUT_S: Final = 90.0

Say = Callable[[str], None]


async def run(step: Say, gauge: Say) -> Verdict:
    """Play it all. `step` is told what begins, `gauge` the numbers, several times a second.

    Raises ServersUnavailable, ServerFailed, RelayFailed, or CheckFailed when something that had to happen
    did not happen in time. A cancellation (SIGINT, SIGTERM) cleans up like an end.
    """
    began = time.monotonic()
    step("starting a private PostgreSQL and a private RabbitMQ")
    async with _servers() as (postgres, rabbit):
        with tempfile.TemporaryDirectory(prefix="relay-demo-") as directory:
            return await _Demo(postgres, rabbit, Path(directory), step, gauge).play(began)


@contextlib.asynccontextmanager
async def _servers() -> AsyncIterator[tuple[PostgresServer, RabbitServer]]:
    """Both servers, started side by side. What started is closed, also when the other one fails."""
    postgres = asyncio.create_task(asyncio.to_thread(PostgresServer.start))
    rabbit = asyncio.create_task(asyncio.to_thread(RabbitServer.start))
    try:
        # Shielded: a thread cannot be cancelled, so on Ctrl-C its start is waited for below, and undone.
        yield await asyncio.shield(postgres), await asyncio.shield(rabbit)
    finally:
        for outcome in await asyncio.gather(postgres, rabbit, return_exceptions=True):
            if not isinstance(outcome, BaseException):
                outcome.close()


class _Demo:
    def __init__(self, postgres: PostgresServer, rabbit: RabbitServer, directory: Path, step: Say, gauge: Say) -> None:
        self._step = step
        self._gauge = gauge
        self._postgres = postgres
        self._orders_url, self._inventory_url = postgres.url("orders"), postgres.url("inventory")
        self._amqp_url = rabbit.amqp_url()
        self._shop = shop.Shop(self._orders_url)
        self._audit = stock.Audit(self._amqp_url)
        self._stock = stock.Stock(self._inventory_url, self._amqp_url)
        self._topology = directory / "topology.toml"
        settings = {"RELAY_DATABASE_URL": self._orders_url, "RELAY_AMQP_URL": self._amqp_url}
        self._settings = {
            **settings,
            "RELAY_INBOX_DATABASE_URL": self._inventory_url,
            "RELAY_MANAGEMENT_URL": rabbit.management_url,
        }
        self._relay = RelayProcess(settings, free_port(), directory / "relay.log")
        self._kills = 0
        self._crashes = 0
        self._redriven = 0
        self._exit_code = 1

    async def play(self, began: float) -> Verdict:
        self._step("relay migrate, relay inbox migrate, relay topology apply")
        await self._prepare()
        try:
            async with asyncio.TaskGroup() as group:
                company = [group.create_task(work()) for work in (self._audit.work, self._stock.work, self._show)]
                await self._scenes(group)
                for task in company:
                    task.cancel()
        except BaseExceptionGroup as failures:
            raise explaining(failures) from failures
        finally:
            await self._relay.close()
        committed, marked_sent = await shop.committed_events(self._orders_url)
        return judge(
            Evidence(
                committed=committed,
                acknowledged=frozenset(self._shop.committed),
                rolled_back=frozenset(self._shop.rolled_back),
                arrivals=self._audit.arrivals,
                duplicates=self._stock.count(Outcome.DUPLICATE),
                retried=self._stock.count(Outcome.RETRIED),
                parked=self._stock.count(Outcome.PARKED),
                redriven=self._redriven,
                left_parked=await self._stock.ready(names.parking_queue(stock.QUEUE)),
                crashes=self._crashes,
                effects=await self._stock.effects(),
                marked_sent=marked_sent,
                kills=self._kills,
                exit_code=self._exit_code,
                elapsed_s=time.monotonic() - began,
            )
        )

    async def _prepare(self) -> None:
        for name, schema in (("orders", shop.SCHEMA), ("inventory", stock.SCHEMA)):
            await asyncio.to_thread(self._postgres.create_database, name)
            await asyncio.to_thread(self._postgres.sql, schema, name)
        stock.write_topology(self._topology)
        await asyncio.gather(
            process.command(self._settings, "migrate"),
            process.command(self._settings, "inbox", "migrate"),
            process.command(self._settings, "topology", "apply", str(self._topology)),
        )

    async def _scenes(self, group: asyncio.TaskGroup) -> None:
        self._step(f"{shop.WRITERS} writers begin; one transaction in ten is rolled back")
        is_enough = asyncio.Event()
        trade = group.create_task(self._shop.trade(TRADE_S, is_enough))
        await self._relay.start()
        self._step("the relay is ready")
        await self._until("the relay is in the middle of it", self._is_relay_busy)
        await self._relay.kill()
        self._kills += 1
        self._step("the relay got SIGKILL")
        await self._relay.start()
        self._step("another relay is ready")
        arrived = len(self._audit.arrivals)
        await self._until("messages flow again", lambda: _at_once(len(self._audit.arrivals) > arrived + 200))
        self._stock.crash_wanted.set()
        await self._until("the consumer crashes", lambda: _at_once(not self._stock.crash_wanted.is_set()))
        self._crashes += 1
        self._step("the consumer crashed after a COMMIT, before its acknowledgement")
        is_enough.set()
        await trade
        self._step("the writers are done; waiting for the last messages")
        await self._until("every event arrives", self._has_all_arrived)
        self._step("the relay gets SIGTERM")
        self._exit_code = await self._relay.stop()
        await self._until("the consumer has nothing left to try", self._is_settled)
        self._step(f"{self._stock.count(Outcome.PARKED)} messages are parked; the catalogue is mended, relay redrive")
        self._stock.is_mended = True
        await self._until("every event has taken effect", self._has_all_taken_effect)

    async def _show(self) -> None:
        while True:
            arrived, distinct = len(self._audit.arrivals), len(self._audit.distinct)
            self._gauge(
                f"        committed {len(self._shop.committed):,}"
                f"  rolled back {len(self._shop.rolled_back):,}"
                f"  delivered {distinct:,}  duplicates {arrived - distinct:,}"
                f"  applied {self._stock.count(Outcome.HANDLED):,}  retried {self._stock.count(Outcome.RETRIED):,}"
                f"  parked {self._stock.count(Outcome.PARKED):,}"
            )
            await asyncio.sleep(0.2)

    async def _until(self, what: str, holds: Callable[[], Awaitable[bool]]) -> None:
        """Wait for a state; a relay that ends meanwhile and a state that never comes are failures."""
        try:
            async with asyncio.timeout(SCENE_TIMEOUT_S):
                while not await holds():
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise CheckFailed(f"the demo waited {SCENE_TIMEOUT_S:.0f} s until {what}, in vain") from None

    async def _is_relay_busy(self) -> bool:
        """Enough is out, and some of it still waits for its confirm: the worst moment to die."""
        self._relay.expect_alive()
        published = await self._relay.metric("relay_published_total")
        return published >= KILL_AFTER_PUBLISHED and await self._relay.metric("relay_in_flight_messages") > 0

    async def _has_all_arrived(self) -> bool:
        self._relay.expect_alive()
        return self._audit.distinct >= self._shop.committed

    async def _is_settled(self) -> bool:
        """What has not taken effect is parked."""
        missing = len(self._shop.committed) - len(self._stock.applied)
        return missing <= self._stock.count(Outcome.PARKED) and await self._parked() >= missing

    async def _has_all_taken_effect(self) -> bool:
        """Redrives what is parked, until nothing is: a version that came back too early may be parked once more."""
        if len(self._stock.applied) >= len(self._shop.committed):
            return True
        if waiting := await self._parked():
            await process.command(self._settings, "redrive", names.parking_queue(stock.QUEUE), "--yes")
            self._redriven += waiting
        return False

    async def _parked(self) -> int:
        await asyncio.sleep(0.2)
        return await self._stock.ready(names.parking_queue(stock.QUEUE))


async def _at_once(value: bool) -> bool:
    return value
