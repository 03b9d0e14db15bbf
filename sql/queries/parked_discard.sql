-- Purpose: delete rows that are parked now (O1). Their keys come back for the promotion (H3). `is_untouched`: locked, but a trigger
--          suppresses the deletion.
-- Values:  $1 ids, $2 seqs.
-- Locks:   FOR UPDATE SKIP LOCKED on the rows, under their shards' locks.
-- Index:   the primary key; coalesce keeps the planner from walking {aside_parked_index} once a row instead.
-- Caller:  relay/parked_table.py, relay/retention.py.
WITH t AS (
        SELECT o.ctid AS c, o.seq FROM unnest($1::text[], $2::bigint[]) k(id, seq)
          JOIN {table} o ON o.id = k.id
         WHERE o.seq = k.seq AND coalesce(o.aside, '') = 'parked' AND o.sent_at IS NULL
           FOR UPDATE OF o SKIP LOCKED),
     d AS (
        DELETE FROM {table} o USING t WHERE o.ctid = t.c AND o.seq = t.seq
        RETURNING o.seq, coalesce(o.aggregate_type, '') AS aggregate_type, o.aggregate_id)
SELECT t.seq, d.aggregate_type, d.aggregate_id, d.seq IS NULL AS is_untouched FROM t LEFT JOIN d ON d.seq = t.seq
