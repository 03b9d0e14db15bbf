"""The broker's interface: a link takes rows and tells their outcomes; and that of whoever records these as spans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from relay.message import PayloadType, Row


class Closed(StrEnum):
    """What ended a link."""

    CONNECTION = "connection"
    """Cut, reset, heartbeat missed, server stopping: nobody's fault."""
    REFUSED = "refused"
    """The broker closed the channel or connection over something that was published."""
    EXCHANGE = "exchange"
    """The configured exchange takes no messages any more: the configuration's fault, no row's."""


@dataclass(frozen=True, slots=True)
class Rejection:
    """A row that was not sent because it cannot be: `reason` of docs/schema.md and the text."""

    row: Row
    reason: str
    error: str
    exchange: str = ""
    routing_key: str = ""
    is_final: bool = True
    """False where what is missing may come yet (an exchange that does not exist): the ladder."""


@dataclass(frozen=True, slots=True)
class Returned:
    """A row that the broker gave back and then confirmed: it reached no queue."""

    row: Row
    error: str
    exchange: str
    routing_key: str


@dataclass(frozen=True, slots=True)
class Publication:
    """`taken`: how many of the rows, from the first on, were accepted or rejected. The rest was
    not looked at (no room in the socket): offer it again after `on_writable`. `unverified`: the first of the rest was, and
    this is its exchange, which is being asked for: offer that row again after `on_verified`, the others at once."""

    taken: int
    rejected: Sequence[Rejection]
    unverified: str | None = None


class LinkListener(Protocol):
    """Told, in the order in which the broker spoke, from the event loop, never from within
    `Link.publish` or `Link.probe`. Each published row gets exactly one outcome."""

    def on_acked(self, rows: Sequence[Row]) -> None: ...
    def on_nacked(self, rows: Sequence[Row]) -> None: ...
    def on_returned(self, returned: Sequence[Returned]) -> None: ...
    def on_blocked(self, reason: str) -> None: ...
    def on_unblocked(self) -> None: ...
    def on_writable(self) -> None:
        """The link takes rows (again): after it had refused some, and after outcomes, once all that came together
        have been told. The listener publishes at once."""
        ...

    def on_verified(self, exchange: str) -> None:
        """One that was asked for has an answer, or may be asked for again; `on_writable` follows."""
        ...

    def on_suspected(self, rows: Sequence[Row], error: str, *, alone: bool) -> None:
        """The broker closes the link over one or more of these, in publish order; `probe` finds out
        over which. `on_closed` follows. `alone`: it closed the whole connection, so that a probe's
        answer counts only while nothing else is in flight."""
        ...

    def on_passed(self, row: Row) -> None:
        """No outcome yet: the broker took the probe in. It is not at fault, its confirm follows."""
        ...

    def on_refused(self, refusal: Rejection, lost: Sequence[Row]) -> None:
        """The broker closed over this row for certain; `lost` are passed probes whose confirms
        went with their channel."""
        ...

    def on_closed(self, lost: Sequence[Row], closed: Closed, error: str) -> None:
        """Once, the link's last word: `lost` are the rows without an outcome."""
        ...


class Link(Protocol):
    """One life of a broker connection with its confirm window."""

    def publish(self, rows: Sequence[Row]) -> Publication:
        """Encode and write, in order, without waiting. No row may be in flight on this link
        already (`is_in_flight`)."""
        ...

    def probe(self, row: Row) -> Publication:
        """Publish a suspect on a channel of its own, whose close harms no other row; one at a time:
        not before the answer to the last one (`on_passed`, or an outcome). Else as `publish`."""
        ...

    def is_in_flight(self, message_id: str) -> bool: ...

    def route_of(self, row: Row) -> tuple[str, str]:
        """Exchange and routing key; empty where it has none."""
        ...

    @property
    def in_flight(self) -> int:
        """Messages without an outcome, orphans and probes included."""
        ...

    @property
    def oldest(self) -> Row | None:
        """The one of them that was published first, but for probes."""
        ...

    @property
    def in_doubt(self) -> int:
        """Those of them over which the broker may yet close: all but probes that have passed."""
        ...

    async def close(self) -> None:
        """Orderly; never raises. `on_closed` follows when rows were in flight."""
        ...


class Broker(Protocol):
    async def connect(self, listener: LinkListener, payload_type: PayloadType) -> Link:
        """Raises BrokerUnavailable (try again) or BrokerRefused (credentials, vhost, missing
        exchange: try again slowly, say so)."""
        ...


class Spans(Protocol):
    def end(self, outcome: str, rows: Sequence[Row], now: float, error: str = "") -> None:
        """These rows, published at their `published_at`, have their outcome (`acked nacked returned lost`);
        `now` in boot-time seconds. Quick, never raises."""
        ...
