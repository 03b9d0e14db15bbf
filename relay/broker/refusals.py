"""What a broker's refusal says about who is at fault: RabbitMQ's texts, in one place.

A close carries a code and a text, no tag. Often the text names the exchange, the routing key or the size, and then
only rows that match can be at fault. A text that says nothing we know leaves everybody a suspect, so a broker that
words it differently costs more tries and no wrong decision.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

REFUSALS: Final = frozenset((311, 313, 403, 404, 406, 501, 502, 503, 504, 505, 540))
"""Reply codes that blame what was sent (AMQP 0-9-1, 1.2). 320 (forced) and 506 (the server's own trouble) do not; nor does 530: RabbitMQ says
it of no message, but of a user who has as many channels as his limit allows, in all his connections, and closes the one that asks for another.
"""

INTERNAL_ERROR: Final = 541
"""The server's own trouble too; but RabbitMQ 4.3 says it, and closes the connection, where it would say a refusal whose
text is too long: it cuts the text to 255 characters, and with others than ASCII these are more than a short string's 255
bytes (`method_field_shortstr_overflow`).
"""

_TOO_LARGE: Final = re.compile(r"message size \d+ is larger than (?:configured )?max size (\d+)")
# rabbit_channel:check_msg_size, 3.10
_INTERNAL: Final = re.compile(r"cannot publish to internal exchange '(.*)' in vhost ")
_NO_WRITE: Final = re.compile(r"(?:write )?access to exchange '(.*)' in vhost ")
_NO_TOPIC: Final = re.compile(r"access to topic '(.*)' in exchange '(.*)' in vhost ", re.DOTALL)
_MISSING: Final = re.compile(r"no exchange '(.*)' in vhost ")
# A reply text is a short string; a name in it may be cut off.
_TEXT_BYTES_MAX: Final = 255


def is_too_long_to_refuse(exchange: str, vhost: str) -> bool:
    """Whether RabbitMQ 4.3 could not say that this exchange is missing."""
    text = f"NOT_FOUND - no exchange '{exchange}' in vhost '{vhost}'"
    return not text.isascii() and len(text.encode()) > _TEXT_BYTES_MAX


@dataclass(frozen=True, slots=True)
class Refusal:
    """A close that blames what was sent. What the text names, else `None`; `is_missing`: the exchange does not
    exist."""

    text: str
    exchange: str | None = None
    routing_key: str | None = None
    body_bytes_max: int | None = None
    is_missing: bool = False
    is_unsaid: bool = False
    """What it was the broker could not say (`INTERNAL_ERROR`), if it was a refusal at all."""

    def blames(self, exchange: str, routing_key: str) -> bool:
        """Whether a row of this route may be at fault."""
        if self.is_unsaid:
            return not (exchange + routing_key).isascii()
        return self.exchange in (None, exchange) and self.routing_key in (None, routing_key)

    @property
    def is_of_exchange(self) -> bool:
        """Every row of that exchange would be refused."""
        return self.exchange is not None and self.routing_key is None


def read(code: int, text: str) -> Refusal | None:
    """`None` where the close blames nothing that was sent."""
    if code not in REFUSALS:
        return None
    said = f"{code} {text}"
    if len(text.encode()) >= _TEXT_BYTES_MAX:
        return Refusal(said)
    if (found := _TOO_LARGE.search(text)) is not None:
        return Refusal(said, body_bytes_max=int(found[1]))
    if code == 404 and (found := _MISSING.search(text)) is not None:
        return Refusal(said, exchange=found[1], is_missing=True)
    if code == 403 and (found := _NO_TOPIC.search(text)) is not None:
        return Refusal(said, exchange=found[2], routing_key=found[1])
    if code == 403 and (found := _INTERNAL.search(text) or _NO_WRITE.search(text)) is not None:
        return Refusal(said, exchange=found[1])
    return Refusal(said)


def unsaid(code: int, text: str) -> Refusal | None:
    """Of a connection's close: what may be a refusal that the broker could not say."""
    return Refusal(f"{code} {text}", is_unsaid=True) if code == INTERNAL_ERROR else None
