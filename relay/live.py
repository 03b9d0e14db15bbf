"""The picture of `relay status --watch` on a terminal. Draws what it is given; asks nobody, prints nothing.

The database knows the backlog, the shards and who has them. What is in flight and what publishing waits for only each relay
knows: it is shown of the one at RELAY_LISTEN (or --metrics-url), and is unknown where none answers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from relay.admin import RelayState, Status
from relay.core.ports.outbox import SHARDS
from relay.scrape import Pace, Scrape
from relay.text import many, seconds

LOOKS: Final = 40
"""So many looks back the curves go: well over a minute, in a terminal of 100 columns."""

BAR: Final = 20
_BLOCKS: Final = " ▁▂▃▄▅▆▇█"


@dataclass(slots=True)
class View:
    """What is shown. `source` is where the relay is asked, None: nowhere. `trouble`: why the last look failed."""

    source: str | None
    status: Status | None = None
    scrape: Scrape | None = None
    pace: Pace | None = None
    trouble: str | None = None
    inserted: deque[float] = field(default_factory=lambda: deque(maxlen=LOOKS))
    settled: deque[float] = field(default_factory=lambda: deque(maxlen=LOOKS))
    backlog: deque[float] = field(default_factory=lambda: deque(maxlen=LOOKS))

    def take(self, status: Status) -> None:
        """A look at the database that went well."""
        self.status = status
        self.trouble = None
        self.backlog.append(status.backlog_rows)
        if status.rates is not None:
            self.inserted.append(status.rates.inserted_per_second)
            self.settled.append(status.rates.settled_per_second)


def draw(view: View) -> RenderableType:
    """The whole picture."""
    status = view.status
    if status is None:
        return Panel(Text(view.trouble or "connecting …"), title="relay status", border_style="red")
    state = Text(f"paused since {status.paused_at} by {status.paused_by}", "bold yellow") if status.is_paused else None
    parts: list[RenderableType] = [_rows(view, status), _one_relay(view), _relays(status)]
    if view.trouble is not None:
        parts.insert(0, Text(f"old by now: {view.trouble}", "bold red"))
    if state is not None:
        parts.insert(0, state)
    border = "red" if view.trouble else "yellow" if status.is_paused else "green"
    seen_at = status.observed_at.partition(".")[0].replace("T", " ")
    return Panel(Group(*parts), title=f"outbox {status.table}", subtitle=f"{seen_at} UTC", border_style=border)


def _rows(view: View, status: Status) -> Table:
    table = _grid()
    about = "about " if status.backlog_estimated else ""
    oldest = status.oldest_pending_age_seconds
    table.add_row("backlog", Text(f"{about}{many(status.backlog_rows, 'row')}"), curve(view.backlog))
    table.add_row("oldest", Text("–" if oldest is None else seconds(oldest), _alarm(oldest or 0.0, 60.0, 600.0)))
    rates = status.rates
    table.add_row(
        "in", Text("–" if rates is None else f"{rates.inserted_per_second:,.0f} rows/s"), curve(view.inserted)
    )
    table.add_row("out", Text("–" if rates is None else f"{rates.settled_per_second:,.0f} rows/s"), curve(view.settled))
    due = status.next_due_in_seconds
    failed = status.deferred_rows - status.scheduled_rows
    waits = "" if due is None else f", next due in {seconds(max(0.0, due))}"
    table.add_row("deferred", Text(f"{many(status.deferred_rows, 'row')}{waits}", _alarm(failed, 1, 1 << 60)))
    table.add_row("scheduled", Text(f"{many(status.scheduled_rows, 'row')} of these"))
    held = Text(
        f"{many(status.held_keys, 'key')}, {many(status.held_rows, 'row')}", _alarm(status.held_keys, 1, 1 << 60)
    )
    table.add_row("held", held)
    classes = ", ".join(f"{name} {count:,}" for name, count in status.parked_by_class.items())
    parked = Text(many(status.parked_rows, "row"), _alarm(status.parked_rows, 1 << 60, 1))
    table.add_row("parked", parked, Text(classes, "red"))
    if status.unmarkable_rows:
        table.add_row("unmarkable", Text(f"{many(status.unmarkable_rows, 'row')} of these", "red"))
    return table


def _one_relay(view: View) -> RenderableType:
    where = view.source or "nowhere: RELAY_LISTEN is empty"
    table = _grid()
    scrape = view.scrape
    if scrape is None:
        table.add_row(
            "in flight", Text("unknown", "dim"), Text(f"no relay answers at {where}; --metrics-url URL", "dim")
        )
        return Group(_heading("one relay"), table)
    in_flight = f"{many(scrape.in_flight_messages, 'message')}, {size(scrape.in_flight_bytes)}"
    table.add_row("in flight", Text(in_flight))
    pace = view.pace
    if pace is not None:
        outcomes = ", ".join(f"{name} {rate:,.0f}/s" for name, rate in pace.outcomes.items() if rate > 0)
        table.add_row("published", Text(outcomes or "nothing"))
        table.add_row("confirm", Text("–" if pace.confirm_s is None else f"{seconds(pace.confirm_s)} on average"))
    for reason, (is_active, _) in scrape.backpressure.items():
        share = 0.0 if pace is None else pace.waiting.get(reason, 0.0)
        if is_active or share > 0:
            style = "yellow" if reason in ("in_flight", "bytes", "rate") else "red"
            text = f"{'now, ' if is_active else ''}{share:.0%} of the time"
            table.add_row(f"waits: {reason}", bar(share, style), Text(text, style))
    if not any(is_active for is_active, _ in scrape.backpressure.values()):
        table.add_row("waits", Text("for nothing", "green"))
    return Group(_heading(f"the relay at {where}"), table)


def _relays(status: Status) -> RenderableType:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, expand=False)
    for name in ("relay", "version", "shards", "", "heard", "broker"):
        table.add_column(name, justify="right" if name in ("heard",) else "left")
    for relay in status.relays:
        table.add_row(*_relay(relay))
    if not status.relays:
        return Text("\nno relay", "bold red")
    heading = Text.assemble(
        _heading(f"{many(len(status.relays), 'relay')}, "),
        (f"{status.shards_owned} of {SHARDS} shards owned", "green" if status.shards_owned == SHARDS else "red"),
    )
    return Group(heading, table)


def _relay(relay: RelayState) -> Sequence[RenderableType]:
    age = relay.heartbeat_age_seconds
    return (
        Text(relay.name or relay.instance),
        Text(relay.version or "?"),
        Text(str(relay.shards)),
        bar(relay.shards / SHARDS, "cyan"),
        Text("–" if age is None else f"{age:.1f} s ago", _alarm(age or 0.0, 3.0, 10.0)),
        Text("connected", "green") if relay.is_available else Text("none", "red"),
    )


# ---------------------------------------------------------------- small pictures


def _grid() -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", min_width=16)
    table.add_column(min_width=BAR)
    table.add_column()
    return table


def _heading(text: str) -> Text:
    return Text(f"\n{text}", "bold")


def _alarm(value: float, warn_at: float, alarm_at: float) -> str:
    return "red" if value >= alarm_at else "yellow" if value >= warn_at else ""


def curve(values: Iterable[float]) -> Text:
    """The last values as blocks, from zero to the highest of them."""
    found = list(values)
    top = max(found, default=0.0)
    if top <= 0:
        return Text("")
    # What is above zero is never shown as nothing.
    return Text("".join(_BLOCKS[max(1, round(value / top * 8)) if value > 0 else 0] for value in found), "cyan")


def bar(share: float, style: str) -> Text:
    """A share of one, as a bar."""
    filled = round(min(1.0, max(0.0, share)) * BAR)
    return Text.assemble(("━" * filled, style), ("─" * (BAR - filled), "dim"))


def size(value: float) -> str:
    """Bytes in the units of RELAY_MAX_BYTES."""
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:,.0f} {unit}" if unit == "B" else f"{value:,.1f} {unit}"
        value /= 1024
    return f"{value:,.1f} GiB"
