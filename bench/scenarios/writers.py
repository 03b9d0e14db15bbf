"""Scenario `writers`: what the relay's table costs those who write to it, against an outbox without a relay's needs.

The plain outbox has the same columns, `id` as primary key, and one index on `seq`; `bare` lacks
that index. Pairs are interleaved: plain, ours, ours, plain, so that the tables' growth and the machine's minutes hit both.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Final

from bench.process import Relay
from bench.proof import expect_no_complaints
from bench.rig import Rig
from bench.step import Form, Run, Step
from bench.writing import commits_per_s

PLAIN: Final = """
    create table {table} (like outbox including defaults including identity);
    alter table {table} add primary key (id);"""
INDEX: Final = "create index on plain_outbox (seq)"
PAIR: Final = ("plain_outbox", "outbox", "outbox", "plain_outbox")
BATCH_ROWS: Final = 100
MANY: Final = ((8, 1), (8, BATCH_ROWS))
ALONE: Final = ((1, 1), (1, BATCH_ROWS))
"""Writers and rows a commit."""


def steps(form: Form) -> Sequence[Step]:
    seconds = form.seconds(1, 10)
    pairs_s = 4.0 + 2 * len(PAIR) * (seconds + 0.2)
    is_once = not form.is_long
    return [
        Step("writers", "eight", pairs_s, lambda rig: _pairs(rig, MANY, seconds)),
        Step("writers", "one", pairs_s, lambda rig: _pairs(rig, ALONE, seconds), is_once),
        Step("writers", "busy", 6.0 + 4 * seconds, lambda rig: _busy(rig, seconds), is_once),
        Step("writers", "bare", 2.0 + 2 * seconds, lambda rig: _bare(rig, seconds), is_once),
    ]


def _pairs(rig: Rig, loads: Sequence[tuple[int, int]], seconds: int) -> Sequence[Run]:
    """Without a relay."""
    runs = []
    with rig.fresh_database() as database:
        rig.sql(PLAIN.format(table="plain_outbox") + INDEX, database)
        rig.wait_until_quiet()
        for writers, rows in loads:
            rates: dict[str, list[float]] = {table: [] for table in PAIR}
            wal = dict.fromkeys(PAIR, 0.0)
            for table in PAIR:
                before = rig.wal_bytes()
                rates[table].append(commits_per_s(rig, database, table, writers, seconds, rows))
                written = rates[table][-1] * seconds * rows
                wal[table] = (rig.wal_bytes() - before) / written
            ours, plain = (statistics.mean(rates[table]) for table in ("outbox", "plain_outbox"))
            runs.append(
                {
                    "variant": _variant(writers, rows),
                    "commits_per_s": round(ours, 1),
                    "commits_per_s_plain": round(plain, 1),
                    "ratio": round(ours / plain, 4),
                    "wal_bytes_per_row": round(wal["outbox"]),
                    "wal_bytes_per_row_plain": round(wal["plain_outbox"]),
                }
            )
    expect_no_complaints(rig)
    return runs


def _busy(rig: Rig, seconds: int) -> Sequence[Run]:
    """Ours while a relay sends what is written; the plain one beside it, while that relay is idle again."""
    runs = []
    with rig.fresh_database() as database, rig.fresh_queue():
        rig.sql(PLAIN.format(table="plain_outbox") + INDEX, database)
        rig.wait_until_quiet()
        with Relay(rig, database) as relay:
            relay.wait_until_ready()
            for rows in (1, BATCH_ROWS):
                rig.wait_until_sent(database)
                plain = commits_per_s(rig, database, "plain_outbox", 8, seconds, rows)
                ours = commits_per_s(rig, database, "outbox", 8, seconds, rows)
                runs.append(
                    {
                        "variant": f"busy, {_variant(8, rows)}",
                        "commits_per_s": round(ours, 1),
                        "commits_per_s_plain": round(plain, 1),
                        "ratio": round(ours / plain, 4),
                    }
                )
    expect_no_complaints(rig)
    return runs


def _bare(rig: Rig, seconds: int) -> Sequence[Run]:
    """A table that nobody could relay from in order."""
    with rig.fresh_database() as database:
        rig.sql(PLAIN.format(table="bare_outbox"), database)
        rig.wait_until_quiet()
        rates = {rows: commits_per_s(rig, database, "bare_outbox", 8, seconds, rows) for rows in (1, BATCH_ROWS)}
    expect_no_complaints(rig)
    return [{"variant": f"bare, {_variant(8, rows)}", "commits_per_s": round(rate, 1)} for rows, rate in rates.items()]


def _variant(writers: int, rows: int) -> str:
    return f"{writers} writers, {'single rows' if rows == 1 else f'batches of {rows}'}"
