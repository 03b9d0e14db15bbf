"""The window follows the broker: smaller while confirms are slow, the setting again when they are quick."""

from __future__ import annotations

from relay.core.pace import PERIOD_S, SLOW_S, WINDOW_MIN, Pace


def drive(pace: Pace, rate: float, seconds: float, *, quick_s: float = 0.005, start: float = 0.0) -> float:
    """A broker that confirms `rate` messages a second, in order, to a relay that always fills its window; the time."""
    now = start
    while now < start + seconds:
        now += 0.05
        pace.on_confirmed(max(quick_s, pace.window / rate) * rate * 0.05, max(1, int(rate * 0.05)), now)
    return now


def test_a_quick_broker_gets_the_whole_setting() -> None:
    pace = Pace(2000)
    drive(pace, rate=20_000, seconds=30)
    assert pace.window == 2000


def test_a_slow_broker_gets_about_a_seconds_worth() -> None:
    pace = Pace(2000)
    drive(pace, rate=200, seconds=30)
    assert 100 <= pace.window <= 250


def test_it_grows_back_within_seconds() -> None:
    pace = Pace(2000)
    now = drive(pace, rate=100, seconds=30)
    assert pace.window <= 125
    drive(pace, rate=20_000, seconds=5, start=now)
    assert pace.window == 2000


def test_however_slow_some_stay_in_flight() -> None:
    pace = Pace(2000)
    drive(pace, rate=1, seconds=300)
    assert pace.window == WINDOW_MIN


def test_a_small_setting_is_never_exceeded_nor_emptied() -> None:
    pace = Pace(8)
    drive(pace, rate=1, seconds=100)
    assert pace.window == 8
    pace = Pace(1)
    drive(pace, rate=1, seconds=100)
    assert pace.window == 1


def test_one_frozen_minute_costs_half_the_window_once() -> None:
    pace = Pace(2000)
    pace.on_confirmed(0.005, 1, 0.0)
    pace.on_confirmed(60.0 * 2000, 2000, 60.0)
    assert pace.window == 1000
    pace.on_confirmed(0.005 * 500, 500, 60.0 + PERIOD_S)
    assert pace.window == 2000


def test_a_slow_queue_among_quick_ones_does_not_count_for_all() -> None:
    pace = Pace(2000)
    for turn in range(100):
        pace.on_confirmed(990 * 0.01 + 10 * 3 * SLOW_S, 1000, turn * 0.1)
    assert pace.window == 2000
