"""`relay check`, `relay status`, `relay pause`, `relay resume`."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from relay.cli.console import Commands, Console, Screen, add_command, print_columns, print_json, wait_for
from relay.errors import UsageError

if TYPE_CHECKING:
    from relay.admin import Status
    from relay.config import Config
    from relay.preflight import Finding

WATCH_INTERVAL_S: Final = 2.0


def add(commands: Commands) -> None:
    text = "preflight: one line per finding, with the mend"
    check = add_command(commands, "check", _check, text, exit_4="there is an error among the findings")
    check.add_argument("--json", action="store_true", help="one JSON document")
    check.add_argument(
        "--deep", action="store_true", help="also walk through the table for unsent rows that nobody reads any more"
    )

    status = add_command(commands, "status", _status, "backlog, ages, what is deferred, held and parked, who relays")
    status.add_argument("--json", action="store_true", help="one JSON document")
    status.add_argument(
        "--watch",
        action="store_true",
        help="again every two seconds, until interrupted: on a terminal a live view, else one text after the other",
    )
    status.add_argument(
        "--metrics-url",
        metavar="URL",
        help="with --watch: the relay that is asked for what is in flight and what it waits for (default: at RELAY_LISTEN)",
    )

    add_command(commands, "pause", _pause, "all relays of this outbox stop reading and publishing; survives restarts")
    add_command(commands, "resume", _resume, "all relays of this outbox go on after a pause")


def _check(options: argparse.Namespace, console: Console) -> int:
    config = console.config("check")
    from relay import preflight

    screen = Screen(is_live=sys.stderr.isatty())
    findings = wait_for(preflight.check(config, console.warnings, on_deep=screen.gauge if options.deep else None))
    screen.clear()
    if options.json:
        print_json(preflight.as_document(findings), console)
    else:
        _print_findings(findings, console)
    return 4 if any(finding.level is preflight.Level.ERROR for finding in findings) else 0


def _print_findings(findings: Sequence[Finding], console: Console) -> None:
    print_columns(
        [
            (finding.level, finding.check, f"{finding.text}; {finding.mend}" if finding.mend else finding.text)
            for finding in findings
        ],
        console,
    )


def _status(options: argparse.Namespace, console: Console) -> int:
    config = console.config("status")
    console.warn()
    from relay import admin

    if options.metrics_url is not None and not options.watch:
        raise UsageError("--metrics-url is for --watch")
    if options.metrics_url is not None and not options.metrics_url.startswith(("http://", "https://")):
        raise UsageError(f"--metrics-url {options.metrics_url}: http://HOST:PORT/metrics, or https://…")
    if not options.watch:
        _print_status(wait_for(admin.status(config)), console, as_json=options.json)
        return 0
    is_live = sys.stdout.isatty() and not options.json
    with contextlib.suppress(KeyboardInterrupt):  # the way in which a watch ends
        if is_live:
            wait_for(_watch_live(config, console, options.metrics_url))
        else:
            wait_for(_watch(config, console, as_json=options.json))
    return 0


async def _watch_live(config: Config, console: Console, url: str | None) -> None:
    import asyncio

    from rich.live import Live

    from relay import live, scrape, watch

    view = live.View(url or scrape.metrics_url(config.listen))
    with Live(live.draw(view), auto_refresh=False) as screen:
        while True:
            await watch.look(config, view, console.redact)
            screen.update(live.draw(view), refresh=True)
            await asyncio.sleep(WATCH_INTERVAL_S)


async def _watch(config: Config, console: Console, *, as_json: bool) -> None:
    import asyncio

    from relay import admin

    before: Status | None = None
    while True:
        now = await admin.status(config, since=before)
        if before is not None and not as_json:
            print()
        _print_status(now, console, as_json=as_json)
        sys.stdout.flush()
        before = now
        await asyncio.sleep(WATCH_INTERVAL_S)


def _print_status(status: Status, console: Console, *, as_json: bool) -> None:
    from relay import admin

    if as_json:
        print_json(admin.as_document(status), console)
        return
    print_columns(admin.as_lines(status), console)


def _pause(options: argparse.Namespace, console: Console) -> int:
    config = console.config("pause")
    console.warn()
    from relay import pause

    found = wait_for(pause.pause(config))
    said = "paused" if found.is_news else "was paused already"
    print(f"{found.table}: {said}, by {found.by} at {found.since.isoformat()}; its relays stop within about a second")
    return 0


def _resume(options: argparse.Namespace, console: Console) -> int:
    config = console.config("resume")
    console.warn()
    from relay import pause

    found = wait_for(pause.resume(config))
    if found.is_news:
        print(f"{found.table}: resumed; {found.by} had paused it at {found.since.isoformat()}")
    else:
        print(f"{found.table}: was not paused")
    return 0
