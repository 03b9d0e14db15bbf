"""Mutants of the reading rules, R1 to R5."""

from __future__ import annotations

from .patch import Mutant, edit

_ON_CHECK = "relay.core.reading:Reading.on_check"
_ON_PAGE = "relay.core.reading:Reading.on_page"
_RESET = "relay.core.reading:Reading.reset"
_PAGE = "tests.sim.outbox:FakeOutbox._page"
_CHECK = "tests.sim.outbox:FakeOutbox._check"
_RENEW = "tests.sim.outbox:FakeOutbox._renew"

MUTANTS = (
    Mutant(
        "r1_order",
        "R1 order: the locks are read first, then S",
        (
            edit(
                _CHECK,
                ("    last_seq = database.last_seq()\n", ""),
                ("    yield Wait(database.draw(database.options.check_gap))\n", ""),
                (
                    "    return Check(last_seq,",
                    "    yield Wait(database.draw(database.options.check_gap))\n    return Check(database.last_seq(),",
                ),
            ),
        ),
    ),
    Mutant(
        "r1_is_called",
        "R1 is_called: last_value counts before anything was drawn",
        (edit(_CHECK, ("database.last_seq()", 'database.meta["last_value"]')),),
    ),
    Mutant(
        "r1_prepared",
        "R1 prepared: a transaction that was prepared counts as a new writer",
        (edit(_ON_CHECK, ("elif found.vxid.startswith(_PREPARED):", "elif False:")),),
    ),
    Mutant(
        "r1_first_check",
        "R1 prepared, first check: a writer that the first check finds has begun just now",
        (edit(_ON_CHECK, ("low = min(self._cursors.values(), default=0)", "low = check.last_seq")),),
    ),
    Mutant(
        "r2_lows",
        "R2 lows of the ended: a page only goes on above the cursor",
        (edit(_PAGE, ("above = cursor if low is None else min(cursor, low)", "above = cursor")),),
    ),
    Mutant(
        "r2_snapshot",
        "R2 own snapshot: a page trusts the check's locks",
        (
            edit(
                _PAGE,
                ('(xid is not None and xid not in database.running and xid < database.meta["next_xid"])', "False"),
            ),
        ),
    ),
    Mutant(
        "r2_struck",
        "R2 struck at arrival: a listed writer is struck by any page, ended or not",
        (edit(_ON_PAGE, ("if writer.number in ended:", "if writer.number in request.numbers:")),),
    ),
    Mutant(
        "r2_cursor",
        "R2 cursor never past S: it stands at the last row that was read",
        (
            edit(
                _ON_PAGE,
                ("end = request.last_seq", "end = max(request.last_seq, last.get(shard, 0))"),
                ("end = min(end, last[shard])", "end = last[shard]"),
            ),
        ),
    ),
    Mutant(
        "r3_beyond",
        "R3: pages read beyond S while a writer has no xid",
        (
            edit(
                "relay.core.reading:Reading.may_read_beyond",
                ("all(writer.xid is not None for writer in self._open.values())", "True"),
            ),
        ),
        seeds_max=5000,
    ),
    Mutant(
        "r3_struck",
        "R3: a writer without an xid is struck by the first page",
        (edit(_ON_PAGE, ("if xid is None and not gone", "if False")),),
    ),
    Mutant(
        "r4_page",
        "R4: a page's rows that were settled since it was sent are taken",
        (
            edit(
                _ON_PAGE,
                ("if settled.get(row.seq) != row.id and row.shard not in dropped", "if row.shard not in dropped"),
            ),
        ),
    ),
    Mutant(
        "r4_due",
        "R4 due rows: those that were settled since the query was sent are taken",
        (edit("relay.core.reading:Reading.fresh", ("settled.get(row.seq) != row.id and row.shard", "row.shard")),),
    ),
    Mutant(
        "r5_floor_in_memory",
        "R5 floor in memory: S is written as floor, read or not",
        (edit("relay.core.reading:Reading.floor", ("floor = self._cursors[shard]", "floor = self._last_seq")),),
    ),
    Mutant(
        "r5_unsettled",
        "R5: the floor passes what is read and not settled",
        (
            edit(
                "relay.core.reading:Reading.floor",
                ("floor = min(floor, lowest_unsettled - 1)", "pass"),
            ),
        ),
    ),
    Mutant(
        "r5_as_stored",
        "R5 as stored: the owner begins at the floor that it remembers",
        (
            edit(
                "relay.core.leases:Leases.on_renewal",
                ("lease.floor = mine[1]", "lease.floor = max(lease.floor, mine[1])"),
            ),
        ),
    ),
    Mutant(
        "r5_session",
        "R5 session: what was read stays when the sessions are lost",
        (edit("relay.engine:Engine.lose_sessions", ("    self.chains.drop_unpublished()\n", "    pass\n")),),
        seeds_max=5000,
    ),
    Mutant(
        "r5_identity",
        "identity: a row is known by its seq alone",
        (
            edit("relay.core.chains:Chains.admit", ("if old.id == row.id:", "if True:")),
            edit("relay.core.chains:Chains._is_news", ("if old.id == row.id:", "if True:")),
        ),
    ),
    Mutant(
        "r5_void_results",
        "R5 void results: what a lost session settled is skipped by the next one's pages",
        (edit("relay.core.reading:Reading.expect_rows", ("self._settled_since.clear()", "pass")),),
    ),
    Mutant(
        "r5_nothing_survives",
        "R5 nothing survives: cursors and S outlive the sessions",
        (edit(_RESET, ("self._cursors.clear()", "pass"), ("self._last_seq = None", "pass")),),
    ),
    Mutant(
        "r5_owner",
        "R5 owner in the fence: the epoch alone decides",
        (
            edit(
                "tests.sim.settling:Settling._settle",
                (
                    "(database.shards[number].owner, database.shards[number].epoch) != (self.instance, epoch)",
                    "database.shards[number].epoch != epoch",
                ),
            ),
            edit(
                _RENEW,
                ("shard.owner != self.instance or shard.epoch != mine.epoch", "shard.epoch != mine.epoch"),
                (
                    "if shard.owner == self.instance\n",
                    "if shard.owner == self.instance or (number in held and held[number].epoch == shard.epoch)\n",
                ),
            ),
        ),
    ),
    Mutant(
        "r5_lowering",
        "R5 lowering: the floor is lowered and its owner left in place",
        (
            edit(
                "tests.sim.outbox:FakeOutbox._search",
                (
                    "database.unseat(number, seq - 1)",
                    "database.put_shard(number, replace(database.shards[number], floor=seq - 1))",
                ),
            ),
        ),
    ),
)
