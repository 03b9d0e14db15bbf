"""The live view: what it says of what it is given, and what it never does."""

from __future__ import annotations

import socket
import subprocess
import sys
from dataclasses import replace
from io import StringIO
from pathlib import Path
from threading import Thread

import pytest
from rich.console import Console

from relay.core.ports.outbox import SHARDS
from relay.live import View, bar, curve, draw, size
from relay.metrics import PRESSURES
from relay.scrape import Scrape, metrics_url, pace, scrape
from relay.values import ListenAddress
from tests.status_picture import example, picture
from tests.test_metrics import Site
from tests.test_metrics import site as site  # a fixture

ROOT = Path(__file__).parent.parent


def shown(view: View, width: int = 100) -> str:
    out = StringIO()
    Console(file=out, width=width).print(draw(view))
    return out.getvalue()


def test_it_shows_what_there_is() -> None:
    text = shown(example())
    for words in (
        "1,840 rows",
        "42.7 s",
        "3,911 rows/s",
        "1 key, 12 rows",
        "too_large 1, unroutable 2",
        "1,994 messages",
        "waits: in_flight",
        "34% of the time",
        "orders-b2d1",
        f"{SHARDS} of {SHARDS} shards owned",
    ):
        assert words in text, words


def test_what_nobody_tells_is_unknown_and_not_zero() -> None:
    view = example()
    view.scrape = view.pace = None
    text = shown(view)
    assert "unknown" in text
    assert "no relay answers at http://127.0.0.1:9761/metrics" in text
    assert "0 messages" not in text
    assert "connecting" in shown(View(None))


def test_a_database_that_went_away_is_said_over_the_old_numbers() -> None:
    view = example()
    view.trouble = "PostgreSQL cannot be reached"
    text = shown(view)
    assert "old by now: PostgreSQL cannot be reached" in text
    assert "1,840 rows" in text
    assert view.status is not None
    view.take(view.status)
    assert "old by now" not in shown(view)


def test_a_pause_and_no_relay_stand_out() -> None:
    view = example()
    assert view.status is not None
    view.status = replace(
        view.status, is_paused=True, paused_at="2026-11-29", paused_by="ann", relays=[], shards_owned=0
    )
    text = shown(view)
    assert "paused since 2026-11-29 by ann" in text
    assert "no relay" in text


@pytest.mark.parametrize("width", [40, 60, 250])
def test_it_fits_any_terminal(width: int) -> None:
    assert all(len(line) <= width for line in shown(example(), width).splitlines())


def test_small_pictures() -> None:
    assert curve([]).plain == ""
    assert curve([0, 0]).plain == ""
    assert curve([0, 0.001, 4, 8]).plain == " ▁▄█"
    assert bar(0.5, "red").plain == "━" * 10 + "─" * 10
    assert bar(7.0, "red").plain == "━" * 20
    assert [size(s) for s in (0, 2048, 3 << 20, 5 << 30)] == ["0 B", "2.0 KiB", "3.0 MiB", "5.0 GiB"]


def test_the_picture_in_the_documentation_is_up_to_date() -> None:
    made = picture()
    assert (ROOT / "docs/status-watch.svg").read_text() == made, (
        "python -m tests.status_picture > docs/status-watch.svg"
    )
    assert "http" not in made.replace("http://www.w3.org/2000/svg", "").replace(
        "https://www.textualize.io", ""
    ).replace("http://127.0.0.1:9761", "")


# ---------------------------------------------------------------- a relay is asked


def test_a_scrape_of_a_relay(site: Site) -> None:
    site.metrics.in_flight_messages = 7
    site.metrics.in_flight_bytes = 70
    site.metrics.published["acked"] = 10
    site.metrics.backpressure.set("rate", True, site.clock.time)
    url = f"http://127.0.0.1:{site.server.port}/metrics"
    before = scrape(url)
    assert before is not None
    assert (before.in_flight_messages, before.in_flight_bytes, before.outcomes["acked"]) == (7, 70, 10)
    assert before.backpressure["rate"][0] and not before.backpressure["bytes"][0]
    assert tuple(before.backpressure) == PRESSURES
    site.metrics.published["acked"] += 100
    site.clock.time += 1.0
    now = scrape(url)
    assert now is not None
    found = pace(replace(before, at=0.0), replace(now, at=2.0))
    assert found is not None
    assert (found.outcomes["acked"], found.waiting["rate"], found.confirm_s) == (50.0, 0.5, None)
    assert pace(now, now) is None


def test_the_mean_confirm_and_a_relay_that_was_restarted() -> None:
    empty = Scrape(0.0, 0, 0, {}, {}, 0.0, 0.0)
    found = pace(empty, replace(empty, at=1.0, confirms=4.0, confirm_seconds=0.2))
    assert found is not None
    assert found.confirm_s == pytest.approx(0.05)
    assert pace(replace(empty, confirms=9.0), replace(empty, at=1.0)) is None


def test_who_is_no_relay_is_none(site: Site) -> None:
    assert scrape(f"http://127.0.0.1:{site.server.port}/livez") is None
    assert scrape("http://127.0.0.1:1/metrics") is None


def test_who_speaks_no_http_is_none() -> None:
    def greet() -> None:
        connection, _ = server.accept()
        with connection:
            connection.recv(4096)
            connection.sendall(b"220 mail.example ESMTP\r\n")

    with socket.create_server(("127.0.0.1", 0)) as server:
        greeter = Thread(target=greet)
        greeter.start()
        assert scrape(f"http://127.0.0.1:{server.getsockname()[1]}/metrics") is None
        greeter.join()


def test_where_a_relay_is_asked() -> None:
    assert metrics_url(ListenAddress("0.0.0.0", 9761)) == "http://127.0.0.1:9761/metrics"
    assert metrics_url(ListenAddress("::", 1)) == "http://[::1]:1/metrics"
    assert metrics_url(ListenAddress("10.0.0.7", 1)) == "http://10.0.0.7:1/metrics"
    assert metrics_url(None) is None


def test_the_daemon_loads_none_of_it() -> None:
    """A sidecar stands beside every service: what only an operator's command needs costs it no memory."""
    script = "import sys, relay.daemon, relay.cli; print(sorted({'rich', 'pygments', 'relay.live'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
