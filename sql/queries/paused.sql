-- Purpose: since when and by whom the relays are paused.
-- Locks:   none.
-- Index:   none.
-- Caller:  relay/pause.py.
SELECT m.paused_at, m.paused_by FROM {meta} m
