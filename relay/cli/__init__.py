"""The command line: arguments, printing, exit codes. The only package that prints and that reads the
environment. A command, or a group of them, is a module: `add` gives it to the parser.

Exit codes: 0 done; 1 anything else; 2 configuration or usage; 3 the schema is incompatible; 4 the command's
own "no" (a check found an error, a drain was cut short, a guarantee of the demo did not hold). Whatever goes
wrong outside is one line on standard error and, where there is one, a second that says what to do; a
traceback is a fault of ours.

Imports are late on purpose: `relay run` stands beside every service, so it loads what it uses and nothing
else.
"""

from __future__ import annotations

import argparse
import errno
import io
import os
import sys
from collections.abc import Sequence

from relay.build import VERSION
from relay.cli import daemon, inbox, operate, parked, redrive, schema, topology, trial
from relay.cli.console import Console, Parser
from relay.errors import RelayError, UsageError
from relay.values import utf8

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""What a file says that takes no more: nothing else here ends in these."""
_PATHS = ("file",)
_POSITIONAL = ("id", "queue")
"""Of the arguments' names, those of files, and those that are no option where they are no list."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; `argv` is without the program's name."""
    console = Console(os.environ)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # An id that the terminal's encoding has no letters for is shown by numbers: no reason to fail.
            stream.reconfigure(errors="backslashreplace")
    options = _parser().parse_args(argv)
    try:
        _refuse_undecoded(options)
        code = int(options.perform(options, console))
        sys.stdout.flush()
    except RelayError as error:
        console.complain(error)
        return error.exit_code
    except KeyboardInterrupt:
        console.note("interrupted")
        return 1
    except BrokenPipeError:
        # Whoever read the output has seen enough.
        _write_no_more()
        return 1
    except OSError as error:
        if error.errno in _NO_ROOM:
            console.note(f"cannot write the output: {error.strerror}")
            _write_no_more()
        else:
            console.confess(error)
        return 1
    except Exception as error:  # noqa: BLE001 - the outermost place: reported as a fault of ours
        console.confess(error)
        return 1
    return code


def _write_no_more() -> None:
    """The interpreter's own flush at exit must not complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parser() -> Parser:
    parser = Parser(
        prog="relay",
        description="Publishes the rows of a PostgreSQL outbox to RabbitMQ: at least once, in order per key.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"relay {VERSION}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for module in (daemon, schema, operate, parked, topology, redrive, trial, inbox):
        module.add(commands)
    return parser


def _refuse_undecoded(options: argparse.Namespace) -> None:
    """Arguments in bytes that are no UTF-8 come as lone surrogates, which no server takes; a file's name may be such.
    Raises UsageError."""
    for name, value in vars(options).items():
        option = name.upper() if name in _POSITIONAL and isinstance(value, str) else f"--{name.replace('_', '-')}"
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str) and name not in _PATHS:
                try:
                    utf8(text)
                except ValueError as error:
                    raise UsageError(f"{option} {text}: {error}; allowed: text in UTF-8 without zero bytes") from None
