"""The fake broker: the suites that the real adapters pass, and what only a fake can be asked."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import pytest

from relay.core.ports.broker import Closed, Link, Publication, Rejection, Returned
from relay.errors import BrokerUnavailable
from relay.message import PayloadType, Row
from tests.broker import link_suite, outcome_suite, tag_suite
from tests.broker.recorder import Recorder

from .bench import Bench
from .broker import BrokerOptions
from .link import FakeBroker, FakeLink
from .loop import Process, run_virtual
from .oracle import Entry, Outcome

SEEDS = 10
"""How often each case is played: the fake confirms by chance, alone or together."""


# ---------------------------------------------------------------- the suites


class RegisteringLink:
    """A fake's link that tells the oracle of rows which nobody inserted."""

    def __init__(self, bench: Bench, link: FakeLink) -> None:
        self._bench = bench
        self._link = link

    @property
    def in_flight(self) -> int:
        return self._link.in_flight

    def route_of(self, row: Row) -> tuple[str, str]:
        return self._link.route_of(row)

    @property
    def oldest(self) -> Row | None:
        return self._link.oldest

    @property
    def in_doubt(self) -> int:
        return self._link.in_doubt

    def is_in_flight(self, message_id: str) -> bool:
        return self._link.is_in_flight(message_id)

    def publish(self, rows: Sequence[Row]) -> Publication:
        self._register(rows)
        return self._link.publish(rows)

    def probe(self, row: Row) -> Publication:
        self._register([row])
        return self._link.probe(row)

    async def close(self) -> None:
        await self._link.close()

    def _register(self, rows: Sequence[Row]) -> None:
        oracle = self._bench.oracle
        for row in rows:
            if row.id not in oracle.entries:
                oracle.committed(Entry(row.id, row.seq, row.key, row.shard, row.event_type, 0, 0, False))
        oracle.granted["a", 0] = 1e18


class FakePlace(Bench):
    """`outcome_suite.BrokerPlace` over the fake, whose pipe takes twenty rows."""

    refused = "refused"

    def __init__(self, seed: int) -> None:
        super().__init__(broker=BrokerOptions(pipe_rows=20, latency=(0.0, 0.004), confirm=(0.0, 0.004)))
        self.rabbit.random = random.Random(seed)

    async def connect(
        self, recorder: Recorder, *, routing_key: str = "{event_type}", is_mandatory: bool = True
    ) -> Link:
        broker = FakeBroker(self.rabbit, "a", Process("a"), mandatory=is_mandatory)
        return RegisteringLink(self, await broker.connect(recorder, PayloadType.JSON))

    async def arrived(self, count: int) -> Sequence[tuple[str, bytes, dict[str, Any]]]:
        found = [each for each in self.oracle.log if self.oracle.entries[each.id].event_type not in self.rabbit.full]
        assert len(found) == count
        return [(each.id, b"", {}) for each in found]

    async def mute(self, on: bool) -> None:
        self.rabbit.mute(on)

    async def cut(self) -> None:
        for link in list(self.rabbit.links):
            link.cut()

    async def block(self, on: bool) -> None:
        self.rabbit.block(on)

    async def route(self, event_type: str, exists: bool) -> None:
        self.rabbit.route(event_type, exists)

    async def fill(self, event_type: str, on: bool) -> None:
        if on:
            self.rabbit.full.add(event_type)
        else:
            self.rabbit.full.remove(event_type)

    async def refuse_connections(self, on: bool) -> None:
        self.rabbit.is_up = not on

    async def delete_exchange(self) -> None:
        self.rabbit.has_exchange = False


class FakeSpeaker(Bench):
    """`tag_suite.Speaker` over the fake."""

    def __init__(self) -> None:
        super().__init__()
        self.rabbit.hush(True)
        self._link: FakeLink

    async def connect(self, recorder: Recorder) -> Link:
        self._link = await FakeBroker(self.rabbit, "a", Process("a")).connect(recorder, PayloadType.JSON)
        return RegisteringLink(self, self._link)

    async def published(self, count: int) -> None:
        await asyncio.sleep(0.01)
        assert self._link.in_flight == count

    def ack(self, tag: int, *, multiple: bool = False) -> None:
        self._link.say(tag, multiple=multiple)

    def nack(self, tag: int, *, multiple: bool = False) -> None:
        self._link.say(tag, verdict=Outcome.NACKED, multiple=multiple)

    def give_back(self, message_id: str) -> None:
        self._link.give_back(message_id)

    def cut(self) -> None:
        self._link.cut()

    def refuse(self, *, alone: bool) -> None:
        self._link.refuse(is_whole=alone)


def on_fakes(case: Any) -> None:
    """The case, on a loop of its own for each seed."""
    for seed in range(SEEDS):
        run_virtual(lambda seed=seed: case(FakePlace(seed)))  # type: ignore[misc]


@pytest.mark.parametrize("case", link_suite.LIVES, ids=lambda case: case.__name__)
def test_link_suite(case: link_suite.Case) -> None:
    on_fakes(case)


@pytest.mark.parametrize("case", outcome_suite.FAULTS, ids=lambda case: case.__name__)
def test_faults(case: outcome_suite.FaultCase) -> None:
    on_fakes(case)


@pytest.mark.parametrize("case", outcome_suite.VERDICTS, ids=lambda case: case.__name__)
def test_verdicts(case: outcome_suite.VerdictCase) -> None:
    on_fakes(case)


@pytest.mark.parametrize("case", tag_suite.TAGS, ids=lambda case: case.__name__)
def test_tags(case: tag_suite.Case) -> None:
    async def main() -> None:
        await case(FakeSpeaker())

    run_virtual(main)


# ---------------------------------------------------------------- the fake alone


class Ear:
    """A listener that writes down what it hears."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, list[str]]] = []

    def on_acked(self, rows: object) -> None:
        self._note("acked", rows)

    def on_nacked(self, rows: object) -> None:
        self._note("nacked", rows)

    def on_returned(self, returned: object) -> None:
        assert isinstance(returned, list)
        self.heard.append(("returned", [each.row.id for each in returned if isinstance(each, Returned)]))

    def on_blocked(self, reason: str) -> None:
        self.heard.append(("blocked", []))

    def on_unblocked(self) -> None:
        self.heard.append(("unblocked", []))

    def on_writable(self) -> None:
        self.heard.append(("writable", []))

    def on_verified(self, exchange: str) -> None:
        self.heard.append(("verified", []))

    def on_suspected(self, rows: object, error: str, *, alone: bool) -> None:
        self._note("suspected", rows)

    def on_passed(self, row: object) -> None:
        self._note("passed", [row])

    def on_refused(self, refusal: Rejection, lost: object) -> None:
        self._note("refused", [refusal.row])

    def on_closed(self, lost: object, closed: Closed, error: str) -> None:
        self._note("closed", lost)

    def _note(self, what: str, rows: object) -> None:
        assert isinstance(rows, list)
        self.heard.append((what, [row.id for row in rows if isinstance(row, Row)]))

    def ids(self, what: str) -> list[str]:
        return [each for name, ids in self.heard if name == what for each in ids]


async def linked(bench: Bench, ear: Ear) -> FakeLink:
    return await FakeBroker(bench.rabbit, "a", Process("a")).connect(ear, PayloadType.JSON)


def rows_of(bench: Bench, count: int, event_type: str = "ok") -> list[Row]:
    rows = []
    for _ in range(count):
        seq = len(bench.oracle.entries) + 1
        row = Row(1, seq, f"m{seq}", event_type, aggregate_type="t", aggregate_id=f"k{seq}", payload=b"x")
        bench.oracle.committed(Entry(row.id, seq, row.key, 1, event_type, 0, 0, False))
        bench.oracle.granted["a", 1] = 1e18
        rows.append(row)
    return rows


def test_every_row_gets_exactly_one_outcome() -> None:
    async def main() -> None:
        bench = Bench(broker=BrokerOptions(nacks=0.2, confirm=(0.001, 0.01), latency=(0.0, 0.01)))
        ear = Ear()
        link = await linked(bench, ear)
        rows = rows_of(bench, 300)
        for start in range(0, 300, 10):
            assert link.publish(rows[start : start + 10]).taken == 10
            await asyncio.sleep(0.001)
        assert not ear.heard or link.in_flight < 300
        await asyncio.sleep(5)
        outcomes = ear.ids("acked") + ear.ids("nacked")
        assert sorted(outcomes) == sorted(row.id for row in rows)
        assert ear.ids("nacked")
        assert outcomes != [row.id for row in rows], "confirms come in any order"
        assert link.in_flight == 0

    run_virtual(main)


def test_returns_rejections_and_a_full_pipe() -> None:
    async def main() -> None:
        bench = Bench(broker=BrokerOptions(pipe_rows=4))
        ear = Ear()
        link = await linked(bench, ear)
        bench.rabbit.route("nowhere", False)
        bad, lost, good = rows_of(bench, 1, "invalid"), rows_of(bench, 2, "nowhere"), rows_of(bench, 5)
        publication = link.publish(bad + lost + good)
        assert publication.taken == 5
        assert [each.row for each in publication.rejected] == bad
        await asyncio.sleep(1)
        assert ear.ids("returned") == [row.id for row in lost]
        assert ("writable", []) in ear.heard
        assert [each.id for each in bench.oracle.log] == [row.id for row in good[:2]]

    run_virtual(main)


def test_a_cut_delivers_a_prefix_without_confirms() -> None:
    async def main() -> None:
        prefixes: set[int] = set()
        for _ in range(20):
            bench = Bench()
            bench.rabbit.random.seed(len(prefixes) * 7 + _)
            ear = Ear()
            link = await linked(bench, ear)
            rows = rows_of(bench, 5)
            link.publish(rows)
            link.cut()
            await asyncio.sleep(1)
            assert ear.heard[-1] == ("closed", [row.id for row in rows])
            delivered = [each.id for each in bench.oracle.log]
            assert delivered == [row.id for row in rows[: len(delivered)]]
            prefixes.add(len(delivered))
        assert len(prefixes) > 2

    run_virtual(main)


def test_alarms_stop_the_link_and_silence_does_not() -> None:
    async def main() -> None:
        bench = Bench()
        ear = Ear()
        link = await linked(bench, ear)
        rows = rows_of(bench, 6)
        bench.rabbit.block(True)
        assert link.publish(rows[:2]).taken == 2
        await asyncio.sleep(1)
        assert ear.heard == [("blocked", [])]
        assert link.publish(rows[2:]).taken == 0
        bench.rabbit.block(False)
        await asyncio.sleep(1)
        assert ear.ids("acked") == [row.id for row in rows[:2]]
        bench.rabbit.mute(True)
        assert link.publish(rows[2:]).taken == 4
        await asyncio.sleep(100)
        assert link.in_flight == 4
        bench.rabbit.mute(False)
        await asyncio.sleep(1)
        assert link.in_flight == 0
        bench.rabbit.go_down(1.0)
        with pytest.raises(BrokerUnavailable):
            await linked(bench, ear)

    run_virtual(main)
