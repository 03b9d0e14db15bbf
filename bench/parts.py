"""What each part of our table costs its writers, by elimination: `python -m bench.parts`.

One backend inserts in turns into our table, a plain outbox, and ours with one part left out or put in; what counts is the
CPU time of that backend, so that neither the disk, nor a client, nor other processes' share of the machine is measured. The
rows are inserted by a procedure, a commit a statement, without waiting for the disk.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Final

import asyncpg

from bench.load import EVENT_TYPE
from bench.procfs import run_time_s
from bench.scenarios.writers import BATCH_ROWS, INDEX, PLAIN
from bench.writing import KEYS, PAYLOAD
from relay import migrate
from relay.rows import shard_sql
from relay.servers import PostgresServer

PLAIN_NAME: Final = "a plain outbox"
OURS: Final = "our table"
VARIANTS: Final[Mapping[str, str]] = {
    PLAIN_NAME: PLAIN.format(table="plain_outbox")
    + f"{INDEX}; drop table outbox; alter table plain_outbox rename to outbox",
    OURS: "select",
    "without the doorbell": "drop trigger outbox_ring on outbox",
    "without the indexes over rows aside": "drop index outbox_aside_key, outbox_aside_due, outbox_aside_parked",
    "without the doorbell and these indexes": "drop trigger outbox_ring on outbox;"
    " drop index outbox_aside_key, outbox_aside_due, outbox_aside_parked",
    "with an index on seq alone to read by": "drop index outbox_read; create index on outbox (seq)",
    "with fill factor 100": "alter table outbox set (fillfactor = 100)",
    "with a generated column for the shard": "drop index outbox_read; alter table outbox"
    f" add column shard smallint not null generated always as ({shard_sql(of='')}) stored;"
    " create index on outbox (shard, seq) where aside is null",
    "with a CHECK on two columns": "alter table outbox add check ((aside is null) = (holds is null)"
    " and aside in ('deferred', 'scheduled', 'held', 'parked'))",
}
"""What makes each table out of a new outbox."""

SERVER: Final = {"synchronous_commit": "off", "autovacuum": "off", "checkpoint_timeout": "1h", "max_wal_size": "8GB"}
TURN_ROWS: Final = {1: 500, BATCH_ROWS: 2_500}
WARM_ROWS: Final = 2_000


@dataclass(frozen=True, slots=True)
class Cost:
    """CPU microseconds a row: the lowest quarter's bound over all turns, and the median."""

    quartile: float
    median: float


def procedure(rows: int) -> str:
    """`fill(a, b)`: the commits numbered a to b, of `rows` rows each."""
    number = "n" if rows == 1 else f"(n * {rows} + i)"
    key = f"'c-' || (hashint4({number}) & 2147483647) % {KEYS}"
    row = f"'parts-' || n % 8 || '-' || {number}, '{EVENT_TYPE}', 'customer', {key}, '{PAYLOAD}'"
    what = f"values ({row})" if rows == 1 else f"select {row} from generate_series(1, {rows}) i"
    return (
        "create procedure fill(a int, b int) language plpgsql as $$ begin for n in a..b loop"
        f" insert into outbox (id, event_type, aggregate_type, aggregate_id, payload) {what}; commit;"
        " end loop; end $$"
    )


async def costs(server: PostgresServer, rows: int, turns: int, names: Sequence[str]) -> dict[str, Cost]:
    """The cost of each variant with `rows` rows a statement, after `turns` turns of all of them. Drops its databases."""
    used: dict[str, list[float]] = {name: [] for name in names}
    commits = TURN_ROWS[rows] // rows
    async with AsyncExitStack() as exits:
        sessions: list[tuple[str, asyncpg.Connection, int]] = []
        for number, name in enumerate(names):
            database = f"parts_{rows}_{number}"
            url = server.create_database(database)
            exits.callback(server.drop_database, database)
            await migrate.run(url)
            session = await asyncpg.connect(url)
            exits.push_async_callback(session.close)
            await session.execute(VARIANTS[name])
            await session.execute(procedure(rows))
            await session.execute(f"call fill(1, {WARM_ROWS // rows})")
            sessions.append((name, session, await session.fetchval("select pg_backend_pid()")))
        for turn in range(turns):
            first = WARM_ROWS // rows + 1 + turn * commits
            for name, session, pid in sessions if turn % 2 == 0 else reversed(sessions):
                before = run_time_s(pid)
                await session.execute(f"call fill({first}, {first + commits - 1})")
                used[name].append((run_time_s(pid) - before) / (commits * rows) * 1e6)
    return {name: Cost(statistics.quantiles(each, n=4)[0], statistics.median(each)) for name, each in used.items()}


def table(rows: int, found: Mapping[str, Cost]) -> str:
    """As Markdown: each against the plain outbox, or against ours."""
    lines = [f"| {rows} a statement | µs a row | against {PLAIN_NAME} | against {OURS} |", "| --- | --- | --- | --- |"]
    for name, cost in found.items():
        from_plain, from_ours = (cost.quartile - found[base].quartile for base in (PLAIN_NAME, OURS))
        lines.append(f"| {name} | {cost.quartile:.1f} | {from_plain:+.1f} | {from_ours:+.1f} |")
    return "\n".join(lines)


async def measure(turns: int) -> None:
    with PostgresServer.start(durable=True, options=SERVER) as server:
        for rows in TURN_ROWS:
            print(table(rows, await costs(server, rows, turns, list(VARIANTS))), end="\n\n", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.parts", description=__doc__.partition("\n")[0])
    parser.add_argument("--turns", type=int, default=40, help="turns of all tables (default: 40, about two minutes)")
    asyncio.run(measure(parser.parse_args().turns))


if __name__ == "__main__":
    main()
