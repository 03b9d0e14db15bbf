"""Mutants of the lease rules, L2 to L6."""

from __future__ import annotations

from .patch import Mutant, edit

MUTANTS = (
    Mutant(
        "l2_skip",
        "L2 skip: one locked shard row makes the renewal of all wait",
        (
            edit(
                "tests.sim.outbox:FakeOutbox.renew",
                (
                    "    pid = self._keeper_pid()\n",
                    "    pid = self._keeper_pid()\n\n"
                    "    def waiting():\n"
                    "        yield from self._await_unlocked(held)\n"
                    "        return self._renew(dict(held), available, pid)\n\n",
                ),
                ("at_once(lambda: self._renew(dict(held), available, pid))", "waiting()"),
            ),
        ),
    ),
    Mutant(
        "l3_suspend",
        "L3: a relay that has lost its renewing session goes on writing",
        (
            edit(
                "relay.core.leases:Leases.suspend",
                ("self._is_suspended = True", "pass"),
                ('lease.until = float("-inf")', "pass"),
            ),
        ),
    ),
    Mutant(
        "l4_fence",
        "L4: a relay writes after its lease",
        (edit("relay.core.leases:Leases.writable", (" and now < lease.until", "")),),
    ),
    Mutant(
        "l5_in_flight",
        "L5: a shard is released with rows in flight",
        (
            edit(
                "relay.keeper:Keeper._release_idle",
                ("if engine.chains.is_idle(lease.shard)", "if True"),
            ),
        ),
    ),
    Mutant(
        "l6_no_broker",
        "L6: a relay without a broker keeps its leases",
        (
            edit(
                "relay.keeper:Keeper._note_availability",
                ("is_available = lost_at is None or engine.clock.now() - lost_at < patience_s", "is_available = True"),
            ),
        ),
    ),
    Mutant(
        "l8_reading",
        "L8 page, due: a former owner that does not know yet reads on",
        (edit("tests.sim.outbox:FakeOutbox._is_ours", ("self.database.shards[shard].owner == self.instance", "True")),),
    ),
)
