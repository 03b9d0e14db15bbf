"""What may surprise about a queue that the outbox's messages get to. Pure: judges what the management API says."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from relay.preflight.finding import Finding, not_checked, ok, warning


def judge(
    name: str, queue: Mapping[str, Any], exchanges: Collection[str], in_flight_max: int, broker_version: tuple[int, ...]
) -> Iterator[Finding]:
    """Findings about one queue. `exchanges` are those of its vhost, `in_flight_max` what one relay may publish at once."""
    kind = str(queue.get("type", "classic"))
    settings = effective(queue)
    findings = list(_durability(name, kind, queue))
    if queue.get("effective_policy_definition") is None:
        # The API tells it only with a queue's statistics, which come some seconds after the queue.
        text = f"{name}: RabbitMQ does not tell yet which policy it has"
        findings.append(
            not_checked(
                "queues",
                text,
                "run it again in ten seconds; it never does where the management plugin's statistics are off",
            )
        )
        yield from findings
        return
    if kind != "stream":
        findings += _dead_letters(name, kind, settings, exchanges)
        findings += _deliveries(name, kind, settings, broker_version)
    findings += _length(name, settings, in_flight_max)
    yield from findings or [ok("queues", f"{name} is a {kind} queue with dead-lettering and limits that fit")]


def effective(queue: Mapping[str, Any]) -> dict[str, Any]:
    """The queue's settings by their policy names. An argument wins over a policy, but of two numbers the lower holds."""
    arguments = {key.removeprefix("x-"): value for key, value in (queue.get("arguments") or {}).items()}
    settings = dict(queue.get("effective_policy_definition") or {})
    for key, value in arguments.items():
        both_numbers = isinstance(value, int) and isinstance(settings.get(key), int)
        settings[key] = min(value, settings[key]) if both_numbers else value
    return settings


def _durability(name: str, kind: str, queue: Mapping[str, Any]) -> Iterator[Finding]:
    if not queue.get("durable", True):
        yield warning("queues", f"{name} is transient: it does not survive a restart", "declare it durable")
    elif kind == "classic":
        mend = "use a quorum queue for data that matters"
        yield warning("queues", f"{name} is a classic queue: it lives on one node", mend)
    if queue.get("auto_delete"):
        yield warning("queues", f"{name} goes when its last consumer goes", "declare it without auto-delete")


def _dead_letters(name: str, kind: str, settings: Mapping[str, Any], exchanges: Collection[str]) -> Iterator[Finding]:
    target = settings.get("dead-letter-exchange")
    if target is None:
        yield warning(
            "queues",
            f"{name} has no dead-lettering: what its consumers reject, or cannot process, is dropped",
            "set dead-letter-exchange by a policy, with a queue bound to it",
        )
    elif target not in exchanges:
        yield warning(
            "queues", f"{name} dead-letters to {target}, which does not exist: that is dropped", "declare the exchange"
        )
    elif kind == "quorum" and settings.get("dead-letter-strategy", "at-most-once") != "at-least-once":
        yield warning(
            "queues",
            f"{name} dead-letters at most once: a dead letter can be lost on its way",
            "set dead-letter-strategy to at-least-once and overflow to reject-publish by a policy",
        )


def _deliveries(
    name: str, kind: str, settings: Mapping[str, Any], broker_version: tuple[int, ...]
) -> Iterator[Finding]:
    """Quorum queues count deliveries; from RabbitMQ 4.0 on with a limit of 20 unless it is set, -1 for none."""
    if kind != "quorum":
        return
    limit = settings.get("delivery-limit")
    if broker_version < (4, 0) if limit is None else limit < 0:
        yield warning(
            "queues",
            f"{name} has no delivery limit: a message that its consumers cannot process comes back for ever",
            "set delivery-limit by a policy, beside dead-letter-exchange",
        )


def _length(name: str, settings: Mapping[str, Any], in_flight_max: int) -> Iterator[Finding]:
    length, size = settings.get("max-length"), settings.get("max-length-bytes")
    if length is None and size is None:
        return
    if not str(settings.get("overflow", "drop-head")).startswith("reject-publish"):
        yield warning(
            "queues",
            f"{name} drops its oldest messages when it is full",
            "set overflow to reject-publish by a policy",
        )
    elif isinstance(length, int) and length < in_flight_max:
        yield warning(
            "queues",
            f"{name} holds at most {length} messages: a burst is refused (nacked) and tried again",
            f"a limit well above RELAY_MAX_IN_FLIGHT ({in_flight_max}), or a smaller RELAY_MAX_IN_FLIGHT",
        )
