"""Which exchanges exist and take messages: asked on a channel of its own, remembered for the life of a connection.

A publish to an exchange that does not exist closes the channel, with everybody's unconfirmed messages on it.
So a name that comes from a row is declared passively first, on a side channel that nobody else suffers with.

    unknown --ask--> asked --exists--> known (until pushed out by newer names)
                       |----refused--> refused, for a few seconds (someone may create it)
                       '----no answer--> unknown, told after a second's pause; refused, for a few seconds, after
                                         three failures: its rows must not pile up here

They are asked one after the other, for each takes a channel. A name whose refusal RabbitMQ 4.3 could not say (`refusals.INTERNAL_ERROR`) is asked for on a connection of its own,
since that one is closed over it.

That a known one takes no messages (it is internal, or the user may not write there) shows only when the broker
closes a channel over it. It is then refused for a few seconds as well, on later connections too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from aiormq import Connection
from aiormq.channel import EXCEPTION_MAPPING
from aiormq.exceptions import AMQPError, ChannelClosed, ChannelInvalidStateError

from relay.broker.losses import CONNECTION_ERRORS, named
from relay.broker.methods import verify_exchange
from relay.broker.opening import opened
from relay.broker.refusals import INTERNAL_ERROR, is_too_long_to_refuse
from relay.broker.wire import Wire
from relay.errors import BrokerError

ANSWER_TIMEOUT_S: Final = 10.0
"""A broker that is asked for an exchange and blocked or busy is asked again after this."""

_REFUSAL_AGE_S: Final = 5.0
_PAUSE_S: Final = 1.0
_FAILURES_MAX: Final = 3
_NAMES_MAX: Final = 1000
_CODES: Final = {error: code for code, error in EXCEPTION_MAPPING.items()}


class Forbidden:
    """Exchanges that exist and refused a message, over all connections of a broker."""

    def __init__(self) -> None:
        self._refused: dict[str, tuple[float, str]] = {}

    def add(self, name: str, text: str) -> None:
        _refuse(self._refused, name, text)

    def refusal(self, name: str) -> str | None:
        """The broker's words, while they are fresh."""
        return _fresh(self._refused, name)


class Exchanges:
    """The exchanges of one connection. `on_answer` is called, from the loop, with a name that was asked for and
    has a verdict, or may be asked for again."""

    def __init__(self, connection: Connection, on_answer: Callable[[str], None]) -> None:
        self._connection = connection
        self._on_answer = on_answer
        self._known: dict[str, None] = {}
        self._refused: dict[str, tuple[float, str]] = {}
        self._asked: dict[str, asyncio.Task[None]] = {}
        self._failures: dict[str, int] = {}
        """Questions that failed one after the other."""
        self._turn, self._own_turn = asyncio.Lock(), asyncio.Lock()
        """To ask on this connection, and on one of its own."""

    def is_known(self, name: str) -> bool:
        """Whether it exists; asks nobody."""
        return name in self._known

    def verdict(self, name: str) -> bool | str:
        """True: it exists. A text: the broker's refusal. False: not known yet, `on_answer` will follow."""
        if name in self._known:
            return True
        if (text := _fresh(self._refused, name)) is not None:
            return text
        if name not in self._asked:
            self._asked[name] = asyncio.get_running_loop().create_task(self._answer(name))
        return False

    async def check(self, name: str) -> str | None:
        """Ask: None if it exists, else the broker's refusal. AMQPError, OSError (TimeoutError), BrokerError: no answer."""
        if is_too_long_to_refuse(name, self._connection.vhost):
            url = str(self._connection.url)
            async with self._own_turn:
                text = await opened(url, "outbox-relay exchange", lambda own, wire: _ask_once(own, wire, name))
        else:
            async with self._turn, asyncio.timeout(ANSWER_TIMEOUT_S):
                text = await _ask(self._connection, name)
        if text is None:
            self._remember(name)
        return text

    def forget(self, name: str) -> None:
        """It is gone, as another answer shows."""
        self._known.pop(name, None)

    def close(self) -> None:
        """Stop asking; no answer follows."""
        for task in self._asked.values():
            task.cancel()
        self._asked.clear()

    async def _answer(self, name: str) -> None:
        try:
            text = await self.check(name)
        except TimeoutError:
            # The broker is blocked, mute or slow, and so it is for everybody.
            await asyncio.sleep(_PAUSE_S)
        except (AMQPError, BrokerError, OSError, RuntimeError) as error:
            # That says nothing about the exchange; a limit of connections, or a password that was changed, may keep the
            # question from being asked for as long as this connection lives.
            await asyncio.sleep(_PAUSE_S)
            self._note_failure(name, error)
        else:
            self._failures.pop(name, None)
            if text is not None:
                _refuse(self._refused, name, text)
        del self._asked[name]
        self._on_answer(name)

    def _note_failure(self, name: str, error: Exception) -> None:
        failures = self._failures.pop(name, 0) + 1
        if failures >= _FAILURES_MAX:
            _refuse(self._refused, name, f"whether the exchange exists could not be asked: {error}")
            return
        if len(self._failures) >= _NAMES_MAX:
            del self._failures[next(iter(self._failures))]
        self._failures[name] = failures

    def _remember(self, name: str) -> None:
        if len(self._known) >= _NAMES_MAX:
            del self._known[next(iter(self._known))]
        self._known[name] = None


async def _ask(connection: Connection, name: str) -> str | None:
    channel = await connection.channel(publisher_confirms=False)
    try:
        await verify_exchange(channel, name)
    except ChannelInvalidStateError:
        raise
    except ChannelClosed as error:
        # Closed without a word: that says nothing about the exchange.
        if not (text := refusal(error)):
            raise
        return text
    await channel.close()
    return None


async def _ask_once(connection: Connection, wire: Wire, name: str) -> str | None:
    """On a connection that is closed behind it."""
    try:
        text = await named(_ask(connection, name))
    except CONNECTION_ERRORS:
        if wire.refused is None or wire.refused[0] != INTERNAL_ERROR:
            raise
        return f"{INTERNAL_ERROR} {wire.refused[1]}: RabbitMQ has no room for what it would say of this exchange's name"
    await connection.close()
    return text


def _refuse(refused: dict[str, tuple[float, str]], name: str, text: str) -> None:
    if len(refused) >= _NAMES_MAX:
        del refused[next(iter(refused))]
    refused[name] = (asyncio.get_running_loop().time() + _REFUSAL_AGE_S, text)


def _fresh(refused: dict[str, tuple[float, str]], name: str) -> str | None:
    if name not in refused:
        return None
    until, text = refused[name]
    if asyncio.get_running_loop().time() < until:
        return text
    del refused[name]
    return None


def refusal(error: ChannelClosed) -> str:
    """The broker's own words, code first: `404 NOT_FOUND - no exchange 'x' in vhost '/'`."""
    code = _CODES.get(type(error))
    return " ".join(str(part) for part in ((code, *error.args) if code else error.args) if part)
