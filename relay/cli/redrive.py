"""`relay redrive QUEUE`."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from relay.cli.console import (
    NOTHING_MATCHED,
    Commands,
    Console,
    Screen,
    add_command,
    print_json,
    print_lines,
    stop_signals,
    wait_for,
)
from relay.errors import NothingMatched

if TYPE_CHECKING:
    from relay.redrive import run


def add(commands: Commands) -> None:
    text = "messages of a broker's queue back to work, under their ids"
    redrive = add_command(commands, "redrive", _redrive, text, exit_4=NOTHING_MATCHED)
    redrive.add_argument("queue", metavar="QUEUE", help="such as orders.inventory.parking")
    redrive.add_argument("--to-exchange", metavar="NAME", help="instead of the exchange that the message first came by")
    redrive.add_argument("--routing-key", metavar="KEY", help="instead of the routing key that it first had")
    redrive.add_argument(
        "--where",
        metavar="HEADER=VALUE",
        action="append",
        default=[],
        help="only messages with this header (or property: type, app_id ...); may be repeated",
    )
    redrive.add_argument("--limit", metavar="N", help="at most so many messages, the oldest first")
    redrive.add_argument("--rate", metavar="N/s", help="at most so many a second (50/s), minute (600/m) or hour")
    redrive.add_argument("--dry-run", action="store_true", help="show what would be sent, send nothing")
    redrive.add_argument("--yes", action="store_true", help="asks nothing anyway; for scripts that say it everywhere")
    redrive.add_argument("--json", action="store_true", help="one JSON document")


def _redrive(options: argparse.Namespace, console: Console) -> int:
    from relay import logs, parked_text
    from relay.redrive import run, words

    order = words.read_order(
        options.queue,
        options.where,
        options.to_exchange,
        options.routing_key,
        limit=parked_text.read_limit(options.limit),
        rate_per_s=parked_text.read_rate(options.rate),
        is_dry=options.dry_run,
    )
    config = console.config("redrive")
    console.warn()
    logs.setup(config.log_format, config.log_level, config.redactor)
    screen = Screen(is_live=sys.stderr.isatty())

    def on_progress(outcome: run.Outcome) -> None:
        screen.gauge(f"{outcome.looked_at:,} looked at, {outcome.redriven:,} redriven")

    def on_end(outcome: run.Outcome) -> None:
        screen.clear()
        if outcome.matched and not outcome.is_dry:
            counts = {"matched": outcome.matched, "redriven": outcome.redriven, "failed": sum(outcome.failed.values())}
            logs.get_logger().info(
                "queue_redriven", queue=outcome.queue, run=outcome.run, where=options.where, **counts
            )

    async def until_stopped() -> run.Outcome:
        return await run.redrive(config, order, stop_signals(), on_progress, on_end)

    outcome = wait_for(until_stopped())
    if options.json:
        print_json(words.document(outcome), console)
    else:
        print_lines(words.lines(outcome), console)
    if outcome.failed or outcome.stopped is not None:
        return 1
    return 0 if outcome.matched else NothingMatched.exit_code
