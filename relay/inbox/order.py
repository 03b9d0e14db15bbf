"""The order policies of a consumer. Pure. A retry is a change of order unless the policy says otherwise.

`none`           later messages of a key go on while one is retried: for effects that do not depend on each other.
`version`        by `aggregate_version`: the next one is applied, a later one waits on the ladder for what is missing,
                 an older one is recorded and never applied.
`single_active`  one message after the other, retries in place: the whole queue waits. For queues with a single active
                 consumer; a sharded queue keeps the wait to one shard.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final


class Order(StrEnum):
    """What happens to a key's later messages while an earlier one is retried."""

    NONE = "none"
    VERSION = "version"
    SINGLE_ACTIVE = "single_active"


class Place(StrEnum):
    """Where a version stands to the one that was applied last."""

    NEXT = "next"
    STALE = "stale"
    GAP = "gap"


NOTHING: Final = -1
"""The version that was applied last where none was: versions are 0 or more. sql/inbox/version_lock.sql has it too."""


def place(applied: int, version: int, first: int | None) -> Place:
    """`applied` is `NOTHING` where nothing was. `first` is the version that an aggregate begins with; None: whichever comes
    first, and an older one that comes after it is stale.
    """
    if version <= applied:
        return Place.STALE
    if applied == NOTHING:
        return Place.NEXT if first is None or version <= first else Place.GAP
    return Place.NEXT if version == applied + 1 else Place.GAP
