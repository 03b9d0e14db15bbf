-- Purpose: a relay that stops leaves the membership, and what is still its own goes with it, floors as stored: a shard that it
--          was unseated of since its last renewal has an epoch that it does not know to give back (L5, R5).
-- Values:  $1 instance.
-- Locks:   FOR NO KEY UPDATE SKIP LOCKED on our shard rows, in shard order; the membership row.
-- Index:   both tables have a few rows.
-- Caller:  relay/outbox.py `leave`.
WITH locked AS MATERIALIZED (
        SELECT s.shard FROM {shard} s WHERE s.owner = $1::text ORDER BY s.shard FOR NO KEY UPDATE SKIP LOCKED),
     given AS (
        UPDATE {shard} s SET owner = NULL, owner_pid = NULL, owner_backend_start = NULL, leased_until = NULL
          FROM locked WHERE s.shard = locked.shard AND s.owner = $1::text)
DELETE FROM {relay} WHERE instance = $1::text
