-- Purpose: delete sent rows where they were last seen (S2); which were found. A row that was marked before is left to the purge.
-- Values:  $1 ctids, $2 seqs, $3 ids, each as an array's text.
-- Locks:   those of the deletion alone. A row that anybody has locked, or had (xmax), is not found here: delete_by_id.sql skips
--          it while it is. Locking all of them first (FOR NO KEY UPDATE SKIP LOCKED) cost a third more CPU and twice the
--          WAL; what is left is a lock taken between our look at a row and its deletion, and that waits for lock_timeout at most.
--          Nor is a row that is aside: delete_by_id.sql tells that it was, so that its key is promoted (H3). By `holds`, null as
--          `aside` is, for a predicate of {read_index} would lure the planner into walking it.
-- Index:   none, by address.
-- Caller:  relay/settling.py.
WITH u AS (
        DELETE FROM {table} o
         USING unnest($1::text::tid[], $2::text::bigint[], $3::text::text[]) k(c, seq, id)
         WHERE o.ctid = k.c AND o.seq = k.seq AND o.id = k.id AND o.sent_at IS NULL AND o.holds IS NULL AND o.xmax = '0'::xid
        RETURNING o.seq)
SELECT array_agg(u.seq) AS seqs FROM u
