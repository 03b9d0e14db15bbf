-- Purpose: the installation's identifier, the first part of the fingerprint to which floors belong (R5).
-- Locks:   none.
-- Index:   none.
-- Caller:  relay/outbox.py `open`.
SELECT system_identifier::text AS system_identifier FROM pg_control_system()
