"""The consumer's half: once per message, in the consumer's own database. Imports nothing of the engine.

    async def handle(message, connection):
        await connection.execute("UPDATE stock SET …", message.json()["sku"])

    consumer = Consumer(name="inventory", queue="inventory", handler=handle, amqp_url=…, database_url=…)
    await consumer.run()

docs/inbox.md explains outcomes, retries, order, metrics and recipes for other drivers.
"""

from relay.inbox.consumer import Consumer
from relay.inbox.ledger import AsyncpgLedger, Handler, Ledger
from relay.inbox.message import Message
from relay.inbox.order import Order
from relay.inbox.outcome import BrokerRetry, ErrorClass, Outcome, Permanent, RetryPolicy, Transient
from relay.inbox.outgoing import Outgoing, outgoing_id
from relay.inbox.settings import ConsumerSettings

__all__ = [
    "AsyncpgLedger",
    "BrokerRetry",
    "Consumer",
    "ConsumerSettings",
    "ErrorClass",
    "Handler",
    "Ledger",
    "Message",
    "Order",
    "Outcome",
    "Outgoing",
    "Permanent",
    "RetryPolicy",
    "Transient",
    "outgoing_id",
]
