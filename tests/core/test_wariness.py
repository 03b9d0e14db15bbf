"""Wariness: which exchanges are doubted soon after a refusal."""

from __future__ import annotations

from relay.core.wariness import WARY_S, Wariness
from relay.message import Row

NOW = 1000.0


def row(exchange: str | None) -> Row:
    return Row(0, 1, "m1", "ok", rare=None if exchange is None else {"exchange": exchange})


def test_rows_without_an_exchange_of_their_own_are_never_doubted() -> None:
    wariness = Wariness()
    wariness.refuse("bad", NOW)
    assert wariness.doubts(row("x"), NOW)
    assert not wariness.doubts(row(None), NOW)
    assert not wariness.doubts(row("x"), NOW + WARY_S)


def test_an_exchange_that_took_a_probe_in_is_trusted_whatever_others_refuse() -> None:
    """One that refuses every few seconds had all of them tried row by row for good."""
    wariness = Wariness()
    wariness.beware(NOW)
    assert wariness.take_in("good", NOW)
    assert not wariness.take_in("good", NOW), "no news"
    wariness.refuse("bad", NOW + 6.0)
    assert not wariness.doubts(row("good"), NOW + 6.0)
    assert wariness.doubts(row("bad"), NOW + 6.0)
    assert wariness.doubts(row("good"), NOW + WARY_S), "asked again now and then"


def test_an_exchange_that_refused_one_row_is_doubted_though_it_takes_others_in() -> None:
    """It may refuse by the routing key: each such row would close everybody's channel."""
    wariness = Wariness()
    wariness.take_in("moody", NOW)
    wariness.refuse("moody", NOW + 1.0)
    assert not wariness.take_in("moody", NOW + 2.0)
    assert wariness.doubts(row("moody"), NOW + 2.0)
    wariness.beware(NOW + 11.0)
    assert wariness.take_in("moody", NOW + 11.0)
    assert not wariness.doubts(row("moody"), NOW + 11.0)
