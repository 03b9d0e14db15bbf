"""`relay inbox migrate`, `relay inbox run`."""

from __future__ import annotations

import argparse
import sys

from relay.cli.console import CUT_SHORT, Commands, Console, add_command, wait_for


def add(commands: Commands) -> None:
    inbox = add_command(commands, "inbox", None, "the consumer's half")
    inbox_commands = inbox.add_subparsers(title="commands", metavar="COMMAND", required=True)
    inbox_migrate = add_command(
        inbox_commands, "migrate", _inbox_migrate, "create the consumer's tables in the consumer's database"
    )
    inbox_migrate.add_argument("--print", action="store_true", help="write the SQL for psql, touch nothing")
    inbox_migrate.add_argument("--role", metavar="NAME", help="grant an existing role what a consumer needs")
    add_command(
        inbox_commands,
        "run",
        _inbox_run,
        "the consumer's sidecar: a queue into the inbox table, until SIGTERM or SIGINT",
        exit_4=CUT_SHORT,
    )


def _inbox_migrate(options: argparse.Namespace, console: Console) -> int:
    spared = ("RELAY_INBOX_DATABASE_URL",) if options.print else ()
    config = console.config("inbox migrate", spared=spared)
    console.warn()
    from relay.inbox import migrate
    from relay.inbox.naming import channel_of
    from relay.values import quote_identifier

    if options.print:
        sys.stdout.write(migrate.printed(table=config.inbox_table, role=options.role))
        return 0
    wait_for(migrate.run(config.inbox_database(), table=config.inbox_table, role=options.role))
    print(f"processed_messages, {config.inbox_table}: in place")
    print(f"its doorbell: LISTEN {quote_identifier(channel_of(config.inbox_table))}")
    return 0


def _inbox_run(options: argparse.Namespace, console: Console) -> int:
    config = console.config("inbox run")
    from relay.inbox import sidecar

    return sidecar.run(config, console.warnings)
