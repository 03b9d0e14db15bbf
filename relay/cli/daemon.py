"""`relay run`."""

from __future__ import annotations

import argparse

from relay.cli.console import CUT_SHORT, Commands, Console, add_command


def add(commands: Commands) -> None:
    text = "the daemon: publish what is in the outbox, until SIGTERM or SIGINT"
    add_command(commands, "run", _run, text, exit_4=CUT_SHORT)


def _run(options: argparse.Namespace, console: Console) -> int:
    config = console.config("run")
    from relay import daemon, tracing

    is_traced, warnings = tracing.is_wanted(console.environ)
    return daemon.run(config, (*console.warnings, *warnings), is_traced=is_traced)
