"""A fake RabbitMQ: one exchange, one queue log; confirms, returns, nacks, alarms, cuts, silence.

Owns: which copies reached the queue (`Oracle.log`) and what the broker said of each. A link (`link.py`) is a pipe:
what `publish` wrote arrives a latency later, in order; each message is then kept, returned or nacked; its
confirm follows, alone or under a covering `multiple`, in any order of tags. A cut loses the rest of the
pipe and whatever was said and not heard; the copies that had arrived stay in the queue.

The routing key is the row's event type: without a route while in `unroutable` (mandatory: returned);
`invalid`, `too_large` and `unknown` cannot be encoded, `expired` is past its deadline; over `refused` the broker closes the channel, over
`refused_all` the connection, and the channel over any message while the exchange is gone: what was on it before is
kept and what comes after is not looked at, no confirm follows for either. An alarm stops the reading at once, and is
told to those who publish meanwhile. A listener is never called from within `publish`.
"""

from __future__ import annotations

import collections
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .loop import OUTSIDE, VirtualLoop
from .oracle import History, Oracle

if TYPE_CHECKING:
    from .link import FakeLink

Span = tuple[float, float]

NO_EXCHANGE = "404 NOT_FOUND - no exchange 'events'"


@dataclass(slots=True)
class BrokerOptions:
    """Latencies in seconds, shares from 0 to 1."""

    latency: Span = (0.001, 0.001)
    confirm: Span = (0.001, 0.001)
    nacks: float = 0.0
    nacked_and_kept: float = 0.3
    returns: float = 0.0
    """Of the messages of type `flaky`: those that find no route though it is there most of the time."""
    multiple: float = 0.5
    unverified: float = 0.0
    """Of the rows: those whose exchange a link asks for first."""
    pipe_rows: int = 100_000
    cut_noticed: Span = (0.0, 0.0)


@dataclass(slots=True)
class Rabbit:
    """The broker itself, shared by all relays."""

    loop: VirtualLoop
    random: random.Random
    oracle: Oracle
    history: History
    options: BrokerOptions
    unroutable: set[str] = field(default_factory=set)
    full: set[str] = field(default_factory=set)
    """Event types whose queue is full and rejects."""
    silent: set[str] = field(default_factory=set)
    """Event types whose queue does nothing, and is waited for (its majority is away)."""
    is_up: bool = True
    has_exchange: bool = True
    is_blocked: bool = False
    is_mute: bool = False
    is_hushed: bool = False
    links: list[FakeLink] = field(default_factory=list)
    scripted: collections.deque[str] = field(default_factory=collections.deque)
    """Verdicts for the next messages, in order: `acked`, `nacked` or `returned`; then by chance."""

    def draw(self, span: Span) -> float:
        return span[0] if span[0] == span[1] else self.random.uniform(*span)

    def block(self, on: bool) -> None:
        """A resource alarm: nothing is taken from connections that publish, and they hear of it when they do."""
        self.is_blocked = on
        self.history.note("broker", "blocks" if on else "unblocks")
        self._go_on()

    def mute(self, on: bool) -> None:
        """Nothing is taken and nothing said, and nobody is told."""
        self.is_mute = on
        self.history.note("broker", "mute" if on else "speaks")
        self._go_on()

    def hush(self, on: bool) -> None:
        """Everything is taken, nothing is confirmed: only the acks vanish, or come late."""
        self.is_hushed = on
        self.history.note("broker", "confirms nothing" if on else "confirms again")
        self._go_on()

    def silence(self, event_type: str, on: bool) -> None:
        """A queue without its majority: what it gets stays where it is, and has no confirm before it is well again."""
        self.history.note("broker", "is silent over" if on else "is heard over", event_type)
        if on:
            self.silent.add(event_type)
        else:
            self.silent.discard(event_type)
        self._go_on()

    def _go_on(self) -> None:
        for link in list(self.links):
            link.serve()

    def go_down(self, down_s: float) -> None:
        self.is_up = False
        self.history.note("broker", "is down", f"{down_s:.3f} s")
        for link in list(self.links):
            link.cut()
        self.loop.call_later(down_s, self._come_up, context=OUTSIDE)

    def _come_up(self) -> None:
        self.is_up = True
        self.history.note("broker", "is up")

    def route(self, event_type: str, exists: bool) -> None:
        self.history.note("broker", "binds" if exists else "unbinds", event_type)
        if exists:
            self.unroutable.discard(event_type)
        else:
            self.unroutable.add(event_type)
