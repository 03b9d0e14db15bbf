-- Purpose: let the relays go on; no line where they are not paused.
-- Locks:   the only row of {meta}.
-- Index:   none.
-- Caller:  relay/pause.py.
UPDATE {meta} m SET paused_at = NULL, paused_by = NULL
  FROM (SELECT b.is_only_row, b.paused_at, b.paused_by FROM {meta} b) b
 WHERE m.paused_at IS NOT NULL AND b.is_only_row = m.is_only_row
RETURNING b.paused_at, b.paused_by
