"""What the engine needs from the outside, as small interfaces: `outbox`, `broker` and `clock`.

The runner is handed one of each. `relay/outbox.py` (PostgreSQL) and `relay/broker/amqp.py`
(RabbitMQ) implement them for real, `tests/sim` in virtual time; both pass the same suite.

Rules cited as R, H, L, P, S and invariants as I stand in `docs/protocol.md`.
"""
