"""Mute routes: who may go, who waits, who makes room."""

from __future__ import annotations

from relay.core.mute import ASIDE_PER_S, PATIENCE_S, Mute, Verdict

A, B = ("events", "a"), ("events", "b")


def test_one_row_of_a_mute_route_goes_and_another_one_after_a_while() -> None:
    mute = Mute(30.0)
    assert not mute and mute.judge(A, 0.0) is Verdict.GO
    mute.add([A, A, ("", "")])
    assert list(mute) == [A]
    assert mute.judge(("", ""), 100.0) is Verdict.GO, "a row without a route is rejected, and waits for nobody"
    assert mute.judge(A, 100.0) is Verdict.GO
    assert mute.judge(A, 100.0 + PATIENCE_S / 2) is Verdict.WAIT
    assert mute.judge(B, 100.0) is Verdict.GO
    assert mute.judge(A, 130.0) is Verdict.GO


def test_others_make_room_where_another_route_is_heard() -> None:
    mute = Mute(30.0)
    mute.add([A, B])
    assert [mute.judge(A, 100.0), mute.judge(B, 100.0)] == [Verdict.GO, Verdict.GO]
    assert mute.on_answered([B, B]) == [B]
    assert mute.judge(A, 100.5) is Verdict.WAIT, "the answer may be on its way"
    assert {mute.judge(A, 102.0) for _ in range(1000)} == {Verdict.ASIDE}
    assert mute.on_answered([("events", "c")]) == []
    assert mute.on_answered([A]) == [A]
    assert not mute


def test_where_nobody_is_heard_they_make_room_slowly() -> None:
    """It may be the whole broker: a backlog set aside row by row would be written twice for nothing."""
    mute = Mute(30.0)
    mute.add([A])
    mute.judge(A, 100.0)
    aside = 0
    for tick in range(1, 200):
        aside += sum(mute.judge(A, 101.0 + tick / 10) is Verdict.ASIDE for _ in range(100))
    assert 0.8 * 19.9 * ASIDE_PER_S <= aside <= 19.9 * ASIDE_PER_S + ASIDE_PER_S
    assert aside / mute.aside_s == ASIDE_PER_S / 2, "those that come back leave room for others to make room"
    mute.on_answered([B])
    assert mute.aside_s == 0.0


def test_a_new_silence_begins_anew() -> None:
    mute = Mute(30.0)
    mute.add([A, B])
    mute.on_answered([B])
    mute.add([A])
    assert mute.judge(A, 100.0) is Verdict.GO
    assert [mute.judge(A, 102.0) for _ in range(200)][-1] is Verdict.WAIT
