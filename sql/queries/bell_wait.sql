-- Purpose: ask for the doorbell's lock: granted when the last writer that did not ring has ended.
-- Values:  $1 patience in milliseconds.
-- Locks:   the doorbell's, exclusively, kept by the session.
-- Index:   none.
-- Caller:  relay/outbox.py `arm`.
SELECT {bell_wait}($1::int) AS is_granted
