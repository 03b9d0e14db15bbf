"""`relay pause` and `relay resume`: a state in the database that every relay of the outbox obeys.

The relays learn it with their next renewal, within about a second: they stop reading and publishing, settle what is in
flight and keep their leases. It survives restarts of relays and database.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from relay.config import Config
from relay.database import close, connect, fill, literal, mapped_errors, sql_file, writing
from relay.migrate import Schema, read_schema

TIMEOUT_S: Final = 10


@dataclass(frozen=True, slots=True)
class Pause:
    """`is_news` is false where nothing had to be changed. `since` and `by` are of the pause that stands or has ended,
    None where there was none."""

    table: str
    is_news: bool
    since: datetime | None
    by: str | None


async def pause(config: Config) -> Pause:
    """Pause all relays of the outbox. Raises what `relay status` raises."""
    return await _set(config, "pause")


async def resume(config: Config) -> Pause:
    """Let them go on. Raises what `relay status` raises."""
    return await _set(config, "resume")


async def _set(config: Config, name: str) -> Pause:
    connection = await connect(config.database(), application_name=f"outbox-relay {name}")
    try:
        schema = await read_schema(connection, config.table)
        with mapped_errors():
            async with writing(connection):
                await connection.execute(
                    f"SET LOCAL statement_timeout = '{TIMEOUT_S}s'; SET LOCAL lock_timeout = '{TIMEOUT_S}s'"
                )
                found: Any = await connection.fetchrow(_text(name, schema))
                is_news = found is not None
                if not is_news:
                    found = await connection.fetchrow(_text("paused", schema))
                await connection.execute(_text("ring", schema))
    finally:
        await close(connection)
    return Pause(str(schema.table), is_news, found["paused_at"], found["paused_by"])


def _text(name: str, schema: Schema) -> str:
    values = {"meta": schema.table.derived("_meta"), "bell_channel": literal(schema.bell_channel)}
    return fill(sql_file(f"queries/{name}.sql"), values)
