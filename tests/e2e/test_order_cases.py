"""Cases from the field about order and late commits, end to end through the installed command."""

from __future__ import annotations

import random

import asyncpg

from tests.conftest import eventually
from tests.e2e.conftest import Daemon, Site
from tests.e2e.ledger import drain, ledger
from tests.proxy import Proxy, Side


async def test_case_07_confirms_are_lost_and_the_connection_reset_twenty_times(site: Site) -> None:
    """The broker took what it never got to say: everything comes again, nothing is lost or overtaken."""
    rows, cuts, keys = 5000, 20, 50
    await site.insert_many(rows, keys)
    async with Proxy(site.amqp_url) as proxy:
        daemon = await site.start(amqp_url=proxy.url, max_rate="1500").ready()
        for cut in range(cuts):
            # More than was confirmed and unsettled at the last cut: the new link works.
            settled = daemon.metric("relay_rows_sent_total")
            await _reached(daemon, "relay_rows_sent_total", settled + 150)
            proxy.deaf = {Side.SERVER}
            # The gauge is a second old at most: one message a key waits for a confirm that never comes.
            await _reached(daemon, "relay_in_flight_messages", keys)
            proxy.reset()
            proxy.heal()
            await _reached(daemon, "relay_reconnects_total", cut + 1)
        await site.all_sent(60)
    found = await ledger(site.database, site.amqp_url)
    found.assert_complete(duplicates_max=cuts * keys)


async def _reached(daemon: Daemon, metric: str, value: float) -> None:
    await eventually(lambda: daemon.metric(metric) >= value, 20)


async def test_case_17_a_lower_seq_commits_late(site: Site) -> None:
    await site.start().ready()
    late = await asyncpg.connect(site.database_url)
    try:
        transaction = late.transaction()
        await transaction.start()
        await late.execute(
            "INSERT INTO outbox (id, event_type, aggregate_id, payload) VALUES ('late', 'ok.x', 'k', '{}')"
        )
        await site.insert("early", key="k")
        await site.until("(SELECT sent_at IS NOT NULL FROM outbox WHERE id = 'early')")
        await transaction.commit()
        await site.all_sent()
        # Ids that were drawn and rolled back change nothing.
        gap = late.transaction()
        await gap.start()
        await late.execute(
            "INSERT INTO outbox (event_type, payload) SELECT 'ok.x', '{}' FROM generate_series(1, 10000)"
        )
        await gap.rollback()
        await site.insert("after the gap", key="k")
        await site.all_sent()
    finally:
        await late.close()
    delivered = [message.message_id for message in await drain(site.amqp_url, 3)]
    assert delivered == ["early", "late", "after the gap"]


async def test_case_19_fifty_rows_of_one_key_in_one_transaction(site: Site) -> None:
    """One time stamp for all, random ids: only `seq` knows the order."""
    shuffled = random.Random(19)
    ids = [f"{shuffled.getrandbits(64):016x}" for _ in range(50)]
    await site.start().ready()
    async with site.database.transaction():
        for id in ids:
            await site.insert(id, key="k")
    await site.all_sent()
    assert [message.message_id for message in await drain(site.amqp_url, 50)] == ids
