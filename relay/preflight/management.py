"""The preflight's look through RabbitMQ's management API: routes, queues, rights, limits. Only where it is
configured. What its user may not see is not checked; the rest is.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from relay.config import Config
from relay.errors import RelayError
from relay.management import ApiFailed, ApiRefused, ManagementApi
from relay.preflight import queues
from relay.preflight.finding import Finding, error, not_checked, ok, warning
from relay.preflight.pending import Pending
from relay.preflight.routes import Topology
from relay.route import Router
from relay.text import many
from relay.urls import amqp_user

CHECKS: Final = ("routes", "queues", "permissions", "limits")
TAGS: Final = {
    "routes": "`management` and permissions in the vhost, or `policymaker` where exchanges have policies",
    "permissions": "`administrator`",
    "least permissions": "`administrator`",
    "limits": "`monitoring` or `administrator`",
}
"""What RabbitMQ asks of the management user, by the part of the look."""

EXAMPLES: Final = 3
"""So many routing keys are named in a finding."""


async def check(config: Config, waiting: Pending | None) -> list[Finding]:
    """Routes, queues, permissions and limits, or one finding that says why nobody looked."""
    try:
        url, amqp_urls = config.management(), config.amqp_urls()
    except RelayError as failure:
        return [not_checked("management", failure.message, failure.hint)]
    if url is None:
        return [not_checked(name, "RELAY_MANAGEMENT_URL is not set") for name in CHECKS]
    try:
        look = _Look(ManagementApi(url), amqp_urls[0], config, waiting)
        return await asyncio.to_thread(lambda: list(look.findings()))
    except ApiFailed as failure:
        mend = "look at RELAY_MANAGEMENT_URL; the user needs the tag `management`"
        findings = [warning("management", str(failure), mend)]
        return findings + [not_checked(name, "the management API cannot be asked") for name in CHECKS]


class _Look:
    """One look; each part by itself, since a user with few tags may see one and not another."""

    def __init__(self, api: ManagementApi, amqp_url: str, config: Config, waiting: Pending | None) -> None:
        self._api = api
        self._vhost = unquote(urlsplit(amqp_url).path[1:]) or "/"
        self._user = amqp_user(amqp_url)
        self._in_flight_max = config.max_in_flight
        self._exchange = Router(config.exchange, config.routing_key).constant_exchange
        self._waiting = waiting
        self._version: tuple[int, ...] = ()

    def findings(self) -> Iterator[Finding]:
        """All of them. Raises ApiFailed where the API does not answer at all."""
        version = str(self._api.overview()["rabbitmq_version"])
        self._version = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
        yield ok("management", f"RabbitMQ {version}")
        yield from self._part("routes", self._routes)
        if (user := self._user) is None:
            why = "auth=external: the certificate says who the user is, by the broker's ssl_cert_login_from"
            mend = f"look by hand: rabbitmqctl list_permissions -p {self._vhost}"
            yield from (not_checked(name, why, mend) for name in ("permissions", "least permissions"))
        else:
            yield from self._part("permissions", lambda: self._permissions(user))
            yield from self._part("least permissions", lambda: self._tags(user))
        yield from self._part("limits", self._limits)

    def _part(self, name: str, look: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
        try:
            yield from look()
        except ApiRefused as refusal:
            yield not_checked(name, str(refusal), f"give the management user the tag {TAGS[name]}")

    # ------------------------------------------------------------ routes and queues

    def _routes(self) -> Iterator[Finding]:
        exchanges = {described["name"]: described for described in self._api.get("exchanges", self._vhost) or ()}
        alternates = {name: to for name, described in exchanges.items() if (to := self._alternate(described))}
        topology = Topology(exchanges, self._api.get("bindings", self._vhost) or (), alternates)
        reached: set[str] = set()
        if self._exchange is None:
            yield not_checked("routes", "the exchange depends on each row")
        elif self._exchange in exchanges:
            yield from _exchange(exchanges[self._exchange], topology)
            reached |= {b["destination"] for b in topology.bound_to(self._exchange) if b["destination_type"] == "queue"}
        if self._waiting is not None:
            yield from _waiting(self._waiting, topology, self._exchange)
            for route in self._waiting.routes:
                reached |= topology.reach(route.exchange, route.routing_key).queues
        for name in sorted(reached):
            queue = self._api.get("queues", self._vhost, name)
            if queue is not None:
                yield from queues.judge(name, queue, exchanges.keys(), self._in_flight_max, self._version)

    def _alternate(self, described: Mapping[str, Any]) -> str | None:
        """A policy names it, or an argument, which wins."""
        argument = (described.get("arguments") or {}).get("alternate-exchange")
        if argument is not None or not described.get("policy"):
            return argument
        policy = self._api.get("policies", self._vhost, described["policy"]) or {}
        named: str | None = (policy.get("definition") or {}).get("alternate-exchange")
        return named

    # ------------------------------------------------------------ rights and limits

    def _permissions(self, user: str) -> Iterator[Finding]:
        granted = self._api.get("permissions", self._vhost, user)
        setting = f"rabbitmqctl set_permissions -p {self._vhost} USER"
        if granted is None:
            yield error("permissions", f"the user has none in the vhost {self._vhost}", f"{setting} …")
            return
        wanted = {route.exchange for route in self._waiting.routes} if self._waiting is not None else set()
        wanted |= {self._exchange} if self._exchange is not None else set()
        refused = sorted(name for name in wanted if not _matches(granted["write"], name))
        if refused:
            mend = f"let the write pattern of `{setting}` match it"
            yield error("permissions", f"the user may not write to {', '.join(refused)}", mend)
        else:
            yield ok("permissions", f"the user may write to {', '.join(sorted(wanted)) or 'what nobody named'}")
        excess = [what for what in ("configure", "read") if granted[what] not in ("", "^$")]
        if excess:
            mend = f"{setting} '^$' '^({'|'.join(map(re.escape, sorted(wanted))) or '…'})$' '^$'"
            yield warning("least permissions", f"the user may {' and '.join(excess)} too: a relay only writes", mend)

    def _tags(self, user: str) -> Iterator[Finding]:
        tags = (self._api.get("users", user) or {}).get("tags") or []
        # A text with commas before RabbitMQ 3.9.
        tags = [tag for tag in tags.split(",") if tag] if isinstance(tags, str) else tags
        if tags:
            yield warning(
                "least permissions",
                f"the user has the tags {', '.join(tags)}",
                "a relay's user needs none: a user of its own",
            )

    def _limits(self) -> Iterator[Finding]:
        nodes = self._api.get("nodes") or []
        for node in nodes:
            for alarm, what in (("mem_alarm", "memory"), ("disk_free_alarm", "disk")):
                if node.get(alarm):
                    mend = "free some: publishers wait until the alarm is over"
                    yield error("limits", f"{node.get('name')} has a {what} alarm and blocks publishers", mend)
        if not any(node.get("mem_alarm") or node.get("disk_free_alarm") for node in nodes):
            yield ok("limits", "no memory or disk alarm")


def _exchange(described: Mapping[str, Any], topology: Topology) -> Iterator[Finding]:
    name, kind = described["name"], described["type"]
    if described.get("internal"):
        yield error("routes", f"{name} is internal: the broker refuses every publish", "use another exchange")
        return
    if not described.get("durable", True):
        yield warning("exchange", f"{name} is transient: a restart of the broker removes it", "declare it durable")
    if kind == "fanout":
        mend = "nothing if that is meant; a topic exchange routes by RELAY_ROUTING_KEY"
        yield warning(
            "exchange", f"{name} is of type fanout: each bound queue gets every message, whatever its key", mend
        )
    elif kind == "headers":
        mend = "nothing if that is meant; a topic exchange routes by RELAY_ROUTING_KEY"
        yield warning("exchange", f"{name} is of type headers: it routes by headers, not by the routing key", mend)
    alternate = topology.alternates.get(name)
    bindings = topology.bound_to(name)
    bound = sorted({binding["destination"] for binding in bindings if binding["destination_type"] == "queue"})
    if not bindings and not alternate:
        yield warning(
            "routes",
            f"nothing is bound to {name}: every message comes back as unroutable",
            "bind the consumers' queues, or set RELAY_UNROUTABLE=drop",
        )
    elif alternate:
        mend = "nothing if that is meant; watch what is bound to it"
        yield warning("routes", f"what no binding takes goes to {alternate}: it never comes back as unroutable", mend)
    else:
        yield ok("routes", f"{many(len(bindings), 'binding')} of {name}, to {', '.join(bound) or 'other exchanges'}")


def _waiting(waiting: Pending, topology: Topology, constant: str | None) -> Iterator[Finding]:
    """The routes of what is pending. Whether the `constant` exchange exists is a finding of its own."""
    missing = sorted({route.exchange for route in waiting.routes} - topology.exchanges.keys() - {constant})
    if missing:
        mend = "declare them; such rows are parked as `refused`"
        yield error("pending", f"rows wait for exchanges that do not exist: {_some(missing)}", mend)
    nowhere = sorted(
        f"{route.exchange}/{route.routing_key}"
        for route in waiting.routes
        if route.needs_queue
        and route.exchange in topology.exchanges
        and topology.reach(route.exchange, route.routing_key).is_nowhere
    )
    if nowhere:
        mend = "bind a queue; such rows come back as `unroutable` and are parked in the end"
        yield error("pending", f"rows wait whose routes lead to no queue: {_some(nowhere)}", mend)
    if waiting.routes and not missing and not nowhere:
        yield ok(
            "pending", f"{many(len(waiting.routes), 'route')} of {many(waiting.rows, 'waiting row')}: all to queues"
        )


def _some(names: list[str]) -> str:
    more = len(names) - EXAMPLES
    return ", ".join(names[:EXAMPLES]) + (f" and {more} more" if more > 0 else "")


def _matches(pattern: str, name: str) -> bool:
    """RabbitMQ searches with PCRE; an empty pattern allows nothing."""
    try:
        return bool(pattern) and re.search(pattern, name) is not None
    except re.error:
        return True  # a pattern that only PCRE understands: no verdict from here
