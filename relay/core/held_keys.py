"""The held keys of one shard, by hash, in 24 bytes each: a dict of keys takes some 400, and a missing queue can hold very many.

Two keys of one hash are one here: the other one's row may then be tested in vain, or taken as free with it. Of a hash's 64
bits, seeded anew in each process, two of 4,096 keys agree once in 10^12 tables.

Does not do: deciding what is held (`holding.py`).
"""

from __future__ import annotations

from array import array
from bisect import bisect_left

from relay.message import Key


class HeldKeys:
    """Of each key the settlement that held it last (-1: found by a walk), and its highest holding row's seq."""

    __slots__ = ("_hashes", "_highest", "_serials")

    def __init__(self) -> None:
        self._hashes = array("q")
        """Sorted; the other two have the same places."""
        self._serials = array("q")
        self._highest = array("q")

    def __len__(self) -> int:
        return len(self._hashes)

    def __contains__(self, key: Key) -> bool:
        return self.get(key) is not None

    def get(self, key: Key) -> tuple[int, int] | None:
        """(settlement, seq), or none: not held."""
        hashes = self._hashes
        if not hashes:
            return None
        number = hash(key)
        place = bisect_left(hashes, number)
        if place == len(hashes) or hashes[place] != number:
            return None
        return self._serials[place], self._highest[place]

    def hold(self, key: Key, serial: int, seq: int) -> None:
        """Of several for a key the higher of each counts: they come in any order."""
        self._hold(hash(key), serial, seq)

    def _hold(self, number: int, serial: int, seq: int) -> None:
        hashes = self._hashes
        place = bisect_left(hashes, number)
        if place < len(hashes) and hashes[place] == number:
            self._serials[place] = max(self._serials[place], serial)
            self._highest[place] = max(self._highest[place], seq)
        else:
            hashes.insert(place, number)
            self._serials.insert(place, serial)
            self._highest.insert(place, seq)

    def free(self, key: Key) -> None:
        """No-op where it is not held."""
        number = hash(key)
        place = bisect_left(self._hashes, number)
        if place < len(self._hashes) and self._hashes[place] == number:
            del self._hashes[place], self._serials[place], self._highest[place]

    def since(self, serial: int) -> HeldKeys:
        """Those held in a settlement after this one."""
        later = HeldKeys()
        places = [place for place, held_in in enumerate(self._serials) if held_in > serial]
        later._hashes.extend(map(self._hashes.__getitem__, places))
        later._serials.extend(map(self._serials.__getitem__, places))
        later._highest.extend(map(self._highest.__getitem__, places))
        return later

    def add(self, others: HeldKeys) -> None:
        for number, serial, seq in zip(others._hashes, others._serials, others._highest, strict=True):
            self._hold(number, serial, seq)

    def last_serial(self) -> int:
        """The last settlement that held one of them; -1: none."""
        return max(self._serials, default=-1)

    def clear(self) -> None:
        del self._hashes[:], self._serials[:], self._highest[:]
