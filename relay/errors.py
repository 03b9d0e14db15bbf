"""The exception tree: what the relay raises on purpose.

Each class knows its exit code (0 done, 1 anything else, 2 configuration or usage, 3 schema incompatible,
4 the command's own "no"); each instance may carry a hint, one line that says what to do about it. The text of an
error is one line for a person; it never holds a secret or a payload. Driver exceptions are mapped to these once, at
the adapter's edge, with `raise ... from`.
"""

from __future__ import annotations

from collections.abc import Sequence


class RelayError(Exception):
    """Base of every error that is raised on purpose.

    `exit_code` is the process's exit code when the error reaches the command line. `hint` is None or one line that
    says what the operator can do.
    """

    exit_code: int = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint

    @property
    def message(self) -> str:
        """The error without its hint, one line."""
        return str(self.args[0])


def explaining(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    """The failure of a group that explains: ours before the libraries'."""
    leaves = [explaining(leaf) if isinstance(leaf, BaseExceptionGroup) else leaf for leaf in failures.exceptions]
    return next((leaf for leaf in leaves if isinstance(leaf, RelayError)), leaves[0])


class UsageError(RelayError):
    """A command was called in a way that it does not understand."""

    exit_code = 2


class ConfigError(RelayError):
    """The configuration cannot be used; `problems` holds every fault found, one line each, in the table's order."""

    exit_code = 2

    def __init__(self, problems: Sequence[str], *, hint: str | None = None) -> None:
        assert problems, "a ConfigError without a problem"
        super().__init__("; ".join(problems), hint=hint)
        self.problems: tuple[str, ...] = tuple(problems)


class ListenFailed(RelayError):
    """The address for /metrics, /livez and /readyz cannot be bound (a taken port is a configuration's fault)."""

    exit_code = 2


class SchemaMissing(RelayError):
    """The outbox table or its companions do not exist yet; `run` waits for them."""


class SchemaIncompatible(RelayError):
    """The schema was made by a version that this one cannot work with."""

    exit_code = 3


class SchemaForeign(RelayError):
    """A table of the wanted name exists and was not created by `relay migrate`; it is left alone."""


class DrainIncomplete(RelayError):
    """The grace ran out, or a second signal came, with work unsettled; its rows are published again later."""

    exit_code = 4


class CheckFailed(RelayError):
    """A preflight, a comparison or a demonstration found what must not be."""

    exit_code = 4


class NothingMatched(RelayError):
    """An operator's command selected no row."""

    exit_code = 4


class DatabaseError(RelayError):
    """Base of what PostgreSQL answers or fails to answer."""


class DatabaseUnavailable(DatabaseError):
    """No session, or the session was lost: wait and connect again. No row is at fault."""


class DatabaseLost(DatabaseError):
    """An open session died or answered not in time: what it was doing may have happened or not (R5, S3)."""


class DatabaseRefused(DatabaseError):
    """PostgreSQL answered no and nothing happened: rights, a password, a statement that it rolled back."""


class RowUnreadable(DatabaseRefused):
    """The same, for what a row holds: its json value has no text (of more than 1 GB), or it is damaged."""


class StatementTooSlow(DatabaseRefused):
    """The same, for it took longer than its statement_timeout."""


class BrokerError(RelayError):
    """Base of what the broker answers or fails to answer."""


class BrokerUnavailable(BrokerError):
    """No connection or channel, or it was lost: wait and connect again. No row is at fault."""


class BrokerRefused(BrokerError):
    """The broker answered no and closed the channel or connection.

    `reply_code` is AMQP's (404, 403, 406 ... close a channel, 501, 504, 530 ... a connection), None where unknown.
    """

    def __init__(self, message: str, *, reply_code: int | None = None, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.reply_code = reply_code


class ExchangeMissing(BrokerRefused):
    """The constant exchange of the configuration does not exist: not ready, no attempt used."""


class MessageInvalid(RelayError):
    """A row cannot become a message, now or ever; `failure_class` is one of docs/schema.md (`invalid`, `too_large`)."""

    def __init__(self, message: str, *, failure_class: str = "invalid", hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.failure_class = failure_class
