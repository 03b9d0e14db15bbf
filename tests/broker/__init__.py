"""The broker adapter: on a stub that says what a test wants, and on a real RabbitMQ."""
