"""The table of settings: one row for each variable that the relay knows.

A row gives the variable, the `Config` field, default, parser, meaning, what is allowed, and the commands that use it.
`relay/config.py` loads from it, redacts by it and prints docs/configuration.md from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from relay import route, urls, values
from relay.choices import Envelope, LogFormat, LogLevel, OnParked, SentRows, Sink
from relay.core.settings import Ordering, Unroutable
from relay.topology import names

RUN, MIGRATE, CHECK, STATUS, PARKED = "run", "migrate", "check", "status", "parked"
PAUSE, RESUME, TOPOLOGY, REDRIVE, BENCH, DEMO = "pause", "resume", "topology", "redrive", "bench", "demo"
INBOX_MIGRATE, INBOX_RUN = "inbox migrate", "inbox run"

_OPERATOR = (STATUS, PAUSE, RESUME, PARKED)
_TABLE_USERS = (RUN, MIGRATE, CHECK, *_OPERATOR, BENCH)
_ENGINE = (RUN, CHECK, BENCH)
_EVERY = (*_TABLE_USERS, TOPOLOGY, REDRIVE, DEMO, INBOX_MIGRATE, INBOX_RUN)
COMMANDS = _EVERY
"""Every command of the command line, a command group's by both words."""

_DURATIONS = "a number and a unit: 250ms 5s 2m 1h 7d"
_UP_TO_A_CENTURY = "up to 36500d"
_TABLES = (
    "a table's name as SQL has it, schema-qualified or not, up to "
    f'{values.IDENTIFIER_BYTES_MAX - values.DERIVED_SUFFIX_BYTES} bytes: outbox, sales.outbox, "Sales"."Outbox"'
)
_TEMPLATES = "text with {" + "} {".join(route.FIELDS) + "}; {{ and }} for braces; up to 255 bytes"
_POSTGRES_URL = "postgresql://USER:PASSWORD@HOST:PORT/DATABASE, the password percent-encoded"
_AMQP_URL = "amqp://USER:PASSWORD@HOST:PORT/VHOST or amqps://…, percent-encoded, several separated by commas"


@dataclass(frozen=True, slots=True)
class Setting:
    """One variable. `default` is a text that `parse` accepts, or None for unset (shown as `shown_default`)."""

    variable: str
    field: str
    default: str | None
    parse: Callable[[str], Any]
    meaning: str
    allowed: str
    used_by: tuple[str, ...] = ()
    required_by: tuple[str, ...] = ()
    is_secret: bool = False
    empty_is_value: bool = False
    shown_default: str = "none"


def _choices(members: type[StrEnum]) -> str:
    return ", ".join(members)


def _consumed_queue(text: str) -> str:
    if len(names.parking_queue(text).encode()) > values.SHORT_STRING_BYTES_MAX:
        raise ValueError("longer than 247 bytes")
    return values.line(text)


SETTINGS: tuple[Setting, ...] = (
    Setting(
        "RELAY_DATABASE_URL",
        "database_url",
        None,
        urls.database_target,
        "PostgreSQL 14 or later, with the outbox table; several hosts are tried in turn",
        _POSTGRES_URL,
        _TABLE_USERS,
        required_by=_TABLE_USERS,
        is_secret=True,
        shown_default="required",
    ),
    Setting(
        "RELAY_AMQP_URL",
        "amqp_url",
        None,
        urls.amqp_urls,
        "RabbitMQ; several URLs are tried in turn",
        _AMQP_URL,
        (*_ENGINE, REDRIVE),
        required_by=(*_ENGINE, REDRIVE),
        is_secret=True,
        shown_default="required",
    ),
    Setting(
        "RELAY_TABLE",
        "table",
        "outbox",
        values.table_name,
        "the outbox table; everything that the relay creates is named after it, in its schema",
        _TABLES,
        _TABLE_USERS,
    ),
    Setting(
        "RELAY_NAME",
        "name",
        None,
        values.words,
        "what logs, leases and `status` call this relay; two with the same name are still two",
        "up to 100 printable characters",
        (RUN, INBOX_RUN),
        shown_default="host name and a random suffix",
    ),
    Setting(
        "RELAY_MANAGEMENT_URL",
        "management_url",
        None,
        urls.management_url,
        "RabbitMQ's management API, for `check` and `topology`; `run` never needs it",
        "http://USER:PASSWORD@HOST:PORT or https://…",
        (CHECK, TOPOLOGY),
        is_secret=True,
    ),
    Setting(
        "RELAY_SINK",
        "sink",
        "amqp",
        values.choice(Sink),
        "where messages go: `amqp` to RabbitMQ, `file` as JSON lines into `RELAY_SINK_PATH`",
        _choices(Sink),
        _ENGINE,
    ),
    Setting(
        "RELAY_SINK_PATH",
        "sink_path",
        None,
        values.line,
        "the file of `RELAY_SINK=file`; `RELAY_AMQP_URL` is not needed then",
        "a path, or - for the standard output",
        _ENGINE,
    ),
    Setting(
        "RELAY_EXCHANGE",
        "exchange",
        "events",
        values.template,
        "the exchange: a template over the row; the row's `exchange` column wins",
        _TEMPLATES,
        _ENGINE,
    ),
    Setting(
        "RELAY_ROUTING_KEY",
        "routing_key",
        "{event_type}",
        values.template,
        "the routing key: a template over the row; the row's `routing_key` column wins",
        _TEMPLATES,
        _ENGINE,
    ),
    Setting(
        "RELAY_ENVELOPE",
        "envelope",
        "none",
        values.choice(Envelope),
        "the body: `none` the payload as it is, the rest in properties and headers; `json` an envelope around it; "
        "`cloudevents` structured JSON",
        _choices(Envelope),
        _ENGINE,
    ),
    Setting(
        "RELAY_ORDERING",
        "ordering",
        "strict",
        values.choice(Ordering),
        "`strict` a key's next message goes out on the confirm of the one before; `pipelined` in order on the wire, "
        "a failure may let followers overtake; `none` no order",
        _choices(Ordering),
        _ENGINE,
    ),
    Setting(
        "RELAY_SENT_ROWS",
        "sent_rows",
        "mark",
        values.choice(SentRows),
        "`mark` sets `sent_at`; `delete` deletes",
        _choices(SentRows),
        _ENGINE,
    ),
    Setting(
        "RELAY_SETTLE_COMMIT",
        "settle_commit",
        "on",
        values.switch,
        "`off`: settlements commit asynchronously (`synchronous_commit = off`); a database crash may then repeat "
        "what it settled last",
        "on, off",
        _ENGINE,
    ),
    Setting(
        "RELAY_RETENTION",
        "retention_s",
        "7d",
        values.duration,
        "age at which marked rows are purged, in small batches",
        f"{_DURATIONS}; {_UP_TO_A_CENTURY}",
        # The sidecar's own retention has to be longer.
        (*_ENGINE, INBOX_RUN),
    ),
    Setting(
        "RELAY_MAX_READ_AHEAD",
        "max_read_ahead",
        # Chosen by measurement (docs/benchmarks.md); a larger one adds only memory.
        "4000",
        values.integer_between(1, 1_000_000),
        "rows in memory, from reading to settlement: those in flight or being settled count, so it bounds "
        "`RELAY_MAX_IN_FLIGHT` too",
        "1 to 1000000",
        _ENGINE,
    ),
    Setting(
        "RELAY_MAX_IN_FLIGHT",
        "max_in_flight",
        # Chosen by measurement (docs/benchmarks.md).
        "2000",
        values.integer_between(1, 1_000_000),
        "messages published and not yet settled, confirmed or not; a fault repeats at most so many. They count in "
        "`RELAY_MAX_READ_AHEAD`: where that is less, it is the bound",
        "1 to 1000000",
        _ENGINE,
    ),
    Setting(
        "RELAY_MAX_BYTES",
        "max_bytes",
        "64MiB",
        values.size,
        "bytes of bodies and headers held at all, read ahead or in flight; one larger row passes alone",
        "64KiB 1MiB 2GiB, or plain bytes; 1 to 1048576GiB",
        _ENGINE,
    ),
    Setting(
        "RELAY_LEASE",
        "lease_s",
        "5s",
        # Renewed about every second: in a shorter one a single late renewal loses the shards.
        values.duration_between(1.0, 3600.0),
        "how long a shard stays with a relay that no longer answers",
        f"{_DURATIONS}; 1s to 1h",
        # An operator's transactions are bounded by it like the relays' own (L7).
        (*_ENGINE, PARKED),
    ),
    Setting(
        "RELAY_MAX_RATE",
        "max_rate",
        None,
        values.rate,
        "messages a second",
        f"a number, 0.01 to {values.RATE_MAX}",
        _ENGINE,
    ),
    Setting(
        "RELAY_RETRY_DELAYS",
        "retry_delays_s",
        "1s,5s,30s,5m",
        values.duration_list,
        "the ladder for a row at fault; n delays are n + 1 attempts; ±20 % jitter. Nacks do not climb it: 100 ms "
        "doubling to 30 s, jittered, no attempt used",
        f"1 to 32 of them, separated by commas, each {_DURATIONS}, above zero and {_UP_TO_A_CENTURY}",
        _ENGINE,
    ),
    Setting(
        "RELAY_MAX_AGE",
        "max_age_s",
        None,
        values.duration_between(0.001),
        "a row older than this, counted from when it might go, is parked instead of retried",
        f"{_DURATIONS}; 1ms or more, {_UP_TO_A_CENTURY}",
        _ENGINE,
    ),
    Setting(
        "RELAY_UNROUTABLE",
        "unroutable",
        "retry",
        values.choice(Unroutable),
        "a message that reaches no queue: `retry` the ladder, then park; `park` at once; `drop` publishes without "
        "`mandatory`",
        _choices(Unroutable),
        _ENGINE,
    ),
    Setting(
        "RELAY_ON_PARKED",
        "on_parked",
        "hold",
        values.choice(OnParked),
        "`hold` the key's later rows wait; `continue` they go on",
        _choices(OnParked),
        # Not `parked`: a parked row stores whether it holds, as the relay that parked it was told.
        _ENGINE,
    ),
    Setting(
        "RELAY_PARKED_RETENTION",
        "parked_retention_s",
        None,
        values.duration_between(0.001),
        "age at which parked rows are discarded",
        f"{_DURATIONS}; 1ms or more, {_UP_TO_A_CENTURY}",
        # The sidecar's own retention has to be longer.
        (*_ENGINE, INBOX_RUN),
        shown_default="for ever",
    ),
    Setting(
        "RELAY_CONFIRM_TIMEOUT",
        "confirm_timeout_s",
        "30s",
        values.duration_between(0.1, 3600.0),
        "messages in flight and no confirm for this long: stalled, not ready, logged once. After ten times as long "
        "the channel is rebuilt; then that wait doubles",
        f"{_DURATIONS}; 100ms to 1h",
        _ENGINE,
    ),
    Setting(
        "RELAY_POLL_INTERVAL",
        "poll_interval_s",
        "500ms",
        values.duration_between(0.01, 3600.0),
        "a read at least this often, whatever wakes or does not",
        f"{_DURATIONS}; 10ms to 1h",
        _ENGINE,
    ),
    Setting(
        "RELAY_SHUTDOWN_GRACE",
        "shutdown_grace_s",
        "8s",
        values.duration_between(0.1, 3600.0),
        "how long a stop waits for what is in flight: below the 10 s that container runtimes give; a second signal "
        "ends at once",
        f"{_DURATIONS}; 100ms to 1h",
        (*_ENGINE, INBOX_RUN),
    ),
    Setting(
        "RELAY_LISTEN",
        "listen",
        "0.0.0.0:9761",
        values.listen_address,
        "`/metrics /livez /readyz`; empty: none",
        "HOST:PORT, [::]:9761, :9761, the port up to 65535, or empty",
        (RUN, STATUS),
        empty_is_value=True,
    ),
    Setting(
        "RELAY_LOG_FORMAT",
        "log_format",
        "json",
        values.choice(LogFormat),
        "one JSON object or one readable text a line",
        _choices(LogFormat),
        _EVERY,
    ),
    Setting(
        "RELAY_LOG_LEVEL",
        "log_level",
        "info",
        values.choice(LogLevel),
        "the least severe event that is logged",
        _choices(LogLevel),
        _EVERY,
    ),
    Setting(
        "RELAY_INBOX_DATABASE_URL",
        "inbox_database_url",
        None,
        urls.database_target,
        "the consumer's database",
        _POSTGRES_URL,
        (INBOX_MIGRATE, INBOX_RUN),
        required_by=(INBOX_MIGRATE, INBOX_RUN),
        is_secret=True,
        shown_default="required",
    ),
    Setting(
        "RELAY_INBOX_AMQP_URL",
        "inbox_amqp_url",
        None,
        urls.amqp_urls,
        "the consumer's RabbitMQ",
        _AMQP_URL,
        (INBOX_RUN,),
        required_by=(INBOX_RUN,),
        is_secret=True,
        shown_default="required",
    ),
    Setting(
        "RELAY_INBOX_QUEUE",
        "inbox_queue",
        None,
        _consumed_queue,
        "the queue that is consumed",
        "a queue's name, up to 247 bytes: its parking queue's has 8 more",
        (INBOX_RUN,),
        required_by=(INBOX_RUN,),
        shown_default="required",
    ),
    Setting(
        "RELAY_INBOX_TABLE",
        "inbox_table",
        "inbox",
        values.table_name,
        "the consumer's inbox table",
        _TABLES,
        (INBOX_MIGRATE, INBOX_RUN),
    ),
    Setting(
        "RELAY_INBOX_PREFETCH",
        "inbox_prefetch",
        # A few round trips' worth: work in hand stays bounded, the consumer is never idle for want of a message.
        "100",
        values.integer_between(1, 65535),
        "messages in hand and not yet acknowledged",
        "1 to 65535",
        (INBOX_RUN,),
    ),
    Setting(
        "RELAY_INBOX_RETENTION",
        "inbox_retention_s",
        # Longer than any replay: marked rows live for 7 days, parked ones are looked at within weeks.
        "30d",
        values.duration,
        "age at which inbox rows are purged; longer than the longest possible replay, so than `RELAY_RETENTION` and "
        "`RELAY_PARKED_RETENTION`",
        f"{_DURATIONS}; {_UP_TO_A_CENTURY}",
        (INBOX_RUN,),
    ),
    Setting(
        "RELAY_INBOX_LISTEN",
        "inbox_listen",
        "0.0.0.0:9762",
        values.listen_address,
        "the consumer's `/metrics /livez /readyz`; empty: none",
        "HOST:PORT, [::]:9762, :9762, the port up to 65535, or empty",
        (INBOX_RUN,),
        empty_is_value=True,
    ),
)

SETTINGS_BY_VARIABLE: Mapping[str, Setting] = {setting.variable: setting for setting in SETTINGS}


def needed_by(command: str) -> frozenset[str]:
    """The variables without which a command (`run`, `inbox migrate` …) cannot work."""
    assert command in COMMANDS, f"no command {command}"
    return frozenset(setting.variable for setting in SETTINGS if command in setting.required_by)


def used_by(command: str) -> frozenset[str]:
    """The variables that a command looks at; a fault in another one is no concern of its."""
    assert command in COMMANDS, f"no command {command}"
    return frozenset(setting.variable for setting in SETTINGS if command in setting.used_by)
