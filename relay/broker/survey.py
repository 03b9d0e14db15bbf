"""What a broker says of itself, asked on a connection of its own: its version, and whether it takes a message so large.

Nothing stays behind: the message goes to a key of the default exchange that no queue has, and the broker drops it.
"""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass
from typing import Final

from aiormq import Connection, spec
from aiormq.exceptions import ChannelClosed
from yarl import URL

from relay.broker.exchanges import refusal
from relay.broker.losses import CONNECTION_ERRORS, named
from relay.broker.opening import shake_hands

TIMEOUT_S: Final = 20.0
"""For everything; a large message over a slow line, or a broker that blocks publishers, is given up."""


@dataclass(frozen=True, slots=True)
class Survey:
    """`product` and `version` as the broker gives them, empty where it gives none. `size_refused`: its words about a
    message of the size in question, None where it takes one or nobody could tell (`is_size_known`)."""

    product: str
    version: str
    size_refused: str | None
    is_size_known: bool


async def survey(url: str, size_bytes: int | None) -> Survey | None:
    """Ask; `size_bytes` None asks for no message. None where the broker gives no answer in time."""
    connection = Connection(URL(url))
    try:
        async with asyncio.timeout(TIMEOUT_S):
            await shake_hands(connection)
            said = connection.server_properties
            product, version = (_text(said.get(name)) for name in ("product", "version"))
            refused, is_known = None, False
            if size_bytes is not None:
                try:
                    refused, is_known = await named(_offer(connection, size_bytes))
                except CONNECTION_ERRORS:
                    is_known = False
    except CONNECTION_ERRORS:
        return None
    finally:
        await _close(connection)
    return Survey(product, version, refused, is_known)


async def _offer(connection: Connection, size_bytes: int) -> tuple[str | None, bool]:
    """(refusal, whether that is a verdict). RabbitMQ looks at the size first, then at the user's rights."""
    channel = await connection.channel(publisher_confirms=True)
    try:
        await channel.basic_publish(
            bytes(size_bytes),
            exchange="",
            routing_key=f"outbox-relay-check-{secrets.token_hex(8)}",
            properties=spec.Basic.Properties(delivery_mode=1),
            timeout=TIMEOUT_S / 2,
        )
    except ChannelClosed as error:
        text = refusal(error)
        if text.startswith("403"):
            return None, True
        return text, True
    return None, True


def _text(value: object) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value or "")


async def _close(connection: Connection) -> None:
    try:
        async with asyncio.timeout(2.0):
            await named(connection.close())
    except CONNECTION_ERRORS:
        return
