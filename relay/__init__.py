"""outbox-relay: rows of a PostgreSQL outbox table become confirmed RabbitMQ messages, at least once and in order."""

__version__ = "0.1.0"
