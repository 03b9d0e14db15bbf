"""Where a message would go: the broker's bindings, followed as the broker follows them. Pure; asks nobody."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any


@dataclass(frozen=True, slots=True)
class Reach:
    """The queues that a message gets to. `is_certain` is false where an exchange on its way routes by other things than
    the key (headers, a hash)."""

    queues: frozenset[str]
    is_certain: bool

    @property
    def is_nowhere(self) -> bool:
        """Whether it would come back as unroutable, for sure."""
        return self.is_certain and not self.queues


@dataclass(frozen=True)
class Topology:
    """Exchanges by name and all bindings of a vhost, as the management API has them; `alternates` are alternate exchanges
    by the exchange's name, from its arguments or its policy."""

    exchanges: Mapping[str, Mapping[str, Any]]
    bindings: Iterable[Mapping[str, Any]]
    alternates: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def _by_source(self) -> dict[str, list[Mapping[str, Any]]]:
        found: dict[str, list[Mapping[str, Any]]] = {}
        for binding in self.bindings:
            found.setdefault(binding["source"], []).append(binding)
        return found

    def bound_to(self, exchange: str) -> list[Mapping[str, Any]]:
        """The bindings of which it is the source."""
        return self._by_source.get(exchange, [])

    def reach(self, exchange: str, routing_key: str) -> Reach:
        """Every queue that a message with this key gets to, over exchanges bound to exchanges and alternate ones."""
        queues: set[str] = set()
        is_certain = True
        seen: set[str] = set()
        todo = [exchange]
        while todo:
            name = todo.pop()
            if name in seen:
                continue  # each exchange routes a message once, or bindings in a circle would never end
            seen.add(name)
            kind = str(self.exchanges.get(name, {}).get("type", "direct"))
            taken = False
            for binding in self.bound_to(name):
                match = takes(kind, str(binding["routing_key"]), routing_key)
                is_certain = is_certain and match is not None
                if match is False:
                    continue
                taken = True
                if binding["destination_type"] == "queue":
                    queues.add(str(binding["destination"]))
                else:
                    todo.append(str(binding["destination"]))
            if not taken and name in self.alternates:
                todo.append(self.alternates[name])
        return Reach(frozenset(queues), is_certain)


def takes(kind: str, binding_key: str, routing_key: str) -> bool | None:
    """Whether a binding takes a message; None where the key alone does not decide."""
    match kind:
        case "direct":
            return binding_key == routing_key
        case "fanout":
            return True
        case "topic":
            return _matches(binding_key.split("."), routing_key.split(".") if routing_key else [])
        case _:
            return None


def _matches(pattern: list[str], words: list[str]) -> bool:
    """AMQP's topic patterns: `*` is one word, `#` any number of them."""
    reachable = {0}
    for part in pattern if pattern != [""] else []:
        if part == "#":
            reachable = set(range(min(reachable), len(words) + 1)) if reachable else set()
        else:
            reachable = {at + 1 for at in reachable if at < len(words) and part in ("*", words[at])}
    return len(words) in reachable
