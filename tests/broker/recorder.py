"""A `LinkListener` that writes down what it is told, and waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from relay.broker.amqp import AmqpBroker
from relay.core.ports.broker import Closed, Link, Rejection, Returned
from relay.message import Row
from relay.route import Router

WAIT_S = 30.0


class Recorder:
    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []
        """(kind, seqs) of outcomes, and (kind, ...) of the rest, in order; `writable` only counts."""
        self.outcomes: dict[str, list[int]] = {"acked": [], "nacked": [], "returned": [], "lost": []}
        """Seqs by outcome; `suspected` and `refused` only where there are some."""
        self.refusals: list[Rejection] = []
        self.is_alone = False
        self.returned: list[Returned] = []
        self.closed: tuple[Closed, str] | None = None
        self.writable = 0
        self.verified: list[str] = []
        self._changed = asyncio.Event()
        self.on_event: Callable[[], None] = lambda: None
        """Called within each event: what an engine would do there."""

    def on_acked(self, rows: Sequence[Row]) -> None:
        self._settled("acked", rows)

    def on_nacked(self, rows: Sequence[Row]) -> None:
        self._settled("nacked", rows)

    def on_returned(self, returned: Sequence[Returned]) -> None:
        self.returned += returned
        self._settled("returned", [each.row for each in returned])

    def on_blocked(self, reason: str) -> None:
        self._tell("blocked", reason)

    def on_unblocked(self) -> None:
        self._tell("unblocked")

    def on_writable(self) -> None:
        self.writable += 1
        self._changed.set()
        self.on_event()

    def on_verified(self, exchange: str) -> None:
        self.verified.append(exchange)

    def on_suspected(self, rows: Sequence[Row], error: str, *, alone: bool) -> None:
        self.is_alone = alone
        self._settled("suspected", rows)

    def on_passed(self, row: Row) -> None:
        self._tell("passed", row.seq)

    def on_refused(self, refusal: Rejection, lost: Sequence[Row]) -> None:
        self.refusals.append(refusal)
        if lost:
            self._settled("lost", lost)
        self._settled("refused", [refusal.row])

    def on_closed(self, lost: Sequence[Row], closed: Closed, error: str) -> None:
        assert self.closed is None, "the link's last word is said once"
        self.closed = (closed, error)
        self.outcomes["lost"] += [row.seq for row in lost]
        self._tell("closed", [row.seq for row in lost])

    def count(self) -> int:
        return sum(len(seqs) for seqs in self.outcomes.values())

    def kinds(self) -> list[str]:
        return [event[0] for event in self.events]

    async def until(self, predicate: Callable[[], Any], timeout: float = WAIT_S) -> None:
        async with asyncio.timeout(timeout):
            while not predicate():
                self._changed.clear()
                await self._changed.wait()

    async def outcomes_of(self, count: int, timeout: float = WAIT_S) -> dict[str, list[int]]:
        """Wait until that many rows have an outcome; each has exactly one."""
        await self.until(lambda: self.count() >= count, timeout)
        seqs = [seq for kind in self.outcomes.values() for seq in kind]
        assert len(seqs) == count
        assert len(set(seqs)) == count
        return self.outcomes

    async def publish_all(self, link: Link, rows: Sequence[Row]) -> list[Any]:
        """Publish, waiting for `on_writable` where the link stops; returns the rejections."""
        rejected: list[Any] = []
        done = 0
        while True:
            seen = self.writable
            publication = link.publish(rows[done:])
            rejected += publication.rejected
            done += publication.taken
            if done == len(rows):
                return rejected
            await self.until(lambda seen=seen: self.writable > seen)  # type: ignore[misc]

    def _settled(self, kind: str, rows: Sequence[Row]) -> None:
        assert rows, "nothing to tell"
        assert self.closed is None, "nothing after the last word"
        self.outcomes.setdefault(kind, []).extend(row.seq for row in rows)
        self._tell(kind, [row.seq for row in rows])

    def _tell(self, *event: Any) -> None:
        self.events.append(event)
        self._changed.set()
        self.on_event()


def make_row(seq: int, **columns: Any) -> Row:
    columns = (
        dict[str, Any]() | {"event_type": "ok.created", "payload": b'{"n":1}', "occurred_at": 1_764_439_200.0} | columns
    )
    return Row(0, seq, columns.pop("id", f"id-{seq}"), columns.pop("event_type"), **columns)


def make_rows(count: int, **columns: Any) -> list[Row]:
    return [make_row(seq, **columns) for seq in range(1, count + 1)]


def make_broker(*urls: str, exchange: str = "ev", **options: Any) -> AmqpBroker:
    options = {"database_now": lambda: 1_764_440_000.0} | options
    return AmqpBroker(lambda: urls, Router(exchange, "{event_type}"), **options)
