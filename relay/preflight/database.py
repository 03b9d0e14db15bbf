"""The preflight's look at PostgreSQL: connection, clock, proxy, schema, and what the current role may do."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from relay.choices import SentRows
from relay.config import Config, Unroutable
from relay.database import close, connect, fill, literal, sql_file
from relay.errors import DatabaseError, RelayError, SchemaMissing
from relay.migrate import Schema, read_schema
from relay.preflight import pending, proxy, vacuum
from relay.preflight.finding import Finding, Level, error, not_checked, ok, warning
from relay.preflight.pending import Pending
from relay.preflight.queries import fetch_one
from relay.route import Router
from relay.rows import shard_sql

if TYPE_CHECKING:
    from relay.database import Connection

TESTED: Final = range(14, 19)
CONNECTIONS_OF_A_RELAY: Final = 3
CLOCK_OFFSET_S_MAX: Final = 2.0
GRANT: Final = "grant this role what it needs: relay migrate --role NAME, as the table's owner"


async def check(config: Config) -> tuple[list[Finding], Pending | None]:
    """Everything about the database, and what waits there for the broker (None: nobody could look). What cannot be
    reached or read is a finding, not an exception.
    """
    try:
        target = config.database()
        connection = await connect(target, application_name="outbox-relay check")
    except RelayError as failure:
        mend = failure.hint or "look at RELAY_DATABASE_URL, the server and pg_hba.conf"
        return [error("database", failure.message, mend)], None
    findings: list[Finding] = []
    waiting: Pending | None = None
    try:
        findings.extend(await _server(connection, target.address))
        if any(finding.check == "pool" and finding.level is Level.WARNING for finding in findings):
            findings.append(await proxy.check(target))
        schema_findings, waiting = await _schema(connection, config)
        findings.extend(schema_findings)
    except DatabaseError as failure:
        findings.append(error("database", failure.message, failure.hint))
    finally:
        await close(connection)
    return findings, waiting


async def _server(connection: Connection, address: str) -> list[Finding]:
    before = time.time()
    facts = await fetch_one(connection, sql_file("queries/preflight_server.sql"))
    after = time.time()
    is_direct = connection.get_server_pid() == facts["pid"]
    return [*_judge_server(facts, address, is_direct=is_direct), _clock(facts["now"], before, after)]


def _judge_server(facts: Mapping[str, Any], address: str, *, is_direct: bool) -> Iterator[Finding]:
    major = facts["version_number"] // 10_000
    text = f"{address}, PostgreSQL {facts['version'].split()[0]}, role {facts['role']}"
    if major < TESTED.start:
        yield error("database", text, f"PostgreSQL {TESTED.start} or later is needed")
    elif major not in TESTED:
        yield warning("database", f"{text}: newer than any version that was tested")
    else:
        yield ok("database", text)
    if facts["is_standby"]:
        mend = "name the primary, or add target_session_attrs=primary"
        yield error("writable", "the server is a standby", mend)
    elif facts["is_read_only"]:
        yield warning(
            "writable",
            "default_transaction_read_only is on: relays write all the same, their transactions say so",
            "pause them (relay pause) if nothing is to be written",
        )
    if facts["encoding"] != "UTF8":
        yield warning(
            "encoding",
            f"the database's encoding is {facts['encoding']}: a row whose id, type or key has a character that UTF-8 does not know "
            "cannot be read, and what lies in its shard waits behind it",
            "keep ids, types and keys in ASCII; or move to a database with ENCODING 'UTF8'",
        )
    if is_direct:
        yield ok("pool", "a direct connection")
    else:
        yield warning(
            "pool",
            "a pooling proxy stands between: relays poll, and a killed relay's shards wait for their lease",
            "name PostgreSQL itself in RELAY_DATABASE_URL",
        )
    yield _connections(facts)


def _connections(facts: Mapping[str, Any]) -> Finding:
    left: int = facts["connections_left"]
    if facts["role_connections_max"] >= 0:
        left = min(left, facts["role_connections_max"] - facts["role_connections"])
    text = f"{max(0, left)} more connections are allowed, a relay uses up to {CONNECTIONS_OF_A_RELAY}"
    if left < CONNECTIONS_OF_A_RELAY:
        return warning("connections", text, "raise max_connections or the role's CONNECTION LIMIT")
    return ok("connections", text)


def _clock(database_now: float, before: float, after: float) -> Finding:
    """The database's clock decides, so an offset breaks nothing; it makes ages in other places hard to
    compare.
    """
    offset = 0.0 if before <= database_now <= after else min(database_now - before, database_now - after, key=abs)
    text = f"the database's clock is {abs(offset):.1f} s {'ahead of' if offset > 0 else 'behind'} this machine's"
    if abs(offset) > CLOCK_OFFSET_S_MAX:
        return warning("clock", text, "synchronise both (NTP); due times and ages follow the database's")
    return ok("clock", "the database's clock and this machine's agree")


# ---------------------------------------------------------------- the schema


async def _schema(connection: Connection, config: Config) -> tuple[list[Finding], Pending | None]:
    try:
        schema = await read_schema(connection, config.table)
    except SchemaMissing as failure:
        return [error("schema", failure.message, f"{failure.hint} (`run` waits for it)")], None
    except RelayError as failure:
        return [error("schema", failure.message, failure.hint or GRANT)], None
    findings = [ok("schema", f"{schema.table}, version {schema.version}, payload {schema.payload_type}")]
    names = _names(schema)
    waiting: Pending | None = None

    def query(name: str) -> str:
        return fill(sql_file(f"queries/{name}.sql"), names)

    try:
        facts = await fetch_one(connection, query("preflight_table"), schema.table_oid)
        is_direct = connection.get_server_pid() == facts["pid"]
        findings.extend(_judge_table(facts, schema, facts["prepared_max"], config.sent_rows, is_direct=is_direct))
        excess = await fetch_one(connection, query("preflight_excess"), schema.table_oid)
        findings.append(_excess(excess["excess"]))
        vacuumed = await fetch_one(connection, query("preflight_vacuum"), schema.table_oid)
        findings.extend(vacuum.judge(vacuumed, schema.table.quoted))
        findings.append(_sequence(await fetch_one(connection, query("preflight_sequence")), names))
        router = Router(config.exchange, config.routing_key)
        drops = config.unroutable is Unroutable.DROP
        payload_type, envelope = schema.payload_type, config.envelope
        waiting = await pending.read(connection, names, payload_type, router, envelope, drops=drops)
    except DatabaseError as failure:
        findings.append(error("rights", failure.message, GRANT))
    if schema.is_paused:
        findings.append(warning("paused", "the outbox is paused: nothing is read or published", "relay resume"))
    return findings, waiting


def _names(schema: Schema) -> dict[str, str]:
    """The placeholders of the queries: each object's quoted name, and the same as a literal (`x_text`)."""
    suffixes = {
        "sequence": "_seq_seq",
        "shard": "_shard",
        "relay": "_relay",
        "fault": "_fault",
        "ring": "_ring",
        "bell_wait": "_bell_wait",
        "read": "_read",
        "aside_key": "_aside_key",
        "aside_due": "_aside_due",
        "aside_parked": "_aside_parked",
    }
    names = {"table": schema.table.quoted}
    names |= {part: schema.table.derived(suffix) for part, suffix in suffixes.items()}
    return names | {f"{part}_text": literal(name) for part, name in names.items()} | {"shard_of_o": shard_sql()}


def _judge_table(
    facts: Mapping[str, Any], schema: Schema, prepared_max: int, sent_rows: SentRows, *, is_direct: bool
) -> Iterator[Finding]:
    if facts["missing_rights"]:
        mend = "as the table's owner: relay migrate --role NAME"
        yield error("rights", f"missing: {'; '.join(facts['missing_rights'])}", mend)
    else:
        yield ok("rights", "all that `run` needs")
    if facts["hides_rows"]:
        yield error(
            "row security",
            "row level security hides rows from this role: they would never be published",
            "ALTER ROLE … BYPASSRLS, or DISABLE ROW LEVEL SECURITY on the outbox",
        )
    if facts["children"] or facts["kind"] != "r":
        yield error(
            "children",
            "the outbox has children or partitions: an insert into one is invisible to the reader's watch",
            "use one plain table (RELAY_TABLE)",
        )
    yield _identity(facts, schema)
    if facts["shards"] != 64:
        yield error("shards", f"{schema.table}_shard has {facts['shards']} rows, not 64", "restore it from a backup")
    if not facts["has_indexes"]:
        yield error(
            "indexes",
            "an index of the outbox is missing or invalid",
            "REINDEX it, or restore it from a backup",
        )
    yield ok("marks", "none: sent rows are deleted") if sent_rows is SentRows.DELETE else _marks(facts)
    if is_direct:  # behind a proxy nobody hears it: `pool` says so
        yield _doorbell(facts, schema, prepared_max)


def _excess(excess: Iterable[str] | None) -> Finding:
    if excess:
        return warning(
            "least rights",
            f"this role may do more than a relay needs: {', '.join(excess)}",
            "a role of its own: CREATE ROLE NAME LOGIN …; relay migrate --role NAME",
        )
    return ok("least rights", "nothing beyond what a relay needs")


def _identity(facts: Mapping[str, Any], schema: Schema) -> Finding:
    column = f"ALTER TABLE {schema.table.quoted} ALTER COLUMN seq"
    if facts["identity"] != "a":
        return error(
            "identity",
            "seq is not GENERATED ALWAYS: writers could choose it",
            f"{column} SET GENERATED ALWAYS",
        )
    if facts["cache"] is not None and facts["cache"] != 1:
        return error(
            "identity",
            f"the sequence caches {facts['cache']} numbers: order is lost",
            f"{column} SET CACHE 1",
        )
    return ok("identity", "seq is always generated, one by one")


def _marks(facts: Mapping[str, Any]) -> Finding:
    if facts["sent_at_indexes"]:
        return warning(
            "marks",
            f"an index on sent_at makes every mark dearer: {', '.join(facts['sent_at_indexes'])}",
            "drop it; the relay's own purge needs none",
        )
    options: Iterable[str] = facts["options"] or ()
    fill_factor = next((option.partition("=")[2] for option in options if option.startswith("fillfactor=")), "100")
    if int(fill_factor) > 50:
        return warning(
            "marks",
            f"the table's fillfactor is {fill_factor}: marks find no room on their page",
            "set it to 50",
        )
    return ok("marks", "find room on their own page")


def _doorbell(facts: Mapping[str, Any], schema: Schema, prepared_max: int) -> Finding:
    if not schema.has_doorbell:
        why = ", as max_prepared_transactions is above 0" if prepared_max else ""
        return warning(
            "doorbell",
            f"none{why}: relays poll",
            "relay migrate --doorbell, unless writers PREPARE TRANSACTION",
        )
    if facts["trigger"] is None or facts["trigger"] == "D":
        return warning(
            "doorbell", "its trigger is missing or disabled: an idle relay polls", "relay migrate --doorbell"
        )
    if prepared_max:
        return warning(
            "doorbell",
            "max_prepared_transactions is above 0: PREPARE TRANSACTION fails while a relay sleeps",
            "relay migrate --no-doorbell if writers use it",
        )
    return ok("doorbell", "wakes an idle relay")


def _sequence(facts: Mapping[str, Any], names: Mapping[str, str]) -> Finding:
    if facts["last_seq"] is None:
        return not_checked("sequence", "this role may not read it")
    if facts["newest_row"] is not None and facts["newest_row"] > facts["last_seq"]:
        return error(
            "sequence",
            f"it stands at {facts['last_seq']}, behind the newest row's {facts['newest_row']}",
            f"SELECT setval({names['sequence_text']}, {facts['newest_row']})",
        )
    return ok("sequence", f"stands at {facts['last_seq']}")
