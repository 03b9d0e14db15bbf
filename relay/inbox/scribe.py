"""The hand of `relay inbox run`: what is in hand goes into the inbox table, batch by batch.

    delivered … delivered -> one transaction (or some, where they are large) -> COMMIT -> ack of all of them

A batch that PostgreSQL refuses for what it holds is written message by message, and the culprit is parked at the broker.
While the database is away, or refuses every write (a full disk, a standby), the batch waits here: each return to the queue
would count towards its delivery limit, and after some of them the broker would park what nobody could ever read.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from typing import Final

from aiormq.abc import DeliveredMessage

from relay.database import DRIVER_ERRORS
from relay.errors import DatabaseError, DatabaseUnavailable, RelayError
from relay.inbox.faults import classify
from relay.inbox.hand import Hand, Life, Shared, iso_now
from relay.inbox.mailbox import PENDING_MAX, Mailbox, full, is_data_at_fault
from relay.inbox.message import Message
from relay.inbox.outcome import Failure, Outcome, Park, Permanent
from relay.inbox.publisher import Lane
from relay.inbox.station import Standby, backoff_s

FULL_RECHECK_S: Final = 1.0
FULL_PATIENCE_S: Final = 300.0
"""What is in hand is unacknowledged meanwhile: longer than its consumer timeout (30 minutes, if nobody has set it) RabbitMQ does not
bear that."""

BATCH_BYTES_MAX: Final = 64 * 2**20
"""Of one transaction's messages: PostgreSQL takes 1 GiB at a time, and what it refuses for that it refuses for ever."""

HEADERS_BYTES_MAX: Final = 128 * 2**10
"""Counted for each message besides its body: headers are one frame, and this is RabbitMQ's `frame_max`."""

_REFUSALS: Final = (Permanent, DatabaseError, *DRIVER_ERRORS)

Pair = tuple[DeliveredMessage, Message]


class Scribe(Hand):
    """See `relay.inbox.hand.Hand`."""

    def __init__(self, shared: Shared, life: Life, lane: Lane, mailbox: Mailbox) -> None:
        super().__init__(shared, life, lane)
        self._mailbox = mailbox

    async def _take(self, delivery: DeliveredMessage) -> None:
        await self._wait_for_room()
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
        for pairs in batches(readable, BATCH_BYTES_MAX):
            await self._write(pairs)

    async def _wait_for_room(self) -> None:
        """Raises LifeOver, and Full after a while: what is in hand goes back to the queue, and is fetched again when there is room.
        Whoever takes nothing for another reason is not full."""
        until = time.monotonic() + FULL_PATIENCE_S
        try:
            while (self._metrics.pending_rows or 0) >= PENDING_MAX:
                no_room = full()
                self._shared.readiness.add("full", no_room.message)
                if time.monotonic() >= until:
                    self._gives_back = True
                    raise no_room
                await self._life.rest(FULL_RECHECK_S)
        finally:
            self._shared.readiness.remove("full")

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
        loop, failures = asyncio.get_running_loop(), 0
        while True:
            began = loop.time()
            try:
                fresh = await self._mailbox.write([message for _, message in pairs])
                break
            except _REFUSALS as error:
                if is_data_at_fault(error):
                    await self._write_apart(pairs, error)
                    return
                failures += 1
                await self._regain(error, failures)
        if failures:
            self._shared.tell_database()
        self._metrics.processing_seconds.observe(loop.time() - began)
        known = len(pairs) - fresh
        await self._ack_batch(pairs[-1][0], {Outcome.HANDLED: fresh, Outcome.DUPLICATE: known})

    async def _write_apart(self, pairs: Sequence[Pair], error: Exception) -> None:
        if len(pairs) == 1:
            await self._park_refused(*pairs[0], classify(error))
            return
        for pair in pairs:
            await self._write([pair])

    async def _regain(self, error: Exception, failures: int) -> None:
        """Whether the batch was committed is not known, so it is written again, by a session that may. Raises Standby,
        LifeOver.
        """
        away = error if isinstance(error, RelayError) else DatabaseUnavailable(classify(error).text)
        await self._mailbox.abandon()
        while True:
            self._shared.tell_away("database", away)
            await self._life.rest(backoff_s(failures, self._shared.random.random()))
            try:
                await self._mailbox.reopen()
                return
            except Standby:
                raise
            except RelayError as again:
                away, failures = again, failures + 1

    async def _park_refused(self, delivery: DeliveredMessage, message: Message, failure: Failure) -> None:
        self._metrics.failures[failure.error_class] += 1
        await self._park(delivery, self._origin(delivery, message.attempt, iso_now()), Park(failure.text), failure)


def batches(pairs: Sequence[Pair], bytes_max: int) -> Iterator[Sequence[Pair]]:
    """Runs of messages, in their order, that are written together: of at most so many bytes, or of one message."""
    batch: list[Pair] = []
    size = 0
    for pair in pairs:
        more = len(pair[1].body) + HEADERS_BYTES_MAX
        if batch and size + more > bytes_max:
            yield batch
            batch, size = [], 0
        batch.append(pair)
        size += more
    if batch:
        yield batch
