"""Users of both servers with passwords of their own, for as long as a test needs them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from urllib.parse import quote

import asyncpg

from relay.servers import PostgresServer, RabbitServer


class Role:
    """A role of PostgreSQL that logs in by password."""

    def __init__(
        self,
        database: asyncpg.Connection[asyncpg.Record],
        server: PostgresServer,
        database_name: str,
        name: str,
        password: str,
    ) -> None:
        self._database = database
        self._server = server
        self._database_name = database_name
        self.name = name
        self.password = password

    @property
    def url(self) -> str:
        who = f"{quote(self.name, safe='')}:{quote(self.password, safe='')}"
        return f"postgresql://{who}@127.0.0.1:{self._server.port}/{self._database_name}"

    async def change_password(self, password: str) -> None:
        """And end its sessions, which would live on with the old one."""
        self.password = password
        await self._database.execute(f"ALTER ROLE \"{self.name}\" PASSWORD '{password}'")
        await self.end_sessions()

    async def end_sessions(self) -> None:
        """Of those that are listed: one that is just logging in with the old password comes to light later."""
        await self._database.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = $1", self.name
        )

    async def is_locked_out(self, reasons: Callable[[], str]) -> bool:
        """Whether `reasons()` tells of a refused password; asked again until it does, it leaves no old session alive."""
        await self.end_sessions()
        return "password authentication failed" in await asyncio.to_thread(reasons)


@contextlib.asynccontextmanager
async def role(
    database: asyncpg.Connection[asyncpg.Record],
    server: PostgresServer,
    name: str,
    password: str,
    *,
    attributes: str = "",
) -> AsyncIterator[Role]:
    database_name = await database.fetchval("SELECT current_database()")
    hba = server.data / "pg_hba.conf"
    line = f'host all "{name}" 127.0.0.1/32 scram-sha-256\n'
    await database.execute(f"CREATE ROLE \"{name}\" LOGIN {attributes} PASSWORD '{password}'")
    hba.write_text(line + hba.read_text())
    await database.fetchval("SELECT pg_reload_conf()")
    try:
        yield Role(database, server, database_name, name, password)
    finally:
        hba.write_text(hba.read_text().replace(line, ""))
        await database.fetchval("SELECT pg_reload_conf()")
        await database.execute(f'DROP OWNED BY "{name}"; DROP ROLE "{name}"')


class User:
    """A user of RabbitMQ with rights in one vhost."""

    def __init__(self, server: RabbitServer, vhost: str, name: str, password: str) -> None:
        self._server = server
        self._vhost = vhost
        self.name = name
        self.password = password

    @property
    def url(self) -> str:
        return self._server.amqp_url(self._vhost, self.name, self.password)

    def change_password(self, password: str) -> None:
        """And close its connections, which would live on with the old one."""
        self.password = password
        name = binary(self.name)
        self._server.eval(
            f'rabbit_auth_backend_internal:change_password({name}, {binary(password)}, <<"test">>), '
            f'[rabbit_networking:close_connection(P, "password changed") || P <- rabbit_networking:connections(), '
            f"[{{user, {name}}}] =:= rabbit_reader:info(P, [user])]"
        )


@contextlib.contextmanager
def user(
    server: RabbitServer, vhost: str, name: str, password: str, *, configure: str, write: str, read: str
) -> Iterator[User]:
    who, where = binary(name), binary(vhost)
    rights = ", ".join(binary(pattern) for pattern in (configure, write, read))
    server.eval(f'rabbit_auth_backend_internal:add_user({who}, {binary(password)}, <<"test">>)')
    try:
        server.eval(f'rabbit_auth_backend_internal:set_permissions({who}, {where}, {rights}, <<"test">>)')
        yield User(server, vhost, name, password)
    finally:
        server.eval(f'rabbit_auth_backend_internal:delete_user({who}, <<"test">>)')


def binary(text: str) -> str:
    """An Erlang binary by its bytes."""
    return f"<<{','.join(map(str, text.encode()))}>>"


def leaks(password: str, text: str) -> list[str]:
    """The forms of a password that a text holds."""
    forms = (password, quote(password, safe=""), quote(password), password.encode("unicode_escape").decode())
    return [form for form in forms if form in text]
