"""Rows of a few keys through failures, parking, redrive, discard and lost answers, at random, on a real PostgreSQL.

The engine's own parts over the real adapter, with a link that answers as the test says and a clock that moves as it
says: what `tests/sim` does with a fake of these statements, here with the statements themselves.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine, Sequence
from itertools import count
from typing import Any, ClassVar, TypeVar

import asyncpg
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.errors import Flaky
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from relay import migrate
from relay.config import load
from relay.core.failures import Failure
from relay.core.ports.outbox import OutboxInfo
from relay.core.settings import EngineSettings
from relay.keeper import Keeper
from relay.message import PayloadType, Row
from relay.parked_rows import Action, Filter
from relay.parked_table import ParkedTable, open_parked
from relay.reader import Reader
from tests.core.parts import Parts
from tests.integration.relay import Relay
from tests.mutants import aside, reading
from tests.mutants.patch import Mutant, edit, planted

T = TypeVar("T")

DICE = st.integers(0, 11)
MOSTLY = st.sampled_from([True, True, True, False])
FAILURES = [Failure.INVALID, Failure.TOO_LARGE, Failure.EXPIRED, Failure.REFUSED, Failure.UNKNOWN]
HOLD_NOBODY = (Failure.EXPIRED,)
EXAMPLES = 9
_numbers = count(1)


class Histories(RuleBasedStateMachine):
    """Under `hold` the first copies of a key arrive in the order of `seq`, whatever happened to its rows; no key is ever
    held by nothing; in the end every row is delivered, or was discarded."""

    url: ClassVar[str]
    reached: ClassVar[Counter[str]] = Counter()
    """What happened to rows while things went wrong (not in the end, when all is drained), over all histories of a run."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.rows: dict[str, tuple[int, str | None]] = {}
        self.delivered: list[str] = []
        self.discarded: set[str] = set()
        self.loose: set[str] = set()
        """Rows that hold nobody: they may arrive late."""
        self.ends_by_takeover = False
        self.is_ending = False

    @initialize(
        attempts=st.sampled_from([1, 1, 2]),
        held_keys_max=st.sampled_from([1, 500]),
        page_span=st.sampled_from([2, 100_000]),
        ends_by_takeover=st.booleans(),
    )
    def begin(self, attempts: int, held_keys_max: int, page_span: int, ends_by_takeover: bool) -> None:
        self.ends_by_takeover = ends_by_takeover
        self.do(self._begin(attempts, held_keys_max, page_span))
        # Something to go wrong from the start.
        self.insert("a", 2)

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(asyncio.wait_for(work, 30.0))

    async def _begin(self, attempts: int, held_keys_max: int, page_span: int) -> None:
        self.database = await asyncpg.connect(self.url)
        await self.database.execute(
            "DELETE FROM outbox; DELETE FROM outbox_relay; SELECT setval('outbox_seq_seq', 1, false);"
            "UPDATE outbox_shard SET owner = NULL, owner_pid = NULL, leased_until = NULL, floor = 0"
        )
        self.parts = Parts(
            EngineSettings(
                # A second attempt at once.
                retry_delays_s=(0.0,) * (attempts - 1),
                read_ahead_max=12,
                in_flight_max=4,
                held_keys_max=held_keys_max,
                page_span=page_span,
            )
        )
        engine = self.parts.engine
        engine.lose_shard(0)
        self.relay = Relay(self.url, f"r{next(_numbers)}")
        engine.outbox = self.relay
        engine.info = OutboxInfo(PayloadType.JSON, is_direct=True, has_doorbell=False)
        config, _ = load({"RELAY_DATABASE_URL": self.url}, needs=frozenset({"RELAY_DATABASE_URL"}))
        self.operator = open_parked(config)
        self.parked: ParkedTable = await self.operator.__aenter__()
        await self._open()

    async def _open(self) -> None:
        """New sessions, and all that lives as long as they do."""
        parts = self.parts
        await self.relay.open(lambda: None, lambda why: None)
        parts.keeper = Keeper(parts.engine)
        parts.reader = Reader(parts.engine, parts.keeper)
        await parts.keeper._renew()

    @rule(
        what=st.sampled_from(
            [*["work"] * 8, *["insert"] * 5, "touch", "lose shards", *["redrive"] * 2, "discard", "retention"]
        ),
        key=st.sampled_from(["a", "a", "b", None]),
        dice=DICE,
        reads=MOSTLY,
        publishes=MOSTLY,
        outcomes=st.lists(st.sampled_from(["ack", "ack", "ack", "return", "return", "nack"]), min_size=2, max_size=4),
        turns=st.integers(1, 3),
        settles=st.sampled_from(["answered"] * 6 + ["unknown", "later"]),
        failure=st.sampled_from(["", "", "", *FAILURES]),
    )
    def step(
        self,
        what: str,
        key: str | None,
        dice: int,
        reads: bool,
        publishes: bool,
        outcomes: list[str],
        turns: int,
        settles: str,
        failure: str,
    ) -> None:
        """One rule, for their shares: failures must come faster than the operator."""
        match what:
            case "work":
                for _ in range(turns):
                    self.work(reads=reads, publishes=publishes, outcomes=outcomes, settles=settles)
            case "insert":
                self.insert(key, dice % 3 + 1, failure)
            case "touch":
                self.touch(dice)
            case "lose shards":
                self.lose_shards(dice)
            case "redrive":
                self.do(self._operate(dice, Action.REDRIVE))
            case "discard":
                self.do(self._operate(dice, Action.DISCARD))
            case "retention":
                self.end_retention()

    # -------------------------------------------------------- the writers

    def insert(self, key: str | None, rows: int, failure: str = "") -> None:
        """The first of them cannot be sent, whenever it is tried, until somebody mends that in the end."""
        found = self.do(
            self.database.fetch(
                "INSERT INTO outbox (aggregate_id, event_type) SELECT $1, 'e' FROM generate_series(1, $2::int)"
                " RETURNING id, seq",
                key,
                rows,
            )
        )
        self.rows.update({id_: (seq, key) for id_, seq in found})
        if failure:
            id_ = found[0]["id"]
            self.parts.link.rejects[id_] = failure
            if failure in HOLD_NOBODY:
                self.loose.add(id_)

    def touch(self, dice: int) -> None:
        """An application changes a row: whatever was decided about it by its address is void."""
        self.do(
            self.database.execute("UPDATE outbox SET tracestate = 'seen' WHERE sent_at IS NULL AND seq % 12 = $1", dice)
        )

    # -------------------------------------------------------- the relay

    def work(self, reads: bool, publishes: bool, outcomes: list[str], settles: str) -> None:
        """A turn of each part, or of some; a COMMIT's answer may be lost with the sessions (S3)."""
        if reads:
            self.read()
        if publishes:
            self.parts.turn()
        for row, outcome in zip(list(self.parts.link.open.values()), outcomes, strict=False):
            match outcome:
                case "ack":
                    self.confirm(row)
                case "return":
                    self.parts.link.give_back(row)
                case "nack":
                    self.parts.link.nack(row)
        if settles != "later":
            self.do(self._settle(settles == "answered"))

    def read(self) -> None:
        self.parts.clock.time += 0.5
        self.do(self.parts.keeper._renew())
        self.do(self.parts.reader._turn())

    def confirm(self, row: Row) -> None:
        if row.id not in self.delivered:
            seq, key = self.rows[row.id]
            lower = [id_ for id_, (s, k) in self.rows.items() if s < seq and k == key and key is not None]
            missing = [id_ for id_ in lower if id_ not in {*self.delivered, *self.discarded, *self.loose}]
            assert not missing, f"seq {seq} of {key} before {[self.rows[id_][0] for id_ in missing]}"
            self.delivered.append(row.id)
        self.parts.link.ack(row)

    async def _settle(self, is_answered: bool) -> None:
        engine, settler = self.parts.engine, self.parts.settler
        settler._offer_locked()
        settlement, serial, _ = settler._build()
        if not len(settlement):
            return
        settled = await self.relay.settle(settlement)
        if is_answered:
            settler._apply(settlement, settled, serial)
            return
        settler._put_back(settlement)
        await self.relay.close()
        engine.lose_sessions()
        await self._open()

    def lose_shards(self, dice: int) -> None:
        """Somebody unseats the owner, as the lowering of a floor does; it claims them again."""
        self.do(
            self.database.execute(
                "UPDATE outbox_shard SET epoch = epoch + 1 WHERE shard % $1 = 0",
                dice % 2 + 1,
            )
        )

    # -------------------------------------------------------- the operator, and the retention

    async def _operate(self, dice: int, action: Action) -> None:
        self.parked.began = await self.database.fetchval("SELECT clock_timestamp()")
        found = await self.parked.select(Filter(), -(2**63), 100)
        if found:
            chosen = found[dice % len(found)]
            is_held_behind = await self.database.fetchval(
                "SELECT EXISTS (SELECT FROM outbox WHERE aside = 'held' AND aggregate_id = $1)", chosen.aggregate_id
            )
            changed = await self.parked.change(action, [chosen])
            assert changed == {chosen.seq}
            if not self.is_ending:
                self.reached[action] += 1
                self.reached[f"{action} before held rows"] += is_held_behind
            if action is Action.DISCARD:
                self.discarded.add(chosen.id)

    def end_retention(self) -> None:
        """Of the row that was parked longest ago."""
        before = self._ids()
        discarded = self.do(self.relay.discard_parked(0.0, 1, []))
        self.parts.engine.promote(discarded.unpromoted)
        gone = before - self._ids()
        assert len(gone) == discarded.rows
        self.reached["retention"] += discarded.rows
        self.discarded |= gone

    def _ids(self) -> set[str]:
        return {record["id"] for record in self.do(self.database.fetch("SELECT id FROM outbox"))}

    # -------------------------------------------------------- what always holds, and how it ends

    @invariant()
    def no_key_is_held_by_nothing(self) -> None:
        assert self.do(self.relay.stuck()) == []

    def teardown(self) -> None:
        try:
            if hasattr(self, "parts"):
                self._drain()
        finally:
            if hasattr(self, "parts"):
                self.do(self._close())
            self.loop.close()

    def _drain(self) -> None:
        """By the owner as it is, or by one that knows nothing but the table."""
        self.is_ending = True
        self.parts.link.rejects.clear()
        if self.ends_by_takeover:
            self.lose_shards(0)
        for _ in range(200):
            if not self.do(self.database.fetchval("SELECT count(*) FROM outbox WHERE sent_at IS NULL")):
                break
            self.do(self._operate(0, Action.REDRIVE))
            # Half a minute has passed, by PostgreSQL's clock: after too many nacks a row is deferred for so long (P2).
            self.do(
                self.database.execute("UPDATE outbox SET due_at = now() WHERE aside = 'deferred' AND due_at > now()")
            )
            self.work(reads=True, publishes=True, outcomes=["ack"] * 4, settles="answered")
        missing = self.rows.keys() - set(self.delivered) - self.discarded
        assert not missing, f"lost or stuck: {sorted(self.rows[id_] for id_ in missing)}"

    async def _close(self) -> None:
        await self.relay.close()
        await self.operator.__aexit__(None, None, None)
        await self.database.close(timeout=5)


def prepared(url: str) -> None:
    Histories.url = url
    loop = asyncio.new_event_loop()
    try:
        loop.run_until_complete(migrate.run(url))
    finally:
        loop.close()


_TEST = "relay.settling:SettlementWriter.test"

PLANTED = (
    *(mutant for mutant in aside.MUTANTS if mutant.name == "h1_followers"),
    *(mutant for mutant in reading.MUTANTS if mutant.name == "r5_unsettled"),
    Mutant(
        "h2_settlement",
        "H2: a settlement takes blocked rows for free ones",
        (
            edit(
                _TEST,
                (
                    "rest = _parted(rows, free or (), progress.settled.unblocked)",
                    "progress.settled.unblocked.extend(rows)",
                ),
                ("await self._written(session, rest, held, progress)", "pass"),
            ),
        ),
    ),
    Mutant(
        "h2_page",
        "H2: what a page saw held counts as free",
        (
            edit(
                "relay.reader:Reader._read_page",
                ("for row in probed if row.seq not in page.blocked", "for row in probed"),
                ("[row for row in probed if row.seq in page.blocked]", "[]"),
            ),
        ),
    ),
    Mutant(
        "h3_settlement",
        "H3: a settlement promotes nobody",
        (edit("relay.settling:SettlementWriter.promote", ("ordered = sorted(keys)", "return")),),
    ),
)
"""Of those of tests/mutants what lies in the engine, and rules that there are planted in the fakes."""


def histories(examples: int, phases: Sequence[Phase] = tuple(Phase), *, is_fixed: bool = False) -> settings:
    return settings(
        max_examples=examples,
        stateful_step_count=40,
        deadline=None,
        phases=phases,
        derandomize=is_fixed,
        database=None,
        print_blob=False,
        suppress_health_check=list(HealthCheck),
    )


def test_order_and_loss_whatever_happens_to_rows(database_url: str) -> None:
    prepared(database_url)
    Histories.reached.clear()
    run_state_machine_as_test(Histories, settings=histories(EXAMPLES))
    assert {Action.REDRIVE, Action.DISCARD, "retention"} <= (+Histories.reached).keys(), "the histories are too tame"


def test_a_row_that_is_deferred_for_its_nacks_is_no_lost_one(database_url: str) -> None:
    """It looked like one: its half minute had not passed when the history ended, some histories in a hundred."""
    prepared(database_url)
    history = Histories()
    history.begin(1, 500, 100_000, False)
    history.insert(None, 6)
    nacked = 0
    for _ in range(50):
        if nacked:
            break
        history.work(True, True, ["nack"] * 4, "answered")
        nacked = history.do(history.database.fetchval("SELECT count(*) FROM outbox WHERE failure_class = 'nacked'"))
    history.teardown()
    assert nacked > 0


@pytest.mark.parametrize(
    "mutant",
    [
        pytest.param(each, id=each.name, marks=() if each.name == "h2_settlement" else pytest.mark.long)
        for each in PLANTED
    ],
)
def test_a_planted_fault_is_found(database_url: str, mutant: Mutant) -> None:
    """By five times as many random histories as the test above plays, most within a fifth of them."""
    prepared(database_url)
    # The clock is PostgreSQL's own: a history may go another way the second time.
    with planted(mutant), pytest.raises((AssertionError, Flaky)):
        run_state_machine_as_test(Histories, settings=histories(60, (Phase.generate,), is_fixed=True))
