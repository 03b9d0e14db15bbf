"""A row that the database lets nobody change, and one that an application keeps locked, beside rows of other keys."""

from __future__ import annotations

from collections import Counter

import asyncpg
import pytest

from tests.e2e.conftest import Site
from tests.e2e.ledger import drain

REFUSE = """
CREATE FUNCTION no() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN
  IF old.event_type = 'ok.bad' OR old.event_type = 'nope.bad' THEN RAISE EXCEPTION 'not this one'; END IF;
  RETURN coalesce(new, old);
END$$;
"""
HOW = {
    "trigger": "CREATE TRIGGER no BEFORE UPDATE OR DELETE ON outbox FOR EACH ROW EXECUTE FUNCTION no()",
    "deferred": "CREATE CONSTRAINT TRIGGER no AFTER UPDATE OR DELETE ON outbox DEFERRABLE INITIALLY DEFERRED"
    " FOR EACH ROW EXECUTE FUNCTION no()",
}


async def bystanders(site: Site, name: str) -> None:
    for number in range(5):
        await site.insert(f"{name}{number}", key=f"key {number}")


@pytest.mark.parametrize("relays", [1, 2])
@pytest.mark.parametrize("sent_rows", ["mark", "delete"])
@pytest.mark.parametrize("how", HOW)
async def test_an_unmarkable_row_is_published_once_and_costs_nobody(
    site: Site, how: str, sent_rows: str, relays: int
) -> None:
    await site.database.execute(REFUSE + HOW[how])
    await bystanders(site, "before ")
    await site.insert("bad 1", "ok.bad", "k")
    await site.insert("after bad", key="k")
    await site.insert("bad 2", "ok.bad")
    await site.insert("never sent", "nope.bad", "n")
    await site.insert("behind it", key="n")
    await bystanders(site, "after ")
    daemons = [site.start(sent_rows=sent_rows, retry_delays="100ms") for _ in range(relays)]
    await site.until("(SELECT count(*) = 3 FROM outbox_fault)")
    gone = "NOT EXISTS (SELECT FROM outbox o WHERE sent_at IS NULL AND NOT EXISTS (SELECT FROM outbox_fault u"
    await site.until(f"{gone} WHERE u.seq = o.seq))")
    records = await site.database.fetch("SELECT id, failure_class, failure_error FROM outbox_fault ORDER BY seq")
    assert [record["id"] for record in records] == ["bad 1", "bad 2", "never sent"]
    assert {record["failure_class"] for record in records} == {"unmarkable"}
    assert all("not this one" in record["failure_error"] for record in records)
    # The second may not even listen before the first is done.
    assert sum(daemon.metrics().get('relay_rows_parked_total{reason="unmarkable"}', 0.0) for daemon in daemons) == 3
    lines = [each for daemon in daemons for each in daemon.events() if each["event"] == "row_parked"]
    assert sorted(each["id"] for each in lines) == ["bad 1", "bad 2", "never sent"]
    # Killed, and begun anew: not published again.
    for daemon in daemons:
        await daemon.kill()
    await site.start(sent_rows=sent_rows).ready()
    await site.insert("last", key="k")
    arrived = Counter(each.message_id for each in await drain(site.amqp_url, 15))
    ids = [f"{when} {number}" for when in ("before", "after") for number in range(5)]
    assert arrived == Counter([*ids, "bad 1", "after bad", "bad 2", "behind it", "last"])


@pytest.mark.parametrize("relays", [1, 2])
async def test_a_row_that_an_application_keeps_locked_stalls_nobody(site: Site, relays: int) -> None:
    """A sent row, a failed one, one to be tested and one to be promoted, each locked for a while."""
    await site.insert("head", "nope.x", "k")
    for number in range(3):
        await site.insert(f"k{number}", key="k")
    await site.insert("failing", "nope.x", "f")
    await site.insert("behind it", key="f")
    await site.insert("sent", key="s")
    application = await asyncpg.connect(site.database_url)
    daemons = []
    try:
        async with application.transaction():
            await application.execute("SELECT FROM outbox WHERE id IN ('failing', 'sent', 'k0') FOR UPDATE")
            daemons = [
                await site.start(retry_delays="200ms,200ms,10m", on_parked="hold").ready() for _ in range(relays)
            ]
            await site.until("(SELECT aside = 'deferred' FROM outbox WHERE id = 'head')")
            for turn in range(3):
                await bystanders(site, f"{turn} ")
                await site.until(
                    f"(SELECT count(*) = 5 AND bool_and(sent_at IS NOT NULL) FROM outbox WHERE id ~ '^{turn} ')", 5
                )
            waiting = await site.database.fetch("SELECT id FROM outbox WHERE sent_at IS NULL ORDER BY seq")
            assert [each["id"] for each in waiting] == ["head", "k0", "k1", "k2", "failing", "behind it", "sent"]
            await site.until("(SELECT attempts >= 3 FROM outbox WHERE id = 'head')")
    finally:
        await application.close()
    await site.until("(SELECT sent_at IS NOT NULL FROM outbox WHERE id = 'sent')")
    await site.until("(SELECT aside IS NOT NULL FROM outbox WHERE id = 'failing')")
    await site.until("(SELECT aside = 'held' FROM outbox WHERE id = 'k0')")
    assert all(daemon.process.poll() is None for daemon in daemons)
    assert not any(each["event"] == "settlement_refused" for daemon in daemons for each in daemon.events())
