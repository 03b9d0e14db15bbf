"""The commands of docs/operations.md are exact: they are read as written there, and run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from relay.cli import _parser
from relay.inbox import migrate as inbox_migrate
from relay.servers import RabbitServer
from relay.servers.process import run
from tests.e2e.conftest import Site
from tests.e2e.operator import relay, state

PAGE: Final = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
SETTING: Final = re.compile(r"[A-Z_]+=\S*")


def commands(program: str) -> Iterator[list[str]]:
    """The arguments of the page's lines with this program; one goes on until its quotes are closed."""
    line = ""
    for part in (each[4:] for each in PAGE.splitlines() if each.startswith("    ")):
        line = f"{line}\n{part}" if line else part
        try:
            words = shlex.split(line, comments=True)
        except ValueError:
            continue
        line = ""
        while words and SETTING.fullmatch(words[0]):
            del words[0]
        if words[0] == program:
            yield words[1 : words.index("|")] if "|" in words else words[1:]
    assert not line, f"quotes that are not closed: {line}"


def inline() -> list[str]:
    """Commands within the text, but for those that are only named."""
    return sorted(set(re.findall(r"`relay (\S[^`]* --[^`]+)`", PAGE)))


@pytest.mark.parametrize("arguments", [*map(shlex.join, commands("relay")), *inline()])
def test_its_relay_commands_are_understood(arguments: str) -> None:
    words = [word for word in shlex.split(arguments) if word != "…"]
    assert callable(_parser().parse_args(words).perform)


async def test_its_queries_run(site: Site) -> None:
    """The outbox's and the inbox's; here both are in one database."""
    await inbox_migrate.run(site.database_url)
    await site.database.execute(
        "INSERT INTO inbox (message_id, queue, event_type, schema_version, aggregate_type, aggregate_id, payload, headers,"
        " exchange, routing_key) SELECT id, 'q', 't', 1, '', 'K', '', '{}', '', '' FROM unnest('{ID,later}'::text[]) id"
    )
    assert await site.database.fetchval("SELECT inbox_failed('ID', 'permanent', 'no such sku')") == "parked"
    await site.insert("head", "nope.x", "K")
    await site.database.execute("UPDATE outbox SET aside = 'parked', holds = true, failure_class = 'unroutable'")
    queries = [words[-1] for words in commands("psql")]
    assert len(queries) == 11
    answers = [await site.database.fetch(query) for query in queries]
    assert any(record.get("failure_class") == "unroutable" for records in answers for record in records)
    # In the page's order: the inbox's parked row is listed, then redriven, so that there is none to discard.
    records = [record for records in answers for record in records]
    assert [record["message_id"] for record in records if record.get("error") == "no such sku"] == ["ID"]
    assert [record["inbox_redrive"] for record in records if "inbox_redrive" in record] == [True]
    assert [record["inbox_discard"] for record in records if "inbox_discard" in record] == [False]
    assert [record["untried"] for record in records if "untried" in record] == [2]
    # A writer that stays open is found, by its own transaction's lock.
    (open_writers,) = (query for query in queries if "RowExclusiveLock" in query)
    async with site.database.transaction():
        await site.insert("open")
        found = await site.database.fetch(open_writers)
    assert [record["pid"] for record in found] == [site.database.get_server_pid()]


def test_its_rabbitmq_commands_run(rabbit_server: RabbitServer) -> None:
    wanted = {tuple(words) for words in commands("rabbitmqctl")}
    assert len(wanted) >= 5
    for words in wanted:
        rabbit_server.ctl(*("/" if word == "VHOST" else word for word in words))
    diagnostics = rabbit_server.ctl_path.with_name("rabbitmq-diagnostics")
    for words in {tuple(words) for words in commands("rabbitmq-diagnostics")}:
        run([str(diagnostics), *words], rabbit_server.environment)


async def test_what_it_says_to_do_about_parked_rows(site: Site) -> None:
    """The section's lines one after the other, as they stand there, but for the question that a terminal is asked."""
    for id_, event_type in (("ID", "order.created"), ("paid", "order.paid")):
        await site.insert(id_, event_type, id_)
    await site.database.execute(
        "UPDATE outbox SET aside = 'parked', holds = true, parked_at = now(), failure_class = 'unroutable'"
    )
    said = ""
    for words in commands("relay"):
        if words[0] == "parked":
            done = await relay(site, *words, *(["--yes"] if "discard" in words else []))
            assert done.returncode == 0, f"{words}: {done.stderr}"
            said += done.stdout
            if "discard" in words:
                break
    assert "1 row of 1 would be redriven" in said
    assert await state(site, "paid") == "deferred"
    assert await site.database.fetchval("SELECT count(*) FROM outbox WHERE id = 'ID'") == 0
