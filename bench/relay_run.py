"""One drain of a full table by `relay run`, observed from outside: its `/metrics`, /proc, the table and the queue."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final

from bench.errors import BenchFailed
from bench.load import Load
from bench.process import Relay, wait_until_shared
from bench.procfs import Cpu, peak_rss_bytes, us_per_message
from bench.proof import check_outcomes, expect_no_complaints, prove_queue
from bench.rig import Rig
from bench.step import Run
from bench.transaction import open_transaction
from relay.benchmark.looks import LOOK_MIN_S, pause_s, published

START_TIMEOUT_S: Final = 60.0
STALL_TIMEOUT_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class Look:
    """One look at the running relays, by the monotonic clock. `has_begun` once one has read or published anything.
    `rows_sent`: each relay's."""

    at: float
    cpu: Cpu
    has_begun: bool
    rows_sent: Sequence[int]
    outcomes: Mapping[str, int]

    @property
    def sent(self) -> int:
        return sum(self.rows_sent)


@dataclass(frozen=True, slots=True)
class Drain:
    """What is drained and how; `settings` are the relay's beside `RELAY_SENT_ROWS`.

    Several `relays` have shared the work before there is any: the backlog is committed then. With an `amqp_url` it goes to
    another broker than the rig's, whose queue nobody can look into.
    """

    load: Load
    sent_rows: str = "delete"
    queue: str = "quorum"
    relays: int = 1
    settings: tuple[tuple[str, str], ...] = ()
    is_ordered: bool = True
    amqp_url: str | None = None


def run_relay(rig: Rig, drain: Drain) -> Run:
    """Drain a fresh copy of the backlog into a fresh queue; one entry of the document's `runs`.

    Without a C compiler messages are only counted. Raises BenchFailed.
    """
    rows, is_shared = drain.load.rows, drain.relays > 1
    settings = dict(drain.settings) | {"RELAY_SENT_ROWS": drain.sent_rows}
    if drain.amqp_url is not None:
        settings["RELAY_AMQP_URL"] = drain.amqp_url
    with rig.fresh_database(None if is_shared else drain.load) as database, rig.fresh_queue(drain.queue):
        rig.wait_until_quiet()
        wal_before = rig.wal_bytes()
        with ExitStack() as stack:
            relays = [stack.enter_context(Relay(rig, database, settings=settings)) for _ in range(drain.relays)]
            if is_shared:
                wal_before, begin = _release(rig, database, drain.load, relays)
            else:
                begin = _watch_start(rig, relays, rows)
            end = _watch_drain(rig, relays, rows, begin)
            for relay in relays:
                # It may have sent everything before it was ready, and could not be stopped cleanly yet.
                relay.wait_until_ready()
            peak = max(peak_rss_bytes(relay.pid) for relay in relays)
            outcomes = _look(rig, relays, rows).outcomes
        wal_bytes = rig.wal_bytes() - wal_before
        _expect_all_sent(rig, database, drain, end)
        check_outcomes(outcomes, rows)
        proof = prove_queue(rig, drain.load, rows, is_ordered=drain.is_ordered) if drain.amqp_url is None else {}
    expect_no_complaints(rig)
    seconds, used = end.at - begin.at, end.cpu - begin.cpu
    return {
        "messages": rows,
        "body_bytes": drain.load.body_bytes,
        "seconds": round(seconds, 6),
        "msgs_per_s": round(rows / seconds, 1),
        "seconds_from_process_start": round(end.at - relays[0].started_at, 6),
        "rows_by_relay": list(end.rows_sent),
        "outcomes": dict(outcomes),
        "cpu_us_per_msg": {
            "publisher": us_per_message(used.relay_s, rows),
            "publisher_with_start": us_per_message(end.cpu.relay_s, rows),
            "postgres": us_per_message(used.postgres_s, rows),
            "rabbitmq": us_per_message(used.rabbitmq_s, rows),
        },
        "peak_rss_mb": round(peak / 1e6, 1),
        "wal_bytes_per_row": round(wal_bytes / rows, 1),
        **proof,
    }


def _release(rig: Rig, database: str, load: Load, relays: Sequence[Relay]) -> tuple[int, Look]:
    """Commit the backlog when the relays have shared the work; bytes of the log, and a look, just ahead of that."""
    wait_until_shared(relays)
    statement = load.insert("1", str(load.rows))
    with open_transaction(rig.postgres.url(database), statement, rows=load.rows, commits=True):
        return rig.wal_bytes(), _look(rig, relays, load.rows)


def _expect_all_sent(rig: Rig, database: str, drain: Drain, end: Look) -> None:
    """By the table, and some by each relay. Raises BenchFailed."""
    total, pending = rig.count(database, drain.load.rows)
    if pending or total != (0 if drain.sent_rows == "delete" else drain.load.rows):
        raise BenchFailed(f"the relay counts {end.sent} rows sent, the table holds {total}, {pending} of them pending")
    if not all(end.rows_sent):
        raise BenchFailed(f"not every relay has sent rows: {', '.join(map(str, end.rows_sent))}")


def _watch_start(rig: Rig, relays: Sequence[Relay], rows: int) -> Look:
    """The last look at which nothing had been read or published: the clock starts no later than the first message."""
    deadline = time.monotonic() + START_TIMEOUT_S
    idle: Look | None = None
    while time.monotonic() < deadline:
        look = _look(rig, relays, rows)
        if look.has_begun:
            assert idle is not None, "the relay was done before it was looked at"
            return idle
        idle = look
        time.sleep(LOOK_MIN_S)
    raise relays[0].failed(f"the relay published nothing within {START_TIMEOUT_S:.0f} s")


def _watch_drain(rig: Rig, relays: Sequence[Relay], rows: int, begin: Look) -> Look:
    """The first look at which every row is settled. Looks are few while much is left, dense towards the end."""
    last, progressed_at = begin, time.monotonic()
    pause = LOOK_MIN_S
    while True:
        time.sleep(pause)
        look = _look(rig, relays, rows)
        if look.sent >= rows:
            return look
        if look.sent > last.sent:
            progressed_at = look.at
        elif look.at - progressed_at > STALL_TIMEOUT_S:
            raise relays[0].failed(f"no row settled for {STALL_TIMEOUT_S:.0f} s; {look.sent} of {rows} are")
        pause = pause_s(rows - look.sent, look.sent - last.sent, look.at - last.at, look.at - begin.at)
        last = look


def _look(rig: Rig, relays: Sequence[Relay], rows: int) -> Look:
    """A relay that does not listen yet has done nothing. Raises BenchFailed when one has ended."""
    pids = [relay.pid for relay in relays]
    at, cpu = time.monotonic(), rig.cpu(*pids)
    outcomes: dict[str, int] = {}
    rows_sent: list[int] = []
    has_begun = False
    for relay in relays:
        values = relay.metrics() or {}
        for outcome, count in published(values).items():
            outcomes[outcome] = outcomes.get(outcome, 0) + count
        begun = ("relay_rows_read_total", "relay_in_flight_messages", "relay_rows_sent_total")
        has_begun = has_begun or any(values.get(name, 0.0) > 0 for name in begun)
        rows_sent.append(int(values.get("relay_rows_sent_total", 0)))
    # A start is dated by the moment before the question, an end by the moment after the answer.
    if sum(rows_sent) >= rows:
        at, cpu = time.monotonic(), rig.cpu(*pids)
    return Look(at, cpu, has_begun or any(outcomes.values()), rows_sent, outcomes)
