"""The hand of `relay inbox run`: what is in hand goes into the inbox table, batch by batch.

    delivered … delivered -> one transaction -> COMMIT -> ack of all of them

A batch that PostgreSQL refuses for what it holds is written message by message, and the culprit is parked at the broker.
A database that is away ends the link's life: the messages go back to the queue, and nothing is consumed until it is there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from aiormq.abc import DeliveredMessage

from relay.database import DRIVER_ERRORS
from relay.errors import DatabaseError, DatabaseUnavailable
from relay.inbox.faults import classify
from relay.inbox.hand import Hand, Life, Shared, iso_now
from relay.inbox.mailbox import PENDING_MAX, Mailbox, is_data_at_fault
from relay.inbox.message import Message
from relay.inbox.outcome import Failure, Outcome, Park, Permanent
from relay.inbox.publisher import Lane

FULL_RECHECK_S: Final = 1.0

_REFUSALS: Final = (Permanent, DatabaseError, *DRIVER_ERRORS)

Pair = tuple[DeliveredMessage, Message]


class Scribe(Hand):
    """See `relay.inbox.hand.Hand`."""

    def __init__(self, shared: Shared, life: Life, lane: Lane, mailbox: Mailbox) -> None:
        super().__init__(shared, life, lane)
        self._mailbox = mailbox

    async def _take(self, delivery: DeliveredMessage) -> None:
        while (self._metrics.pending_rows or 0) >= PENDING_MAX:
            self._shared.readiness.add("full", f"{PENDING_MAX:,} rows wait in the table")
            await self._life.rest(FULL_RECHECK_S)
        self._shared.readiness.remove("full")
        batch = [delivery, *self._rest_of_hand()]
        readable: list[Pair] = []
        unreadable: list[tuple[DeliveredMessage, Failure]] = []
        for each in batch:
            message = self._read(each)
            if isinstance(message, Failure):
                unreadable.append((each, message))
            else:
                readable.append((each, message))
        # First: the acknowledgement of those that were written covers everything older.
        for each, failure in unreadable:
            await self._park_unread(each, failure)
        await self._write(readable)

    def _rest_of_hand(self) -> list[DeliveredMessage]:
        rest: list[DeliveredMessage] = []
        while not self._hand.empty():
            delivery = self._hand.get_nowait()
            if delivery is None:
                # The life is over: the loop that called has to see it again.
                self._hand.put_nowait(None)
                break
            rest.append(delivery)
        return rest

    async def _write(self, pairs: Sequence[Pair]) -> None:
        if not pairs:
            return
        began = asyncio.get_running_loop().time()
        try:
            fresh = await self._mailbox.write([message for _, message in pairs])
        except _REFUSALS as error:
            if not is_data_at_fault(error):
                await self._give_up(error)
            if len(pairs) == 1:
                await self._park_refused(*pairs[0], classify(error))
                return
            for pair in pairs:
                await self._write([pair])
            return
        self._metrics.processing_seconds.observe(asyncio.get_running_loop().time() - began)
        known = len(pairs) - fresh
        await self._ack_batch(pairs[-1][0], {Outcome.HANDLED: fresh, Outcome.DUPLICATE: known})

    async def _park_refused(self, delivery: DeliveredMessage, message: Message, failure: Failure) -> None:
        self._metrics.failures[failure.error_class] += 1
        await self._park(delivery, self._origin(delivery, message.attempt, iso_now()), Park(failure.text), failure)

    async def _give_up(self, error: Exception) -> None:
        """Raises DatabaseUnavailable: whether the batch was committed is not known, so the broker delivers it again."""
        await self._mailbox.abandon()
        if isinstance(error, DatabaseError):
            raise DatabaseUnavailable(error.message, hint=error.hint) from error
        raise DatabaseUnavailable(classify(error).text) from error
