"""The names that the topology and its consumers agree on: queues that belong to a work queue, and headers.

Pure. The topology declares these queues, `relay.inbox` publishes to them, `relay redrive` reads the headers; nobody
spells one of the names anywhere else.

How a message travels. A consumer that wants to try again publishes a copy to the retry queue, by the default exchange
(routing key: the queue's name). There the copy waits, without a consumer, until the queue's TTL ends it, and dead-letters
by the default exchange to the work queue. So it comes back to the queue that retried it and to no other, whatever is bound
to the work exchange. Its routing key is then the work queue's name: the one that it was published with stands in
`ORIGINAL_ROUTING_KEY`, which the first copy sets and every later one keeps. A parked copy goes to the dead letter exchange
with the parking queue's name as its routing key.
"""

from __future__ import annotations

from typing import Final

# ---------------------------------------------------------------- queues

DEFAULT_EXCHANGE: Final = ""
"""Routes by queue name, to each queue that exists, and to nothing else."""


def retry_queue(queue: str, delay_s: float) -> str:
    """`orders.inventory.retry.5s`: where copies for `queue` wait for `delay_s` seconds."""
    return f"{queue}.retry.{delay_text(delay_s)}"


def parking_queue(queue: str) -> str:
    """`orders.inventory.parking`: where messages of `queue` wait for an operator, unless another is named."""
    return f"{queue}.parking"


def shard_queue(queue: str, number: int) -> str:
    """`orders.inventory.0`: one of a sharded queue's; it has retry queues of its own, and the parking queue of all."""
    return f"{queue}.{number}"


def shard_exchange(queue: str) -> str:
    """`orders.inventory.shards`: the hash exchange in front of a sharded queue."""
    return f"{queue}.shards"


def delay_text(delay_s: float) -> str:
    """A delay as it stands in a name: in the largest unit that needs no fraction, from `ms` to `d`."""
    milliseconds = delay_ms(delay_s)
    for unit, size_ms in (("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1_000)):
        if milliseconds % size_ms == 0:
            return f"{milliseconds // size_ms}{unit}"
    return f"{milliseconds}ms"


def delay_ms(delay_s: float) -> int:
    """A delay as the broker counts it: whole milliseconds, at least one."""
    return max(1, round(delay_s * 1000))


# ---------------------------------------------------------------- headers

RETRY_ATTEMPT: Final = "x-retry-attempt"
"""Integer: how often the message was retried, 0 or absent the first time. A redrive sets it back to 0."""

LAST_ERROR: Final = "x-last-error"
"""Text of the last failure, one line."""

ERROR_CLASS: Final = "x-error-class"
"""What kind of failure it was."""

FIRST_FAILURE: Final = "x-first-failure"
"""When it first failed: ISO 8601, UTC. A redrive keeps it."""

ORIGINAL_EXCHANGE: Final = "x-original-exchange"
ORIGINAL_ROUTING_KEY: Final = "x-original-routing-key"
"""The route that the message was first consumed by: set with the first copy, kept by every later one."""

ORIGINAL_USER_ID: Final = "x-original-user-id"
"""The property `user_id`, which RabbitMQ takes from its owner only, and a copy has another publisher."""

CONSUMER: Final = "x-consumer"
CONSUMER_VERSION: Final = "x-consumer-version"
"""Who gave it up, and in which version."""

DELIVERY_COUNT: Final = "x-delivery-count"
"""Integer, a quorum queue's own: how many deliveries of the message failed, absent the first time. RabbitMQ 4.3 and later
count `basic.reject` and consumers that died with it in hand, and no `basic.nack`; earlier ones count every return.
"""

BROKER_RETRY_VERSION_MIN: Final = (4, 3)
"""The RabbitMQ whose quorum queues hold back what is returned (`retry = "broker"`)."""

REDRIVE_COUNT: Final = "x-redrive-count"
"""Integer: how often `relay redrive` sent it back to work. Consumers keep it."""

REDRIVE_RUN: Final = "x-redrive-run"
"""The last run of `relay redrive` that sent it, so that no run takes a message twice. Consumers keep it."""


def is_brokers_own(header: str) -> bool:
    """Whether RabbitMQ writes this header by itself: no copy may carry it on.

    It is more than tidiness: a message with an old `x-death` of the work queue, for any reason but `rejected`, that
    expires in a retry queue is taken for an automatic cycle and *dropped* (rabbit_dead_letter:is_cycle).
    """
    return header in ("x-death", DELIVERY_COUNT, "x-acquired-count") or header.startswith(
        ("x-first-death-", "x-last-death-")
    )
