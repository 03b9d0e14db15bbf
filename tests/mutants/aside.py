"""Mutants of the rules about rows that are set aside, H1 to H7, and of the operator's."""

from __future__ import annotations

from .patch import Mutant, edit

_DUE = "tests.sim.outbox:FakeOutbox._due"
_PROMOTE = "tests.sim.database:Database.promote"
_DISCARD = "tests.sim.outbox:FakeOutbox._discard_parked"
_TEST_BEHIND = "relay.core.chains:Chains.test_behind"
_OPERATE = "tests.sim.world:World.operate"

MUTANTS = (
    Mutant(
        "h1_followers",
        "H1: followers are dropped from memory, not held",
        (
            edit(
                "relay.engine:Engine.set_back",
                ("self.decisions.followers.extend(followers)", "self.chains.finish(followers)"),
            ),
        ),
    ),
    Mutant(
        "h2_tested",
        "H2: a row that was read behind a holding one is not tested",
        (
            edit(
                "tests.sim.settling:Settling._decide",
                ("is_same and stored is not None and not database.has_blocker(stored)", "is_same"),
            ),
        ),
    ),
    Mutant(
        "h2_behind",
        "H2: what stands behind a row that becomes held, read when the key was free, is not tested",
        (edit(_TEST_BEHIND, ("later.state in _UNTESTED", "later.aside is not None and later.state in _UNTESTED")),),
    ),
    Mutant(
        "h2_one_frees_no_key",
        "H2 one row frees no key: a free row frees its key, whatever holds above it",
        (edit("relay.core.holding:Holding.note_free", (" and hold[1] < seq:", ":")),),
    ),
    Mutant(
        "h3_operator",
        "H3: an operator promotes nobody",
        (edit(_OPERATE, ("self._promote(promotions)", "pass")),),
    ),
    Mutant(
        "h3_settlement",
        "H3: a settlement promotes nobody",
        (edit("tests.sim.settling:Settling._decide", ("database.promote(touched)", "database.promote(())")),),
    ),
    Mutant(
        "h3_owed",
        "H3 owed: a promotion that a lock prevented is forgotten",
        (
            edit(
                "relay.settler:Settler._keep_locked",
                ("self._unpromoted.update((key, shard) for shard, key in settled.unpromoted)", "pass"),
            ),
        ),
    ),
    Mutant(
        "h3_next_owner",
        "H3 owed: the next owner does not look for what is held by nothing",
        (edit("tests.sim.outbox:FakeOutbox._held_keys", ("rows[0].aside is Aside.HELD", "False")),),
    ),
    Mutant(
        "h4_lowest",
        "H4 lowest: any due row is released",
        (edit(_DUE, ("blocked if database.has_blocker(row) else released", "released")),),
    ),
    Mutant(
        "h4_cursor",
        "H4 cursor: due rows above the cursor are released",
        (edit(_DUE, (" and row.seq <= cursors[row.shard]", "")),),
    ),
    Mutant(
        "h4_newcomer",
        "H4 newcomer: of the held ones the first that was held goes next",
        (
            edit(
                _PROMOTE,
                (
                    "lowest = self.holding_rows(key, shard)[0]\n",
                    "lowest = min(self.holding_rows(key, shard), key=lambda row: row.ctid)\n"
                    "            if lowest.aside is not Aside.HELD:\n"
                    "                break\n",
                ),
            ),
            edit(_DUE, ("database.has_blocker(row)", "row.aside is Aside.SCHEDULED and database.has_blocker(row)")),
        ),
    ),
    Mutant(
        "h4_followers_newcomer",
        "H4 followers, newcomer: what was loaded behind a head stays when a row is moved aside below it",
        (
            edit("relay.settler:Settler._apply", ("if engine.chains.drop_followers(row):", "if False:")),
            # Else they would be tested like what came when the key was free, and held again.
            edit(_TEST_BEHIND, ("later.state in _UNTESTED", "later.aside is None and later.state in _UNTESTED")),
        ),
    ),
    Mutant(
        "h4_followers_void",
        "H4 followers, void: what was loaded behind a row stays when that row leaves memory unsent",
        (edit("relay.reader:Reader._reread", ("engine.chains.drop_followers(row)", "pass")),),
    ),
    Mutant(
        "h4_followers_cursor",
        "H4 followers, cursor: followers above the cursor are loaded",
        (edit("tests.sim.outbox:FakeOutbox._followers", (" or row.seq > cursors[row.shard]", "")),),
    ),
    Mutant(
        "h5_in_memory",
        "H5: a released row is set back to pending",
        (
            edit(
                _DUE,
                (
                    "    for row in due[:limit]:\n",
                    "    for row in due[:limit]:\n"
                    "        row = database.updated(row, aside=None, holds=False, due_at=None)\n"
                    "        database.commit(synchronous=True)\n",
                ),
            ),
        ),
    ),
    Mutant(
        "h6_scheduled",
        "H6: a scheduled row is forgotten instead of written aside",
        (
            edit(
                "relay.reader:Reader._put_off",
                (
                    "engine.decisions.scheduled.extend(row for row in dated if row in early and "
                    "engine.chains.admit_scheduled(row))",
                    "pass",
                ),
            ),
        ),
    ),
    Mutant(
        "h6_held",
        "H6: a row before its time that a page found held becomes held",
        (
            edit(
                "relay.reader:Reader._read_page",
                (
                    "self._put_off([row for row in probed if row.seq in page.blocked])",
                    "[row for row in probed if row.seq in page.blocked]",
                ),
            ),
        ),
    ),
    Mutant(
        "h7_continue",
        "H7: the next row goes before the park is committed",
        (
            edit(
                "relay.core.chains:Chains.set_back",
                (
                    "    if chain is None or not holds:\n        return followers\n",
                    "    if chain is None:\n        return followers\n",
                ),
                (
                    "    followers = [later for later in chain.above(row) if later.state in _MOVABLE]\n",
                    "    if holds:\n"
                    "        followers = [later for later in chain.above(row) if later.state in _MOVABLE]\n",
                ),
            ),
        ),
    ),
    Mutant(
        "l1_policy",
        "L1 the parked rows' policy: an operator's command goes by its own (continue)",
        (
            edit(
                _OPERATE,
                (
                    "    promotions = self._promotions(",
                    "    for row in self.parked():\n"
                    "        database.updated(row, holds=False)\n"
                    "    promotions = self._promotions(",
                ),
            ),
        ),
    ),
    Mutant(
        "o1_no_shard_lock",
        "O1 under the lock: an operator takes no shard lock",
        (
            edit(
                _OPERATE,
                ("while not all(database.is_shard_free(shard) for shard in shards):", "while False:"),
                ("unlock = database.lock_shards(shards)", "unlock = database.lock_shards(set())"),
            ),
        ),
    ),
    Mutant(
        "o2_no_shard_lock",
        "O2 under the lock: parked rows are deleted without the shards' locks",
        (
            edit(
                _DISCARD,
                ("yield from self._await_unlocked(dict.fromkeys(shards))", "yield from ()"),
                (
                    "while any(database.key_share[shard] or shard in database.exclusive for shard in shards):",
                    "while False:",
                ),
                ("database.exclusive |= shards", "chosen = old()"),
                ("rows = [row for row in old() if row.shard in shards]", "rows = chosen"),
                ("database.exclusive -= shards", "pass"),
                (
                    "promoted = database.promote((row.shard, row.key) for row in rows)",
                    "promoted = database.promote(())",
                ),
            ),
        ),
    ),
    Mutant(
        "o2_created_at",
        "O2 parked_at: retention goes by created_at",
        (
            edit(
                _DISCARD,
                ("row.parked_at is not None and row.parked_at < before", "row.created_at < before"),
            ),
        ),
    ),
)
