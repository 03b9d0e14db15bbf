"""What aiormq says of a connection that goes, or of a peer that raves, under names that can be caught."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Final, TypeVar

from aiormq.exceptions import AMQPConnectionError, AMQPError

from relay.errors import RelayError

T = TypeVar("T")

CONNECTION_ERRORS: Final = (AMQPError, OSError, ValueError, RuntimeError)
"""What `named` raises for the driver; a TimeoutError is an OSError."""


async def named(work: Awaitable[T]) -> T:
    """What a server that hangs up between two frames, or says garbage, makes aiormq raise is written down nowhere
    (StopAsyncIteration, struct.error, AttributeError …); who waits for an answer when the connection goes is given the
    reader's failure, a bare Exception, or is cancelled. Each is a connection that came to nothing.

    Raises CONNECTION_ERRORS, RelayError.
    """
    try:
        return await work
    except (*CONNECTION_ERRORS, RelayError):
        raise
    except asyncio.CancelledError as error:
        if is_being_cancelled():
            raise
        raise AMQPConnectionError("closed before the answer came") from error
    except Exception as error:
        raise AMQPConnectionError(f"broken off ({type(error).__name__})") from error


def is_being_cancelled() -> bool:
    """Whether a CancelledError is meant for this task, and is not aiormq's word for a connection that went."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
