"""What there is to say about a broker: a change, a conflict, a leftover; and how two values differ. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from relay.topology.expand import AnyObject, Arguments, BindingObject


class Action(StrEnum):
    """What is to be done about one object."""

    CREATE = "create"
    UPDATE = "update"
    CONFLICT = "conflict"
    LEFTOVER = "leftover"


@dataclass(frozen=True, slots=True)
class Change:
    """`kind` and `name` say what of; `detail` how it differs; `mend` what an operator does about a conflict."""

    action: Action
    kind: str
    name: str
    detail: str
    mend: str | None = None
    wanted: AnyObject | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Found:
    """What a broker has, as the management API tells it; None: it may not be asked."""

    version: str
    exchange_types: frozenset[str]
    feature_flags: Mapping[str, str] | None
    exchanges: Sequence[Mapping[str, Any]]
    queues: Sequence[Mapping[str, Any]]
    bindings: Sequence[Mapping[str, Any]]
    policies: Sequence[Mapping[str, Any]]
    consumers: Mapping[str, int]
    users: Mapping[str, Mapping[str, str] | None] | None
    """Each wanted user that exists: its permissions in the vhost, None where it has none."""


def difference(name: str, wanted: object, found: object) -> list[str]:
    """How one value differs, as a list of none or one."""
    return [] if wanted == found else [f"{name} {word(found)} instead of {word(wanted)}"]


def table_differences(wanted: Arguments, found: Mapping[str, Any]) -> list[str]:
    """How two tables differ, key by key."""
    expected = dict(wanted)
    return [
        found_difference
        for key in sorted({*expected, *found})
        for found_difference in difference(key, expected.get(key), found.get(key))
    ]


def word(value: object) -> str:
    """A value as an operator writes it."""
    match value:
        case None:
            return "none"
        case True | False:
            return str(value).lower()
        case "":
            return '""'
        case _:
            return str(value)


def binding_of(document: Mapping[str, Any]) -> BindingObject:
    """A binding as the API tells it."""
    given = (document.get("arguments") or {}).items()
    # An array or a table is none of ours, and cannot be a key.
    arguments = tuple(sorted((key, value if isinstance(value, str | int) else repr(value)) for key, value in given))
    to_queue = document["destination_type"] == "queue"
    return BindingObject(document["source"], document["destination"], to_queue, document["routing_key"], arguments)


def matches(pattern: str, name: str) -> bool:
    """Whether a policy's pattern matches; one that only PCRE understands gets no verdict from here."""
    try:
        return re.search(pattern, name) is not None
    except re.error:
        return False


def by_name(documents: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """The API's documents of one kind."""
    return {document["name"]: document for document in documents}
