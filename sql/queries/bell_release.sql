-- Purpose: give the doorbell's lock back, then ring once for the others that sleep.
-- Locks:   releases the session's.
-- Index:   none.
-- Caller:  relay/outbox.py `disarm`.
SELECT pg_advisory_unlock({bell_class}, {bell_object}) AS is_released, pg_notify({bell_channel}, '')
