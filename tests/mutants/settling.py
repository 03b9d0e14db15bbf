"""Mutants of publishing and settling: P1 to P3, S1 to S4, and the confirms."""

from __future__ import annotations

from .patch import Mutant, edit

_SETTLE = "tests.sim.settling:Settling._settle"
_LOSE = "relay.engine:Engine.lose_sessions"

MUTANTS = (
    Mutant(
        "mark_before_confirm",
        "I1: rows are marked when they are published",
        (
            edit(
                "relay.publisher:Publisher._take_publication",
                (
                    "    for rejection in publication.rejected:\n",
                    "    engine, rejected = self._engine, {each.row for each in publication.rejected}\n"
                    "    engine.decisions.sent.extend(r for r in batch[: publication.taken] if r not in rejected)\n"
                    "    engine.to_settle.set()\n"
                    "    for rejection in publication.rejected:\n",
                ),
            ),
            edit("relay.publisher:Publisher.on_acked", ("engine.decisions.sent.extend(confirmed)", "pass")),
            edit(
                "relay.settler:Settler._build",
                (
                    "sent = [row for row in decisions.sent if row.state is _SETTLING]",
                    "sent = [row for row in decisions.sent if row.state in (_SETTLING, State.IN_FLIGHT)]",
                ),
            ),
        ),
    ),
    Mutant(
        "wake_after_read",
        "waking is cleared after the read",
        (
            edit(
                "relay.reader:Reader.run",
                (
                    "wait_s = await self._turn()\n",
                    "wait_s = await self._turn()\n            self._has_rung = engine.to_read._is_set = False\n",
                ),
            ),
        ),
    ),
    Mutant(
        "return_is_delivery",
        "I1: an ack after a return is taken as delivery",
        (
            edit(
                "relay.core.window:Window.mark_returned",
                ("self._returned[tag] = Returned(row, error, exchange, routing_key)", "pass"),
            ),
        ),
    ),
    Mutant(
        "nack_is_confirm",
        "I1: a nack is taken as an ack",
        (
            edit(
                "relay.publisher:Publisher.on_nacked",
                ("    engine = self._engine\n", "    return self.on_acked(rows)\n    engine = self._engine\n"),
            ),
        ),
    ),
    Mutant(
        "p1_late_low",
        "P1: what stood ready goes before a lower row that came late, and with it",
        (
            edit(
                "relay.core.chains:Chains._demote",
                ("[later for later in chain.above(row) if later.state is _READY]", "[]"),
            ),
        ),
    ),
    Mutant(
        "p3_orphans",
        "P3: a row is published again while its orphan is unconfirmed",
        (
            edit(
                "relay.core.chains:Chains.forget",
                ("self.has_orphans = True", "pass"),
            ),
        ),
    ),
    Mutant(
        "s1_epoch",
        "S1: a settlement without the epoch",
        (
            edit(
                _SETTLE,
                (
                    "if (database.shards[number].owner, database.shards[number].epoch) != (self.instance, epoch)",
                    "if False",
                ),
            ),
        ),
    ),
    Mutant(
        "s2_parks_by_seq",
        "S2 no fallback for parks: what is parked is settled again by seq after an unknown outcome",
        (
            edit("tests.sim.settling:Settling._move", ("stored.ctid != row.ctid or ", "")),
            edit(
                _LOSE,
                (
                    "    undecided = [setback.row for setback in decisions.setbacks]\n",
                    "    undecided = []\n",
                ),
                ("sent=decisions.sent)", "sent=decisions.sent, setbacks=decisions.setbacks)"),
            ),
        ),
    ),
    Mutant(
        "s2_locked_is_done",
        "S2: a row that somebody keeps locked counts as settled",
        (
            edit(
                "tests.sim.settling:Settling._mark",
                ("settled.locked.append(row)", "settled.done.append(row)"),
            ),
        ),
    ),
    Mutant(
        "s3_sent",
        "S3: decisions of sent rows are dropped with a lost session",
        (
            edit(
                _LOSE,
                ("sent=decisions.sent)", "sent=[])"),
                (
                    "    self.chains.finish(undecided)\n",
                    "    self.chains.finish([*undecided, *decisions.sent])\n",
                ),
            ),
        ),
    ),
    Mutant(
        "s4_unmarkable",
        "S4: a row whose mark is refused refuses its whole settlement",
        (
            edit(
                "tests.sim.settling:Settling._mark",
                (
                    "self._fault(row, settled, touched)\n",
                    "from relay.errors import DatabaseRefused\n            raise DatabaseRefused('a trigger refuses it')\n",
                ),
            ),
        ),
    ),
    Mutant(
        "s4_holds_nobody",
        "S4 holds nobody: nobody is promoted past a row whose change is refused",
        (edit("tests.sim.settling:Settling._fault", ("touched.append((row.shard, row.key))", "pass")),),
    ),
    Mutant(
        "i5_attempts",
        "I5: a lost link uses up an attempt",
        (
            edit(
                "relay.core.chains:Chains._back_from_link",
                ("        self._land(row)\n", "        self._land(row)\n        row.attempts += 1\n"),
            ),
        ),
    ),
)
