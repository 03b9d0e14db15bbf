"""A topology file: TOML text into a checked `Topology`, or every fault with its line.

Pure. What each key may be stands in `fields`; what two keys say to each other is looked at in `contradictions`.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterable, Sequence
from typing import Any, Final

from relay.errors import ConfigError
from relay.topology.contradictions import contradictions
from relay.topology.description import (
    Binding,
    BrokerRetry,
    Exchange,
    Hash,
    Parking,
    Queue,
    QueueType,
    Shards,
    Strategy,
    Topology,
)
from relay.topology.fields import BIND, BROKER, DURATION, EXCHANGE, PARKING, QUEUE, TOP, Field
from relay.topology.lines import Lines, Path
from relay.topology.names import parking_queue

DELIVERY_LIMIT: Final = 20
"""RabbitMQ 4's own default, written out so that 3.x has it too: a message that kills its consumer ends in parking."""


def read(text: str, name: str) -> Topology:
    """The topology of a file's text. Raises ConfigError with every fault as `NAME:LINE: …`, what is allowed included."""
    try:
        document = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        # Not its own error alone: an integer of thousands of digits, and tables within tables within tables.
        raise ConfigError([_syntax(error, name, len(text.splitlines()))]) from None
    reading = _Reading(Lines(text))
    topology = reading.topology(document)
    if not reading.problems:
        reading.problems += [
            (reading.lines.of(path), words) for path, words in contradictions(topology, reading.places)
        ]
    if reading.problems:
        raise ConfigError([f"{name}:{line}: {words}" for line, words in sorted(reading.problems)])
    return topology


def _syntax(error: Exception, name: str, lines: int) -> str:
    found = re.search(r"\(at line (\d+), column (\d+)\)", str(error))
    words = re.sub(r"\s*\(at [^)]*\)$", "", str(error))
    line = found[1] if found else lines
    return f"{name}:{line}: not TOML: {words[:1].lower()}{words[1:]}; allowed: TOML 1.0, see docs/topology.md"


class _Reading:
    """One file on its way: problems with their lines, and where each queue and exchange stands."""

    def __init__(self, lines: Lines) -> None:
        self.lines = lines
        self.problems: list[tuple[int, str]] = []
        self.places: dict[str, Path] = {}

    def topology(self, document: dict[str, Any]) -> Topology:
        top = self._fields(document, (), TOP, "the file")
        exchanges = [self._exchange(table, ("exchange", i)) for i, table in enumerate(top["exchange"])]
        queues = [self._queue(table, ("queue", i)) for i, table in enumerate(top["queue"])]
        return Topology(top["vhost"], top["policy_priority"], tuple(exchanges), tuple(queues))

    def _exchange(self, table: dict[str, Any], path: Path) -> Exchange:
        found = self._fields(table, path, EXCHANGE, "[[exchange]]")
        self._once(f"exchange {found['name']}", path)
        return Exchange(found["name"], found["type"])

    def _queue(self, table: dict[str, Any], path: Path) -> Queue:
        found = self._fields(table, path, QUEUE, "[[queue]]")
        self._once(f"queue {found['name']}", path)
        binds = [self._fields(bind, (*path, "bind", i), BIND, "bind") for i, bind in enumerate(found["bind"])]
        dead_letter = found["dead_letter"]
        if dead_letter is None and binds:
            dead_letter = f"{binds[0]['exchange']}.dlx"
        parking = None
        if dead_letter:
            given = found["parking"] or {}
            park = self._fields(given, (*path, "parking"), PARKING, "[queue.parking]")
            park["name"] = park["name"] or parking_queue(found["name"] or "")
            parking = Parking(park["name"], park["retention"], park["user"], park["max_length"], park["max_bytes"])
        is_quorum = found["type"] is QueueType.QUORUM
        self._loose(found, path, dead_letter)
        strategy = found["strategy"] or (Strategy.AT_LEAST_ONCE if is_quorum and dead_letter else Strategy.AT_MOST_ONCE)
        limit = found["delivery_limit"]
        return Queue(
            name=found["name"],
            type=found["type"],
            bindings=tuple(Binding(bind["exchange"], bind["key"], bind["arguments"]) for bind in binds),
            single_active_consumer=self._is_single(found),
            shards=self._shards(found),
            retry=self._ladder(found, path),
            dead_letter=dead_letter or None,
            parking=parking,
            strategy=strategy,
            overflow=found["overflow"],
            delivery_limit=DELIVERY_LIMIT if limit is None and is_quorum else limit,
            max_length=found["max_length"],
            max_bytes=found["max_bytes"],
        )

    def _loose(self, found: dict[str, Any], path: Path, dead_letter: str | None) -> None:
        """Keys that say nothing without another one."""
        for key in ("hash", "shard_by"):
            if found[key] is not None and found["shards"] is None:
                self._problem((*path, key), f"{key} without shards; allowed: with shards = a number")
        if found["parking"] is not None and not dead_letter:
            self._problem(
                (*path, "parking"), "parking without dead_letter; allowed: with dead_letter = an exchange's name"
            )

    def _is_single(self, found: dict[str, Any]) -> bool:
        given = found["single_active_consumer"]
        return found["shards"] is not None if given is None else bool(given)

    def _shards(self, found: dict[str, Any]) -> Shards | None:
        if found["shards"] is None:
            return None
        hash_ = found["hash"] or Hash.CONSISTENT
        by = found["shard_by"] or ("aggregate_id" if hash_ is Hash.CONSISTENT else "routing_key")
        return Shards(found["shards"], hash_, by)

    def _ladder(self, found: dict[str, Any], path: Path) -> tuple[float, ...] | BrokerRetry:
        bounds = [key for key in ("retry_min", "retry_max") if found[key] is not None]
        if found["retry"] != BROKER:
            for key in bounds:
                self._problem((*path, key), f'{key} without retry = "{BROKER}"; allowed: only with it')
            return tuple(found["retry"])
        for key in ("retry_min", "retry_max"):
            if found[key] is None:
                self._problem((*path, "retry"), f'retry = "{BROKER}" needs {key}; allowed: {DURATION}')
        return BrokerRetry(found["retry_min"] or 1.0, found["retry_max"] or 1.0)

    def _once(self, what: str, path: Path) -> None:
        if what in self.places and not what.endswith(" None"):
            first = self.lines.of(self.places[what])
            self._problem((*path, "name"), f"{what} is there twice, first in line {first}; allowed: once")
        self.places.setdefault(what, path)

    def _fields(self, table: dict[str, Any], path: Path, fields: Sequence[Field], where: str) -> dict[str, Any]:
        """The value of each field; what cannot be read is a problem, and has its default."""
        keys = [field.key for field in fields]
        for key in table:
            if key not in keys:
                self._problem(
                    (*path, key), f"unknown key {key!r} in {where}{_nearest(key, keys)}; allowed: {_list(keys)}"
                )
        found: dict[str, Any] = {}
        for field in fields:
            found[field.key] = field.default
            if field.key not in table:
                if field.is_required:
                    self._problem(path, f"{where} without {field.key}; allowed: {field.allowed}")
                continue
            try:
                found[field.key] = field.parse(table[field.key])
            except ValueError as error:
                shown = _shown(table[field.key])
                near = (
                    _nearest(table[field.key], field.allowed.split(", ")) if isinstance(table[field.key], str) else ""
                )
                self._problem((*path, field.key), f"{field.key} = {shown}: {error}{near}; allowed: {field.allowed}")
        return found

    def _problem(self, path: Path, words: str) -> None:
        self.problems.append((self.lines.of(path), words))


def _shown(value: object) -> str:
    try:
        text = repr(value)
    except ValueError:
        # A hexadecimal number may have more digits than Python writes out.
        return "a number without end"
    return text if len(text) <= 60 else text[:60] + "…"


def _nearest(word: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; nearest: {near[0]}" if near else ""


def _list(keys: Iterable[str]) -> str:
    return ", ".join(keys)
