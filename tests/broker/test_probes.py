"""Probes on a real RabbitMQ: a channel of their own, whose close harms nobody else."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from relay.core.ports.broker import Link
from relay.message import Row
from relay.servers import RabbitServer
from tests.broker.outcome_suite import probe
from tests.broker.recorder import Recorder, make_row, make_rows
from tests.broker.test_rabbitmq import Vhost, vhost

__all__ = ["vhost"]


async def probe_all(link: Link, recorder: Recorder, rows: Sequence[Row]) -> list[int]:
    return [row.seq for row in rows if not await probe(link, recorder, row)]


async def test_a_close_over_a_probe_is_told_of_that_row_only(vhost: Vhost, rabbit_server: RabbitServer) -> None:
    await vhost.channel.exchange_declare("inner", exchange_type="topic", durable=True, internal=True)
    recorder = Recorder()
    link = await vhost.link(recorder, exchange="{aggregate_type}")
    good = [make_row(seq, aggregate_type="ev") for seq in range(1, 31)]
    bad = [make_row(seq, aggregate_type="inner") for seq in (40, 41)]
    assert await probe_all(link, recorder, [*good[:10], bad[0], *good[10:20]]) == [40]
    # What else goes there is known for a few seconds, and not sent at all.
    publication = link.probe(bad[1])
    assert [(each.row.seq, each.reason, each.is_final) for each in publication.rejected] == [(41, "refused", True)]
    link.publish(good[20:])
    outcomes = await recorder.outcomes_of(31)
    assert outcomes["refused"] == [40]
    assert sorted(outcomes["acked"] + outcomes["lost"]) == list(range(1, 31))
    # Each of those was taken in before the close, and may have been confirmed by then or not.
    assert set(outcomes["lost"]) <= set(range(1, 11))
    assert "cannot publish to internal exchange 'inner'" in recorder.refusals[0].error
    assert recorder.closed is None, "the link lives"
    channels = await asyncio.to_thread(rabbit_server.eval, "length(rabbit_channel:list())")
    assert int(channels) >= 2
    await link.close()


@pytest.mark.parametrize("count", [300])
async def test_a_probe_costs_a_round_trip_and_no_confirm(vhost: Vhost, count: int) -> None:
    recorder = Recorder()
    link = await vhost.link(recorder)
    for row in make_rows(count):
        assert await probe(link, recorder, row)
        assert link.in_doubt == 0, "whatever is confirmed"
    assert len((await recorder.outcomes_of(count))["acked"]) == count
    await link.close()
