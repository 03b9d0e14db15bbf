"""The outbox in PostgreSQL: claim, check, read, settle, doorbell, backlog (`core.ports.outbox.Outbox`).

Owns: which statement of `sql/queries` does what, the fingerprint to which stored floors belong (R5), whether
the doorbell's lock is ours. Its three sessions live and die together (`relay/sessions.py`); rows are made in
`relay/rows.py`, decisions written in `relay/settling.py`. Times are the database's (I7).

Does not decide: what to claim, read, release or settle, nor when. Retries nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Final

import asyncpg

from relay import arrays
from relay.core.ports.outbox import (
    Armed,
    Backlog,
    Check,
    Claim,
    Discarded,
    Due,
    Held,
    HeldKey,
    HeldPage,
    OutboxInfo,
    Page,
    PageRequest,
    Place,
    PolicyApplied,
    Purged,
    Renewal,
    Searched,
    Settled,
    Settlement,
    Writer,
)
from relay.core.refusals import Blame
from relay.culprits import CulpritHunt
from relay.database import mapped_errors
from relay.errors import DatabaseLost, DatabaseRefused, DatabaseUnavailable, RowUnreadable, StatementTooSlow
from relay.message import Row
from relay.migrate import read_schema
from relay.outbox_sql import COLUMNS, IDENTIFICATION, refuse_unusable, texts
from relay.refusal import blame_of
from relay.retention import Retention
from relay.rows import due_rows, page_rows, reloaded_rows
from relay.sessions import READ_DEADLINE_S, Group, Sessions
from relay.settling import SettlementWriter
from relay.sparing import Sparing
from relay.urls import DatabaseTarget
from relay.values import TableName

OPEN_DEADLINE_S: Final = 60.0
"""For all of an opening; each of its steps has a shorter one where the driver lets it."""

BACKLOG_TIMEOUT_S: Final = 2.0
"""A gauge is not worth more; one that cannot be read is absent."""

ROWS_COUNTED_MAX: Final = 100_000
"""A gauge of more rows says that it is an estimate."""

SEARCH_TIMEOUT_S: Final = 0.25
"""For a look below the floors. Where an old transaction keeps dead rows there, it is put off rather than reads delayed."""

HUNT_SHARE: Final = 0.4
"""Of a settlement's bound, for finding the rows that the database refuses; what is not looked at by then waits for the
next settlement."""

SEQ_MAX: Final = 2**63 - 1

LONG_LOAD_S: Final = 1.25 * READ_DEADLINE_S
LOAD_BYTES_PER_S: Final = 1024 * 1024
"""The slowest line that a large body is waited for on."""


class PostgresOutbox:
    """`core.ports.outbox.Outbox` over three asyncpg sessions.

    `database` gives the target anew at each `open` (credentials may have changed). `instance` is what leases
    name as their owner, `name` what people call this relay. `lease_s` bounds every transaction (L7).
    `settle_commit` false: settlements commit asynchronously. `is_ordered` false (`none`): no key holds a row.
    """

    def __init__(
        self,
        database: Callable[[], DatabaseTarget],
        table: TableName,
        *,
        instance: str,
        name: str,
        version: str,
        lease_s: float,
        marks_sent: bool,
        holds_when_parked: bool,
        is_ordered: bool,
        settle_commit: bool,
        poll_interval_s: float,
    ) -> None:
        self._database = database
        self._table = table
        self._instance = instance
        self._name = name
        self._version = version
        self._lease_s = lease_s
        self._marks_sent = marks_sent
        self._is_ordered = is_ordered
        self._parked_hold = holds_when_parked and is_ordered
        self._poll_interval_s = poll_interval_s
        self._sessions = Sessions(lease_s, settle_commit=settle_commit)
        self._writer = SettlementWriter(instance, name, version, marks_sent)
        self._fingerprint = ""
        self._rings = False
        """Whether inserts can ring at all: a trigger, and no proxy in between."""
        self._is_armed = False
        self._begin_write = ""
        self._begin_signed = ""
        self._begin_settlement = ""

    # ------------------------------------------------------------ open and close

    async def open(self, on_ring: Callable[[], None], on_lost: Callable[[str], None]) -> OutboxInfo:
        """As `core.ports.outbox.Outbox.open`; also raises SchemaForeign, DatabaseRefused."""
        sessions = self._sessions
        try:
            async with asyncio.timeout(OPEN_DEADLINE_S):
                await sessions.open(self._database, self._name)
                info = await self._prepare(on_ring)
                sessions.watch(on_lost)
                return info
        except TimeoutError as error:
            await sessions.close()
            raise DatabaseUnavailable("PostgreSQL gave no answer in time") from error
        except DatabaseLost as error:
            await sessions.close()
            raise DatabaseUnavailable(error.message) from error
        except BaseException:
            await sessions.close()
            raise

    async def _prepare(self, on_ring: Callable[[], None]) -> OutboxInfo:
        sessions = self._sessions
        schema = await read_schema(sessions.connection(Group.KEEPER), self._table)
        sessions.know(IDENTIFICATION)
        async with sessions.call(Group.READER, READ_DEADLINE_S) as session:
            identifier = ""
            if (await session.read("may_identify"))[0]["may_identify"]:
                identifier = (await session.read("identify"))[0]["system_identifier"]
            sessions.know(texts(schema, identifier))
            (found,) = await session.read("inspect", COLUMNS)
        refuse_unusable(schema, found)
        self._fingerprint = found["fingerprint"]
        self._is_armed = False
        self._begin_write = sessions.begin_write()
        self._begin_signed = sessions.begin_write(sign=schema.sign)
        self._begin_settlement = sessions.begin_write(sign=schema.sign, is_settlement=True)
        self._rings = schema.has_doorbell and sessions.is_direct
        if self._rings:
            own_pid = sessions.pid(Group.READER)

            def on_notification(_: object, pid: int, channel: str, payload: object) -> None:
                if pid != own_pid:
                    on_ring()

            with mapped_errors():
                await sessions.connection(Group.KEEPER).add_listener(schema.bell_channel, on_notification)
        return OutboxInfo(schema.payload_type, sessions.is_direct, self._rings)

    async def close(self) -> None:
        await self._sessions.close()

    # ------------------------------------------------------------ the keeper's

    async def claim(self, shards_max: int) -> Sequence[Claim]:
        sessions = self._sessions
        async with (
            sessions.call(Group.KEEPER, sessions.bound_s) as session,
            session.transaction(self._begin_signed),
        ):
            records = await session.fetch(
                "claim",
                shards_max,
                self._instance,
                self._lease_s,
                sessions.is_direct,
                self._fingerprint,
                self._parked_hold,
            )
        return [Claim(*record) for record in records]

    async def renew(self, held: Mapping[int, Held], *, available: bool) -> Renewal:
        sessions = self._sessions
        async with sessions.call(Group.KEEPER, sessions.bound_s) as session:
            async with session.transaction(self._begin_write):
                found = await session.fetch_one(
                    "renew",
                    *_leases(held),
                    self._instance,
                    self._lease_s,
                    sessions.is_direct,
                    self._fingerprint,
                    self._name,
                    self._version,
                    available,
                )
            if found["fingerprint"] != self._fingerprint:
                # Truncated, rewritten or another table by now: what was read and where is void (R5).
                raise DatabaseLost("the outbox table was rewritten; starting over")
        shards = found["shards"] or ()
        due_in_s = found["next_due_in_s"]
        return Renewal(
            renewed=frozenset(
                shard for shard, is_renewed in zip(shards, found["are_renewed"] or (), strict=True) if is_renewed
            ),
            mine={
                shard: (epoch, floor)
                for shard, epoch, floor in zip(shards, found["epochs"] or (), found["floors"] or (), strict=True)
            },
            claimable=found["claimable"],
            relays=found["other_relays"] + available,
            is_paused=bool(found["is_paused"]),
            database_time=found["now"],
            next_due_in_s=None if due_in_s is None or math.isinf(due_in_s) else due_in_s,
        )

    async def release(self, held: Mapping[int, Held]) -> frozenset[int]:
        sessions = self._sessions
        async with (
            sessions.call(Group.KEEPER, sessions.bound_s) as session,
            session.transaction(self._begin_write),
        ):
            locked = await session.fetch("release", *_leases(held), self._instance, self._fingerprint)
        return frozenset(shard for (shard,) in locked)

    async def leave(self) -> None:
        sessions = self._sessions
        async with (
            sessions.call(Group.KEEPER, sessions.bound_s) as session,
            session.transaction(self._begin_write),
        ):
            await session.fetch("leave", self._instance)

    async def check(self) -> Check:
        sessions = self._sessions
        async with sessions.call(Group.KEEPER, sessions.bound_s) as session:
            ((seq, xmax, now, writers),) = await session.read("check")
        return Check(seq, [_writer(text, xmax) for text in writers or ()], now)

    # ------------------------------------------------------------ the reader's

    async def page(self, request: PageRequest) -> Page:
        values: list[object] = [
            request.numbers,
            request.lows,
            request.xids,
            request.gone,
            request.asked,
            arrays.numbers(request.shards),
            arrays.numbers(request.cursors),
            SEQ_MAX if request.beyond else request.last_seq,
            request.limit,
            request.span,
            request.inline_bytes,
            self._instance,
            SEQ_MAX if request.beyond_drawn else request.last_seq,
        ]
        if request.probed:
            records = await self._rows("page_probed", *values, request.probed)
        else:
            records = await self._rows("page", *values)
        ended = records[0]["ended"]
        if not request.probed:
            return Page(ended or (), page_rows(records))
        blocked = {record["seq"] for record in records if record["is_blocked"]}
        return Page(ended or (), page_rows(record[:-1] for record in records), blocked)

    async def _rows(self, name: str, *values: object) -> list[Any]:
        """A statement that brings rows; where PostgreSQL refuses it for what rows hold, or for its length, once more without a look
        into their bodies: one that cannot be read hides no others. Who loads it finds it."""
        try:
            async with self._sessions.call(Group.READER, READ_DEADLINE_S) as session:
                return await session.read(name, *values)
        except DatabaseRefused as error:
            if not (_is_slow(error) or _is_of_rows(error)):
                raise
            async with self._sessions.call(Group.READER, READ_DEADLINE_S) as session:
                return await session.read(f"{name}_blind", *values)

    async def load(self, rows: Sequence[Row]) -> Sequence[Row]:
        deadline_s = READ_DEADLINE_S + sum(row.size for row in rows) / LOAD_BYTES_PER_S
        identities = [row.id for row in rows], [row.seq for row in rows]
        try:
            async with _telling_slow(), self._sessions.call(Group.READER, deadline_s) as session:
                if deadline_s < LONG_LOAD_S:
                    records = await session.read("load", *identities)
                else:
                    # The session's own timeout would cut it off.
                    async with session.transaction(self._sessions.begin_read(0.8 * deadline_s)):
                        records = await session.fetch("load", *identities)
        except DatabaseRefused as error:
            if _is_of_rows(error):
                raise RowUnreadable(error.message) from error.__cause__
            raise
        found = {row.seq: row for row in reloaded_rows(records)}
        gone = []
        for row in rows:
            if (whole := found.get(row.seq)) is None:
                gone.append(row)
                continue
            row.payload, row.rare, row.headers = whole.payload, whole.rare, whole.headers
            row.size, row.is_loaded = whole.size, True
        return gone

    async def reload(self, rows: Sequence[Row]) -> Sequence[Row]:
        return reloaded_rows(await self._rows("reload", [row.id for row in rows], [row.seq for row in rows]))

    async def due(self, cursors: Mapping[int, int], limit: int, here: Sequence[int] = ()) -> Due:
        shards = list(cursors)
        async with self._sessions.call(Group.READER, READ_DEADLINE_S) as session:
            # First: what falls due between the two statements is in both, not in neither.
            ((later_s,),) = await session.read("due_later", shards)
        records = await self._rows(
            "due", shards, list(cursors.values()), limit, self._is_ordered, self._instance, list(here)
        )
        released, blocked = due_rows(record[:-1] for record in records)
        has_more = len(records) >= limit or any(record["is_more"] for record in records)
        return Due(released, blocked, None if later_s is None or math.isinf(later_s) else later_s, has_more)

    async def followers(self, heads: Sequence[Row], cursors: Mapping[int, int], limit: int) -> Sequence[Row]:
        keys = [row.key for row in heads if row.key is not None]
        assert len(keys) == len(heads), "a row without a key has no followers"
        records = await self._rows(
            "followers",
            [kind for kind, _ in keys],
            [id_ for _, id_ in keys],
            [row.seq for row in heads],
            [cursors[row.shard] for row in heads],
            limit,
        )
        return due_rows(records)[0]

    async def held_keys(self, shards: Sequence[int], after: Place | None, limit: int) -> HeldPage:
        async with self._sessions.call(Group.READER, READ_DEADLINE_S) as session:
            records = await session.read("held_keys", shards, *(after or (-(2**63), -(2**63))), limit)
        keys = [
            HeldKey(hash_, shard, (kind, id_), highest, is_lowest_held)
            for hash_, shard, kind, id_, highest, is_lowest_held, _, _ in records
            if hash_ is not None
        ]
        _, _, _, _, _, _, reached_hash, reached_seq = records[0]
        return HeldPage(keys, None if reached_hash is None else (reached_hash, reached_seq))

    async def apply_policy(self, epochs: Mapping[int, int], limit: int, spared: Sequence[int] = ()) -> PolicyApplied:
        """As `core.ports.outbox.Outbox.apply_policy`. A row that refuses to be changed keeps neither its shard from everybody nor
        the others as they are."""
        async with (
            _telling_slow(),
            self._sessions.call(Group.READER, self._sessions.bound_s) as session,
            session.transaction(self._begin_signed),
        ):
            (shards,) = await session.fetch_one(
                "fence", arrays.numbers(epochs), arrays.numbers(epochs.values()), self._instance
            )
            policy = Sparing(session, "park_policy", (shards or [], self._parked_hold), spared)
            spent = await policy.change_in_parts(limit, self._sessions.bound_s * HUNT_SHARE)
            if spent.is_all:
                await session.fetch("park_policy_done", shards or [], self._instance, self._parked_hold)
        return PolicyApplied(spent.is_all, spent.refused)

    async def arm(self, wait_s: float) -> Armed:
        # Whatever the caller's patience: inserts ring while we wait, and polling goes on only after it.
        wait_s = min(wait_s, self._poll_interval_s)
        async with self._sessions.call(Group.READER, wait_s + self._sessions.bound_s) as session:
            if not self._rings:
                return Armed.TIMED_OUT
            if self._is_armed:
                return Armed.GRANTED
            if (await session.fetch_one("bell_elsewhere", session.pid))["is_elsewhere"]:
                return Armed.ELSEWHERE
            # A lock_timeout of 0 would wait for ever.
            wait_ms = max(1, int(wait_s * 1000))
            self._is_armed = (await session.fetch_one("bell_wait", wait_ms))["is_granted"]
            return Armed.GRANTED if self._is_armed else Armed.TIMED_OUT

    async def disarm(self) -> None:
        async with self._sessions.call(Group.READER, self._sessions.bound_s) as session:
            if self._is_armed:
                await session.fetch("bell_release")
                self._is_armed = False

    async def purge(self, older_than_s: float, limit: int, spared: Sequence[int] = ()) -> Purged:
        sessions = self._sessions
        async with _telling_slow(), sessions.call(Group.READER, sessions.bound_s) as session:
            purge = Sparing(session, "purge", (self._instance, older_than_s), spared)
            try:
                async with session.transaction(self._begin_signed):
                    return Purged(await purge.change(limit), ())
            except asyncpg.PostgresError as error:
                if blame_of(error) is Blame.SERVER:
                    raise
            session.set_deadline(sessions.bound_s)
            async with session.transaction(self._begin_signed):
                spent = await purge.change_in_parts(limit, sessions.bound_s * HUNT_SHARE)
                return Purged(spent.rows, spent.refused)

    async def search(self, positions: Sequence[tuple[int, int]], limit: int) -> Searched:
        """As `core.ports.outbox.Outbox.search`. That a shard's owner was unseated the next renewal tells."""
        sessions = self._sessions
        shards, above = [shard for shard, _ in positions], [seq for _, seq in positions]
        async with sessions.call(Group.READER, sessions.bound_s) as session:
            async with session.transaction(sessions.begin_read(SEARCH_TIMEOUT_S)):
                records = await session.fetch("search", self._instance, shards, above, limit)
            reached: list[int | None] = [None] * len(positions)
            lowest: dict[int, int] = {}
            for number, last_seq, rows, unsent_seq in records:
                shard = shards[number - 1]
                if rows >= limit:
                    reached[number - 1] = last_seq
                if unsent_seq is not None:
                    lowest[shard] = min(unsent_seq, lowest.get(shard, unsent_seq))
            lowered: dict[int, int] = {}
            if lowest:
                async with session.transaction(self._begin_write):
                    found = await session.fetch("lower_floors", self._instance, list(lowest), list(lowest.values()))
                lowered = dict(found)
        return Searched(reached, sum(record["rows"] for record in records), lowered)

    async def discard_parked(self, older_than_s: float, limit: int, spared: Sequence[int]) -> Discarded:
        sessions = self._sessions
        async with (
            sessions.call(Group.READER, sessions.bound_s) as session,
            session.transaction(self._begin_signed),
        ):
            budget_s = sessions.bound_s * HUNT_SHARE
            return await Retention(session, self._instance, older_than_s, limit, spared, budget_s).discard()

    async def backlog(self, starts: Mapping[int, int] | None = None) -> Backlog:
        sessions = self._sessions
        async with (
            sessions.call(Group.READER, READ_DEADLINE_S) as session,
            session.transaction(sessions.begin_read(BACKLOG_TIMEOUT_S)),
        ):
            found = await session.fetch_one("backlog", list(starts or ()), list((starts or {}).values()))
            is_aside_many = found["aside"] > ROWS_COUNTED_MAX
            aside = await session.fetch_one("backlog_aside", found["aside"]) if is_aside_many else found
        pending = found["pending"]
        if found["is_capped"]:
            pending = max(pending, found["estimate"] or 0)
        rows = pending + aside["overdue"] + aside["deferred"] + aside["held"]
        scheduled = aside["scheduled"] + found["unread_scheduled"]
        ages_s = [age_s for age_s in (found["oldest_age_s"], aside["oldest_age_s"]) if age_s is not None]
        return Backlog(
            backlog_rows=rows,
            is_estimated=found["is_capped"] or rows > ROWS_COUNTED_MAX or (is_aside_many and aside["is_estimated"]),
            oldest_pending_age_s=max(ages_s, default=None),
            deferred_rows=aside["deferred"] + scheduled,
            parked_rows=aside["parked"],
            held_rows=aside["held"],
            held_keys=aside["held_keys"],
            scheduled_rows=scheduled,
            newest_seq=found["newest_seq"],
        )

    # ------------------------------------------------------------ the settler's

    async def settle(self, settlement: Settlement) -> Settled:
        sessions = self._sessions
        async with _telling_slow(), sessions.call(Group.SETTLER, sessions.bound_s) as session:
            try:
                async with session.transaction(self._begin_settlement):
                    return await self._writer.write(session, settlement)
            except asyncpg.PostgresError as error:
                if blame_of(error) is Blame.SERVER:
                    raise
            # Some row's fault: once more, in parts, and never again with that row.
            session.set_deadline(sessions.bound_s)
            async with session.transaction(self._begin_settlement):
                hunt = CulpritHunt(self._writer, session, sessions.bound_s * HUNT_SHARE)
                return await hunt.write(settlement)


def _leases(held: Mapping[int, Held]) -> tuple[list[int], list[int], list[int | None]]:
    return (
        list(held),
        [lease.epoch for lease in held.values()],
        [lease.floor for lease in held.values()],
    )


def _writer(text: str, xmax: int) -> Writer:
    """`vxid|xid`: the lock table has 32 bits of an xid; the whole one lies next to the snapshot's end."""
    vxid, _, xid = text.partition("|")
    if not xid:
        return Writer(vxid, None)
    distance = (int(xid) - xmax + 2**31) % 2**32 - 2**31
    return Writer(vxid, xmax + distance)


@contextlib.asynccontextmanager
async def _telling_slow() -> AsyncIterator[None]:
    """A statement that ran into its time limit is a refusal of its own: with fewer rows it may go well."""
    try:
        yield
    except DatabaseRefused as error:
        if _is_slow(error):
            raise StatementTooSlow(error.message) from error.__cause__
        raise


def _is_slow(error: DatabaseRefused) -> bool:
    return isinstance(error.__cause__, asyncpg.QueryCanceledError)


def _is_of_rows(error: DatabaseRefused) -> bool:
    """Whether it is for what a row holds. Not what is in doubt: a server without the compression of its rows refuses all."""
    cause = error.__cause__
    if not isinstance(cause, asyncpg.PostgresError):
        return False
    return blame_of(cause) is Blame.ROW or isinstance(cause, asyncpg.DataCorruptedError)
