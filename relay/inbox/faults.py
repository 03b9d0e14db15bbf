"""Exceptions of handlers and drivers, each as a class. Pure: no driver is imported, so that any may be used.

PostgreSQL's errors are told by their SQLSTATE, whichever driver or mapper raised them (asyncpg, psycopg, SQLAlchemy
around either).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from relay.errors import DatabaseLost, DatabaseRefused, DatabaseUnavailable
from relay.inbox.outcome import ErrorClass, Failure, Permanent, Transient, one_line

_TRANSIENT_CLASSES: Final = ("08", "40", "53", "57", "58")
"""Connection, transaction rollback (deadlock, serialisation, unknown COMMIT), resources, an operator's act, the system."""

_TRANSIENT_STATES: Final = ("25006", "25P03", "25P04", "55P03", "55006")
"""Read only (a failover under way), idle or transaction timeouts, a lock that is not to be had."""

_PERMANENT_CLASSES: Final = ("22", "23", "54")
"""Data exception, integrity constraint, a limit of the program such as an index row's size."""

_DRIVERS: Final = ("asyncpg", "psycopg", "psycopg2", "sqlalchemy")
_LOST: Final = (
    "OperationalError",
    "InterfaceError",
    "InternalClientError",
    "ConnectionDoesNotExistError",
    "PoolTimeout",
)


def classify(error: BaseException) -> Failure:
    """The failure that an exception stands for."""
    text = one_line(f"{type(error).__name__}: {_said(error)}".removesuffix(": "))
    for each in _chain(error):
        match each:
            case Permanent() | Transient():
                return Failure(each.error_class, one_line(_said(each)) or each.error_class)
            case DatabaseLost() | DatabaseUnavailable():
                return Failure(ErrorClass.DATABASE, text)
            case DatabaseRefused() if each.__cause__ is None:
                return Failure(ErrorClass.UNKNOWN, text)
            case _:
                pass
        state = getattr(each, "sqlstate", None)
        if isinstance(state, str) and len(state) == 5:
            return Failure(_class_of(state), f"{text} ({state})")
        if type(each).__module__.partition(".")[0] in _DRIVERS and type(each).__name__ in _LOST:
            return Failure(ErrorClass.DATABASE, text)
        if type(each).__module__.startswith("asyncpg.") and isinstance(each, ValueError):
            # The driver's own check of a value against its column.
            return Failure(ErrorClass.CONSTRAINT, text)
    if isinstance(error, TimeoutError | ConnectionError):
        return Failure(ErrorClass.TRANSIENT, text)
    return Failure(ErrorClass.UNKNOWN, text)


def _said(error: BaseException) -> str:
    """A handler's exception may have a `__str__` of its own; that it fails must not cost more than the text."""
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - whatever somebody else's code raises
        return "(it has no readable text)"


def is_database_away(failure: Failure, error: BaseException) -> bool:
    """Whether it says that no other message would fare better: no session, no room, a standby, rather than a deadlock or
    a lock.
    """
    if failure.error_class is not ErrorClass.DATABASE:
        return False
    if any(isinstance(each, DatabaseUnavailable) for each in _chain(error)):
        return True
    states = [state for each in _chain(error) if isinstance(state := getattr(each, "sqlstate", None), str)]
    return not states or states[0].startswith(("08", "53", "57", "58", "25006"))


def _class_of(state: str) -> ErrorClass:
    if state == "57014":
        # query_canceled: a statement_timeout, or an operator.
        return ErrorClass.TIMEOUT
    if state.startswith(_TRANSIENT_CLASSES) or state in _TRANSIENT_STATES:
        return ErrorClass.DATABASE
    if state.startswith(_PERMANENT_CLASSES):
        return ErrorClass.CONSTRAINT
    return ErrorClass.UNKNOWN


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The exception, and those that it wraps: SQLAlchemy's `orig`, then what it was raised from."""
    seen: set[int] = set()
    following: list[BaseException | None] = [error]
    while following:
        each = following.pop(0)
        if not isinstance(each, BaseException) or id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        following += [getattr(each, "orig", None), each.__cause__]
