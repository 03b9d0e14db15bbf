"""`relay migrate`."""

from __future__ import annotations

import argparse
import sys

from relay.cli.console import Commands, Console, add_command, wait_for


def add(commands: Commands) -> None:
    migrate = add_command(commands, "migrate", _migrate, "create or upgrade the outbox's schema; safe to repeat")
    migrate.add_argument("--print", action="store_true", help="write the SQL for psql, touch nothing")
    migrate.add_argument("--role", metavar="NAME", help="grant an existing role the least rights that `run` needs")
    migrate.add_argument(
        "--writer", metavar="NAME", help="grant an existing role INSERT on the writers' columns, nothing else"
    )
    migrate.add_argument(
        "--payload",
        choices=("json", "jsonb", "text", "bytea"),
        help="the payload column's type (default: json)",
    )
    migrate.add_argument(
        "--doorbell",
        action=argparse.BooleanOptionalAction,
        help="with or without the trigger that wakes an idle relay "
        "(default: with, unless max_prepared_transactions is above 0)",
    )


def _migrate(options: argparse.Namespace, console: Console) -> int:
    config = console.config("migrate", spared=("RELAY_DATABASE_URL",) if options.print else ())
    console.warn()
    from relay import migrate

    wanted = {name: getattr(options, name) for name in ("payload", "doorbell", "role", "writer")}
    if options.print:
        sys.stdout.write(migrate.printed(config.table, **wanted))
        return 0
    done = wait_for(migrate.run(config.database(), config.table, **wanted))
    schema = done.schema
    did = "created" if done.version_before == 0 else "upgraded"
    if done.version_before == schema.version:
        did = "up to date"
    doorbell = "with the doorbell" if schema.has_doorbell else "without the doorbell: relays poll"
    print(f"{schema.table}: {did}, schema version {schema.version}, payload {schema.payload_type}, {doorbell}")
    for name, text in (("role", "may run the relay"), ("writer", "may write events")):
        if wanted[name] is not None:
            print(f"{schema.table}: the role {wanted[name]} {text}")
    return 0
