"""Each finding about RabbitMQ, provoked on a real one; what waits in the outbox is given, not read."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import asyncpg
import pytest

from relay import config, envelope, migrate, preflight
from relay.choices import Envelope
from relay.config import Config
from relay.management import ManagementApi
from relay.message import PayloadType, Row
from relay.preflight import broker, management, pending
from relay.preflight.finding import Finding, Level
from relay.preflight.pending import Pending, Route
from relay.servers import RabbitServer, free_port
from tests.authority import Authority
from tests.conftest import eventually

OF_EACH_ROW = ("id", "event_type", "aggregate_type", "aggregate_id")
TEXTS = (
    *(*OF_EACH_ROW, "correlation_id", "causation_id", "content_type", "content_encoding"),
    *("traceparent", "tracestate"),
)
DATABASE = "postgresql://x@127.0.0.1:1/x"


def settings(amqp_url: str, server: RabbitServer | None = None, **changes: str) -> Config:
    values = {"RELAY_DATABASE_URL": DATABASE, "RELAY_AMQP_URL": amqp_url, **changes}
    if server is not None:
        values.setdefault("RELAY_MANAGEMENT_URL", server.management_url)
    return config.load(values)[0]


def waiting(
    *routes: tuple[str, str], size: int = 0, needs_queue: bool = True, unroutable: str | None = None
) -> Pending:
    return Pending(len(routes), frozenset(Route(*route, needs_queue) for route in routes), unroutable, size)


def only(findings: Iterable[Finding], check: str, level: Level) -> str:
    """The text of the only finding of that name and level, with its mend."""
    here = [finding for finding in findings if finding.check == check and finding.level is level]
    assert len(here) == 1, list(findings)
    assert here[0].mend or level is not Level.ERROR
    return f"{here[0].text}; {here[0].mend}"


def put(server: RabbitServer, *path: str, **document: object) -> None:
    ManagementApi(server.management_url).put(*path, document=document)


class Vhost:
    """The test's vhost: what it declares there."""

    def __init__(self, server: RabbitServer, url: str) -> None:
        self.server = server
        self.url = url
        self.name = unquote(urlsplit(url).path[1:])

    def exchange(self, name: str, kind: str = "topic", **more: Any) -> None:
        put(self.server, "exchanges", self.name, name, **{"type": kind, "durable": True, **more})

    def queue(self, name: str) -> None:
        put(self.server, "queues", self.name, name, durable=True, arguments={"x-queue-type": "quorum"})

    def policy(self, name: str, pattern: str, to: str, **definition: Any) -> None:
        dashed = {key.replace("_", "-"): value for key, value in definition.items()}
        put(self.server, "policies", self.name, name, **{"pattern": pattern, "definition": dashed, "apply-to": to})

    def bind(self, exchange: str, queue: str, key: str) -> None:
        path = ("bindings", self.name, "e", exchange, "q", queue)
        ManagementApi(self.server.management_url).post(*path, document={"routing_key": key})

    def user(self, name: str, tags: str = "", **permissions: str) -> str:
        """Create or change it; the vhost's URL as that user."""
        put(self.server, "users", name, password="x", tags=tags)
        if permissions:
            put(self.server, "permissions", self.name, name, **permissions)
        return self.url.replace("guest:guest", f"{name}:x")

    async def look(self, pending: Pending | None = None, **changes: str) -> list[Finding]:
        return await management.check(settings(self.url, self.server, **changes), pending)


@pytest.fixture
def vhost(rabbit_server: RabbitServer, amqp_url: str) -> Vhost:
    here = Vhost(rabbit_server, amqp_url)
    here.exchange("events")
    return here


# ---------------------------------------------------------------- by AMQP alone


async def test_version_exchange_and_size(vhost: Vhost) -> None:
    found = await broker.check(settings(vhost.url), waiting(size=3_000_000))
    assert "events exists" in only(found, "exchange", Level.OK)
    assert "RabbitMQ" in only(found, "version", Level.OK)
    assert "3,000,000 bytes" in only(found, "size", Level.OK)


async def test_a_row_that_the_broker_will_not_take(vhost: Vhost, rabbit_server: RabbitServer) -> None:
    """max_message_size cannot be asked for by any API: a message of that size is offered, which no queue gets."""
    with rabbit_server.limited_message_size(1 << 20):
        found = await broker.check(settings(vhost.url), waiting(size=2_000_000))
        text = only(found, "size", Level.ERROR)
        assert "max_message_size" in text
        assert "2,000,000 bytes" in text
        assert only(await broker.check(settings(vhost.url), waiting(size=500_000)), "size", Level.OK)
        await _as_weak_user(vhost)


async def _as_weak_user(vhost: Vhost) -> None:
    """A user who may not write to the default exchange learns the same."""
    name = f"size_{os.getpid()}"
    url = vhost.user(name, configure="^$", write="^events$", read="^$")
    assert only(await broker.check(settings(url), waiting(size=2_000_000)), "size", Level.ERROR)
    assert only(await broker.check(settings(url), waiting(size=500_000)), "size", Level.OK)
    await asyncio.to_thread(vhost.server.ctl, "delete_user", name)


async def test_rows_without_a_route_and_an_exchange_that_is_missing(vhost: Vhost) -> None:
    found = await broker.check(
        settings(vhost.url, RELAY_EXCHANGE="nowhere"), waiting(unroutable="the template needs the column producer")
    )
    assert "declare it" in only(found, "exchange", Level.ERROR)
    assert "producer" in only(found, "pending", Level.ERROR)


async def test_a_blocked_broker_is_not_asked_for_ever(
    vhost: Vhost, rabbit_server: RabbitServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relay.broker.survey.TIMEOUT_S", 1.0)
    await asyncio.to_thread(rabbit_server.memory_alarm, True)
    try:
        found = await broker.check(settings(vhost.url), waiting(size=1000))
        assert "in time" in only(found, "size", Level.NOT_CHECKED)

        async def is_seen() -> bool:
            look = await vhost.look()
            return any(finding.check == "limits" and finding.level is Level.ERROR for finding in look)

        await eventually(is_seen, 20.0, interval_s=0.3)  # the management plugin's own statistics
    finally:
        await asyncio.to_thread(rabbit_server.memory_alarm, False)


# ---------------------------------------------------------------- by the management API


@pytest.mark.parametrize(
    ("exchange", "check", "level", "words"),
    [
        ({"kind": "fanout"}, "exchange", Level.WARNING, "fanout"),
        ({"kind": "headers"}, "exchange", Level.WARNING, "headers"),
        ({"durable": False}, "exchange", Level.WARNING, "transient"),
        ({"internal": True}, "routes", Level.ERROR, "internal"),
        ({}, "routes", Level.WARNING, "nothing is bound"),
        ({"arguments": {"alternate-exchange": "spare"}}, "routes", Level.WARNING, "goes to spare"),
    ],
)
async def test_the_exchange(vhost: Vhost, exchange: dict[str, Any], check: str, level: Level, words: str) -> None:
    vhost.exchange("mine", **exchange)
    assert words in only(await vhost.look(RELAY_EXCHANGE="mine"), check, level)


async def test_an_alternate_exchange_by_policy(vhost: Vhost) -> None:
    vhost.exchange("spare", "fanout")
    vhost.policy("ae", "^events$", "exchanges", alternate_exchange="spare")
    assert "goes to spare" in only(await vhost.look(), "routes", Level.WARNING)


async def test_the_routes_of_what_is_pending(vhost: Vhost) -> None:
    vhost.queue("q")
    vhost.bind("events", "q", "ok.#")
    good = waiting(("events", "ok.x"))
    assert "1 route of 1 waiting row" in only(await vhost.look(good), "pending", Level.OK)
    bad = waiting(("events", "ok.x"), ("events", "nope.x"), ("elsewhere", "ok.x"))
    found = await vhost.look(bad)
    errors = [finding.text for finding in found if finding.check == "pending" and finding.level is Level.ERROR]
    assert errors == [
        "rows wait for exchanges that do not exist: elsewhere",
        "rows wait whose routes lead to no queue: events/nope.x",
    ]
    fine = waiting(("events", "nope.x"), needs_queue=False)
    assert only(await vhost.look(fine), "pending", Level.OK)


async def test_the_queues(vhost: Vhost) -> None:
    vhost.queue("q")
    vhost.queue("other")
    vhost.bind("events", "q", "ok.#")

    async def texts() -> list[str]:
        return [finding.text for finding in await vhost.look() if finding.check == "queues"]

    async def is_known() -> bool:
        return any("q has no dead-lettering" in text for text in await texts())

    await eventually(is_known)
    assert not any("other" in text for text in await texts())
    vhost.exchange("dlx", "fanout")
    vhost.policy(
        "good", "^q$", "queues", dead_letter_exchange="dlx", dead_letter_strategy="at-least-once",
        overflow="reject-publish", delivery_limit=10,
    )  # fmt: skip

    async def is_ok() -> bool:
        return {finding.level for finding in await vhost.look() if finding.check == "queues"} == {Level.OK}

    await eventually(is_ok)


async def test_least_permissions(vhost: Vhost) -> None:
    assert "configure and read" in only(
        [finding for finding in await vhost.look() if "may" in finding.text], "least permissions", Level.WARNING
    )
    name = f"relay_{os.getpid()}"
    vhost = Vhost(vhost.server, vhost.user(name))
    url = vhost.url
    assert "has none" in only(await management.check(settings(url, vhost.server), None), "permissions", Level.ERROR)
    vhost.user(name, configure="^$", write="^other$", read="^$")
    assert "may not write to events" in only(await vhost.look(), "permissions", Level.ERROR)
    vhost.user(name, configure="^$", write="^events$", read="^$")
    found = await vhost.look()
    assert only(found, "permissions", Level.OK)
    assert not [finding for finding in found if finding.check == "least permissions"]
    vhost.user(name, "administrator")
    assert "administrator" in only(await vhost.look(), "least permissions", Level.WARNING)
    await asyncio.to_thread(vhost.server.ctl, "delete_user", name)


async def test_a_user_that_a_certificate_names_is_not_taken_for_guest(vhost: Vhost, tmp_path: Path) -> None:
    certificate, key = Authority(tmp_path).sign(name="relay")
    url = f"amqps://127.0.0.1/{vhost.url.rpartition('/')[2]}?certfile={certificate}&keyfile={key}&auth=external"
    found = await management.check(settings(url, vhost.server), None)
    for check in ("permissions", "least permissions"):
        (only_one,) = [finding for finding in found if finding.check == check]
        assert (only_one.level, "ssl_cert_login_from" in only_one.text) == (Level.NOT_CHECKED, True)
    assert only(found, "limits", Level.OK)


async def test_a_management_user_of_few_tags_sees_less_and_no_error(vhost: Vhost) -> None:
    name = f"few_{os.getpid()}"
    vhost.user(name, "management", configure="", write="", read="")
    url = vhost.server.management_url.replace("guest:guest", f"{name}:x")
    found = await vhost.look(RELAY_MANAGEMENT_URL=url)
    assert "nothing is bound" in only(found, "routes", Level.WARNING)
    assert "tag `administrator`" in only(found, "permissions", Level.NOT_CHECKED)
    assert "tag `administrator`" in only(found, "least permissions", Level.NOT_CHECKED)
    assert "tag `monitoring`" in only(found, "limits", Level.NOT_CHECKED)
    vhost.user(name, "monitoring")
    assert "no memory or disk alarm" in only(await vhost.look(RELAY_MANAGEMENT_URL=url), "limits", Level.OK)
    # Where a policy names an alternate exchange, only its own tag may read it.
    vhost.policy("alternate", "^events$", "exchanges", alternate_exchange="amq.fanout")

    async def is_seen() -> bool:
        return "routes" not in {each.check for each in await vhost.look() if "nothing is bound" in each.text}

    await eventually(is_seen)
    found = await vhost.look(RELAY_MANAGEMENT_URL=url)
    assert "`policymaker`" in only(found, "routes", Level.NOT_CHECKED)
    vhost.user(name, "policymaker")
    assert "amq.fanout" in only(await vhost.look(RELAY_MANAGEMENT_URL=url), "routes", Level.WARNING)
    await asyncio.to_thread(vhost.server.ctl, "delete_user", name)


async def test_a_management_api_that_cannot_be_asked(vhost: Vhost) -> None:
    url = f"http://guest:s3cretword@127.0.0.1:{free_port()}"
    found = await vhost.look(RELAY_MANAGEMENT_URL=url)
    assert "s3cretword" not in only(found, "management", Level.WARNING)
    assert {finding.check for finding in found if finding.level is Level.NOT_CHECKED} == set(management.CHECKS)
    wrong = vhost.server.management_url.replace("guest:guest", "guest:wrong")
    assert "401" in only(await vhost.look(RELAY_MANAGEMENT_URL=wrong), "management", Level.WARNING)


# ---------------------------------------------------------------- from the table to the broker


async def test_what_waits_in_the_table_is_held_against_the_broker(vhost: Vhost, database_url: str) -> None:
    await migrate.run(database_url)
    vhost.queue("q")
    vhost.bind("events", "q", "ok.#")
    connection = await asyncpg.connect(database_url)
    await connection.execute(
        "INSERT INTO outbox (event_type, payload, mandatory, exchange, producer) VALUES"
        " ('ok.1', to_json(repeat('x', 1000)), null, null, null), ('nope.1', null, null, null, null),"
        " ('fine.1', null, false, null, null), ('ok.2', null, null, 'gone', null)"
    )
    await connection.close()
    found = await preflight.check(settings(vhost.url, vhost.server, RELAY_DATABASE_URL=database_url))
    text = "; ".join(finding.text for finding in found if finding.check == "pending")
    assert "events/nope.1" in text
    assert "gone" in text
    assert "fine.1" not in text
    assert "1,002 bytes" in only(found, "size", Level.OK)
    template = {"RELAY_DATABASE_URL": database_url, "RELAY_ROUTING_KEY": "{producer}"}
    found = await preflight.check(settings(vhost.url, vhost.server, **template))
    assert any("column producer" in finding.text for finding in found if finding.check == "pending")
    dropped = {"RELAY_DATABASE_URL": database_url, "RELAY_UNROUTABLE": "drop"}
    found = await preflight.check(settings(vhost.url, vhost.server, **dropped))
    assert not any("nope.1" in finding.text for finding in found)


AWKWARD = '\u0001"\\é' * 500
"""Text that grows as a JSON string, threefold."""


@pytest.mark.parametrize("wrapping", ["json", "cloudevents"])
@pytest.mark.parametrize(
    ("payload_type", "payload"),
    [("json", json.dumps(AWKWARD)), ("jsonb", json.dumps(AWKWARD)), ("text", AWKWARD), ("bytea", b"\0" * 4000)],
)
async def test_the_size_of_a_body_is_that_in_its_envelope(
    database_url: str, payload_type: str, payload: str | bytes, wrapping: str
) -> None:
    """The payload was measured and the envelope goes out: base64 makes a third more of it, escapes up to six times as much."""
    await migrate.run(database_url, payload=payload_type)
    connection = await asyncpg.connect(database_url)
    columns = {name: f'{name} "é" \u0001' for name in (*TEXTS, "producer")}
    names, marks = ", ".join(columns), ", ".join(f"${n}" for n in range(2, len(columns) + 2))
    await connection.execute(
        f"INSERT INTO outbox (payload, aggregate_version, {names}) VALUES ($1, {-(2**63)}, {marks})",
        payload, *columns.values(),
    )  # fmt: skip
    size = pending.size_sql(PayloadType(payload_type), Envelope(wrapping))
    bound = await connection.fetchval(f"SELECT {size} FROM outbox o")
    stored = await connection.fetchval(
        "SELECT payload FROM outbox"
        if payload_type == "bytea"
        else "SELECT convert_to(payload::text, 'UTF8') FROM outbox"
    )
    await connection.close()
    rare: dict[str, Any] = {name: text for name, text in columns.items() if name not in OF_EACH_ROW}
    row = Row(
        0, 1, columns["id"], columns["event_type"], aggregate_type=columns["aggregate_type"],
        aggregate_id=columns["aggregate_id"], payload=stored, occurred_at=1.5,
        rare=rare | {"aggregate_version": -(2**63), "schema_version": 2**31 - 1},
    )  # fmt: skip
    body = envelope.envelope(wrapping, PayloadType(payload_type), "s" * 63).wrap(row)
    assert len(body) <= bound <= len(body) + 1500


async def test_what_was_measured_is_said(vhost: Vhost) -> None:
    """Nobody could tell whether the size was the payload's or the message's."""
    found = await broker.check(settings(vhost.url, RELAY_ENVELOPE="json"), waiting(size=3000))
    assert "up to 3,000 bytes in the envelope json" in only(found, "size", Level.OK)
