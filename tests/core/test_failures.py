"""The table of failure classes: who is tried again, who parks, who holds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from relay.core.failures import Failure, classify, judge, may_hold
from relay.core.settings import EngineSettings, Ordering, Unroutable
from relay.message import Aside, Row

SETTINGS = EngineSettings(retry_delays_s=(1.0, 5.0))
AT_ONCE = [Failure.INVALID, Failure.TOO_LARGE, Failure.EXPIRED, Failure.UNMARKABLE, Failure.REFUSED]
LADDER = [Failure.UNROUTABLE, Failure.UNKNOWN]


def make_row(attempts: int = 0, key: str | None = "k") -> Row:
    return Row(0, 1, "m", "ok", aggregate_id=key, attempts=attempts)


@pytest.mark.parametrize("failure", AT_ONCE)
def test_parks_at_once(failure: Failure) -> None:
    verdict = judge(make_row(), failure, SETTINGS, is_final=True, age_s=1e9, roll=0.5)
    assert (verdict.failure, verdict.aside, verdict.attempts) == (failure, Aside.PARKED, 1)
    assert verdict.holds == (failure not in (Failure.EXPIRED, Failure.UNMARKABLE))


@pytest.mark.parametrize("failure", LADDER)
def test_climbs_the_ladder_and_parks_at_its_end(failure: Failure) -> None:
    delays = []
    for attempts in range(2):
        verdict = judge(make_row(attempts), failure, SETTINGS, is_final=True, age_s=None, roll=0.5)
        assert (verdict.failure, verdict.aside, verdict.holds) == (failure, Aside.DEFERRED, True)
        delays.append(verdict.delay_s)
    assert delays == [1.0, 5.0]
    verdict = judge(make_row(2), failure, SETTINGS, is_final=True, age_s=None, roll=0.5)
    assert (verdict.failure, verdict.aside, verdict.attempts) == (failure, Aside.PARKED, 3)


def test_what_is_missing_may_come_yet() -> None:
    verdict = judge(make_row(), Failure.REFUSED, SETTINGS, is_final=False, age_s=None, roll=0.5)
    assert verdict.aside is Aside.DEFERRED
    verdict = judge(make_row(2), Failure.REFUSED, SETTINGS, is_final=False, age_s=None, roll=0.5)
    assert (verdict.aside, verdict.failure) == (Aside.PARKED, Failure.REFUSED)


def test_no_route_parks_at_once_where_that_is_wanted() -> None:
    settings = replace(SETTINGS, on_unroutable=Unroutable.PARK)
    verdict = judge(make_row(), Failure.UNROUTABLE, settings, is_final=True, age_s=None, roll=0.5)
    assert (verdict.aside, verdict.failure) == (Aside.PARKED, Failure.UNROUTABLE)


def test_an_old_row_parks_instead_of_being_tried_again() -> None:
    settings = replace(SETTINGS, age_max_s=60.0)
    old = judge(make_row(), Failure.UNROUTABLE, settings, is_final=True, age_s=61.0, roll=0.5)
    assert (old.aside, old.failure) == (Aside.PARKED, Failure.MAX_AGE)
    young = judge(make_row(), Failure.UNROUTABLE, settings, is_final=True, age_s=59.0, roll=0.5)
    assert young.aside is Aside.DEFERRED
    invalid = judge(make_row(), Failure.INVALID, settings, is_final=True, age_s=61.0, roll=0.5)
    assert invalid.failure is Failure.INVALID, "it would not be tried again anyway"


def test_who_holds() -> None:
    assert may_hold(make_row(), SETTINGS)
    assert not may_hold(make_row(key=None), SETTINGS)
    assert not may_hold(make_row(), replace(SETTINGS, ordering=Ordering.NONE))
    settings = replace(SETTINGS, holds_when_parked=False)
    assert not judge(make_row(), Failure.INVALID, settings, is_final=True, age_s=None, roll=0.5).holds
    assert judge(make_row(), Failure.UNROUTABLE, settings, is_final=True, age_s=None, roll=0.5).holds


def test_a_reason_without_a_class_is_unknown() -> None:
    assert classify("refused") is Failure.REFUSED
    assert classify("something new") is Failure.UNKNOWN
