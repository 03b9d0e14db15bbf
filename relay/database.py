"""Opening a PostgreSQL connection, what the driver's errors mean, and where the SQL files are.

Owns: how every session of the relay is opened, so that each passes a transaction-pooling proxy; the mapping of
asyncpg's exceptions to `relay.errors`, used once at each adapter's edge. Keeps no connection, retries nothing.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import asyncpg

from relay import __version__
from relay.errors import DatabaseLost, DatabaseRefused, DatabaseUnavailable

if TYPE_CHECKING:
    from relay.urls import DatabaseTarget

    Connection: TypeAlias = asyncpg.Connection[asyncpg.Record]

CONNECT_TIMEOUT_S = 10.0
"""For opening a session unless the URL has a `connect_timeout`: a half-open socket must not hold a start up."""

CLOSE_TIMEOUT_S = 2.0
"""For the goodbye; the server notices a closed socket anyway."""

_SQL = Path(__file__).parent / "_sql"
_PLACEHOLDER = re.compile(r"\{([a-z_]+)\}")


def sql_file(path: str) -> str:
    """The text of a file under `sql/`, such as `migrations/0001_outbox.sql`, without the header that explains it."""
    lines = (_SQL / path).read_text(encoding="utf-8").splitlines(keepends=True)
    return "".join(itertools.dropwhile(lambda line: line.startswith("--"), lines))


def sql_files(folder: str) -> list[str]:
    """The paths of the numbered files in a folder under `sql/`, in the order of their numbers."""
    return sorted(f"{folder}/{file.name}" for file in (_SQL / folder).glob("[0-9][0-9][0-9][0-9]_*.sql"))


def fill(text: str, values: Mapping[str, str]) -> str:
    """Put `values` in the place of every `{name}`; each one must be there and is SQL already (quoted)."""
    return _PLACEHOLDER.sub(lambda match: values[match[1]], text)


def literal(text: str | None) -> str:
    """A string literal for SQL text, `NULL` for None."""
    if text is None:
        return "NULL"
    assert "\0" not in text, "a literal with a zero byte"
    quoted = "'" + text.replace("'", "''") + "'"
    return "E" + quoted.replace("\\", "\\\\") if "\\" in quoted else quoted


async def connect(target: DatabaseTarget | str, *, application_name: str | None = None) -> Connection:
    """Open a session. `target` is a configured target or a plain PostgreSQL URL.

    Nothing but the application's name goes into the startup packet (a pooling proxy refuses other settings), and no
    statement is kept prepared by name. Raises DatabaseUnavailable (try again) and DatabaseRefused (password, rights,
    no such database).
    """
    dsn, timeout = (target, None) if isinstance(target, str) else (target.dsn, target.connect_timeout_s)
    with mapped_errors(connecting=True):
        return await asyncpg.connect(
            dsn,
            timeout=CONNECT_TIMEOUT_S if timeout is None else timeout,
            statement_cache_size=0,
            server_settings={"application_name": application_name or f"outbox-relay {__version__}"},
        )


async def close(connection: Connection) -> None:
    """End a session, with a goodbye if the server takes it within seconds; never raises, safe to repeat."""
    try:
        await connection.close(timeout=CLOSE_TIMEOUT_S)
    except (asyncpg.PostgresError, asyncpg.InterfaceError, OSError):
        connection.terminate()


@contextlib.contextmanager
def mapped_errors(*, connecting: bool = False) -> Iterator[None]:
    """Turn the driver's exceptions into the relay's.

    DatabaseRefused: PostgreSQL said no, and rolled back, for sure. DatabaseLost: the session is gone or did not
    answer, the effect is unknown; while `connecting` that is DatabaseUnavailable. Only the server's first line goes
    into the text: its details quote rows.
    """
    gone = DatabaseUnavailable if connecting else DatabaseLost
    try:
        yield
    except (
        asyncpg.PostgresConnectionError,  # class 08, a proxy's own complaints among them
        asyncpg.AdminShutdownError,
        asyncpg.CrashShutdownError,
        asyncpg.CannotConnectNowError,
        asyncpg.TooManyConnectionsError,
        asyncpg.IdleSessionTimeoutError,
        asyncpg.IdleInTransactionSessionTimeoutError,
        asyncpg.TransactionTimeoutError,
    ) as error:
        raise gone(_said(error)) from error
    except asyncpg.PostgresError as error:
        raise DatabaseRefused(_said(error), hint=error.hint) from error
    except TimeoutError as error:
        raise gone("PostgreSQL gave no answer in time") from error
    except OSError as error:
        raise gone(f"PostgreSQL cannot be reached: {error.strerror or error}") from error
    except asyncpg.ClientConfigurationError as error:
        raise DatabaseRefused(f"the PostgreSQL driver cannot use this URL: {error}") from error
    except (asyncpg.InterfaceError, asyncpg.InternalClientError) as error:
        raise gone(f"the PostgreSQL session is unusable: {error}") from error


def _said(error: asyncpg.PostgresError) -> str:
    return f"PostgreSQL: {error.message or type(error).__name__} ({error.sqlstate})"
