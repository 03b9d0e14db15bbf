"""What a scrape of a running relay holds, and that its gauges never look fresher than they are."""

from __future__ import annotations

import asyncio
import time

import asyncpg
from prometheus_client.parser import text_string_to_metric_families

from relay.servers import PostgresServer
from tests.conftest import eventually
from tests.e2e.conftest import Daemon, Site

REASONS = frozenset({"in_flight", "bytes", "blocked", "rate", "broker_down", "database_down"})
PEERS = frozenset({"database", "broker"})
CLASSES = frozenset({"unroutable", "refused", "invalid", "too_large", "expired", "max_age", "unmarkable", "unknown"})

# The contract's names, by hand: a table that is written from the code would only say that the code is the code.
CONTRACT: dict[str, tuple[str, str | None, frozenset[str]]] = {
    "published": ("counter", "outcome", frozenset({"acked", "nacked", "returned", "lost"})),
    "rows_sent": ("counter", None, frozenset()),
    "rows_deferred": ("counter", "reason", CLASSES),
    "rows_parked": ("counter", "reason", CLASSES),
    "backlog_rows": ("gauge", None, frozenset()),
    "backlog_estimated": ("gauge", None, frozenset()),
    "oldest_pending_age_seconds": ("gauge", None, frozenset()),
    "deferred_rows": ("gauge", None, frozenset()),
    "parked_rows": ("gauge", None, frozenset()),
    "held_keys": ("gauge", None, frozenset()),
    "in_flight_messages": ("gauge", None, frozenset()),
    "in_flight_bytes": ("gauge", None, frozenset()),
    "confirm_seconds": ("histogram", None, frozenset()),
    "delivery_seconds": ("histogram", None, frozenset()),
    "claim_seconds": ("histogram", None, frozenset()),
    "settle_seconds": ("histogram", None, frozenset()),
    "publish_attempts": ("histogram", None, frozenset()),
    "rows_read": ("counter", None, frozenset()),
    "shards_owned": ("gauge", None, frozenset()),
    "lease_lost": ("counter", None, frozenset()),
    "backpressure_active": ("gauge", "reason", REASONS),
    "backpressure_seconds": ("counter", "reason", REASONS),
    "connected": ("gauge", "peer", PEERS),
    "paused": ("gauge", None, frozenset()),
    "newest_seq": ("gauge", None, frozenset()),
    "late_commit_writers": ("gauge", None, frozenset()),
    "reconnects": ("counter", "peer", PEERS),
    "last_confirm_timestamp_seconds": ("gauge", None, frozenset()),
    "backlog_observed_timestamp_seconds": ("gauge", None, frozenset()),
    "build_info": ("gauge", "version", frozenset()),
}


async def test_a_scrape_holds_what_the_contract_names(site: Site) -> None:
    relay = await site.start(retry_delays="1h").ready()
    await site.insert_many(50, 10)
    await site.insert("nowhere", "nope.x", "k")
    await site.insert("behind", "ok.x", "k")
    await site.until("count(*) FILTER (WHERE sent_at IS NOT NULL) = 50 AND count(aside) = 2 FROM outbox")
    await eventually(lambda: relay.metric("relay_held_keys") == 1, 15.0)
    text = relay.get("/metrics")[1]
    families = {family.name.removeprefix("relay_"): family for family in text_string_to_metric_families(text)}
    for name, (kind, label, values) in CONTRACT.items():
        assert name in families, name
        family = families[name]
        assert family.type == kind, name
        labels = {key for sample in family.samples for key in sample.labels} - {"le"}
        assert labels == ({label} if label else set()), name
        if values:
            found = {sample.labels[label] for sample in family.samples if label is not None}
            assert values <= found, name
    assert "_created" not in text
    for name in ("confirm_seconds", "delivery_seconds", "claim_seconds", "settle_seconds"):
        bounds = [float(s.labels["le"]) for s in families[name].samples if s.name.endswith("_bucket")]
        assert bounds[0] == 0.0005 and bounds[-2] >= 120.0, name
    numbers = relay.metrics()
    assert numbers['relay_published_total{outcome="acked"}'] == 50
    assert numbers['relay_published_total{outcome="returned"}'] == 1
    assert numbers['relay_rows_deferred_total{reason="unroutable"}'] == 1
    assert numbers["relay_rows_sent_total"] == 50
    # Positive confirms; each of these rows at its first attempt, the deferred one will be observed when it is sent or parked.
    assert numbers["relay_confirm_seconds_count"] == numbers["relay_delivery_seconds_count"] == 50
    assert numbers["relay_publish_attempts_count"] == numbers["relay_publish_attempts_sum"] == 50
    assert numbers["relay_rows_read_total"] >= 52
    # 52 rows are read and settled in one transaction each at the most.
    assert 1 <= numbers["relay_settle_seconds_count"] <= 52
    for name in ("confirm_seconds", "claim_seconds", "settle_seconds"):
        assert numbers[f"relay_{name}_count"] >= 1, name
        assert 0 < numbers[f"relay_{name}_sum"] < 600, name
    assert numbers["relay_backlog_rows"] == 2
    assert numbers["relay_newest_seq"] == 52
    assert numbers["relay_oldest_pending_age_seconds"] >= 0
    for moment in ("last_confirm", "backlog_observed"):
        assert abs(numbers[f"relay_{moment}_timestamp_seconds"] - time.time()) < 60, "Unix time: alerts subtract it"
    assert not any("ok.x" in line or "nowhere" in line for line in text.splitlines())


async def test_the_number_of_series_does_not_change_with_traffic(site: Site) -> None:
    """Case 36, a slice of it: keys and routing keys never become labels."""
    relay = await site.start().ready()
    await site.insert("first")
    await site.all_sent()
    await eventually(lambda: relay.metric("relay_backlog_observed_timestamp_seconds") > 0, 15.0)
    await eventually(lambda: relay.metric("relay_backlog_rows") == 0, 15.0)
    before = set(relay.metrics())
    assert relay.metrics()["relay_oldest_pending_age_seconds"] == 0
    await site.database.execute(
        "INSERT INTO outbox (event_type, aggregate_type, aggregate_id) SELECT 'ok.' || n, 't' || n, 'k' || n"
        " FROM generate_series(1, 2000) n"
    )
    await site.all_sent()
    assert set(relay.metrics()) == before


async def test_gauges_are_absent_when_postgresql_is_gone(site: Site, postgres_server: PostgresServer) -> None:
    """Case 35: a number from before the outage would read as if all were well."""
    relay = await site.start().ready()
    await eventually(lambda: "relay_backlog_rows" in relay.metrics(), 15.0)
    await site.database.close()
    await asyncio.to_thread(postgres_server.stop)
    try:
        gone = (
            "relay_backlog_rows",
            "relay_parked_rows",
            "relay_newest_seq",
            "relay_late_commit_writers",
            "relay_paused",
        )
        await eventually(lambda: not set(gone) & relay.metrics().keys(), 20.0)
        assert relay.metric("relay_backlog_observed_timestamp_seconds") > 0
        assert relay.metrics()['relay_backpressure_active{reason="database_down"}'] == 1
    finally:
        await asyncio.to_thread(postgres_server.restart)
    await site.reconnect()
    await eventually(lambda: "relay_backlog_rows" in relay.metrics(), 30.0)


async def _has_no_shards(relay: Daemon) -> None:
    await eventually(lambda: relay.metric("relay_shards_owned") == 0, 30.0)


async def test_the_backlog_shows_while_no_relay_has_shards(site: Site) -> None:
    """Without a broker a relay gives its shards away after three leases: just then somebody wants to see what piles up."""
    relay = site.start(lease="1s", amqp_url="amqp://guest:guest@127.0.0.1:1/")
    await relay.not_ready("broker")
    await eventually(lambda: "fair_share_left" in relay.text(), 20.0)
    await _has_no_shards(relay)
    await site.insert_many(7, 7)
    await eventually(lambda: relay.metric("relay_backlog_rows") == 7, 15.0)
    before = relay.metric("relay_oldest_pending_age_seconds")
    await eventually(lambda: relay.metric("relay_oldest_pending_age_seconds") > before, 15.0)


async def test_a_writer_that_stays_open_shows_with_its_age(site: Site) -> None:
    relay = await site.start(retry_delays="1h").ready()
    async with site.database.transaction():
        await site.insert("late")
        await eventually(lambda: relay.metric("relay_oldest_writer_age_seconds") > 0.5, 15.0)
        assert relay.metric("relay_late_commit_writers") == 1
        other = await asyncpg.connect(site.database_url)
        await other.execute(
            "INSERT INTO outbox (event_type, aggregate_id) SELECT 'nope.x', 'k' || n FROM generate_series(1, 9) n"
        )
        await eventually(lambda: relay.metric("relay_backlog_rows") == 9, 15.0)
        await other.close()
    await eventually(lambda: relay.metric("relay_late_commit_writers") == 0, 15.0)
    assert relay.metric("relay_oldest_writer_age_seconds") == 0
