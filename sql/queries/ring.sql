-- Purpose: wake the relays at the commit.
-- Locks:   the notification queue's, at the commit.
-- Index:   none.
-- Caller:  relay/parked_table.py, relay/pause.py.
SELECT pg_notify({bell_channel}, '')
