-- Purpose: rows that are parked now become deferred, due now (O1): what is kept of their failures stays, and a row with a
--          key holds it until it is through. Their keys come back for the promotion (H3). `is_untouched`: locked, but a trigger
--          suppresses the change.
-- Values:  $1 ids, $2 seqs. {expiry} is empty, or also clears deadlines that have passed.
-- Locks:   FOR NO KEY UPDATE SKIP LOCKED on the rows, under their shards' locks.
-- Index:   the primary key; coalesce keeps the planner from walking {aside_parked_index} once a row instead.
-- Caller:  relay/parked_table.py.
WITH t AS (
        SELECT o.ctid AS c, o.seq FROM unnest($1::text[], $2::bigint[]) k(id, seq)
          JOIN {table} o ON o.id = k.id
         WHERE o.seq = k.seq AND coalesce(o.aside, '') = 'parked' AND o.sent_at IS NULL
           FOR NO KEY UPDATE OF o SKIP LOCKED),
     u AS (
        UPDATE {table} o SET aside = 'deferred', holds = o.aggregate_id IS NOT NULL, due_at = clock_timestamp(),
                             parked_at = NULL{expiry}
          FROM t WHERE o.ctid = t.c AND o.seq = t.seq
        RETURNING o.seq, coalesce(o.aggregate_type, '') AS aggregate_type, o.aggregate_id)
SELECT t.seq, u.aggregate_type, u.aggregate_id, u.seq IS NULL AS is_untouched FROM t LEFT JOIN u ON u.seq = t.seq
