"""How the driver's answers and failures reach a run, without a broker."""

from __future__ import annotations

from typing import Any, cast

import pytest

from relay.errors import BrokerUnavailable
from relay.redrive.session import Session
from tests.losses import BY_ANY_LOSS, losing


@BY_ANY_LOSS
async def test_whatever_the_driver_raises_is_a_lost_connection(loss: BaseException) -> None:
    """A run whose connection went ended with a traceback where the driver's words for it were none of its own errors."""
    with pytest.raises(BrokerUnavailable, match="the connection was lost"):
        await Session(cast("Any", None), cast("Any", None)).answer(losing(loss)(), "an answer")
