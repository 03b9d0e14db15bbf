-- Purpose: pause all relays of this outbox; no line where they are paused already.
-- Locks:   the only row of {meta}.
-- Index:   none.
-- Caller:  relay/pause.py.
UPDATE {meta} m SET paused_at = clock_timestamp(), paused_by = current_user WHERE m.paused_at IS NULL
RETURNING m.paused_at, m.paused_by
