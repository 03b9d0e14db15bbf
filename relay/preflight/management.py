"""The preflight's look through RabbitMQ's management API: routes, queues, rights, limits. Only where it is
configured.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from relay.config import Config
from relay.errors import RelayError
from relay.management import ApiFailed, ManagementApi
from relay.preflight.finding import Finding, error, not_checked, ok, warning
from relay.route import Router

CHECKS: Final = ("routes", "queues", "permissions", "limits")


async def check(config: Config) -> list[Finding]:
    """Routes, queues, permissions and limits, or one finding that says why nobody looked."""
    try:
        url, amqp_urls = config.management(), config.amqp_urls()
    except RelayError as failure:
        return [not_checked("management", failure.message, failure.hint)]
    if url is None:
        return [not_checked(name, "RELAY_MANAGEMENT_URL is not set") for name in CHECKS]
    exchange = Router(config.exchange, config.routing_key).constant_exchange
    try:
        return await asyncio.to_thread(lambda: list(_look(ManagementApi(url), amqp_urls[0], exchange)))
    except ApiFailed as failure:
        return [
            warning(
                "management",
                str(failure),
                "look at RELAY_MANAGEMENT_URL; the user needs the tag `management`",
            )
        ]


def _look(api: ManagementApi, amqp_url: str, exchange: str | None) -> Iterator[Finding]:
    parts = urlsplit(amqp_url)
    vhost, user = unquote(parts.path[1:]) or "/", unquote(parts.username or "guest")
    overview = api.get("overview") or {}
    yield ok("management", f"RabbitMQ {overview.get('rabbitmq_version', 'of an unknown version')}")
    if exchange is None:
        yield not_checked("routes", "the exchange depends on each row")
    else:
        yield from _routes(api, vhost, exchange)
        yield from _permissions(api, vhost, user, exchange)
    yield from _limits(api)


def _routes(api: ManagementApi, vhost: str, exchange: str) -> Iterator[Finding]:
    described = api.get("exchanges", vhost, exchange)
    if described is None:
        yield not_checked("routes", f"there is no exchange {exchange}")
        return
    if described.get("internal"):
        yield error("routes", f"{exchange} is internal: the broker refuses every publish", "use another exchange")
    alternate = (described.get("arguments") or {}).get("alternate-exchange")
    bindings = api.get("exchanges", vhost, exchange, "bindings", "source") or []
    queues = sorted({binding["destination"] for binding in bindings if binding["destination_type"] == "queue"})
    if not bindings and not alternate:
        yield warning(
            "routes",
            f"nothing is bound to {exchange}: every message comes back as unroutable",
            "bind the consumers' queues, or set RELAY_UNROUTABLE=drop",
        )
    elif alternate:
        yield warning("routes", f"what no binding takes goes to {alternate}: it never comes back as unroutable")
    else:
        yield ok(
            "routes",
            f"{len(bindings)} bindings of {exchange} lead to {', '.join(queues) or 'other exchanges'}",
        )
    for name in queues:
        yield from _queue(name, api.get("queues", vhost, name) or {})


def _queue(name: str, queue: dict[str, Any]) -> Iterator[Finding]:
    kind = queue.get("type", "classic")
    settings = {
        **(queue.get("effective_policy_definition") or {}),
        **_plain_arguments(queue.get("arguments") or {}),
    }
    limit = settings.get("max-length") or settings.get("max-length-bytes")
    if not queue.get("durable", True):
        yield warning("queues", f"{name} is transient: it does not survive a restart", "declare it durable")
    elif limit and not str(settings.get("overflow", "drop-head")).startswith("reject-publish"):
        yield warning(
            "queues",
            f"{name} drops its oldest messages when it is full",
            "set overflow to reject-publish by a policy",
        )
    elif kind == "classic":
        yield warning(
            "queues",
            f"{name} is a classic queue: it lives on one node",
            "use a quorum queue for data that matters",
        )
    else:
        yield ok("queues", f"{name} is a {kind} queue")


def _plain_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    return {key.removeprefix("x-"): value for key, value in arguments.items()}


def _permissions(api: ManagementApi, vhost: str, user: str, exchange: str) -> Iterator[Finding]:
    granted = api.get("permissions", vhost, user)
    if granted is None:
        yield error(
            "permissions",
            f"the user has none in the vhost {vhost}",
            f"rabbitmqctl set_permissions -p {vhost} USER …",
        )
    elif not _matches(granted["write"], exchange):
        mend = f"let the write pattern of `rabbitmqctl set_permissions -p {vhost} USER` match it"
        yield error("permissions", f"the user may not write to {exchange}", mend)
    else:
        yield ok("permissions", f"the user may write to {exchange}")


def _matches(pattern: str, name: str) -> bool:
    """RabbitMQ searches with PCRE; an empty pattern allows nothing."""
    try:
        return bool(pattern) and re.search(pattern, name) is not None
    except re.error:
        return True  # a pattern that only PCRE understands: no verdict from here


def _limits(api: ManagementApi) -> Iterator[Finding]:
    nodes = api.get("nodes") or []
    for node in nodes:
        for alarm, what in (("mem_alarm", "memory"), ("disk_free_alarm", "disk")):
            if node.get(alarm):
                mend = "free some: publishers wait until the alarm is over"
                yield error("limits", f"{node.get('name')} has a {what} alarm and blocks publishers", mend)
    if not any(node.get("mem_alarm") or node.get("disk_free_alarm") for node in nodes):
        yield ok("limits", "no memory or disk alarm")
