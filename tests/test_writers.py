"""The examples of docs/writers.md, run as they stand there by a role that may only write.

Each places order 42 and its event, and is then asked for the same order again: that must fail and leave no event behind.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit, urlunsplit

import asyncpg
import pytest

from relay import migrate
from relay.values import table_name

PAGE: Final = (Path(__file__).parents[1] / "docs" / "writers.md").read_text()

_EXAMPLE: Final = re.compile(r"<!-- run: (\w+) -->\n```\w+\n(.*?)```\n", re.DOTALL)
EXAMPLES: Final[Mapping[str, list[str]]] = {
    name: [text for found, text in _EXAMPLE.findall(PAGE) if found == name] for name, _ in _EXAMPLE.findall(PAGE)
}

_JDBC: Final = Path("/usr/share/java/postgresql.jar")
_GO_PQ: Final = Path("/usr/share/gocode/src/github.com/lib/pq")
_NODE_PG: Final = [Path(text) for text in os.environ.get("NODE_PATH", "/usr/share/nodejs").split(":")]


@dataclass(frozen=True, slots=True)
class Shop:
    """A database with `orders` and an outbox, and a role that may write both. Its URL has no password: trust."""

    url: str
    admin: asyncpg.Connection[asyncpg.Record]

    async def events(self) -> list[tuple[str, str, str, object]]:
        rows = await self.admin.fetch("SELECT * FROM outbox ORDER BY seq")
        return [
            (row["event_type"], row["aggregate_type"], row["aggregate_id"], json.loads(row["payload"])) for row in rows
        ]

    @property
    def parts(self) -> dict[str, str]:
        split = urlsplit(self.url)
        return {
            "host": split.hostname or "",
            "port": str(split.port),
            "user": split.username or "",
            "name": split.path[1:],
        }


@pytest.fixture
async def shop(database_url: str) -> AsyncIterator[Shop]:
    admin = await asyncpg.connect(database_url)
    role = f"writer_{os.getpid()}_{database_url.rpartition('_')[2]}"
    await admin.execute(
        f"CREATE ROLE {role} LOGIN; CREATE TABLE orders (id text PRIMARY KEY, total int);"
        f" GRANT SELECT, INSERT ON orders TO {role}"
    )
    await migrate.migrate(admin, table_name("outbox"), writer=role)
    host = urlsplit(database_url).netloc.rpartition("@")[2]
    yield Shop(urlunsplit(urlsplit(database_url)._replace(netloc=f"{role}@{host}")), admin)
    await admin.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")
    await admin.close()


PLACED: Final = ("order.placed", "order", "42", {"order_id": "42", "total": 100})

_TWICE: Final = """
place("42", 100)
try:
    place("42", 200)
except Exception as error:
    print("refused:", error)
else:
    raise SystemExit("a second order of one id")
"""

_PYTHON: Final = {
    "psycopg": "connection = psycopg.connect({url!r})\ndef place(*order): place_order(connection, *order)",
    "asyncpg": "import asyncio\n"
    "async def placed(*order):\n"
    "    connection = await asyncpg.connect({url!r})\n"
    "    try:\n"
    "        await place_order(connection, *order)\n"
    "    finally:\n"
    "        await connection.close()\n"
    "def place(*order): asyncio.run(placed(*order))",
    "sqlalchemy": "from sqlalchemy import create_engine\n"
    "engine = create_engine({url!r}.replace('postgresql:', 'postgresql+psycopg:'))\n"
    "def place(*order): place_order(Session(engine), *order)",
    "django": "place = place_order",
}

_DJANGO: Final = """
import django
from django.conf import settings
settings.configure(DATABASES={{"default": {{"ENGINE": "django.db.backends.postgresql", "NAME": {name!r}, "USER": {user!r},
    "HOST": {host!r}, "PORT": {port!r}}}}})
django.setup()
"""


async def run(*command: str | Path, cwd: Path, timeout_s: float = 120.0, **environment: str) -> str:
    """What a program prints; it must end well."""
    done = await asyncio.to_thread(
        lambda: subprocess.run(
            [str(part) for part in command],
            cwd=cwd,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


async def in_python(name: str, shop: Shop, directory: Path) -> None:
    before = _DJANGO.format(**shop.parts) if name == "django" else ""
    script = before + EXAMPLES[name][0] + "\n" + _PYTHON[name].format(url=shop.url) + "\n" + _TWICE
    (directory / "example.py").write_text(script)
    assert "refused:" in await run(sys.executable, "example.py", cwd=directory)


async def in_node(name: str, shop: Shop, directory: Path) -> None:
    (directory / "writer.mjs").write_text(EXAMPLES[name][0])
    (directory / "main.mjs").write_text(
        'import { createRequire } from "node:module";\n'
        'import { placeOrder } from "./writer.mjs";\n'
        'const pg = createRequire(import.meta.url)("pg");\n'
        f"const client = new pg.Client({{ connectionString: {json.dumps(shop.url)} }});\n"
        "await client.connect();\n"
        'await placeOrder(client, "42", 100);\n'
        'try { await placeOrder(client, "42", 200); process.exitCode = 1; } catch (error) { console.log("refused:"); }\n'
        "await client.end();\n"
    )
    assert "refused:" in await run("node", "main.mjs", cwd=directory)


async def in_go(name: str, shop: Shop, directory: Path) -> None:
    source = directory / "src" / "main"
    (source / "writer").mkdir(parents=True)
    (source / "writer" / "writer.go").write_text(EXAMPLES[name][0])
    (source / "main.go").write_text(
        'package main\n\nimport (\n"context"\n"database/sql"\n"fmt"\n\n_ "github.com/lib/pq"\n"main/writer"\n)\n\n'
        "func main() {\n"
        f'db, err := sql.Open("postgres", {json.dumps(shop.url + "?sslmode=disable")})\n'
        "if err != nil { panic(err) }\n"
        'if err := writer.PlaceOrder(context.Background(), db, "42", 100); err != nil { panic(err) }\n'
        'if err := writer.PlaceOrder(context.Background(), db, "42", 200); err == nil { panic("twice") }\n'
        'fmt.Println("refused:")\n}\n'
    )
    places = f"{directory}:{_GO_PQ.parents[3]}"
    assert "refused:" in await run(
        "go", "run", "main", cwd=source, GO111MODULE="off", GOPATH=places, GOFLAGS="", GOCACHE=str(directory / "cache")
    )


async def in_java(name: str, shop: Shop, directory: Path) -> None:
    (directory / "Writer.java").write_text(EXAMPLES[name][0])
    at = "jdbc:postgresql://{host}:{port}/{name}?user={user}".format(**shop.parts)
    (directory / "Main.java").write_text(
        "class Main { public static void main(String[] arguments) throws Exception {\n"
        f"var connection = java.sql.DriverManager.getConnection({json.dumps(at)});\n"
        'Writer.placeOrder(connection, "42", 100);\n'
        'try { Writer.placeOrder(connection, "42", 200); System.exit(1); }\n'
        'catch (java.sql.SQLException error) { System.out.println("refused:"); }\n} }\n'
    )
    await run("javac", "Writer.java", "Main.java", cwd=directory)
    assert "refused:" in await run("java", "-cp", f".:{_JDBC}", "Main", cwd=directory)


def runnable() -> dict[str, Callable[[str, Shop, Path], object]]:
    """The examples that run on this machine: Python's everywhere, the others where tool and driver are installed."""
    found: dict[str, Callable[[str, Shop, Path], object]] = dict.fromkeys(_PYTHON, in_python)
    if shutil.which("node") and any((path / "pg").is_dir() for path in _NODE_PG):
        found["node"] = in_node
    if shutil.which("go") and _GO_PQ.is_dir():
        found["go"] = in_go
    if shutil.which("javac") and _JDBC.is_file():
        found["java"] = in_java
    return found


RUNNABLE: Final = runnable()


@pytest.mark.parametrize("name", RUNNABLE)
async def test_order_and_event_commit_together_or_not_at_all(name: str, shop: Shop, tmp_path: Path) -> None:
    performed = RUNNABLE[name](name, shop, tmp_path)
    assert asyncio.iscoroutine(performed)
    await performed
    assert await shop.events() == [PLACED]
    assert await shop.admin.fetch("SELECT id, total FROM orders") == [("42", 100)]


async def test_the_sql_examples(shop: Shop) -> None:
    single, batch, trigger, again = EXAMPLES["sql"]
    writer = await asyncpg.connect(shop.url)
    try:
        await writer.execute(single)
        assert await shop.events() == [PLACED]
        await writer.execute("INSERT INTO orders (id, total) VALUES ('41', 7)")
        await writer.execute(batch)
        assert [(type_, id_) for type_, _, id_, _ in (await shop.events())[1:]] == [
            ("order.imported", "41"),
            ("order.imported", "42"),
        ]
        for _ in range(2):
            await writer.execute(again)
        assert len(await shop.events()) == 4
        await shop.admin.execute(trigger)
        await writer.execute("INSERT INTO orders (id, total) VALUES ('43', 9)")
        assert (await shop.events())[-1] == ("order.insert", "order", "43", {"id": "43", "total": 9})
    finally:
        await writer.close()


def test_the_page_has_every_example() -> None:
    assert EXAMPLES.keys() == {*_PYTHON, "sql", "node", "go", "java"}
