-- Purpose: the floors that `relay check --deep` looks below, and what tells whether they count (R5).
-- Values:  none.
-- Locks:   none.
-- Index:   none needed, the table has 64 rows.
-- Caller:  relay/preflight/deep.py.
SELECT s.shard, s.floor, s.fingerprint, s.last_seq <= last.seq AND s.floor <= last.seq AS is_below_sequence,
       {fingerprint} AS fingerprint_now
  FROM {shard} s
 CROSS JOIN (SELECT CASE WHEN is_called THEN last_value ELSE last_value - 1 END AS seq FROM {sequence}) last
 ORDER BY s.shard
