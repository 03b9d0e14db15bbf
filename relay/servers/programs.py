"""Where the servers' installed programs are; nothing is installed here."""

from __future__ import annotations

import shutil
from pathlib import Path

from relay.errors import RelayError

LOOPBACK = "127.0.0.1"
# Where Debian installs them, outside of the PATH.
POSTGRES_HOME = Path("/usr/lib/postgresql")
RABBITMQ_HOME = Path("/usr/lib/rabbitmq/bin")
ERLANG_HOME = Path("/usr/lib/erlang")


class ServersUnavailable(RelayError):
    """A server's programs are not installed here; the hint says what to install."""


def find_postgres() -> Path:
    """The folder of `postgres`, `initdb` and `psql`: Debian's newest, else the PATH's.

    Raises ServersUnavailable.
    """
    versions = sorted(POSTGRES_HOME.glob("*/bin/postgres"), key=lambda p: float(p.parts[-3]), reverse=True)
    on_path = shutil.which("postgres")
    for program in [*versions, *([Path(on_path).resolve()] if on_path else [])]:
        if all((program.parent / name).exists() for name in ("initdb", "psql")):
            return program.parent
    raise ServersUnavailable(
        "PostgreSQL's programs (postgres, initdb, psql) are not installed",
        hint="install PostgreSQL 14 or newer (Debian: apt-get install postgresql), or run `make setup`",
    )


def find_rabbitmq() -> Path:
    """The folder of `rabbitmq-server` and `rabbitmqctl`. Raises ServersUnavailable.

    Debian's own folder first: the scripts of the same name in /usr/sbin insist on the user `rabbitmq`.
    """
    on_path = shutil.which("rabbitmq-server")
    for folder in [RABBITMQ_HOME, *([Path(on_path).parent] if on_path else [])]:
        if (folder / "rabbitmq-server").exists() and (folder / "rabbitmqctl").exists():
            find_erl_call()
            return folder
    raise ServersUnavailable(
        "RabbitMQ (rabbitmq-server) is not installed",
        hint="install RabbitMQ 3.10 or newer (Debian: apt-get install rabbitmq-server), or run `make setup`",
    )


def find_erl_call() -> str:
    """Erlang's one-shot remote call. Raises ServersUnavailable."""
    return _erlang_program("erl_call", "lib/erl_interface-*/bin/erl_call")


def find_epmd() -> str:
    """Erlang's port mapper. Raises ServersUnavailable."""
    return _erlang_program("epmd", "erts-*/bin/epmd")


def _erlang_program(name: str, pattern: str) -> str:
    found = shutil.which(name) or next((str(path) for path in ERLANG_HOME.glob(pattern)), None)
    if found is None:
        raise ServersUnavailable(
            f"Erlang's {name} is not installed",
            hint="install Erlang's interface programs (Debian: apt-get install erlang-base)",
        )
    return found
