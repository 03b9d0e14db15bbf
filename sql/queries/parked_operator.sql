-- Purpose: who acts, and the database's time.
-- Locks:   none.
-- Index:   none.
-- Caller:  relay/parked_table.py.
SELECT current_user::text AS role, clock_timestamp() AS now
