"""The shards that are ours, until when, and how many should be (L1-L6 of `docs/protocol.md`).

Owns: each held shard's epoch, deadline by the boot-time clock and stored floor; the fair share;
which shards are being handed over. Invariant (I3, I4): nothing is published for a shard after its
deadline, and a deadline counts from *before* the renewal was sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from relay.core.ports.outbox import SHARDS, Claim, Held, Renewal

KEEP_LEASES = 6
"""A shard whose hand-over took too long is worked on for so many leases' time before the next try (L5)."""


@dataclass(slots=True)
class Lease:
    """One held shard. `until`: boot-time seconds after which nothing is written for it."""

    shard: int
    epoch: int
    until: float
    floor: int
    giving_since: float | None = None
    kept_until: float = float("-inf")
    """After a hand-over that took too long: not given again before."""
    has_other_policy: bool = False
    """Its parked rows have not got our `RELAY_ON_PARKED` yet (L1): new sessions begin with that again."""

    def claim(self) -> Claim:
        """To take the shard up anew, from the floor as stored."""
        return Claim(self.shard, self.epoch, self.floor, has_other_policy=self.has_other_policy)


class Leases:
    """All leases of one relay."""

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        # A tenth of a lease: the slack between our clock's reading and the last byte written.
        self._margin_s = lease_s * 0.1
        self._held: dict[int, Lease] = {}
        self._is_suspended = False
        self._writable: list[bool] | None = None
        """The last answer to `writable`; none once something has changed."""
        self._writable_until = 0.0

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, shard: int) -> bool:
        return shard in self._held

    def all(self) -> Sequence[Lease]:
        return list(self._held.values())

    @property
    def shards(self) -> Sequence[int]:
        return sorted(self._held)

    def epoch(self, shard: int) -> int:
        return self._held[shard].epoch

    def is_kept(self, shard: int) -> bool:
        """Ours, and not being handed over."""
        lease = self._held.get(shard)
        return lease is not None and lease.giving_since is None

    # ------------------------------------------------------------ claims and renewals

    def on_claimed(self, claims: Iterable[Claim], sent_at: float) -> None:
        """`sent_at`: boot-time seconds before the claim was sent."""
        self._writable = None
        for claim in claims:
            until = sent_at + self._lease_s - self._margin_s
            self._held[claim.shard] = Lease(
                claim.shard, claim.epoch, until, claim.floor, has_other_policy=claim.has_other_policy
            )

    def on_policy(self, epochs: Mapping[int, int]) -> None:
        """The parked rows of these shards, claimed under these epochs, have our policy."""
        for shard, epoch in epochs.items():
            lease = self._held.get(shard)
            if lease is not None and lease.epoch == epoch:
                lease.has_other_policy = False

    def on_renewal(self, renewal: Renewal, sent_at: float) -> list[int]:
        """Extend what was renewed; returns the shards that are lost, already forgotten here."""
        self._writable = None
        lost: list[int] = []
        for shard, lease in list(self._held.items()):
            mine = renewal.mine.get(shard)
            if mine is None or mine[0] != lease.epoch:
                del self._held[shard]
                lost.append(shard)
                continue
            # As stored, even where that is lower than before: the database may have gone back in time (R5).
            lease.floor = mine[1]
            if shard in renewal.renewed:
                lease.until = sent_at + self._lease_s - self._margin_s
        self._is_suspended = False
        return lost

    def was_skipped(self, renewal: Renewal) -> bool:
        """Whether a shard of ours was locked by somebody: renew again soon (L2)."""
        return any(shard not in renewal.renewed for shard in self._held)

    def drop(self, shard: int) -> None:
        self._writable = None
        self._held.pop(shard, None)

    # ------------------------------------------------------------ the fence

    def suspend(self) -> None:
        """The renewing session is gone: write nothing for a shard until its renewal succeeded (L3)."""
        self._writable = None
        self._is_suspended = True
        for lease in self._held.values():
            # One by one: a shard that the next renewal skips may be taken at once, its session being gone.
            lease.until = float("-inf")

    def standing(self, now: float) -> int:
        """How many leases stand at boot-time `now`; one that ran out, or whose session is gone, may be another's."""
        return 0 if self._is_suspended else sum(now < lease.until for lease in self._held.values())

    def writable(self, now: float) -> Sequence[bool]:
        """By shard, whether something may be published for it at boot-time `now` (L3, L4, L5).

        Asked for each publish: worked out again only when a lease has changed or run out.
        """
        flags = self._writable
        if flags is None or now >= self._writable_until:
            flags, until = [False] * SHARDS, float("inf")
            if not self._is_suspended:
                for shard, lease in self._held.items():
                    if lease.giving_since is None and now < lease.until:
                        flags[shard] = True
                        until = min(until, lease.until)
            self._writable, self._writable_until = flags, until
        return flags

    # ------------------------------------------------------------ fair share

    def strays(self, renewal: Renewal) -> dict[int, Held]:
        """Shards that are ours in the table and not here: we were unseated, or the answer to a claim was lost. Nobody claims
        them before our lease has run out, unless we give them back."""
        return {shard: Held(epoch, None) for shard, (epoch, _) in renewal.mine.items() if shard not in self._held}

    def claims_wanted(self, renewal: Renewal) -> int:
        """How many shards to claim now, up to this relay's share; strays have been given back."""
        if renewal.claimable + len(self.strays(renewal)) == 0 or renewal.relays == 0:
            return 0
        return max(0, _share(renewal.relays) - len(self._held))

    def surplus(self, renewal: Renewal, now: float) -> list[int]:
        """Shards to hand over: those above the share that are not being given yet."""
        if renewal.relays == 0:
            return []
        giving = sum(1 for lease in self._held.values() if lease.giving_since is not None)
        excess = len(self._held) - giving - _share(renewal.relays)
        if excess <= 0:
            return []
        ours = sorted(self._held.items())
        free = [shard for shard, lease in ours if lease.giving_since is None and lease.kept_until <= now]
        return free[-excess:]

    def give(self, shard: int, now: float) -> None:
        self._writable = None
        self._held[shard].giving_since = now

    def keep(self, shard: int, now: float) -> None:
        """A hand-over took too long: go on with the shard, try later (L5)."""
        self._writable = None
        lease = self._held[shard]
        lease.giving_since = None
        lease.kept_until = now + KEEP_LEASES * self._lease_s

    def giving(self) -> list[Lease]:
        return [lease for lease in self._held.values() if lease.giving_since is not None]


def _share(relays: int) -> int:
    return -(-SHARDS // relays)
