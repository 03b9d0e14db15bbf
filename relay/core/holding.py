"""Which keys are held, as far as the relay knows (H2), and the walk over the rows aside that finds out.

A row that is read of a key that may be held is tested first. Asking the table for every row would be right and cost each
an index probe, so the held keys are remembered, per shard with the highest holding row of each: those that decisions
noted, and those that a *walk* has found. While a shard is not known completely (it was just taken up, or has very many
held keys) the pages ask for its rows; of those that a page saw free, only rows whose key was held since are tested. It
may know too many, never too few: a key that is not held any more costs a test, one that is held and not known would cost
the order (I3). Bounded (I6).

Does not do: testing, asking the table, rows in memory (`chains.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from relay.core.held_keys import HeldKeys
from relay.core.ports.outbox import HeldPage, Place
from relay.message import Key


class Walk:
    """One look at all rows aside, in order of their key's hash and seq, page by page. Every page sees all settlements up
    to `known_until`."""

    def __init__(self, shards: Iterable[int], known_until: int, keys_max: int) -> None:
        self.known_until = known_until
        self._keys_max = keys_max
        self.after: Place | None = None
        """Where the next page begins; none: at the first row."""
        self.is_over = False
        self.found = {shard: HeldKeys() for shard in shards}
        """Not more than are remembered."""
        self._going_on: set[Key] = set()
        """Keys with the hash at which the last page ended: the next page may begin with more of their rows."""

    @property
    def shards(self) -> Sequence[int]:
        """Those that are looked at."""
        return list(self.found)

    @property
    def keys(self) -> int:
        """Held keys that were found and are remembered."""
        return sum(map(len, self.found.values()))

    def take(self, page: HeldPage) -> list[tuple[int, Key]]:
        """A page's answer; returns the keys, with their shards, whose lowest holding row is held (H3)."""
        stuck: list[tuple[int, Key]] = []
        began, before = self.after, self._going_on
        going_on: set[Key] = set()
        for held in page.keys:
            is_first_seen = began is None or held.hash != began[0] or held.key not in before
            if held.is_lowest_held and is_first_seen:
                stuck.append((held.shard, held.key))
            if page.reached is not None and held.hash == page.reached[0]:
                going_on.add(held.key)
            found = self.found[held.shard]
            if len(found) < self._keys_max or held.key in found:
                found.hold(held.key, -1, held.highest)
        if page.reached is not None and began is not None and page.reached[0] == began[0]:
            # The whole page within one hash: all keys that were seen of it go on.
            going_on |= before
        self.after, self._going_on = page.reached, going_on
        self.is_over = page.reached is None
        return stuck


class _Shard:
    """`keys`: all that were noted in settlements after `since`; if `is_complete`, every other held one as well."""

    __slots__ = ("is_complete", "keys", "since")

    def __init__(self) -> None:
        self.keys = HeldKeys()
        self.since = -1
        self.is_complete = True


class Holding:
    """The held keys of the shards in memory."""

    def __init__(self, keys_max: int) -> None:
        """`keys_max`: how many held keys are remembered a shard."""
        self._keys_max = keys_max
        self._shards: dict[int, _Shard] = {}

    def take_up(self, shard: int) -> None:
        """The shard is ours (again): what is held in it is to be found out, but for what was noted."""
        self._shards.setdefault(shard, _Shard()).is_complete = False

    def drop(self, shard: int) -> None:
        """The shard is no longer ours."""
        self._shards.pop(shard, None)

    @property
    def incomplete(self) -> Sequence[int]:
        """Shards whose rows the pages ask about."""
        return [number for number, shard in self._shards.items() if not shard.is_complete]

    def end(self, walk: Walk) -> None:
        """What a walk has found. A shard stays incomplete when it holds too many keys, or when so many were noted
        meanwhile that some were forgotten."""
        assert walk.is_over, "a walk that is not over knows too few"
        for number, found in walk.found.items():
            shard = self._shards.get(number)
            if shard is None or shard.since > walk.known_until:
                continue
            noted = shard.keys.since(walk.known_until)
            found.add(noted)
            shard.since = walk.known_until
            shard.is_complete = len(found) < self._keys_max
            shard.keys = found if shard.is_complete else noted

    def note(self, shard: int, key: Key, seq: int, serial: int) -> None:
        """This row goes aside and holds its key, in the settlement numbered `serial`."""
        holds = self._shards.setdefault(shard, _Shard())
        # Not in order: what a settlement's tests held is noted when it is applied, and the next one has decided by then.
        holds.keys.hold(key, serial, seq)
        if len(holds.keys) >= self._keys_max:
            # Forgotten with all of them: also one that a later settlement holds, whose decision was noted before this.
            holds.since = max(holds.since, holds.keys.last_serial())
            holds.keys.clear()
            holds.is_complete = False

    def note_free(self, shard: int, key: Key, seq: int) -> None:
        """A test found that nothing below this row holds its key: the key is free, unless a holding row lies above."""
        holds = self._shards.get(shard)
        if holds is not None and (hold := holds.keys.get(key)) is not None and hold[1] < seq:
            holds.keys.free(key)

    def is_known(self, shard: int) -> bool:
        """Whether every held key of the shard is remembered."""
        holds = self._shards.get(shard)
        return holds is None or holds.is_complete

    @property
    def is_any(self) -> bool:
        """Whether any key is, or may be, held."""
        return any(len(shard.keys) or not shard.is_complete for shard in self._shards.values())

    def may_hold(self, shard: int, key: Key, known_until: int | None) -> bool:
        """Whether a row of the key has to be tested. `known_until`: for one whose query found it free, the last
        settlement that the query saw."""
        holds = self._shards.get(shard)
        if holds is None:
            return False
        hold = holds.keys.get(key)
        if known_until is None:
            return hold is not None or not holds.is_complete
        return known_until < holds.since or (hold is not None and hold[0] > known_until)
