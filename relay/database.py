"""Opening a PostgreSQL connection, what the driver's errors mean, and where the SQL files are.

Owns: how every session of the relay is opened, so that each passes a transaction-pooling proxy; the mapping
of asyncpg's exceptions to `relay.errors`, used once at each adapter's edge; quoting, and putting names into
the texts of `sql/`. Keeps no connection, retries nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
import ssl
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import asyncpg

from relay import __version__, tls
from relay.errors import (
    DatabaseLost,
    DatabaseRefused,
    DatabaseUnavailable,
    RelayError,
    SchemaForeign,
    SchemaIncompatible,
    UsageError,
)

if TYPE_CHECKING:
    from relay.urls import DatabaseTarget

Connection: TypeAlias = asyncpg.Connection

CONNECT_TIMEOUT_S = 10.0
"""To open a session unless the URL has a `connect_timeout`: a half-open socket must not hold a start up."""

ANSWER_TIMEOUT_S = 90.0
"""For one command, BEGIN and COMMIT too, that says nothing else: above every statement_timeout of ours, so that a session
which hangs without being closed holds nobody for ever."""

CLOSE_TIMEOUT_S = 2.0
"""For the goodbye; the server notices a closed socket anyway."""

STEP_TIMEOUT_S = 900.0
"""For one step: far above any honest one; only a server that no longer answers takes this long."""

DRIVER_ERRORS = (asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError, OSError, TimeoutError)
"""All that a statement raises where no column's value is wrong; the third comes of a session that ends under it."""

_CERTIFICATE_HINT = "check the server's certificate, and host and sslrootcert in its URL"
_HANG_UP_HINT = "the server's log says why; one that refuses a client's certificate may hang up like this"
_TLS_HINT = "check sslcert and sslkey in its URL: the server must know their authority"

_AWAY_HINT = "is it up, and are host and port of its URL right?"
_NO_TLS_HINT = "is TLS on there (ssl = on), and are sslmode, host and port of its URL right?"
_SSL_REFUSED = "rejected SSL upgrade"
"""asyncpg's words for a server without TLS; so answers what is no PostgreSQL, too."""

_SQL = Path(__file__).parent / "_sql"
_PLACEHOLDER = re.compile(r"\{([a-z_]+)\}")


def sql_file(path: str) -> str:
    """The text of a file under `sql/` such as `migrations/guard.sql`, without the header that explains it."""
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


async def connect(
    target: DatabaseTarget | str,
    *,
    application_name: str | None = None,
    answer_timeout_s: float | None = ANSWER_TIMEOUT_S,
    statement_cache_size: int = 0,
    connection_class: type[Connection] = asyncpg.Connection,
) -> Connection:
    """Open a session. `target` is a configured target or a plain PostgreSQL URL. A command that was not answered
    within `answer_timeout_s`, or its own, raises TimeoutError (None: without end, where others watch over it).

    Nothing but the application's name goes into the startup packet (a pooling proxy refuses other settings),
    and by default no statement is kept prepared by name. Raises DatabaseUnavailable (try again) and DatabaseRefused
    (password, rights, no such database).
    """
    dsn, timeout = (target, None) if isinstance(target, str) else (target.dsn, target.connect_timeout_s)
    with mapped_errors(connecting=True):
        return await asyncpg.connect(
            dsn,
            timeout=CONNECT_TIMEOUT_S if timeout is None else timeout,
            command_timeout=answer_timeout_s,
            statement_cache_size=statement_cache_size,
            connection_class=connection_class,
            server_settings={"application_name": application_name or f"outbox-relay {__version__}"},
        )


async def close(connection: Connection) -> None:
    """End a session, with a goodbye if the server takes it within seconds; never raises, safe to repeat."""
    try:
        await connection.close(timeout=CLOSE_TIMEOUT_S)
    except DRIVER_ERRORS:
        connection.terminate()


@contextlib.asynccontextmanager
async def writing(connection: Connection) -> AsyncIterator[None]:
    """A transaction that writes and sees what others commit meanwhile, whatever the role's or the database's defaults are
    (`default_transaction_read_only`, `default_transaction_isolation`)."""
    async with connection.transaction():
        await connection.execute("SET TRANSACTION ISOLATION LEVEL READ COMMITTED, READ WRITE")
        yield


@contextlib.contextmanager
def mapped_errors(*, connecting: bool = False) -> Iterator[None]:
    """Turn the driver's exceptions into the relay's.

    DatabaseRefused: PostgreSQL said no, and rolled back, for sure. DatabaseLost: the session is gone or did
    not answer, the effect is unknown; while `connecting` that is DatabaseUnavailable. Only the server's first
    line goes into the text: its details quote rows.
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
        if (failure := tls.cause(error)) is not None:
            # A certificate that the server refuses is refused after the handshake (TLS 1.3).
            raise gone(f"no TLS with PostgreSQL: {tls.said(failure)}", hint=_TLS_HINT) from error
        raise gone(_said(error), hint=_HANG_UP_HINT if connecting else None) from error
    except asyncpg.InvalidAuthorizationSpecificationError as error:
        hint = "check user, password and certificate in its URL, and the server's pg_hba.conf"
        raise DatabaseRefused(_said(error), hint=hint) from error
    except asyncpg.InvalidCatalogNameError as error:
        raise DatabaseRefused(_said(error), hint="create it, or mend the name at the end of its URL") from error
    except asyncpg.PostgresError as error:
        raise DatabaseRefused(_said(error), hint=error.hint) from error
    except TimeoutError as error:
        raise gone("PostgreSQL gave no answer in time") from error
    except ssl.SSLCertVerificationError as error:
        raise gone(f"PostgreSQL's certificate is not accepted: {tls.said(error)}", hint=_CERTIFICATE_HINT) from error
    except ssl.SSLError as error:
        raise gone(f"no TLS with PostgreSQL: {tls.said(error)}", hint=_TLS_HINT) from error
    except OSError as error:
        hint = _NO_TLS_HINT if _SSL_REFUSED in str(error) else _AWAY_HINT
        raise gone(
            f"PostgreSQL cannot be reached: {error.strerror or str(error) or type(error).__name__}", hint=hint
        ) from error
    except asyncpg.ClientConfigurationError as error:
        raise DatabaseRefused(f"the PostgreSQL driver cannot use this URL: {error}") from error
    except (asyncpg.InterfaceError, asyncpg.InternalClientError) as error:
        raise gone(f"the PostgreSQL session is unusable: {error}") from error
    except ValueError as error:
        if not connecting:
            raise
        # The driver adds what its URL leaves open from the environment, and nobody has checked that.
        hint = "check PGHOST, PGPORT and the other PG… variables"
        raise DatabaseRefused(f"the PostgreSQL driver cannot use its URL: {error}", hint=hint) from error


def _said(error: asyncpg.PostgresError) -> str:
    return f"PostgreSQL: {error.message or str(error) or type(error).__name__} ({error.sqlstate})"


async def perform_step(connection: Connection, step: str, deadline: float) -> None:
    """Run one step of a migration, again while somebody holds a lock that it needs.

    `step` is one transaction's text, from BEGIN to COMMIT; `deadline` is in monotonic seconds. Raises what
    the step's own codes say (SchemaForeign, SchemaIncompatible, UsageError, DatabaseRefused),
    DatabaseUnavailable at the deadline, DatabaseLost.
    """
    pause_s = 0.1
    while True:
        try:
            with mapped_errors():
                try:
                    await connection.execute(step, timeout=STEP_TIMEOUT_S)
                    return
                except asyncpg.PostgresError:
                    if connection.is_in_transaction():
                        await connection.execute("ROLLBACK")
                    raise
        except DatabaseRefused as error:
            cause = error.__cause__
            if not isinstance(cause, asyncpg.LockNotAvailableError | asyncpg.DeadlockDetectedError):
                raise _explained(error) from cause
            if time.monotonic() + pause_s > deadline:
                raise DatabaseUnavailable(
                    "no lock for the migration: a transaction on the table, or a migration, goes on",
                    hint="look for old transactions in pg_stat_activity, then run it again",
                ) from cause
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, 1.0)


def _explained(error: DatabaseRefused) -> RelayError:
    """The codes that the migrations' SQL raises (sql/migrations/guard.sql), each as its error."""
    cause = error.__cause__
    assert isinstance(cause, asyncpg.PostgresError), "a refusal without the server's word"
    message, hint = cause.message or "", cause.hint
    match cause.sqlstate:
        case "RLY01":
            return SchemaForeign(message, hint=hint)
        case "RLY02":
            return SchemaIncompatible(message, hint=hint)
        case "RLY03" | "RLY04" | "RLY05":
            return UsageError(message, hint=hint)
        case "RLY06":
            return DatabaseRefused(message, hint=hint)
        case _:
            return error
