"""Scenarios of a few rows on real servers: the suite proves what it measures, and its stopwatches are where they belong."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from bench import compiled, native
from bench.ceiling import Ceiling, run_ceiling
from bench.errors import BenchFailed, Unavailable
from bench.load import Load, row_id
from bench.process import Relay
from bench.procfs import children
from bench.proof import check_outcomes, check_queue, prove_queue
from bench.relay_run import Drain, run_relay
from bench.rig import Rig, Taken
from bench.scenarios import consumer, growth, inbox, isolation, peers, sink
from bench.scenarios.trickle import trickle
from bench.step import Form
from bench.writing import write_at
from relay.servers import PostgresServer, RabbitServer
from tests.conftest import eventually

LOAD = Load(rows=400, keys=20)


@pytest.fixture(scope="module")
def rig(postgres_server: PostgresServer, rabbit_server: RabbitServer) -> Iterator[Rig]:
    url = rabbit_server.add_vhost("bench")
    with Rig(postgres_server, rabbit_server, url) as rig:
        yield rig
    rabbit_server.delete_vhost("bench")


@pytest.mark.usefixtures("c_programs")
def test_the_relay_and_the_c_publisher_send_the_same_messages(rig: Rig) -> None:
    relay = run_relay(rig, Drain(LOAD))
    ceiling = run_ceiling(rig, Ceiling(LOAD, window=50))
    assert relay["messages"] == ceiling["messages"] == LOAD.rows
    assert relay["shape"] == ceiling["shape"]
    assert relay["copies"] == 0
    assert relay["outcomes"]["acked"] == LOAD.rows
    assert 20 < relay["peak_rss_mb"] < 200
    assert relay["wal_bytes_per_row"] > 50


@pytest.mark.usefixtures("c_programs")
def test_a_trickle_times_every_row_at_the_confirm_and_at_the_consumer(rig: Rig) -> None:
    single, batches = trickle(rig, [(100, 1, 1), (500, 10, 1)])
    for run in (single, batches):
        assert run["copies"] == 0
        assert 0 <= run["p50_ms"] <= run["p99_ms"] <= run["max_ms"]
        assert run["to_consumer"]["p50_ms"] > 0
        # From when it was due includes the commit itself.
        assert run["from_due"]["p50_ms"] > run["p50_ms"]
    assert batches["messages"] % 10 == 0


def test_a_relay_that_ran_for_minutes_is_still_asked_whether_it_is_ready(rig: Rig) -> None:
    """The patience began with the process: each drain of more than a minute failed at its end."""
    with rig.fresh_database() as database, rig.fresh_queue(), Relay(rig, database) as relay:
        relay.started_at -= 600.0
        assert relay.wait_until_ready() > 600.0


def test_a_relay_of_another_build_is_no_result(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiled tree that was removed amid a suite left the sources in its place, measured under its name."""
    monkeypatch.setenv("PYTHONPATH", compiled.environment(compiled.KEPT / "removed")["PYTHONPATH"])
    with (
        rig.fresh_database() as database,
        rig.fresh_queue(),
        pytest.raises(BenchFailed, match="the relay was the pure build, and compiled is to be measured"),
        Relay(rig, database) as relay,
    ):
        relay.wait_until_ready()


def test_the_rows_of_a_commit_and_of_the_next_are_of_other_keys(rig: Rig) -> None:
    """Ten rows a commit had the same ten keys in every commit: at most ten messages were in flight."""
    with rig.fresh_database() as database:
        rows = 10 * len(write_at(rig, database, "k", 50, 1, 10))
        keys = int(rig.sql("select count(distinct aggregate_id) from outbox", database))
    assert keys > 0.8 * rows


def test_a_queue_that_lacks_a_row_or_overtakes_one_proves_nothing(rig: Rig) -> None:
    backlog, ids = rig.backlog(LOAD), [row_id(number) for number in range(1, LOAD.rows + 1)]
    assert check_queue(backlog, [*ids, ids[0]]) == 1
    assert check_queue(backlog, ids[:100], rows=100) == 0
    with pytest.raises(BenchFailed, match=f"1 rows are sent and not in the queue, such as {ids[0]}"):
        check_queue(backlog, ids[1:])
    for stranger in ("stranger", row_id(0), row_id(LOAD.rows + 1), ids[0].upper(), "0" + ids[0][1:]):
        with pytest.raises(BenchFailed, match=f"1 messages belong to no row, such as {stranger}"):
            check_queue(backlog, [*ids, stranger])
    with pytest.raises(BenchFailed, match=f"{LOAD.rows - LOAD.keys} messages of {LOAD.keys} keys were overtaken"):
        check_queue(backlog, ids[::-1])
    assert check_queue(backlog, ids[::-1], is_ordered=False) == 0


async def test_a_broker_out_of_memory_disturbs_what_is_measured(rig: Rig) -> None:
    """It blocks every publisher, and its log calls that a warning."""
    rig.complaints()
    rig.rabbit.memory_alarm(True)
    rig.rabbit.memory_alarm(False)
    found = await eventually(rig.complaints)
    assert "memory resource limit alarm set" in found[0]


def test_a_run_with_copies_or_other_outcomes_proves_nothing(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    check_outcomes({"acked": 5, "lost": 0}, 5)
    with pytest.raises(BenchFailed, match="5 acked, 1 lost"):
        check_outcomes({"acked": 5, "lost": 1}, 5)
    ids = [row_id(number) for number in range(1, LOAD.rows + 1)]
    monkeypatch.setattr(rig, "take_first", lambda: Taken(LOAD.rows + 1, ids[0], {}))
    monkeypatch.setattr(native, "collect", lambda *_: iter(ids))
    with pytest.raises(BenchFailed, match="400 rows are sent, the queue held 401 messages"):
        prove_queue(rig, LOAD, LOAD.rows)


def test_a_missing_compiler_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert not native.is_available()
    with pytest.raises(Unavailable, match="install a C compiler and librabbitmq"):
        native.compiled("ceiling")


def test_a_probe_compares_reads_without_and_with(rig: Rig) -> None:
    (run,) = growth.open_writer(rig, open_s=2, seconds=1)
    assert min(run["reads"]) > 0
    assert run["growth"] == pytest.approx(run["read_ms"] / run["read_ms_without"], rel=0.01)
    assert run["latency"]["p50_ms"] > 0


def test_two_relays_read_beside_what_both_have_sent(rig: Rig) -> None:
    (run,) = growth.two_relays(rig, rows=200, seconds=1)
    assert run["relays"] == 2
    assert min(run["reads"]) > 0
    assert run["latency"]["p50_ms"] > 0


def test_two_relays_share_a_drain(rig: Rig) -> None:
    """One could have sent everything while the other took its shards up."""
    run = run_relay(rig, Drain(LOAD, relays=2))
    assert len(run["rows_by_relay"]) == 2
    assert min(run["rows_by_relay"]) > 0
    assert sum(run["rows_by_relay"]) == run["outcomes"]["acked"] == LOAD.rows


def test_good_rows_are_timed_beside_rows_that_cannot_go(rig: Rig) -> None:
    (run,) = isolation.poison(rig, rows=20)
    assert run["max_ms"] > 0
    assert run["alone"]["max_ms"] > 0
    assert run["delay_ms"] == pytest.approx(run["p50_ms"] - run["alone"]["p50_ms"], abs=0.002)


def test_a_broker_apart_shares_no_core_with_anybody(rig: Rig) -> None:
    pids = (0, rig.postgres.pid, children(rig.postgres.pid)[0])
    before = [os.sched_getaffinity(pid) for pid in (rig.rabbit.broker_pid, *pids)]
    if len(before[1]) == 1:
        with pytest.raises(Unavailable, match="one core"), rig.apart():
            pass
        return
    with rig.apart():
        brokers = os.sched_getaffinity(rig.rabbit.broker_pid)
        assert all(brokers.isdisjoint(os.sched_getaffinity(pid)) for pid in pids)
    assert [os.sched_getaffinity(pid) for pid in (rig.rabbit.broker_pid, *pids)] == before


def test_the_peers_send_every_row_on_the_relays_event_loop(rig: Rig) -> None:
    """They ran on asyncio's own, which is slower, and the relay was set against that."""
    for step in peers.steps(Form("short", 1, scale=0.01)):
        (run,) = step.measure(rig)
        assert run["loop"] == "uvloop"
        assert run["copies"] == 0
        assert run["msgs_per_s"] > 0


def test_the_relay_drains_into_the_sink(rig: Rig) -> None:
    """The sink speaks enough AMQP for the relay to believe it, and keeps nothing."""
    relay, encoder = (step.measure(rig)[0] for step in sink.steps(Form("short", 1, scale=0.005)))
    assert relay["outcomes"]["acked"] == relay["messages"] == 1_000
    assert encoder["messages"] == 1_000
    assert encoder["msgs_per_s"] > 0


@pytest.mark.usefixtures("c_programs")
def test_the_consumers_sidecar_takes_every_message_once(rig: Rig) -> None:
    load = Load(rows=inbox.ROWS_MIN, keys=20)
    (run,) = inbox.sidecar(rig, load)
    assert 0 < run["messages"] <= load.rows
    assert run["msgs_per_s"] > 0


@pytest.mark.usefixtures("c_programs")
def test_a_consumer_and_asyncpg_alone_do_the_same(rig: Rig) -> None:
    alone, consumed = consumer.pair(rig, LOAD)
    assert alone["messages"] == consumed["messages"] == LOAD.rows
    assert alone["msgs_per_s"] > 0 and consumed["msgs_per_s"] > 0
