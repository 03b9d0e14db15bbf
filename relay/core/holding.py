"""Which keys are held, as far as the relay knows: a row that is read of such a key is tested first (H2).

Owns, per shard, the held keys and the highest holding row of each. It may know too many, never too few: a key that
is not held any more costs a test, one that is held and not known would cost the order (I3). Bounded (I6): a shard
with very many held keys has all its rows tested instead, which is slower and as right.

Does not do: testing, rows in memory (`chains.py`).
"""

from __future__ import annotations

from collections.abc import Iterable

from relay.message import Key, Row

_Hold = tuple[int, int]
"""Of a held key: the settlement that held it last, and its highest holding row's seq."""

HOLDING_KEYS_MAX = 500
"""Held keys remembered a shard."""


class Holding:
    """The held keys of the shards in memory."""

    def __init__(self) -> None:
        self._shards: dict[int, dict[Key, _Hold] | None] = {}
        self._noted: dict[int, int] = {}
        """Per shard the settlement that a hold was noted for last."""

    def learn(self, shard: int, rows: Iterable[Row], known_until: int = -1) -> None:
        """What a query found: of each held key in the shard its highest holding row.

        The query saw all settlements up to `known_until`; what was noted for later ones stays.
        """
        known: dict[Key, _Hold] = {row.key: (-1, row.seq) for row in rows if row.key is not None}
        before = self._shards.get(shard, _NONE)
        if before is None and self._noted.get(shard, -1) > known_until:
            return
        for key, (serial, highest) in (before or _NONE).items():
            if serial > known_until:
                known[key] = (serial, max(highest, known.get(key, (-1, highest))[1]))
        self._shards[shard] = None if len(known) >= HOLDING_KEYS_MAX else known

    def note(self, shard: int, key: Key, seq: int, serial: int) -> None:
        """This row goes aside and holds its key, in the settlement numbered `serial`."""
        known = self._shards.setdefault(shard, {})
        self._noted[shard] = serial
        if known is None:
            return
        _, highest = known.get(key, (serial, seq))
        known[key] = (serial, max(highest, seq))
        if len(known) >= HOLDING_KEYS_MAX:
            self._shards[shard] = None

    def note_free(self, shard: int, key: Key, seq: int) -> None:
        """A test found that nothing below this row holds its key: the key is free, unless a holding row lies above."""
        known = self._shards.get(shard)
        if known is not None and (hold := known.get(key)) is not None and hold[1] < seq:
            del known[key]

    @property
    def is_any(self) -> bool:
        """Whether any key is, or may be, held."""
        return any(known is None or known for known in self._shards.values())

    def may_hold(self, shard: int, key: Key, known_until: int | None) -> bool:
        """Whether a row of the key has to be tested. `known_until`: for one whose query found it free, the last
        settlement that the query saw."""
        known = self._shards.get(shard, _NONE)
        if known is None:
            return True
        if not known or (hold := known.get(key)) is None:
            return False
        return known_until is None or hold[0] > known_until

    def drop(self, shard: int) -> None:
        """The shard is no longer ours."""
        self._shards.pop(shard, None)
        self._noted.pop(shard, None)


_NONE: dict[Key, _Hold] = {}
