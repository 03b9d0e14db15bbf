"""`relay check`: the preflight. Looks at both servers as `run` will use them and changes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from relay.choices import Sink
from relay.config import Config
from relay.preflight import broker, database, deep, encryption, management
from relay.preflight.finding import Finding, Level, warning

__all__ = ["Finding", "Level", "as_document", "check"]


async def check(config: Config, warnings: Sequence[str] = (), *, on_deep: deep.Progress | None = None) -> list[Finding]:
    """Every finding, in a stable order; the configuration's own `warnings` come first. With `on_deep` also all of the
    table is walked through, which it is told of. Raises nothing of the servers'.
    """
    found, waiting = await database.check(config)
    # What waits in the outbox is what the broker must have a way for.
    checks = [broker.check(config, waiting)]
    if config.sink is Sink.AMQP:
        checks.append(management.check(config, waiting))
    parts = [found, *await asyncio.gather(*checks), encryption.check(config)]
    if on_deep is not None:
        parts.append(await deep.check(config, on_deep))
    return [warning("configuration", text) for text in warnings] + [finding for part in parts for finding in part]


def as_document(findings: Sequence[Finding]) -> dict[str, object]:
    """The JSON document; its keys are stable."""
    return {
        "ok": all(finding.level is not Level.ERROR for finding in findings),
        "findings": [
            {
                "check": finding.check,
                "level": finding.level.value,
                "text": finding.text,
                "mend": finding.mend,
                "details": finding.details,
            }
            for finding in findings
        ],
    }
