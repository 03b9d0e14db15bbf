"""Finds out over which row the broker closed a link, while everything else goes on (`core/suspects.py`).

Owns the suspects, and the doubts about exchanges that rows name themselves (P4). The publisher asks it before each turn,
and hands it what the link says about probes.
"""

from __future__ import annotations

from collections.abc import Sequence

from relay.core.ports.broker import Link, Publication, Rejection
from relay.core.suspects import Suspects
from relay.core.wariness import Wariness, own_exchange
from relay.engine import Engine
from relay.message import Row, State


class Quarantine:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._suspects = Suspects()
        self._wariness = Wariness()

    def __len__(self) -> int:
        return len(self._suspects)

    # ------------------------------------------------------------ publishing

    def next(self, link: Link, now: float) -> Row | None:
        """The row to probe now: it is in flight, its key's turn has come. `None` where there is none."""
        engine = self._engine
        suspects = self._suspects
        if not suspects:
            return None
        row = suspects.next(engine.leases.writable(now))
        if row is None or link.is_in_flight(row.id) or (suspects.is_alone(row) and link.in_doubt):
            return None
        engine.chains.take_alone(row)
        suspects.begin(row)
        row.published_at = now
        return row

    def take(self, row: Row, publication: Publication) -> None:
        """What became of the probe of `row`."""
        if not publication.taken:
            self._suspects.lose_probe()
            self._engine.chains.keep_apart([row])
            if publication.unverified is not None:
                self._suspects.put_off(row, publication.unverified)
        elif publication.rejected:
            self.clear(row)

    def is_alone(self, now: float) -> bool:
        """Whether nothing else may be published: a suspect that closed a whole connection is or can be tried."""
        suspects = self._suspects
        if not suspects.are_alone:
            return False
        row = suspects.probed or suspects.next(self._engine.leases.writable(now))
        return row is not None and suspects.is_alone(row)

    def without_suspects(self, batch: list[Row], now: float) -> list[Row]:
        """Suspects whose turn came in the ordinary queue are kept apart again; so is who is doubted, soon after a refusal."""
        if self._wariness.is_wary(now):
            known = len(self._suspects)
            for row in batch:
                if self._wariness.doubts(row, now):
                    self._suspects.doubt(row)
            if len(self._suspects) > known:
                # Nothing else may come that would have them tried.
                self._engine.to_publish.set()
        if not self._suspects:
            return batch
        apart = [row for row in batch if row in self._suspects]
        self._engine.chains.keep_apart(apart)
        return [row for row in batch if row.state is State.IN_FLIGHT]

    # ------------------------------------------------------------ what the link says

    def suspect(self, rows: Sequence[Row], error: str, *, alone: bool) -> None:
        """The link was closed over one or more of these. A row that is an orphan by now is nobody's."""
        engine = self._engine
        self._suspects.lose_probe()
        live = [row for row in rows if row.state is State.IN_FLIGHT]
        if not live:
            return
        if engine.is_stopping:
            # Whoever reads them next will find out.
            engine.chains.finish(live)
            return
        engine.chains.keep_apart(live)
        self._suspects.add(live, alone=alone)
        engine.log.warning("rows_suspected", rows=len(live), alone=alone, error=error)

    def on_verified(self, exchange: str | None = None) -> None:
        """There is a verdict on this exchange, or on any."""
        self._suspects.on_verified(exchange)

    def beware(self, now: float) -> None:
        """The broker has refused a row: the next one may be among those that wait."""
        self._wariness.beware(now)

    def refuse(self, refusal: Rejection, now: float) -> None:
        """This row is the culprit."""
        self.clear(refusal.row)
        self._wariness.refuse(refusal.exchange, now)

    def take_in(self, row: Row, now: float) -> None:
        """The broker took the probe in. Whoever waited for what becomes of its exchange may go."""
        self.clear(row)
        exchange = own_exchange(row)
        if exchange is not None and self._wariness.take_in(exchange, now):
            self._engine.chains.rejoin(self._suspects.trust(exchange))

    def clear(self, row: Row) -> None:
        """It is no suspect any more."""
        self._suspects.clear(row)
        self._engine.to_publish.set()

    def lose_alone(self, lost: Sequence[Row]) -> Row | None:
        """The link is gone, and one of these was being tried while nothing else was in flight: it is at fault, for all that can be
        known, and no suspect any more."""
        probed = self._suspects.probed
        if probed is None or not self._suspects.is_alone(probed) or probed not in lost:
            return None
        self.clear(probed)
        return probed

    def lose(self, lost: Sequence[Row]) -> list[Row]:
        """The link is gone: a row that was being tried is kept apart. Returns the others."""
        probed = self._suspects.lose_probe()
        if probed is None:
            return list(lost)
        self._engine.chains.keep_apart([row for row in lost if row is probed])
        return [row for row in lost if row is not probed]
