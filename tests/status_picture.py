"""The picture of `relay status --watch` in the documentation: `python -m tests.status_picture > docs/status-watch.svg`.

An example, drawn by the code that draws the view; a test compares.
"""

from __future__ import annotations

import re
import sys
from collections import deque
from io import StringIO

from rich.console import Console

from relay.admin import Rates, RelayState, Status
from relay.live import LOOKS, View, draw
from relay.scrape import Pace, Scrape

WIDTH = 104


def example() -> View:
    """A busy outbox: a key behind a row without a route, two relays, the window full for a third of the time."""
    status = Status(
        table="public.outbox",
        schema_version=1,
        payload_type="json",
        observed_at="2026-11-29T22:14:03.120000+00:00",
        is_paused=False,
        paused_at=None,
        paused_by=None,
        backlog_rows=1840,
        backlog_estimated=False,
        oldest_pending_age_seconds=42.7,
        pending_rows=1827,
        deferred_rows=311,
        next_due_in_seconds=18.4,
        scheduled_rows=310,
        held_rows=12,
        held_keys=1,
        parked_rows=3,
        parked_by_class={"too_large": 1, "unroutable": 2},
        unmarkable_rows=0,
        unknown_aside={},
        sent_rows_estimate=812_000,
        newest_seq=1_204_311,
        rates=Rates(3911.0, 3987.5),
        has_doorbell=True,
        is_doorbell_armed=False,
        shards_owned=64,
        relays=[
            RelayState("orders-7c9f/1", "orders-7c9f", "0.1.0", None, 0.4, True, 32),
            RelayState("orders-b2d1/2", "orders-b2d1", "0.1.0", None, 0.9, True, 32),
        ],
    )
    reasons = ("in_flight", "bytes", "blocked", "rate", "broker_down", "database_down")
    pressure = {reason: (reason == "in_flight", 0.0) for reason in reasons}
    scrape = Scrape(1.0, 1994, 512_000, pressure, {"acked": 0.0}, 0.0, 0.0)
    pace = Pace({"in_flight": 0.34}, {"acked": 1989.0, "returned": 0.0}, 0.0214)
    looks = range(LOOKS)
    return View(
        "http://127.0.0.1:9761/metrics",
        status,
        scrape,
        pace,
        inserted=deque([2000.0 + 1911 * (n % 15) / 14 for n in looks], LOOKS),
        settled=deque([2400.0 + 1500 * (n % 13) / 12 for n in looks], LOOKS),
        backlog=deque([max(0.0, 9000.0 - 130 * n) + 200 for n in looks], LOOKS),
    )


def picture() -> str:
    """The SVG, without the web fonts that rich would have a reader's browser fetch."""
    console = Console(
        record=True, width=WIDTH, file=StringIO(), force_terminal=True, color_system="truecolor", legacy_windows=False
    )
    console.print(draw(example()))
    text = console.export_svg(title="relay status --watch", unique_id="relay")
    return re.sub(r"\s*@font-face \{.*?\}", "", text, flags=re.DOTALL) + "\n"


if __name__ == "__main__":
    sys.stdout.write(picture())
