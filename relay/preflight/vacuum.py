"""The preflight's look at autovacuum: whether it keeps up with the outbox, and who holds it back.

A queue's table lives on vacuum: marked and purged rows are dead rows, and reads slow down as they pile up.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from relay.preflight.finding import Finding, not_checked, ok, warning
from relay.text import many

SNAPSHOT_AGE_S_MAX: Final = 3600.0
SLOT_AGE_TRANSACTIONS_MAX: Final = 10_000_000

DEAD_ROWS_MIN: Final = 10_000
DUE_FACTOR: Final = 10
"""So many times more dead rows than make a vacuum due, and it did not come: it lags."""

VACUUMED_S_AGO_MAX: Final = 600.0


def judge(facts: Mapping[str, Any], table: str) -> Iterator[Finding]:
    """Findings about the row of preflight_vacuum.sql; `table` is the quoted name."""
    yield _autovacuum(facts, table)
    yield from _transactions(facts)


def _autovacuum(facts: Mapping[str, Any], table: str) -> Finding:
    if not facts["is_on"]:
        return warning("autovacuum", "the server's autovacuum is off: dead rows pile up", "autovacuum = on")
    if not facts["is_on_here"]:
        return warning(
            "autovacuum",
            "it is off for the outbox: dead rows pile up",
            f"ALTER TABLE {table} RESET (autovacuum_enabled)",
        )
    dead, due_at = facts["dead_rows"], facts["due_at_rows"]
    if dead is None:
        return not_checked("autovacuum", "the server has no statistics of the outbox")
    ago = facts["vacuumed_s_ago"]
    lags = dead > DEAD_ROWS_MIN and dead > DUE_FACTOR * due_at and (ago is None or ago > VACUUMED_S_AGO_MAX)
    last = "never" if ago is None else f"{ago / 60:.0f} min ago"
    if lags:
        return warning(
            "autovacuum",
            f"lags: {dead:,} dead rows, {due_at:,.0f} would make it due, last run: {last}",
            f"VACUUM {table}; then raise autovacuum_max_workers or lower autovacuum_vacuum_cost_delay,"
            " and see `transactions`",
        )
    return ok("autovacuum", f"keeps up: {many(dead, 'dead row')}, last run: {last}")


def _transactions(facts: Mapping[str, Any]) -> Iterator[Finding]:
    """Who keeps dead rows alive. A transaction that writes nothing does it too."""
    held = [
        warning("transactions", f"{what.format(age=age)}: dead rows pile up meanwhile", mend)
        for age, age_max, what, mend in (
            (
                _hours(facts["oldest_transaction_s"]),
                SNAPSHOT_AGE_S_MAX / 3600,
                "a transaction has been open for {age:.1f} h",
                "find it in pg_stat_activity (order by xact_start) and end it",
            ),
            (
                _hours(facts["oldest_prepared_s"]),
                SNAPSHOT_AGE_S_MAX / 3600,
                "a prepared transaction has waited for {age:.1f} h",
                "find it in pg_prepared_xacts; COMMIT PREPARED or ROLLBACK PREPARED",
            ),
            (
                facts["slot_age_transactions"],
                SLOT_AGE_TRANSACTIONS_MAX,
                "a replication slot holds back the last {age:,} transactions",
                "find it in pg_replication_slots; mend its consumer, or drop it",
            ),
        )
        if age is not None and age > age_max
    ]
    yield from held
    if held:
        return
    if facts["sees_sessions"]:
        yield ok("transactions", "none is old enough to hold vacuum back")
    else:
        yield not_checked(
            "transactions", "this role sees no other role's sessions", "GRANT pg_read_all_stats to it, for this"
        )


def _hours(seconds: float | None) -> float | None:
    return None if seconds is None else seconds / 3600
