"""Settings that contradict each other are warnings of `relay check` and `relay run`."""

from __future__ import annotations

import pytest

from relay import config


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"RELAY_ORDERING": "none", "RELAY_ON_PARKED": "continue"}, "RELAY_ON_PARKED has no effect"),
        ({"RELAY_MAX_IN_FLIGHT": "500", "RELAY_MAX_READ_AHEAD": "100"}, "RELAY_MAX_IN_FLIGHT=500 is never reached"),
        ({"RELAY_RETRY_DELAYS": "5s,1s"}, "RELAY_RETRY_DELAYS falls"),
        ({"RELAY_MAX_AGE": "10ms"}, "no row is ever retried"),
        ({"RELAY_SENT_ROWS": "delete", "RELAY_RETENTION": "1d"}, "RELAY_RETENTION has no effect"),
        ({"RELAY_SINK_PATH": "x"}, "RELAY_SINK_PATH has no effect"),
        ({"RELAY_EXCHNAGE": "x"}, "nearest: RELAY_EXCHANGE"),
    ],
)
def test_a_contradiction_is_a_warning(settings: dict[str, str], words: str) -> None:
    (warning,) = config.load(settings)[1]
    assert words in warning


def test_the_defaults_contradict_nothing() -> None:
    assert config.load({})[1] == ()
