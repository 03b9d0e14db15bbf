"""A rolling upgrade: the schema first, under a relay that knows only the older one, then the relays."""

from __future__ import annotations

import asyncio

from relay.migrate import SCHEMA_VERSION
from tests.conftest import eventually
from tests.e2e.conftest import Site, command
from tests.e2e.ledger import drain

NEXT = SCHEMA_VERSION + 1

STEP = f"""
BEGIN;
SET LOCAL lock_timeout = '2s';
ALTER TABLE outbox ADD COLUMN tenant text;
ALTER TABLE outbox_relay ADD COLUMN zone text;
CREATE INDEX outbox_tenant ON outbox (tenant) WHERE tenant IS NOT NULL;
UPDATE outbox_meta SET schema_version = {NEXT};
COMMIT;
"""
"""What a later version's migration may do that older relays can live with: `compatible_from` stays."""


async def test_the_schema_is_upgraded_under_running_relays(site: Site) -> None:
    ids = await site.insert_many(1200, 40)
    old = await site.start(max_rate="1000").ready()
    await eventually(lambda: old.metric("relay_published_total") > 300)
    await site.database.execute(STEP)
    later = await site.insert_many(400, 40, prefix="n")
    beside = await site.start().ready()
    assert await old.stop() == 0
    await site.all_sent()
    assert await beside.stop() == 0
    first: dict[str, list[str]] = {}
    delivered = [message.message_id or "" for message in await drain(site.amqp_url, 1600)]
    for id_ in dict.fromkeys(delivered):
        first.setdefault(id_[0], []).append(id_)
    assert sorted(delivered) == sorted([*ids, *later]), "lost, or copied though nothing was killed"
    for key in range(40):
        of_key = [int(id_[1:]) for id_ in first["m"] if int(id_[1:]) % 40 == key]
        assert of_key == sorted(of_key)
    assert "Traceback" not in old.text() + beside.text()


async def test_an_older_migrate_leaves_a_newer_compatible_schema_as_it_is(site: Site) -> None:
    await site.database.execute(STEP)
    done = await asyncio.to_thread(lambda: command("migrate", settings=site.settings))
    assert (done.returncode, done.stderr) == (0, "")
    assert f"schema version {NEXT}" in done.stdout
    assert await site.database.fetchval("SELECT schema_version FROM outbox_meta") == NEXT
