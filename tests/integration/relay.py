"""The outbox adapter as these tests use it, and rows and decisions in a line each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import asyncpg

from relay import config
from relay.config import Config
from relay.core.ports.outbox import Claim, Held, PageRequest, Setback, Settlement
from relay.message import Aside, Key, Row
from relay.outbox import PostgresOutbox
from relay.urls import DatabaseTarget
from relay.values import table_name

ALL = 64


class Relay(PostgresOutbox):
    """A relay's outbox with what a test needs: who rang, what was lost, its claims."""

    def __init__(self, url: str, instance: str, **changes: Any) -> None:
        settings: dict[str, Any] = {
            "instance": f"{instance}-1",
            "name": instance,
            "version": "0.0",
            "lease_s": 5.0,
            "marks_sent": True,
            "holds_when_parked": True,
            "is_ordered": True,
            "settle_commit": True,
            "poll_interval_s": 0.5,
        }
        table = changes.pop("table", "outbox")
        super().__init__(lambda: DatabaseTarget(url, "test"), table_name(table), **(settings | changes))
        self.rings = 0
        self.lost: list[str] = []
        self.epochs: dict[int, int] = {}

    async def start(self, shards: int = ALL) -> Relay:
        await self.open(self._on_ring, self.lost.append)
        if shards:
            self.take(await self.claim(shards))
        return self

    def _on_ring(self) -> None:
        self.rings += 1

    def take(self, claims: Iterable[Claim]) -> None:
        self.epochs.update({claim.shard: claim.epoch for claim in claims})

    async def claims(self) -> Sequence[Claim]:
        await self.start(0)
        return await self.claim(ALL)

    async def stuck(self) -> list[tuple[int, Key]]:
        """Keys whose lowest holding row is held."""
        page = await self.held_keys(range(ALL), None, 1000)
        assert page.reached is None
        return [(held.shard, held.key) for held in page.keys if held.is_lowest_held]

    def held(self, floor: int | None = None) -> dict[int, Held]:
        return {shard: Held(epoch, floor) for shard, epoch in self.epochs.items()}

    async def read(self, **changes: Any) -> list[Row]:
        """All rows of its shards, by seq."""
        return sorted((await self.page(request(self.epochs, **changes))).rows, key=lambda row: row.seq)

    def settlement(self, **decisions: Any) -> Settlement:
        return Settlement(fences=dict(self.epochs), **decisions)


def request(shards: Iterable[int], cursor: int = 0, **changes: Any) -> PageRequest:
    wanted = list(shards)
    values: dict[str, Any] = {
        "numbers": [],
        "lows": [],
        "xids": [],
        "gone": [],
        "asked": [],
        "shards": wanted,
        "cursors": [cursor] * len(wanted),
        "last_seq": 2**40,
        "beyond": False,
        "beyond_drawn": False,
        "limit": 1000,
        "inline_bytes": 16384,
    }
    return PageRequest(**(values | changes))


def deferred(row: Row, **changes: Any) -> Setback:
    values: dict[str, Any] = {
        "aside": Aside.DEFERRED,
        "delay_s": 60.0,
        "holds": True,
        "attempts": 1,
        "reason": "unroutable",
        "error": "NO_ROUTE",
        "exchange": "events",
        "routing_key": "a.b",
    }
    return Setback(row=row, **(values | changes))


def parked(row: Row, **changes: Any) -> Setback:
    return deferred(row, **({"aside": Aside.PARKED, "delay_s": 0.0} | changes))


FUNCTION: Final = (
    "CREATE FUNCTION no() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN"
    " IF old.event_type = 'bad' THEN {refuse}; END IF; RETURN {returns}; END$$;"
)
REFUSALS: Final = {
    "trigger": FUNCTION.format(refuse="RAISE EXCEPTION 'not this one'", returns="coalesce(new, old)")
    + "CREATE TRIGGER no BEFORE UPDATE OR DELETE ON outbox FOR EACH ROW EXECUTE FUNCTION no()",
    "own code": FUNCTION.format(refuse="RAISE EXCEPTION 'not this one' USING ERRCODE = 'RLY99'", returns="new")
    + "CREATE TRIGGER no AFTER UPDATE OR DELETE ON outbox FOR EACH ROW EXECUTE FUNCTION no()",
    "deferred": FUNCTION.format(refuse="RAISE EXCEPTION 'not this one'", returns="NULL")
    + "CREATE CONSTRAINT TRIGGER no AFTER UPDATE OR DELETE ON outbox DEFERRABLE INITIALLY DEFERRED"
    " FOR EACH ROW EXECUTE FUNCTION no()",
    "broken branch": FUNCTION.format(refuse="PERFORM not_this_one FROM outbox_meta", returns="coalesce(new, old)")
    + "CREATE TRIGGER no BEFORE UPDATE OR DELETE ON outbox FOR EACH ROW EXECUTE FUNCTION no()",
    "missing table": FUNCTION.format(refuse="PERFORM 1 FROM not_this_one", returns="coalesce(new, old)")
    + "CREATE TRIGGER no BEFORE UPDATE OR DELETE ON outbox FOR EACH ROW EXECUTE FUNCTION no()",
    "silence": FUNCTION.format(refuse="RETURN NULL", returns="coalesce(new, old)")
    + "CREATE TRIGGER no BEFORE UPDATE OR DELETE ON outbox FOR EACH ROW EXECUTE FUNCTION no()",
    "foreign key": "CREATE TABLE note (id text REFERENCES outbox DEFERRABLE INITIALLY DEFERRED);"
    " INSERT INTO note SELECT id FROM outbox WHERE event_type = 'bad'",
    "check": "ALTER TABLE outbox ADD CONSTRAINT not_this_one CHECK"
    " (event_type <> 'bad' OR (sent_at IS NULL AND aside IS NULL))",
}
"""Ways in which a database lets nobody change a row whose `event_type` is `bad`."""


async def insert(connection: asyncpg.Connection, *keys: str | None, **columns: Any) -> None:
    """One row a key, in one transaction each."""
    columns = {"event_type": "order.created", "payload": "{}"} | columns
    names = ", ".join(["aggregate_type", "aggregate_id", *columns])
    marks = ", ".join(f"${number}" for number in range(1, len(columns) + 3))
    for key in keys:
        await connection.execute(
            f"INSERT INTO outbox ({names}) VALUES ({marks})", "order" if key else None, key, *columns.values()
        )


async def states(connection: asyncpg.Connection) -> list[str]:
    """Each row's state by seq: its `aside` (with + where it holds), sent, or pending."""
    return [
        record[0]
        for record in await connection.fetch(
            "SELECT CASE WHEN sent_at IS NOT NULL THEN 'sent'"
            " ELSE coalesce(aside || CASE WHEN holds THEN '+' ELSE '' END, 'pending') END FROM outbox ORDER BY seq"
        )
    ]


def configured(url: str, **changes: str) -> Config:
    found, _ = config.load({"RELAY_DATABASE_URL": url, **changes})
    return found


async def set_aside(connection: asyncpg.Connection, *seqs: int, aside: str = "parked", **columns: Any) -> None:
    """Rows become parked, holding their keys, as a settlement leaves them."""
    values = {"failure_class": "unroutable", "failure_error": "312 NO_ROUTE", "attempts": 5, "holds": True} | columns
    texts = ", ".join(f"{name} = ${number}" for number, name in enumerate(values, start=3))
    await connection.execute(
        f"UPDATE outbox SET aside = $1, {texts}, first_failed_at = now() - interval '1 h', last_failed_at = now(),"
        " parked_at = CASE WHEN $1 = 'parked' THEN now() END, failure_exchange = 'events',"
        " failure_routing_key = event_type, failure_relay = 'r', failure_relay_version = '0.9' WHERE seq = ANY ($2)",
        aside, list(seqs), *values.values(),
    )  # fmt: skip


async def set_fault(connection: asyncpg.Connection, seq: int) -> None:
    """A row becomes unmarkable, as a relay records it."""
    await connection.execute(
        "INSERT INTO outbox_fault (seq, id, failure_class, failure_error, attempts, relay, relay_version)"
        " SELECT seq, id, 'unmarkable', 'the trigger says no', 1, 'r', '0.9' FROM outbox WHERE seq = $1", seq,
    )  # fmt: skip


async def id_of(connection: asyncpg.Connection, seq: int) -> str:
    return str(await connection.fetchval("SELECT id FROM outbox WHERE seq = $1", seq))
