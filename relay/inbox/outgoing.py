"""A consumer's own events: through an outbox, in the transaction of the message that caused them.

Their ids follow from the message's: a repeat after a rollback, a lost COMMIT or a redrive makes the same ids, and so no
second event. The relay of that outbox publishes them.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any, Final

import asyncpg
import orjson

from relay.inbox.message import Message
from relay.values import quote_identifier, table_name

NAMESPACE: Final = uuid.UUID("6c9ad1b6-50b6-5f6d-9d0f-0e4f2f0c7f59")
"""Of these ids (RFC 9562, version 5). It never changes."""


def outgoing_id(consumer: str, message_id: str, number: int) -> str:
    """The id of the `number`th event (from 0) that `consumer` makes of a message."""
    return str(uuid.uuid5(NAMESPACE, f"{consumer}\x1f{message_id}\x1f{number}"))


class Outgoing:
    """The events of one message, in the order of `add`: a repeat has to add the same ones in the same order.

    `connection` is the transaction that the handler was given; `table` an outbox of `relay migrate` there.
    """

    def __init__(self, connection: asyncpg.Connection, message: Message, *, table: str = "outbox") -> None:
        self._connection = connection
        self._message = message
        self._table = table_name(table).quoted
        self._count = 0

    async def add(self, event_type: str, payload: Mapping[str, Any] | bytes | str, **columns: Any) -> str:
        """Insert one event and return its id. `columns` are the writers' columns of the outbox.

        `causation_id` is the message's id, `correlation_id` the message's or else its id; the trace goes on.
        """
        message = self._message
        event_id = outgoing_id(message.consumer, message.id, self._count)
        self._count += 1
        values: dict[str, Any] = {
            "id": event_id,
            "event_type": event_type,
            "payload": orjson.dumps(payload).decode() if isinstance(payload, Mapping) else payload,
            "correlation_id": message.correlation_id or message.id,
            "causation_id": message.id,
            "traceparent": message.traceparent,
            "tracestate": message.tracestate,
            **columns,
        }
        names = ", ".join(quote_identifier(name) for name in values)
        places = ", ".join(f"${number}" for number in range(1, len(values) + 1))
        insert = f"INSERT INTO {self._table} ({names}) VALUES ({places})"
        # No column is named: that would need SELECT on it, which a writer does not have.
        tag = await self._connection.execute(f"{insert} ON CONFLICT DO NOTHING", *values.values())
        if tag == "INSERT 0 0":
            await self._insert_again(insert, values)
        return event_id

    async def _insert_again(self, insert: str, values: Mapping[str, Any]) -> None:
        """The id is there already where a forgotten message came once more; any other unique index is the user's own, and
        what stands against it is not to be passed over in silence."""
        try:
            async with self._connection.transaction():
                await self._connection.execute(insert, *values.values())
        except asyncpg.UniqueViolationError as error:
            if not (error.constraint_name or "").endswith("_pkey"):
                raise
