-- Purpose: rows that were parked under another RELAY_ON_PARKED get this relay's, the new owner then looks for
--          keys that nothing holds any more (stuck_keys.sql). Expired and unmarkable rows never hold.
-- Values:  $1 shards, $2 whether parked rows hold.
-- Locks:   the rows, as an UPDATE does; skips those that somebody keeps locked.
-- Index:   {aside_parked_index}: the shards' parked rows; only when a claimed shard was last owned under something else.
-- Caller:  relay/outbox.py `claim`.
WITH t AS (
        SELECT o.ctid AS c, o.seq FROM {table} o
         WHERE o.aside = 'parked' AND o.shard = ANY ($1::smallint[])
           AND coalesce(o.failure_class, '') NOT IN ('expired', 'unmarkable')
           AND o.holds <> ($2::bool AND o.aggregate_id IS NOT NULL)
           FOR NO KEY UPDATE SKIP LOCKED)
UPDATE {table} o SET holds = $2::bool AND o.aggregate_id IS NOT NULL
  FROM t WHERE o.ctid = t.c AND o.seq = t.seq
