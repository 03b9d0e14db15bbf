"""What aiormq raises for those who wait for an answer on a connection that goes, or whose peer raves."""

from __future__ import annotations

import asyncio
import struct
from typing import Any

import pytest

LOSSES: tuple[BaseException, ...] = (
    StopAsyncIteration(),
    struct.error("short"),
    AttributeError("reader"),
    ValueError("a frame"),
    RuntimeError("a loop"),
    asyncio.CancelledError(),
    # To all who wait on one that ends without a reason.
    Exception(),
)

BY_ANY_LOSS = pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: type(loss).__name__)


def losing(loss: BaseException) -> Any:
    """A coroutine function that takes anything and raises it."""

    async def fail(*_: object, **__: object) -> Any:
        raise loss

    return fail
