"""What `relay run` is made of, without a server."""

from __future__ import annotations

import logging
from typing import NoReturn

import pytest

from relay import daemon
from relay.config import load
from relay.http import Readiness
from relay.logs import Log


class Asked(Exception):
    """The moment from which anybody can ask."""


async def test_not_ready_from_the_first_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A probe that comes before the relay has looked at anything must not hear that all is well."""
    reasons: list[str] = []

    def serving(listen: object, metrics: object, readiness: Readiness, *rest: object) -> NoReturn:
        reasons.extend(reason for reason, _ in readiness.reasons)
        raise Asked

    monkeypatch.setattr(daemon, "serving", serving)
    config, _ = load({"RELAY_DATABASE_URL": "postgresql://db/x", "RELAY_AMQP_URL": "amqp://mq/"})
    with pytest.raises(Asked):
        await daemon._live(config, Log(logging.getLogger("tests.daemon")), is_traced=False)
    assert reasons == ["database", "broker"]
