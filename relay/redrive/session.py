"""The connection of one run: whether it is good, and every wait for the broker, each with a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from aiormq import Connection
from aiormq.exceptions import ChannelClosed

from relay.broker.exchanges import refusal
from relay.broker.losses import CONNECTION_ERRORS, named
from relay.broker.wire import Wire
from relay.errors import BrokerRefused, BrokerUnavailable

T = TypeVar("T")

ANSWER_TIMEOUT_S: Final = 30.0
"""For an answer, a confirm, the end of an alarm; then the run ends with an error, and what was not confirmed stays."""


class Session:
    """Source and sender share it, and one task waits in it at a time."""

    def __init__(self, connection: Connection, wire: Wire) -> None:
        self.connection = connection
        self.wire = wire
        self._failure: BrokerUnavailable | BrokerRefused | None = None
        self._changed = asyncio.Event()

    def check(self) -> None:
        """Raises what ended the connection."""
        if self._failure is not None:
            raise self._failure

    def fail(self, failure: BrokerUnavailable | BrokerRefused) -> None:
        """The connection is of no more use; the first reason stays."""
        if self._failure is None:
            self._failure = failure
        self._changed.set()

    def tell(self) -> None:
        """Something changed: who waits looks again."""
        self._changed.set()

    async def change(self, wait_s: float) -> bool:
        """Whether something changes within so many seconds, from now on: look at everything right before."""
        self._changed.clear()
        try:
            async with asyncio.timeout(wait_s):
                await self._changed.wait()
        except TimeoutError:
            return False
        return True

    async def until(self, is_so: Callable[[], bool], why: Callable[[], str]) -> None:
        """Wait until it is so; each change gives it new time. Raises BrokerUnavailable with `why` it was not."""
        self.check()
        while not is_so():
            if not await self.change(ANSWER_TIMEOUT_S):
                raise BrokerUnavailable(f"the broker: {why()} for {ANSWER_TIMEOUT_S:g} s")
            self.check()

    async def answer(self, asked: Awaitable[T], what: str) -> T:
        """The driver's answer, its errors mapped. Raises BrokerUnavailable, BrokerRefused."""
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                return await named(asked)
        except TimeoutError as error:
            raise BrokerUnavailable(f"the broker did not give {what} within {ANSWER_TIMEOUT_S:g} s") from error
        except ChannelClosed as error:
            raise BrokerRefused(f"the broker closed the channel: {refusal(error)}") from error
        except CONNECTION_ERRORS as error:
            self.check()
            text = " ".join(map(str, error.args)) or type(error).__name__
            raise BrokerUnavailable(f"the connection was lost: {text}") from error
