"""An exception that nobody foresaw is one row's failure."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from relay.broker.lines import LineEncoder
from relay.broker.unforeseen import of_the_row
from relay.errors import MessageInvalid
from relay.message import PayloadType
from relay.route import Router
from tests.core.test_encode import NOW, encoder, make_row


def wrap(row: object) -> bytes:
    raise ZeroDivisionError("of all things")


def test_what_an_encoder_raises_is_about_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    frames = encoder(envelope_name="json")
    lines = LineEncoder(Router("events", "{event_type}"), PayloadType.JSON)
    row = make_row()
    for each in (frames, lines):
        monkeypatch.setattr(each, "_envelope", SimpleNamespace(wrap=wrap, content_type=None))
        with pytest.raises(
            MessageInvalid, match=r"^ZeroDivisionError: of all things \(test_unforeseen\.py:\d+\)$"
        ) as told:
            each.encode(row, lambda: NOW)
        assert told.value.failure_class == "unknown"
    out: list[bytes] = []
    assert frames.encode_run([row], 0, "events", 10**6, out) == (0, 0)
    assert out == []


@pytest.mark.parametrize("error", [MessageInvalid("no", failure_class="expired"), AssertionError("ours")])
def test_what_was_foreseen_goes_on_as_it_is(error: Exception) -> None:
    @of_the_row
    def encode() -> None:
        raise error

    with pytest.raises(type(error)) as raised:
        encode()
    assert raised.value is error
