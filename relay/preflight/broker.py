"""The preflight's look at the broker: each URL is opened as by `run`, up to the verified exchange."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Sequence
from typing import Final

from relay.broker.amqp import AmqpBroker
from relay.broker.appender import STANDARD_OUTPUT
from relay.broker.survey import Survey, survey
from relay.choices import Envelope, Sink
from relay.config import Config
from relay.core.ports.broker import Closed, Rejection, Returned
from relay.errors import BrokerError, ExchangeMissing, RelayError
from relay.message import PayloadType, Row
from relay.preflight.finding import Finding, Level, error, not_checked, ok, warning
from relay.preflight.pending import Pending
from relay.route import Router
from relay.urls import amqp_address

TESTED: Final = ((3, 10), (4, 3))
SIZE_MAX: Final = 512 * 1024 * 1024 + 1
"""RabbitMQ takes no larger message whatever its configuration: beyond it there is nothing to ask."""


async def check(config: Config, waiting: Pending | None) -> list[Finding]:
    """A finding a URL, and one about the exchange. While one URL works the others are warnings. Of a file only whether
    it can be written: nothing is created.
    """
    if config.sink is Sink.FILE:
        return [_file(config.sink_path or "")]
    try:
        urls = config.amqp_urls()
    except RelayError as failure:
        return [error("broker", failure.message, failure.hint)]
    router = Router(config.exchange, config.routing_key)
    outcomes = [(url, await _open(url, router)) for url in urls]
    works = any(failure is None or isinstance(failure, ExchangeMissing) for _, failure in outcomes)
    findings = [_connection(url, failure, works=works) for url, failure in outcomes]
    exchange = router.constant_exchange
    missing = next((failure for _, failure in outcomes if isinstance(failure, ExchangeMissing)), None)
    if exchange is None:
        findings.append(not_checked("exchange", f"RELAY_EXCHANGE={config.exchange} depends on each row"))
    elif missing is not None:
        mend = f"declare it, such as: rabbitmqadmin declare exchange name={exchange} type=topic durable=true"
        findings.append(error("exchange", missing.message, mend))
    elif works:
        findings.append(ok("exchange", f"{exchange} exists"))
    else:
        findings.append(not_checked("exchange", "no broker answers"))
    if waiting is not None and waiting.unroutable is not None:
        mend = "mend the writer or the template; such rows are parked as `invalid`"
        findings.append(error("pending", f"rows wait that have no route: {waiting.unroutable}", mend))
    url = next((url for url, failure in outcomes if failure is None or isinstance(failure, ExchangeMissing)), None)
    if url is not None:
        findings.extend(_survey(await survey(url, _offered(waiting)), waiting, config.envelope))
    return findings


def _file(path: str) -> Finding:
    if path == STANDARD_OUTPUT:
        return ok("broker", "the standard output")
    target = path if os.path.exists(path) else os.path.dirname(path) or "."
    if os.path.isdir(path) or not os.access(target, os.W_OK):
        mend = "RELAY_SINK_PATH needs an existing directory in which the relay may write"
        return error("broker", f"{path} cannot be written", mend)
    return ok("broker", f"the file {path}")


def _offered(waiting: Pending | None) -> int | None:
    """The size to ask about: that of the largest body that waits."""
    size = None if waiting is None else waiting.largest_bytes
    return min(size, SIZE_MAX) if size else None


def _survey(found: Survey | None, waiting: Pending | None, envelope: Envelope) -> Iterator[Finding]:
    if found is None:
        yield not_checked("version", "no answer in time")
        return
    numbers = tuple(int(number) for number in re.findall(r"\d+", found.version)[:2])
    text = f"{found.product} {found.version}".strip() or "unknown"
    if found.product != "RabbitMQ":
        yield warning("version", f"{text}: relays are tested with RabbitMQ only")
    elif not TESTED[0] <= numbers <= TESTED[1]:
        yield warning("version", f"{text}: tested are 3.10 to 4.3", "another version, or test it yourself")
    else:
        yield ok("version", text)
    if waiting is None:
        yield not_checked("size", "the table could not be looked at")
    elif waiting.largest_bytes is None:
        yield not_checked("size", "the size of what is pending could not be read in time")
    elif waiting.largest_bytes and not found.is_size_known:
        yield not_checked("size", "the broker gave no answer about a message of that size in time")
    elif waiting.largest_bytes and found.size_refused is not None:
        mend = "raise max_message_size at the broker, or send less; such rows are parked as `too_large`"
        yield error("size", f"a row of {_measured(waiting.largest_bytes, envelope)} waits: {found.size_refused}", mend)
    elif waiting.largest_bytes:
        yield ok("size", f"the broker takes the largest pending row, {_measured(waiting.largest_bytes, envelope)}")


def _measured(size: int, envelope: Envelope) -> str:
    return f"{size:,} bytes" if envelope is Envelope.NONE else f"up to {size:,} bytes in the envelope {envelope}"


def _connection(url: str, failure: BrokerError | None, *, works: bool) -> Finding:
    if failure is None or isinstance(failure, ExchangeMissing):
        return ok("broker", amqp_address(url))
    mend = failure.hint or "look at RELAY_AMQP_URL and the broker"
    level = warning if works else error
    finding = level("broker", failure.message, mend)
    assert finding.level is not Level.OK
    return finding


async def _open(url: str, router: Router) -> BrokerError | None:
    broker = AmqpBroker(lambda: [url], router, database_now=time.time, connection_name="outbox-relay check")
    try:
        link = await broker.connect(_Silence(), PayloadType.JSON)
    except BrokerError as failure:
        return failure
    await link.close()
    return None


class _Silence:
    """Listens to a link on which nothing is published."""

    def on_acked(self, rows: Sequence[Row]) -> None: ...
    def on_nacked(self, rows: Sequence[Row]) -> None: ...
    def on_returned(self, returned: Sequence[Returned]) -> None: ...
    def on_blocked(self, reason: str) -> None: ...
    def on_unblocked(self) -> None: ...
    def on_writable(self) -> None: ...
    def on_verified(self, exchange: str) -> None: ...
    def on_suspected(self, rows: Sequence[Row], error: str, *, alone: bool) -> None: ...
    def on_passed(self, row: Row) -> None: ...
    def on_refused(self, refusal: Rejection, lost: Sequence[Row]) -> None: ...
    def on_closed(self, lost: Sequence[Row], closed: Closed, error: str) -> None: ...
