"""Brokers behind the small interface of `relay.core.ports`; nothing outside of this package says AMQP."""
